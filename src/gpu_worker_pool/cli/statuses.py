"""Defines the exit statuses, and maps errors of the package to them."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
    TIMED_OUT = 124
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


#: Added to the number of the signal that ended a command.
KILLED: Final = 128


def status_of(error: GPUWorkerPoolError) -> Status:
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
