"""Errors say what happened without help, are caught under every name the documents promise, and pickle."""

import ast
import asyncio
import copy
import inspect
import pickle
from pathlib import Path

import pytest

from gpu_worker_pool import errors
from gpu_worker_pool.errors import GPUWorkerPoolError, ImpossibleRequestError

#: name: (what else it is caught as, whether it is retryable)
PROMISES = {
    "GPUWorkerPoolError": ((Exception,), False),
    "WorkerTimeoutError": ((TimeoutError, asyncio.TimeoutError), True),
    "ImpossibleRequestError": ((ValueError,), False),
    "RequestCancelledError": ((), False),
    "RequestGivenUpError": ((), True),
    "RequestEndedError": ((), False),
    "InvalidAssignmentError": ((ValueError,), False),
    "StaleAssignmentError": ((ValueError,), False),
    "BrokenGPUWorkerError": ((RuntimeError,), True),
    "NotStartedError": ((RuntimeError,), False),
    "AlreadyStartedError": ((RuntimeError,), False),
    "PoolStoppedError": ((RuntimeError,), False),
    "WrongThreadError": ((RuntimeError,), False),
    "ServiceUnavailableError": ((), True),
    "ServiceUnavailableTimeoutError": (
        (errors.WorkerTimeoutError, errors.ServiceUnavailableError, TimeoutError),
        True,
    ),
    "RetryableError": ((), True),
    "NetworkRetryableError": ((errors.RetryableError,), True),
    "ServiceRetryableError": ((errors.RetryableError,), True),
    "ServiceRefusedError": ((errors.ServiceUnavailableError,), False),
    "DriverError": ((), True),
    "LedgerUnavailableError": ((), True),
    "LedgerUnusableError": ((errors.LedgerUnavailableError, errors.ServiceRefusedError), False),
    "LedgerPermissionError": ((errors.LedgerUnusableError,), False),
    "IllegalEventError": ((), False),
    "PolicyError": ((ValueError,), False),
    "PolicyLimitError": ((errors.TooManyWaitingError,), False),
    "TooManyLeasesError": ((errors.TooManyWaitingError,), False),
    "TooManyWaitingError": ((errors.IllegalEventError,), False),
    "RequestMismatchError": ((errors.IllegalEventError,), False),
    "UnknownLeaseError": ((errors.IllegalEventError,), False),
    "LeaseEndedError": ((errors.IllegalEventError,), False),
    "NotYourLeaseError": ((errors.IllegalEventError,), False),
}
CLASSES = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and name.endswith("Error")}

every_error = pytest.mark.parametrize("error_class", CLASSES.values(), ids=CLASSES.keys())


def test_the_promises_cover_every_error() -> None:
    assert CLASSES.keys() == PROMISES.keys()


@every_error
def test_is_caught_under_every_promised_name(error_class: type[GPUWorkerPoolError]) -> None:
    bases, retryable = PROMISES[error_class.__name__]
    for base in (GPUWorkerPoolError, *bases):
        assert issubclass(error_class, base)
    assert error_class.retryable is retryable


@every_error
def test_says_the_first_line_of_its_docstring(error_class: type[GPUWorkerPoolError]) -> None:
    first_line = inspect.cleandoc(error_class.__doc__ or "").splitlines()[0]
    assert first_line.endswith(".")
    assert str(error_class()) == first_line


@every_error
def test_a_given_message_wins(error_class: type[GPUWorkerPoolError]) -> None:
    assert str(error_class("three of them")) == "three of them"
    assert str(error_class("")) == ""


@every_error
@pytest.mark.parametrize("args", [(), ("three of them",)], ids=["default", "message"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(error_class: type[GPUWorkerPoolError], args: tuple[str, ...], protocol: int) -> None:
    error = error_class(*args)
    error.add_note("seen by a worker")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):  # noqa: S301 - our own bytes
        assert type(again) is error_class
        assert again.args == error.args
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_an_impossible_request_tells_its_reasons_also_in_another_process() -> None:
    error = ImpossibleRequestError(reasons=("4 GPUs wanted, the host has 2", "no A100 here"))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    for it in (error, again):
        assert it.reasons == ("4 GPUs wanted, the host has 2", "no A100 here")
        assert str(it) == "The request can never be granted: 4 GPUs wanted, the host has 2; no A100 here"
    assert ImpossibleRequestError().reasons == ()
    assert str(ImpossibleRequestError("no", reasons=("because",))) == "no"


def test_only_the_first_line_of_a_docstring_is_the_message() -> None:
    class LostError(GPUWorkerPoolError):
        """
        The GPU is lost.

        Look for it.
        """

    assert str(LostError()) == "The GPU is lost."


def test_a_class_without_a_docstring_says_its_name() -> None:
    # Also what `python -OO` makes of all of them.
    class LostError(GPUWorkerPoolError):
        pass

    assert str(LostError()) == "LostError"


def test_is_a_leaf() -> None:
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imported] == ["from typing import ClassVar"]
