"""Exit statuses: what they are, and which of them an error of the package means."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpu_worker_pool.errors import GPUWorkerPoolError


class Status(IntEnum):
    """What scripts go by. A command that `run` started has its own; 128+N where signal N killed it."""

    FAILED = 1
    USAGE = 2
    #: It can never be granted.
    IMPOSSIBLE = 65
    #: No endpoint answered, also when that ended in a timeout; or none that could be used.
    UNAVAILABLE = 69
    #: A fault of this program.
    BUG = 70
    #: Nothing is free now.
    NOT_NOW = 75
    TIMED_OUT = 124
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


#: Added to the number of the signal that ended a command.
KILLED: Final = 128


def status_of(error: GPUWorkerPoolError) -> Status:
    """What an error of the package means to a script."""
    from gpu_worker_pool import errors

    match error:
        case errors.ImpossibleRequestError():
            return Status.IMPOSSIBLE
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
