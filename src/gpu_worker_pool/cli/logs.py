"""Sets up logging for the command line: one line per record on stderr."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

#: Interval between warnings about an unshared state directory.
SAME_WARNING_SECONDS: Final = 24 * 3600.0


class _Line(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is logging's
        return printable(super().formatMessage(record))


def configure_logs() -> None:
    """`GPU_POOL_DEBUG=1` shows everything."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("gpu-pool: %(message)s"))
    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG if os.environ.get("GPU_POOL_DEBUG") else logging.ERROR)


def warned_today(directory: Path) -> bool:
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
