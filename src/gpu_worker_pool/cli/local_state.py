"""`--private`: the command line coordinates only the jobs of its own user."""

from __future__ import annotations

import os

from gpu_worker_pool.errors import LedgerUnusableError
from gpu_worker_pool.state_directory import VARIABLE, own_directory


def use_own_directory() -> None:
    """From now on, this process and its children use the user's own directory."""
    try:
        os.environ[VARIABLE] = str(own_directory())
    except RuntimeError as error:
        raise LedgerUnusableError(f"{error}; set {VARIABLE}") from None
