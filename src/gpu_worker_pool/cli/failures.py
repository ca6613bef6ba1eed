"""Errors that end a command: one sentence, which says what to do, and an exit status."""

from __future__ import annotations

import sys
from contextlib import suppress

from gpu_worker_pool.cli.printable import printable
from gpu_worker_pool.cli.statuses import Status


class CommandError(Exception):
    """What is wrong and what to do."""

    def __init__(self, message: str, status: int = Status.FAILED) -> None:
        super().__init__(message)
        self.status = int(status)

    def tell(self) -> int:
        """The exit status, when it was told."""
        with suppress(OSError):  # nobody listens any more
            sys.stderr.write(f"gpu-pool: {printable(str(self))}\n")
        return self.status
