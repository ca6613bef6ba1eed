"""An async client in a thread of its own, and how other threads have things done there and learn what came of it."""

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

#: A thread that waits looks up so often: only a signal to the main thread wakes it, and no other interrupt does.
LOOK_UP_SECONDS = 1.0
#: At exit a client that nobody stopped is given so long to clean up.
EXIT_SECONDS = 5.0


class Call:
    """Something that the loop does for a thread, and how that thread learns what came of it.

    Belongs to the loop from when it is posted until it is over, and then to the thread.
    """

    __slots__ = ("error", "is_withdrawn", "news", "task", "value", "work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        #: Called in the loop's thread.
        self.work = work
        #: None says that it is over; a future asks the thread for something.
        self.news: SimpleQueue[asyncio.Future[Exception | None] | None] = SimpleQueue()
        self.task: asyncio.Task[Any] | None = None
        self.is_withdrawn = False
        self.value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> asyncio.Future[Exception | None] | None:
        while True:
            try:
                return self.news.get(timeout=LOOK_UP_SECONDS)
            except Empty:
                continue

    def fail(self) -> NoReturn:
        assert self.error is not None  # whoever calls this has looked
        try:
            raise self.error
        finally:
            self.error = None  # which knows this frame, and must not be known by it


class LoopThread:
    """A client from its start to its stop: the thread, its event loop, and the calls that are open."""

    def __init__(self, client: AsyncClient, owner: object) -> None:
        self._client = client
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_stop_wanted = asyncio.Event()
        self._is_exiting = False
        #: Whether calls are taken from threads, and whether those that were taken are begun.
        self._is_open = self._begins_calls = True
        self.is_over = False
        #: Whatever threads wait for. No lock: a signal's handler may call while its own thread is in the middle of it.
        self._calls: set[Call] = set()
        #: By worker id: what was handed out and not released.
        self._held: dict[str, ref[GPUAssignment]] = {}
        #: Dropped without a stop, it ends as well, a moment later; at exit there is more to do.
        self._owner_dropped = finalize(owner, self.want_stop)
        self._owner_dropped.atexit = False
        # A daemon: a client that nobody stopped must not keep a program from ending.
        self._thread = threading.Thread(target=self._run, name="gpu-worker-pool", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        if not self.is_over:  # by a signal's handler that stopped it
            _running.add(self)
            self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def post(self, call: Call) -> None:
        """Calls are begun in the order in which they are posted."""
        # First known, then asked for: so `_close` finds it, or we find that it is closed.
        self._calls.add(call)
        if self._is_open:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin, call)
                return
        self._calls.discard(call)
        raise NotStartedError("the client is not started: it has been stopped")

    def look(self, look: Callable[[], T]) -> T:
        async def looked() -> T:
            # A task like everything else, so that it sees what was posted before.
            return look()

        return self.do(looked)

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Done to its end, also if the thread that asked is interrupted meanwhile."""
        call = Call(work)
        self.post(call)
        call.wait()
        if call.error is not None:
            call.fail()
        result: T = call.value
        return result

    def request(self, call: Call) -> GPUAssignment:
        """Withdrawn, and given back if it was granted, should the thread that asks be interrupted."""
        try:
            self.post(call)
            call.wait()
        except BaseException:
            try:
                self.withdraw(call)
            finally:
                self.withdraw(call)  # again, which is harmless: the next interrupt may have hit the first one
            raise
        # Interrupts come after calls into C and where functions begin: none from here to the caller's next step.
        if call.error is None:
            result: GPUAssignment = call.value
            return result
        return call.fail()

    def give_back(self, assignment: GPUAssignment) -> None:
        """Without waiting for it."""
        self._tell(self._begin, Call(partial(self.release, assignment)))

    def withdraw(self, call: Call) -> None:
        self._tell(self._withdraw, call)

    def answer(self, turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
        self._tell(_set, turn, error)

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and everything has ended
            self._loop.call_soon_threadsafe(function, *args)

    def want_stop(self) -> None:
        """Returns at once, and takes no lock: garbage is collected in any thread and at any moment."""
        if self.pid == os.getpid():
            self._tell(self._is_stop_wanted.set)

    def stop(self) -> None:
        self.want_stop()
        if self._thread.ident is None:  # an interrupt came before it was started
            self._close()
            self._loop.close()
        else:
            self._thread.join()

    def exit(self) -> None:
        """The program ends: whoever still waits is a daemon, and left where it is, as the interpreter does."""
        if self.pid == os.getpid():
            self._is_exiting = True
            self.want_stop()
            self._thread.join(EXIT_SECONDS)

    # --- in the loop's own thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except RuntimeError:
            # From Python 3.12 on no thread is started at exit, not even the one that waits for resolvers of names.
            if not self._is_exiting:
                raise
        finally:
            self._close()

    async def _live(self) -> None:
        await self._is_stop_wanted.wait()
        self._is_open = False
        await asyncio.sleep(0)  # so that whatever was posted is begun
        if self._is_exiting:
            for call in list(self._calls):
                call.news = SimpleQueue()
            await self._cancel_calls()
            # They end with the program, which needs no warning.
            for held in list(self._held.values()):
                if (assignment := held()) is not None:
                    with suppress(Exception):
                        await self._client.release_gpu(assignment)
        await self._client.stop()
        for _ in range(2):  # requests end by themselves now: the answer comes, the error is raised
            await asyncio.sleep(0)
        await self._cancel_calls()
        await self._client.stop()  # again, if what was left was its start

    async def _cancel_calls(self) -> None:
        self._begins_calls = False
        left = [call.task for call in list(self._calls) if call.task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _close(self) -> None:
        """Whatever happened: nobody waits for a loop that does not run."""
        self._is_open = False
        for call in list(self._calls):
            self._end(call, PoolStoppedError())
        self._owner_dropped.detach()
        self.is_over = True
        _running.discard(self)

    def _begin(self, call: Call) -> None:
        if not self._begins_calls:
            self._end(call, PoolStoppedError())
            return
        self._calls.add(call)
        try:
            # As it is, without a coroutine around it: the pool must not take its end for the end of who asked.
            call.task = self._loop.create_task(call.work())
        except Exception as error:  # of arguments, before there is a coroutine
            self._end(call, error)
        else:
            call.task.add_done_callback(partial(self._task_done, call))

    def _task_done(self, call: Call, task: asyncio.Task[Any]) -> None:
        error = PoolStoppedError() if task.cancelled() else task.exception()
        if error is None:
            call.value = task.result()
            if isinstance(call.value, GPUAssignment):
                self._held[call.value.worker_id] = ref(call.value)
        self._end(call, error)
        if call.is_withdrawn:
            self._give_back(call)

    def _end(self, call: Call, error: BaseException | None) -> None:
        call.error = error
        # It dies here, where no signal comes: in the main thread one would be lost in what Python does with dead tasks.
        call.task = None
        self._calls.discard(call)
        call.news.put(None)

    def _withdraw(self, call: Call) -> None:
        call.is_withdrawn = True
        if call.task is not None:
            call.task.cancel()
        else:  # it is over, or the interrupt came before it was posted
            self._calls.discard(call)
            self._give_back(call)

    def _give_back(self, call: Call) -> None:
        assignment, call.value = call.value, None
        if isinstance(assignment, GPUAssignment):
            self._begin(Call(partial(self.release, assignment)))

    async def release(self, assignment: GPUAssignment) -> None:
        await self._client.release_gpu(assignment)
        self._held.pop(assignment.worker_id, None)


def _set(turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not turn.done():
        turn.set_result(error)


#: What is to be stopped at exit.
_running: set[LoopThread] = set()


@atexit.register
def _exit() -> None:
    for running in list(_running):
        running.exit()
