"""Runs an async client in its own thread, and executes calls of other threads there."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import finalize, ref

from gpu_worker_pool.errors import NotStartedError, PoolStoppedError
from gpu_worker_pool.models import GPUAssignment

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpu_worker_pool.client.client import GPUWorkerPoolClient as AsyncClient

T = TypeVar("T")

#: Waiting threads wake this often to notice interrupts: only a signal to the main thread wakes them at once.
WAKE_SECONDS = 1.0
#: Time limit at exit for a client that was not stopped.
EXIT_SECONDS = 5.0


class LoopCall:
    """One call that the loop executes for a thread, and its result.

    The loop owns it from `post` until it is over, then the thread.
    """

    __slots__ = ("error", "is_withdrawn", "news", "task", "value", "work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        #: Runs in the loop's thread.
        self.work: Callable[[], Coroutine[Any, Any, Any]] = work
        #: None: the call is over. A future: the loop waits for the thread to set it.
        self.news: SimpleQueue[asyncio.Future[Exception | None] | None] = SimpleQueue()
        self.task: asyncio.Task[Any] | None = None
        self.is_withdrawn: bool = False
        self.value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> asyncio.Future[Exception | None] | None:
        while True:
            try:
                return self.news.get(timeout=WAKE_SECONDS)
            except Empty:
                continue

    def fail(self) -> NoReturn:
        assert self.error is not None  # the caller has checked it
        try:
            raise self.error
        finally:
            self.error = None  # breaks a reference cycle through the traceback


class LoopThread:
    """A running client: its thread, its event loop, and the open calls."""

    def __init__(self, client: AsyncClient, owner: object) -> None:
        self._client = client
        self.pid: int = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_stop_wanted = asyncio.Event()
        self._is_exiting = False
        #: Whether threads may post calls, and whether posted calls are started.
        self._is_open = self._begins_calls = True
        self.is_over: bool = False
        #: Open calls. Without a lock: a signal handler may call while its own thread holds it.
        self._calls: set[LoopCall] = set()
        #: Unreleased assignments by worker id.
        self._held: dict[str, ref[GPUAssignment]] = {}
        #: A client that is dropped without `stop` stops too; `_exit` handles the exit.
        self._owner_dropped = finalize(owner, self.request_stop)
        self._owner_dropped.atexit = False
        # A daemon: a client that was not stopped must not keep the program running.
        self._thread = threading.Thread(target=self._run, name="gpu-worker-pool", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        if not self.is_over:  # a signal handler has stopped it
            _running.add(self)
            self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def post(self, call: LoopCall) -> None:
        """Calls start in the order in which they are posted."""
        # Add it first: then either `_close` finds it, or we see that the loop is closed.
        self._calls.add(call)
        if self._is_open:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin, call)
                return
        self._calls.discard(call)
        raise NotStartedError("the client is not started: it has been stopped")

    def look(self, look: Callable[[], T]) -> T:
        async def looked() -> T:
            # As a task, so that it runs after the calls that were posted before.
            return look()

        return self.do(looked)

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """It completes even if the calling thread is interrupted."""
        call = LoopCall(work)
        self.post(call)
        call.wait()
        if call.error is not None:
            call.fail()
        result: T = call.value
        return result

    def request(self, call: LoopCall) -> GPUAssignment:
        """If the thread is interrupted, the request is cancelled, or its GPU released."""
        try:
            self.post(call)
            call.wait()
        except BaseException:
            try:
                self.withdraw(call)
            finally:
                self.withdraw(call)  # again, which is harmless: another interrupt may have hit the first one
            raise
        # Python raises interrupts after C calls and at function entry: none can come before the caller continues.
        if call.error is None:
            result: GPUAssignment = call.value
            return result
        return call.fail()

    def give_back(self, assignment: GPUAssignment) -> None:
        """Does not wait for it."""
        self._tell(self._begin, LoopCall(partial(self.release, assignment)))

    def withdraw(self, call: LoopCall) -> None:
        self._tell(self._withdraw, call)

    def answer(self, turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
        self._tell(_set, turn, error)

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and everything has ended
            self._loop.call_soon_threadsafe(function, *args)

    def request_stop(self) -> None:
        """Returns at once and takes no lock: the garbage collector may call it in any thread at any moment."""
        if self.pid == os.getpid():
            self._tell(self._is_stop_wanted.set)

    def stop(self) -> None:
        self.request_stop()
        if self._thread.ident is None:  # interrupted before the start
            self._close()
            self._loop.close()
        else:
            self._thread.join()

    def exit(self) -> None:
        """At exit: threads that still wait are daemons and are abandoned, as the interpreter does."""
        if self.pid == os.getpid():
            self._is_exiting = True
            self.request_stop()
            self._thread.join(EXIT_SECONDS)

    # --- in the loop's own thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_client())
        except RuntimeError:
            # Since Python 3.12 no thread can be started at exit, not even the one that joins the DNS threads.
            if not self._is_exiting:
                raise
        finally:
            self._close()

    async def _run_client(self) -> None:
        await self._is_stop_wanted.wait()
        self._is_open = False
        await asyncio.sleep(0)  # start what was posted
        if self._is_exiting:
            for call in list(self._calls):
                call.news = SimpleQueue()
            await self._cancel_calls()
            # They end with the program: no warning is needed.
            for held in list(self._held.values()):
                if (assignment := held()) is not None:
                    with suppress(Exception):
                        await self._client.release_gpu(assignment)
        await self._client.stop()
        for _ in range(2):  # requests end now: first the result, then the error
            await asyncio.sleep(0)
        await self._cancel_calls()
        await self._client.stop()  # again, if the open call was its start

    async def _cancel_calls(self) -> None:
        self._begins_calls = False
        left = [call.task for call in list(self._calls) if call.task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _close(self) -> None:
        """No thread may wait for a loop that does not run."""
        self._is_open = False
        for call in list(self._calls):
            self._end(call, PoolStoppedError())
        self._owner_dropped.detach()
        self.is_over = True
        _running.discard(self)

    def _begin(self, call: LoopCall) -> None:
        if not self._begins_calls:
            self._end(call, PoolStoppedError())
            return
        self._calls.add(call)
        try:
            call.task = self._loop.create_task(call.work())
        except Exception as error:  # bad arguments, raised before there is a coroutine
            self._end(call, error)
        else:
            call.task.add_done_callback(partial(self._task_done, call))

    def _task_done(self, call: LoopCall, task: asyncio.Task[Any]) -> None:
        error = PoolStoppedError() if task.cancelled() else task.exception()
        if error is None:
            call.value = task.result()
            if isinstance(call.value, GPUAssignment):
                self._held[call.value.worker_id] = ref(call.value)
        self._end(call, error)
        if call.is_withdrawn:
            self._give_back(call)

    def _end(self, call: LoopCall, error: BaseException | None) -> None:
        call.error = error
        # Free the task here: in the main thread a signal could get lost while Python destroys it.
        call.task = None
        self._calls.discard(call)
        call.news.put(None)

    def _withdraw(self, call: LoopCall) -> None:
        call.is_withdrawn = True
        if call.task is not None:
            call.task.cancel()
        else:  # it is over, or was not posted before the interrupt
            self._calls.discard(call)
            self._give_back(call)

    def _give_back(self, call: LoopCall) -> None:
        assignment, call.value = call.value, None
        if isinstance(assignment, GPUAssignment):
            self._begin(LoopCall(partial(self.release, assignment)))

    async def release(self, assignment: GPUAssignment) -> None:
        await self._client.release_gpu(assignment)
        self._held.pop(assignment.worker_id, None)


def _set(turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not turn.done():
        turn.set_result(error)


#: To stop at exit.
_running: set[LoopThread] = set()


@atexit.register
def _exit() -> None:
    for running in list(_running):
        running.exit()
