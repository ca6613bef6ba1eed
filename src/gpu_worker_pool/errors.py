"""Every exception of the package, under one base; a leaf that imports nothing else of the package."""

from typing import ClassVar


class GPUWorkerPoolError(Exception):
    """The GPU worker pool failed."""

    #: Whether asking again later, unchanged, may succeed.
    retryable: ClassVar[bool] = False

    # One optional argument and everything else in `__dict__`: that is what lets each of these be pickled.
    def __init__(self, message: str | None = None) -> None:
        super().__init__(self._default_message() if message is None else message)

    @classmethod
    def _default_message(cls) -> str:
        # `python -OO` strips docstrings, and a subclass need not write one.
        return (cls.__doc__ or cls.__name__).strip().partition("\n")[0]


# --- waiting for a GPU ---


class WorkerTimeoutError(GPUWorkerPoolError, TimeoutError):
    """No GPU could be assigned within the timeout."""

    retryable = True


class ImpossibleRequestError(GPUWorkerPoolError, ValueError):
    """The request can never be granted."""

    #: Each one sentence: a rule that no GPU in the inventory can meet.
    reasons: tuple[str, ...]

    def __init__(self, message: str | None = None, *, reasons: tuple[str, ...] = ()) -> None:
        if message is None and reasons:
            message = f"{self._default_message().rstrip('.')}: {'; '.join(reasons)}"
        super().__init__(message)
        self.reasons = reasons


class RequestCancelledError(GPUWorkerPoolError):
    """The request was removed from the queue by an administrator or another process."""


class RequestGivenUpError(GPUWorkerPoolError):
    """The request was given up because its waiter had not asked for it in time; request again."""

    retryable = True


class RequestEndedError(GPUWorkerPoolError):
    """The request has ended; choose a new id to ask again."""

    #: How it ended, such as `cancelled`; `granted` if it was granted and the lease has ended since.
    state: str
    reasons: tuple[str, ...]

    def __init__(self, message: str | None = None, *, state: str = "", reasons: tuple[str, ...] = ()) -> None:
        if message is None and state:
            how = "; ".join(reasons) or state.replace("_", " ")
            message = f"the request has ended ({how}); choose a new id to ask again"
        super().__init__(message)
        self.state = state
        self.reasons = reasons


# --- what was assigned ---


class InvalidAssignmentError(GPUWorkerPoolError, ValueError):
    """The assignment was not made by this pool."""


class StaleAssignmentError(GPUWorkerPoolError, ValueError):
    """The assignment is no longer held: it expired, was taken back, or was lost."""


# --- the pool's life ---


class NotStartedError(GPUWorkerPoolError, RuntimeError):
    """The pool is not started: call start() or use it as a context manager."""


class AlreadyStartedError(GPUWorkerPoolError, RuntimeError):
    """The pool is already started."""


class PoolStoppedError(GPUWorkerPoolError, RuntimeError):
    """The pool was stopped while the request was waiting."""


class WrongThreadError(GPUWorkerPoolError, RuntimeError):
    """The pool belongs to the thread that started it and was called from another one."""


# --- the GPU service ---


class ServiceUnavailableError(GPUWorkerPoolError):
    """The GPU service is unavailable."""

    retryable = True


class ServiceUnavailableTimeoutError(WorkerTimeoutError, ServiceUnavailableError):
    """No GPU could be assigned within the timeout, and no GPU service answered."""


class ServiceRefusedError(ServiceUnavailableError):
    """The GPU service refused the request; the same request will be refused again."""

    # It answers, so this is no reason to leave it alone for a while: breakers do not count it.
    retryable = False
    #: The HTTP status, such as 401 or 404.
    status: int | None

    def __init__(self, message: str | None = None, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RetryableError(GPUWorkerPoolError):
    """The GPU service failed in a way that is retried."""

    # Unlike the other retryable errors, these are retried by the HTTP client itself before anyone sees them.
    retryable = True


class NetworkRetryableError(RetryableError):
    """The GPU service could not be reached."""


class ServiceRetryableError(RetryableError):
    """The GPU service answered with an error that may pass."""

    #: The HTTP status; `None` where there was none to read.
    status: int | None
    #: How long the service asks to be left alone; `None` where it does not say.
    retry_after_seconds: float | None
    #: The service's own explanation; empty where it gives none.
    detail: str

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.detail = detail


# --- the hardware of this host ---


class DriverError(GPUWorkerPoolError):
    """The GPUs of this host could not be read."""

    retryable = True
    #: For programs: which of a few causes it was, such as `nvidia_smi_not_found`.
    code: str

    def __init__(self, message: str | None = None, *, code: str = "driver_error") -> None:
        super().__init__(message)
        self.code = code


# --- the ledger ---


class LedgerUnavailableError(GPUWorkerPoolError):
    """The ledger cannot be used: nothing is granted, and nothing that was promised is forgotten."""

    retryable = True


# --- events the core refuses ---


class IllegalEventError(GPUWorkerPoolError):
    """The event is not legal in the present state; nothing was changed."""


class RequestMismatchError(IllegalEventError):
    """The request id was already used for a different request."""


class TooManyWaitingError(IllegalEventError):
    """Too many requests of one asker wait already."""


class UnknownLeaseError(IllegalEventError):
    """No lease with this id is known."""


class LeaseEndedError(IllegalEventError):
    """The lease has ended and is not revived."""


class NotYourLeaseError(IllegalEventError):
    """The lease belongs to somebody else."""
