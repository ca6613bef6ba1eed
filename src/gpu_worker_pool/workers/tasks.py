"""A task of an executor, and how its future is settled."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from gpu_worker_pool.workers import messages
from gpu_worker_pool.workers.pickling import unpickled_exception, unpickled_value


class Task:
    __slots__ = ("future", "name", "payload", "tries_left")

    def __init__(self, payload: bytes, name: str, retries: int) -> None:
        self.future: Future[Any] = Future()
        self.payload: bytes = payload
        #: Of its function.
        self.name: str = name
        self.tries_left: int = retries

    def begin(self) -> bool:
        """False if it was cancelled, of which those who wait for it hear now."""
        # One that is tried again is running already.
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def settle(self, kind: bytes, payload: bytes) -> None:
        """With what its worker has sent."""
        if kind == messages.EXCEPTION:
            self.fail(unpickled_exception(payload))
            return
        try:
            value = unpickled_value(payload, self.name)
        except RuntimeError as error:
            self.fail(error)
            return
        with suppress(InvalidStateError):
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


def copy_of(error: BaseException) -> BaseException:
    """Each future raises its own: a traceback belongs to one of them."""
    found = type(error)(*error.args)
    found.__dict__.update(error.__dict__)
    found.__cause__ = error.__cause__
    return found
