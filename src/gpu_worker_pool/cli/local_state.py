"""Finds the state directory for the command line, and says once if other users cannot share it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.errors import LedgerUnusableError, ServiceRefusedError
from gpu_worker_pool.state_directory import VARIABLE, announce_privacy, own_directory, state_directory

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


def local_state_directory() -> Path:
    """Raises a `ServiceRefusedError` that says what to do."""
    try:
        return state_directory()
    except OSError as error:
        raise ServiceRefusedError(f"no usable state directory: {error}") from None


def granting_state_directory() -> Path:
    """The same for a command that grants, which says whose jobs it does not see."""
    directory = local_state_directory()
    announce_privacy(say=logger.error)
    return directory


def use_own_directory() -> None:
    """`--private`: from now on, this process and its children use the user's own directory."""
    try:
        os.environ[VARIABLE] = str(own_directory())
    except RuntimeError as error:
        raise LedgerUnusableError(f"{error}; set {VARIABLE}") from None
