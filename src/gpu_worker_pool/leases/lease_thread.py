"""The thread in which a program's lease engine runs: all that is sent to servers about leases is sent from there.

A training step may block the program's event loop for minutes; a task that is cancelled, or a loop that is closed, must
not leave a GPU held. So this thread has its own event loop, which nothing else blocks, cancels or closes.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_worker_pool.errors import PoolStoppedError
from gpu_worker_pool.leases import engine
from gpu_worker_pool.leases.engine import LeaseEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import aiohttp

    from gpu_worker_pool.leases.lease import HeldLease, YieldNotice

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("gpu_worker_pool.leases.keeper")


class LeaseThread:
    """`on_lost` is called in this thread with every lease that is lost, and must not block it.

    `on_asked` likewise, when its holder is asked to give it back; `on_ending`, shortly before its time limit.
    """

    def __init__(
        self,
        on_lost: Callable[[HeldLease], object],
        on_ending: Callable[[HeldLease], object] = lambda _: None,
        on_asked: Callable[[HeldLease], object] = lambda _: None,
    ) -> None:
        self._on_lost = on_lost
        self._on_ending = on_ending
        self._on_asked = on_asked
        self.pid: int = os.getpid()
        # Not the loop of the event loop policy: it must work the same in every program.
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_debug(False)  # the program's debug mode is about its own loop
        self._is_stop_wanted = asyncio.Event()
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        #: Belongs to this thread, as whatever its methods return.
        self.engine: LeaseEngine = LeaseEngine(
            self._lost, _log_trouble, on_ending=self._ending, on_yield_asked=self._asked
        )
        self._session: aiohttp.ClientSession | None = None
        self._closers: list[Callable[[], Coroutine[Any, Any, object]]] = []
        self._thread = threading.Thread(target=self._run, name="gpu-pool leases", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether it runs in this process; a fork has a copy that must not be used."""
        return self.pid == os.getpid()

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Call it soon in the thread, in the order of these calls; False if the thread has ended."""
        if not self.is_here:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run it to its end in the thread, even if the caller stops waiting for it."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        if not self.call(self._begin, work, done):
            done.set_exception(PoolStoppedError("the client has been stopped"))
        return done

    def request_stop(self) -> concurrent.futures.Future[None]:
        """Give back everything that is held, and end. Returns at once: garbage is collected in any thread."""
        self.call(self._is_stop_wanted.set)
        return self._over

    def join(self) -> None:
        """After the end was awaited: the thread's own end is only a moment away."""
        if self.is_here and self._thread.ident is not None:
            self._thread.join()

    def exit(self) -> None:
        """The program ends: give back what can be given back quickly."""
        if self.is_here:
            self.request_stop()
            self._thread.join(engine.STOP_SECONDS + 1.0)

    # --- in its own thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        finally:
            _running.discard(self)
            self._over.set_result(None)

    async def _live(self) -> None:
        await self._is_stop_wanted.wait()
        await self.engine.stop(engine.STOP_SECONDS)
        for close in self._closers:
            with suppress(Exception):
                await close()

    def close_with(self, close: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Await it at the very end."""
        self._closers.append(close)

    def session(self) -> aiohttp.ClientSession:
        """Its own connections: polls of statistics do not wait for long polls, nor the other way round."""
        if self._session is None:
            from gpu_worker_pool.api.transport import make_session  # it takes longer to load than all else here

            self._session = make_session(limit_per_host=0)
            self.close_with(self._session.close)
        return self._session

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]], done: concurrent.futures.Future[T]) -> None:
        def settle(task: asyncio.Task[T]) -> None:
            if done.cancelled() or not done.set_running_or_notify_cancel():
                if not task.cancelled():
                    task.exception()  # it is not awaited
            elif task.cancelled():
                done.set_exception(PoolStoppedError("the client was stopped meanwhile"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self.engine.work_on(work()).add_done_callback(settle)

    def _lost(self, lease: HeldLease, reason: str) -> None:
        logger.warning("%s lost %s: %s", lease.request.worker_id, lease.shown, reason)
        self._on_lost(lease)

    def _ending(self, lease: HeldLease, seconds: float) -> None:
        logger.warning("%s reaches its time limit in %.0f s", lease.shown, seconds)
        self._on_ending(lease)

    def _asked(self, lease: HeldLease, notice: YieldNotice) -> None:
        logger.warning("%s: %s", lease.shown, notice.sentence)
        self._on_asked(lease)


def _log_trouble(lease: HeldLease, text: str) -> None:
    logger.warning("%s: %s", lease.shown, text)


#: What is to be ended at exit.
_running: set[LeaseThread] = set()


@atexit.register
def _exit() -> None:
    for running in list(_running):
        running.exit()
