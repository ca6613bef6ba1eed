"""Where this host's programs meet, as the command line finds it, and what is to be said about it."""

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
    """Raises a `ServiceRefusedError` that says what to do where there is none."""
    logging.getLogger("gpu_worker_pool.state_directory").setLevel(logging.ERROR)  # which is said here instead
    try:
        return state_directory()
    except OSError as error:
        chosen = " (GPU_POOL_STATE_DIR)" if os.environ.get("GPU_POOL_STATE_DIR", "").strip() else ""
        raise ServiceRefusedError(f"this host's programs have no place to meet{chosen}: {error}") from None


def is_private(directory: Path) -> bool:
    """Whether programs of other users are not seen, though nobody has chosen that."""
    return not os.environ.get("GPU_POOL_STATE_DIR", "").strip() and directory != SHARED_DIRECTORY


def privacy_warning(directory: Path) -> str:
    return (
        f"only your own programs are seen, in {directory}; to share with other users: sudo install -d -m 1777 "
        f"{SHARED_DIRECTORY} (or set GPU_POOL_STATE_DIR)"
    )


def new_privacy_warning(directory: Path) -> str | None:
    """The same, once a day."""
    return privacy_warning(directory) if is_private(directory) and not warned_today(directory) else None
