"""Finds the state directory for the command line, and warns if other users cannot share it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.logs import warned_today
from gpu_worker_pool.errors import ServiceRefusedError
from gpu_worker_pool.state_directory import SHARED_DIRECTORY, state_directory

if TYPE_CHECKING:
    from pathlib import Path


def local_state_directory() -> Path:
    """Raises a `ServiceRefusedError` that says what to do."""
    logging.getLogger("gpu_worker_pool.state_directory").setLevel(logging.ERROR)  # reported here instead
    try:
        return state_directory()
    except OSError as error:
        chosen = " (GPU_POOL_STATE_DIR)" if os.environ.get("GPU_POOL_STATE_DIR", "").strip() else ""
        raise ServiceRefusedError(f"no usable state directory{chosen}: {error}") from None


def is_private(directory: Path) -> bool:
    """Whether programs of other users cannot share it, although it was not chosen."""
    return not os.environ.get("GPU_POOL_STATE_DIR", "").strip() and directory != SHARED_DIRECTORY


def privacy_warning(directory: Path) -> str:
    return (
        f"the state directory {directory} is yours alone; to share GPUs with other users: sudo install -d -m 1777 "
        f"{SHARED_DIRECTORY} (or set GPU_POOL_STATE_DIR)"
    )


def new_privacy_warning(directory: Path) -> str | None:
    """Once a day."""
    return privacy_warning(directory) if is_private(directory) and not warned_today(directory) else None
