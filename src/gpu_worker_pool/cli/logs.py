"""What the package logs, as the command line tells it: one line on stderr, like everything else that it says."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: A folder that only one's own programs share is worth a word, but not with every command.
SAME_WARNING_SECONDS: Final = 24 * 3600.0


def configure_logs(level: int = logging.ERROR) -> None:
    """`GPU_POOL_DEBUG=1` shows everything."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gpu-pool: %(message)s"))
    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG if os.environ.get("GPU_POOL_DEBUG") else level)


def warned_today(directory: Path) -> bool:
    """Whether that this folder is not shared was said here not long ago; from now on it was."""
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
