"""The program of a worker process: it runs tasks, one after the other, until its executor closes the connection.

It knows nothing of leases: its lease process holds and renews the lease, however long a task computes without letting
other threads run.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing import process, spawn
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.workers.messages import (
    EXCEPTION,
    INTERRUPTED,
    READY,
    UNUSABLE,
    VALUE,
    BlockingEnd,
)
from gpu_worker_pool.workers.pickling import name_of, pickled_exception, pickled_value

if TYPE_CHECKING:
    from types import FrameType


def main(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    end = BlockingEnd(descriptor)
    interrupts = _Interrupts(end)
    signal.signal(signal.SIGINT, interrupts.on_signal)
    try:
        _work(end, interrupts)
    except BrokenPipeError:
        sys.exit(1)  # the executor is gone


def _work(end: BlockingEnd, interrupts: _Interrupts) -> None:
    message = end.receive()
    if message is None:
        return
    try:
        _prepare(message[1])
    except BaseException as error:
        end.send(UNUSABLE, pickled_exception(error))
        return
    end.send(READY)
    while (message := end.receive()) is not None:
        kind, payload = interrupts.let(_run, message[1])
        _flush()
        end.send(kind, payload)
        del message, payload  # large values must not stay until the next task


def _flush() -> None:
    """What a task has printed is shown when it is done."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _prepare(payload: bytes) -> None:
    # A main module without a guard would start an executor here, while it is imported: as `multiprocessing` does, this
    # marks the process, and the executor says what is wrong.
    current: Any = process.current_process()
    current._inheriting = True  # noqa: SLF001
    try:
        preparation, rest = pickle.loads(payload)  # noqa: S301  # of our own executor
        spawn.prepare(preparation)
        initializer, initargs = pickle.loads(rest)  # noqa: S301  # may need the main module
    finally:
        del current._inheriting  # noqa: SLF001
    if initializer is not None:
        initializer(*initargs)


def _run(payload: bytes) -> tuple[bytes, bytes]:
    try:
        function, args, kwargs = pickle.loads(payload)  # noqa: S301  # of our own executor
        value = function(*args, **kwargs)
        return VALUE, pickled_value(value, name_of(function))
    except BaseException as error:
        return EXCEPTION, pickled_exception(error)


class _Interrupts:
    """Ctrl-C raises `KeyboardInterrupt` in a task, and does nothing between two tasks."""

    def __init__(self, end: BlockingEnd) -> None:
        self._end = end
        self._is_running = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:
            self._is_running = False  # once for each task
            self._end.send(INTERRUPTED)
            signal.default_int_handler(number, frame)

    def let(self, run: Any, payload: bytes) -> tuple[bytes, bytes]:
        try:
            self._is_running = True
            try:
                found: tuple[bytes, bytes] = run(payload)
            finally:
                self._is_running = False
        except KeyboardInterrupt as error:  # it came just before or after
            return EXCEPTION, pickled_exception(error)
        return found
