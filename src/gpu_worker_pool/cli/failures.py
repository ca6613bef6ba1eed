"""The error that ends a command: one sentence that says what to do, and an exit status."""

from __future__ import annotations

import sys
from contextlib import suppress

from gpu_worker_pool.cli.printable import printable
from gpu_worker_pool.cli.statuses import Status


class CommandError(Exception):
    def __init__(self, message: str, status: int = Status.FAILED) -> None:
        super().__init__(message)
        self.status = int(status)

    def report(self) -> int:
        """Print it; returns the exit status."""
        with suppress(OSError):  # stderr is closed
            sys.stderr.write(f"gpu-pool: {printable(str(self))}\n")
        return self.status
