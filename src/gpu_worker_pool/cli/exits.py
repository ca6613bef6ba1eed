"""How a command ends: its exit status, the error that ends it with one sentence, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.output import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.errors import GPUWorkerPoolError


class Status(IntEnum):
    """`run` exits with the status of its command, or 128+N if signal N killed it."""

    FAILED = 1
    USAGE = 2
    #: The request can never be granted.
    IMPOSSIBLE = 65
    #: No usable endpoint answered, also if that ended in a timeout.
    UNAVAILABLE = 69
    #: An internal error.
    BUG = 70
    #: With `--no-wait`: nothing is free now.
    NOT_NOW = 75
    #: This user may not do that: it needs root, or the group of the shared state directory.
    NO_PERMISSION = 77
    TIMED_OUT = 124
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


#: Added to the number of the signal that ended a command.
KILLED: Final = 128


class CommandError(Exception):
    def __init__(self, message: str, status: int = Status.FAILED) -> None:
        super().__init__(message)
        self.status: int = int(status)

    def report(self) -> int:
        """Print it; returns the exit status."""
        with suppress(OSError):  # stderr is closed
            sys.stderr.write(f"gpu-pool: {printable(str(self))}\n")
        return self.status


def status_of(error: GPUWorkerPoolError) -> Status:
    from gpu_worker_pool import errors

    match error:
        case errors.ImpossibleRequestError():
            return Status.IMPOSSIBLE
        case errors.LedgerPermissionError():
            return Status.NO_PERMISSION
        case (
            errors.ServiceUnavailableError()
            | errors.RetryableError()
            | errors.LedgerUnavailableError()
            | errors.DriverError()
        ):
            return Status.UNAVAILABLE
        case errors.WorkerTimeoutError():
            return Status.TIMED_OUT
    return Status.FAILED


def status_after(command: Callable[[], int]) -> int:
    """Its exit status. Errors are printed as one sentence; `GPU_POOL_DEBUG=1` shows the traceback."""
    try:
        return command()
    except CommandError as error:
        return error.report()
    except KeyboardInterrupt:
        return die_of_interrupt()
    except BrokenPipeError:
        # The reader is gone. Write nothing more, also not when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return KILLED + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("GPU_POOL_DEBUG"):
            raise
        return _report(error)


def _report(error: Exception) -> int:
    from gpu_worker_pool.errors import GPUWorkerPoolError

    if isinstance(error, GPUWorkerPoolError):
        return CommandError(str(error), status_of(error)).report()
    if isinstance(error, OSError):
        return CommandError(str(error)).report()
    text = f"internal error of gpu-pool ({type(error).__name__}: {error}); GPU_POOL_DEBUG=1 shows the traceback"
    return CommandError(text, Status.BUG).report()


def die_of_interrupt() -> int:
    """End as Ctrl-C ends a program: by the signal, not by a status, so that a shell ends its loop or script too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    return KILLED + signal.SIGINT
