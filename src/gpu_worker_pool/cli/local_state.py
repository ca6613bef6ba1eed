"""Finds the state directory for the command line, and warns if other users cannot share it."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import ServiceRefusedError
from gpu_worker_pool.state_directory import SHARED_DIRECTORY, state_directory

if TYPE_CHECKING:
    from pathlib import Path

#: Interval between warnings about an unshared state directory.
SAME_WARNING_SECONDS: Final = 24 * 3600.0


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
    return privacy_warning(directory) if is_private(directory) and not _warned_today(directory) else None


def _warned_today(directory: Path) -> bool:
    """Whether the user was warned about this directory within a day; notes the warning."""
    stamp = directory / "warned-not-shared"
    try:
        if time.time() - stamp.stat().st_mtime < SAME_WARNING_SECONDS:
            return True
        stamp.touch()
    except FileNotFoundError:
        stamp.touch()
    except OSError:
        return True
    return False
