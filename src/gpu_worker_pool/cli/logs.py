"""Sets up logging for the command line: one line per record on stderr."""

from __future__ import annotations

import logging
import os

from gpu_worker_pool.cli.output import printable


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
