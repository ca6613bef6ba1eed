"""All exceptions of the package, under one base. Imports nothing else of the package."""

from typing import ClassVar


class GPUWorkerPoolError(Exception):
    """The GPU worker pool failed."""

    #: Whether the same call may succeed later.
    retryable: ClassVar[bool] = False

    # One optional argument and everything else in `__dict__`, so that every error can be pickled.
    def __init__(self, message: str | None = None) -> None:
        super().__init__(self._default_message() if message is None else message)

    @classmethod
    def _default_message(cls) -> str:
        # `python -OO` strips docstrings, and a subclass may have none.
        return (cls.__doc__ or cls.__name__).strip().partition("\n")[0]


# --- waiting for a GPU ---


class WorkerTimeoutError(GPUWorkerPoolError, TimeoutError):
    """No GPU could be assigned within the timeout."""

    retryable = True


class ImpossibleRequestError(GPUWorkerPoolError, ValueError):
    """The request can never be granted."""

    #: One sentence for each endpoint: why none of its GPUs can ever serve the request.
    reasons: tuple[str, ...]

    def __init__(self, message: str | None = None, *, reasons: tuple[str, ...] = ()) -> None:
        if message is None and reasons:
            message = f"{self._default_message().rstrip('.')}: {'; '.join(reasons)}"
        super().__init__(message)
        self.reasons = reasons


class RequestCancelledError(GPUWorkerPoolError):
    """The request was removed from the queue by an administrator or another process."""


class RequestGivenUpError(GPUWorkerPoolError):
    """The request was dropped because its client did not poll for it in time; request again."""

    retryable = True


class RequestEndedError(GPUWorkerPoolError):
    """The request has ended; choose a new id to ask again."""

    #: How it ended, such as `cancelled`; `granted` if its lease has ended.
    state: str
    reasons: tuple[str, ...]

    def __init__(self, message: str | None = None, *, state: str = "", reasons: tuple[str, ...] = ()) -> None:
        if message is None and state:
            how = "; ".join(reasons) or state.replace("_", " ")
            message = f"the request has ended ({how}); choose a new id to ask again"
        super().__init__(message)
        self.state = state
        self.reasons = reasons


# --- assignments ---


class InvalidAssignmentError(GPUWorkerPoolError, ValueError):
    """The assignment was not made by this pool."""


class StaleAssignmentError(GPUWorkerPoolError, ValueError):
    """The assignment is no longer held: it expired, was taken back, or was lost."""


# --- worker processes ---


class BrokenGPUWorkerError(GPUWorkerPoolError, RuntimeError):
    """A worker process ended, or lost its GPU, before it had finished its task."""

    # The same task may end the next worker, too: `retries=` says how often to try.
    retryable = True


# --- starting and stopping the pool ---


class NotStartedError(GPUWorkerPoolError, RuntimeError):
    """The pool is not started: call start() or use it as a context manager."""


class AlreadyStartedError(GPUWorkerPoolError, RuntimeError):
    """The pool is already started."""


class PoolStoppedError(GPUWorkerPoolError, RuntimeError):
    """The pool was stopped while the request was waiting."""


class WrongThreadError(GPUWorkerPoolError, RuntimeError):
    """The pool was called from another thread than the one that started it."""


# --- the GPU service ---


class ServiceUnavailableError(GPUWorkerPoolError):
    """The GPU service is unavailable."""

    retryable = True


class ServiceUnavailableTimeoutError(WorkerTimeoutError, ServiceUnavailableError):
    """No GPU could be assigned within the timeout, and no GPU service answered."""


class ServiceRefusedError(ServiceUnavailableError):
    """The GPU service refused the request; the same request will be refused again."""

    # The service answers, so circuit breakers do not count it as a failure.
    retryable = False
    #: The HTTP status, such as 401 or 404.
    status: int | None

    def __init__(self, message: str | None = None, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RetryableError(GPUWorkerPoolError):
    """The GPU service failed in a way that is retried."""

    # Unlike other retryable errors, the HTTP client retries these itself before it raises them.
    retryable = True


class NetworkRetryableError(RetryableError):
    """The GPU service could not be reached."""


class ServiceRetryableError(RetryableError):
    """The GPU service answered with an error that may pass."""

    #: The HTTP status; `None` where there was none.
    status: int | None
    #: How long the service asks clients to wait; `None` where it does not say.
    retry_after_seconds: float | None
    #: The service's own explanation; empty where it gives none.
    detail: str
    #: After a renewal: whether the lease is held for another TTL although that could not be written.
    is_lease_held: bool

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        detail: str = "",
        is_lease_held: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.detail = detail
        self.is_lease_held = is_lease_held


# --- the hardware of this host ---


class DriverError(GPUWorkerPoolError):
    """The GPUs of this host could not be read."""

    retryable = True
    #: The cause, for programs, such as `nvidia_smi_not_found`.
    code: str

    def __init__(self, message: str | None = None, *, code: str = "driver_error") -> None:
        super().__init__(message)
        self.code = code


# --- the ledger ---


class LedgerUnavailableError(GPUWorkerPoolError):
    """The ledger cannot be used: nothing is granted, and existing leases are not forgotten."""

    retryable = True
    #: After a renewal: `held` if no process can write the ledger, so that no lease in it expires; else `unknown`.
    lease: str = ""


class LedgerUnusableError(LedgerUnavailableError, ServiceRefusedError):
    """The ledger cannot be opened, and trying again does not help."""

    retryable = False


class LedgerPermissionError(LedgerUnusableError):
    """This user may not use the ledger that the others share."""


# --- the policy of a ledger ---


class PolicyError(GPUWorkerPoolError, ValueError):
    """The policy file cannot be used; the policy that was in force before stays."""

    #: Where the mistake is; None if that is not in a line, as for a file that cannot be read.
    line: int | None

    def __init__(self, message: str | None = None, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


# --- events the core refuses ---


class IllegalEventError(GPUWorkerPoolError):
    """The event is not legal in the current state; nothing was changed."""


class RequestMismatchError(IllegalEventError):
    """The request id was already used for a different request."""


class TooManyWaitingError(IllegalEventError):
    """Too many requests of this account are waiting already."""


class PolicyLimitError(TooManyWaitingError):
    """The policy allows this account no further request now."""


class TooManyLeasesError(TooManyWaitingError):
    """This account, or all together, have as many leases as the server allows."""


class UnknownLeaseError(IllegalEventError):
    """No lease with this id is known."""


class LeaseEndedError(IllegalEventError):
    """The lease has ended and cannot be renewed."""


class NotYourLeaseError(IllegalEventError):
    """The lease belongs to another owner."""
