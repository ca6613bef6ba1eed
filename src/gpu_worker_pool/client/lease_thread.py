"""The thread that keeps leases: all that is said and heard of them is said and heard there.

A training step may block the program's event loop for minutes; a task that is cancelled, or a loop that is closed, must
not keep a GPU. So this thread has an event loop of its own, which nobody else blocks, cancels or closes.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_worker_pool.api.http_client import make_session
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    LeaseEndedError,
    NotYourLeaseError,
    PoolStoppedError,
    StaleAssignmentError,
    UnknownLeaseError,
)
from gpu_worker_pool.leases.lifetime import End

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import aiohttp

    from gpu_worker_pool.leases.values import HeldLease, LeaseService

T = TypeVar("T")

logger = logging.getLogger("gpu_worker_pool.leases.keeper")

#: A stop gives back what it can in so long; the rest runs out by itself.
STOP_SECONDS = 5.0
#: And then, to end what it is about.
LAST_WORD_SECONDS = 0.5
#: Timers do not count the time in which the machine sleeps; so they are short.
LONGEST_SLEEP_SECONDS = 5.0
LONGEST_RENEWAL_SECONDS = 10.0

#: It is not ours any more, says who must know.
_LOST = (UnknownLeaseError, NotYourLeaseError, LeaseEndedError)


class LeaseThread:
    """`on_lost` is called in this thread with every lease that is lost, and must not hold it up."""

    def __init__(self, on_lost: Callable[[HeldLease], object]) -> None:
        self._on_lost = on_lost
        self.pid = os.getpid()
        # Not what a policy would make: it must work the same in every program.
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_debug(False)  # which would tell of our own moments what is no business of anybody's
        self._is_stop_wanted = asyncio.Event()
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        #: By request id, since servers number their leases alike: what is held, who gave it, and who renews it.
        self._held: dict[str, tuple[LeaseService, HeldLease, asyncio.Task[None]]] = {}
        #: Whatever must be done to its end: places given up, leases given back.
        self._work: set[asyncio.Task[Any]] = set()
        #: What is tried again for a while, and given up when everything ends.
        self._attempts: set[asyncio.Task[Any]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._is_closing = False
        self._closers: list[Callable[[], Coroutine[Any, Any, object]]] = []
        self._thread = threading.Thread(target=self._run, name="gpu-pool leases", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it runs in; a fork has a copy of it that is no good."""
        return self.pid == os.getpid()

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Have it called soon, in the order of these calls; False if nothing is called any more."""
        if not self.is_here:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Have it done to its end, whether or not anybody waits for that."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        if not self.call(self._begin, work, done):
            done.set_exception(PoolStoppedError("the client has been stopped"))
        return done

    def want_stop(self) -> concurrent.futures.Future[None]:
        """Give back everything that is held, and end. Returns at once: garbage is collected in any thread."""
        self.call(self._is_stop_wanted.set)
        return self._over

    def join(self) -> None:
        """After the end was awaited, of which the thread's own is only a moment away."""
        if self.is_here and self._thread.ident is not None:
            self._thread.join()

    def exit(self) -> None:
        """The program ends: what it held is given back, as far as that is quickly done."""
        if self.is_here:
            self.want_stop()
            self._thread.join(STOP_SECONDS + 1.0)

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
        for task in self._attempts:
            task.cancel()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._give_back_everything()
                while self._work:
                    await asyncio.wait(self._work)
        except TimeoutError:
            logger.warning("a lease could not be given back in %g s; it runs out by itself", STOP_SECONDS)
        self._is_closing = True
        left = {*self._work, *self._attempts, *(renewing for _, _, renewing in self._held.values())}
        # To a request that is withdrawn the first word means to give up its place; there is no time left for that.
        for _ in range(2):
            for task in left:
                task.cancel()
            if left:
                _, left = await asyncio.wait(left, timeout=LAST_WORD_SECONDS)
        for close in self._closers:
            with suppress(Exception):
                await close()

    async def _give_back_everything(self) -> None:
        held = list(self._held.values())
        for _, lease, _ in held:
            # At once: a renewal that is answered in this moment must not take it for a loss.
            self._forget(lease)
            lease.life.end(End.LOST, "the client that held it was stopped, and gave it back")
        releasing = [self._send_release(service, lease) for service, lease, _ in held]
        await asyncio.gather(*releasing, return_exceptions=True)

    def close_with(self, close: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have it awaited at the very end."""
        self._closers.append(close)

    def session(self) -> aiohttp.ClientSession:
        """Connections of its own: what is polled elsewhere does not wait for long polls, nor the other way round."""
        if self._session is None:
            self._session = make_session(limit_per_host=0)
            self.close_with(self._session.close)
        return self._session

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]], done: concurrent.futures.Future[T]) -> None:
        def settle(task: asyncio.Task[T]) -> None:
            if done.cancelled() or not done.set_running_or_notify_cancel():
                if not task.cancelled():
                    task.exception()  # nobody asks for it any more
            elif task.cancelled():
                done.set_exception(PoolStoppedError("the client was stopped meanwhile"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self.work_on(work()).add_done_callback(settle)

    def work_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A stop waits for its end."""
        task = self._loop.create_task(work)
        if self._is_closing:
            task.cancel()
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def attempt(self, work: Coroutine[Any, Any, object]) -> None:
        """A stop does not wait for it."""
        task = self._loop.create_task(work)
        self._attempts.add(task)
        task.add_done_callback(self._attempts.discard)

    # --- holding ---

    def hold(self, service: LeaseService, lease: HeldLease) -> None:
        """From now on it is renewed, until it is released or lost."""
        renewing = self._loop.create_task(self._keep_renewing(service, lease))
        self._held[lease.ask.request_id] = (service, lease, renewing)

    async def _keep_renewing(self, service: LeaseService, lease: HeldLease) -> None:
        life = lease.life
        while not life.is_lost:
            # A third of its life after the last word that it is held.
            due_in = life.held_until - life.ttl_seconds * 2 / 3 - boot_time()
            if due_in > 0:
                await asyncio.sleep(min(due_in, LONGEST_SLEEP_SECONDS))
            else:
                await self._renew(service, lease)
        self._held.pop(lease.ask.request_id, None)
        self._tell_lost(lease)

    async def _renew(self, service: LeaseService, lease: HeldLease) -> None:
        """Until it is renewed or lost; whoever is asked, a try must leave time for another."""
        life, attempt, bug = lease.life, 0, ""
        while not life.is_lost:
            sent_at = boot_time()
            seconds = min(max(life.ttl_seconds / 6, 0.5), LONGEST_RENEWAL_SECONDS, life.held_until - sent_at)
            try:
                await service.renew(lease, timeout_seconds=max(seconds, 0.01))
            except _LOST as error:
                life.end(End.LOST, str(error))
            except Exception as error:
                if not isinstance(error, GPUWorkerPoolError):
                    # A bug of ours: it must not end the renewals in silence, nor be told with every one of them.
                    if repr(error) != bug:
                        bug = repr(error)
                        logger.exception("renewing %s failed", lease.shown)
                elif attempt == 0:
                    logger.warning("%s could not be renewed, and is tried again: %s", lease.shown, error)
                delay = backoff_seconds(attempt, random.random(), base=0.1, longest=life.ttl_seconds / 10)  # noqa: S311
                attempt += 1
                await asyncio.sleep(min(delay + 0.02, max(life.held_until - boot_time(), 0.0)))
            else:
                life.renewed(sent_at)
                if attempt:
                    logger.info("%s is renewed again", lease.shown)
                return

    def _tell_lost(self, lease: HeldLease) -> None:
        logger.warning("%s lost %s: %s", lease.ask.worker_id, lease.shown, lease.life.reason)
        try:
            self._on_lost(lease)
        except Exception:
            logger.exception("nobody could be told that %s is lost", lease.shown)

    # --- giving back ---

    async def release(self, service: LeaseService, lease: HeldLease) -> None:
        """Its holder is done. `StaleAssignmentError` if it was lost before; twice is harmless."""
        life = lease.life
        if life.is_lost:
            raise StaleAssignmentError(f"{lease.ask.worker_id} lost {lease.shown}: {life.reason}")
        if life.end(End.RELEASED):
            await self._send_release(service, lease)

    def let_expire(self, lease: HeldLease) -> None:
        """Nobody can release it, and somebody may still use it: its server waits until nothing is seen of that."""
        lease.life.end(End.LOST, "nothing refers to its assignment any more")
        self._forget(lease)

    async def _send_release(self, service: LeaseService, lease: HeldLease) -> None:
        self._forget(lease)
        try:
            await service.release(lease)
        except _LOST as error:
            raise StaleAssignmentError(f"{lease.ask.worker_id} lost {lease.shown}: {error}") from None
        except GPUWorkerPoolError as error:
            # The holder is done with it in any case, and need not wait for a server that is away.
            logger.warning("%s could not be given back, and is tried again: %s", lease.shown, error)
            self.attempt(self._release_later(service, lease))

    async def _release_later(self, service: LeaseService, lease: HeldLease) -> None:
        """For as long as it may live there."""
        attempt = 0
        while not lease.life.is_overdue:
            await asyncio.sleep(backoff_seconds(attempt, random.random(), longest=5.0) + 0.1)  # noqa: S311
            attempt += 1
            try:
                await service.release(lease)
            except _LOST:
                return
            except GPUWorkerPoolError:
                continue
            return

    def _forget(self, lease: HeldLease) -> None:
        held = self._held.pop(lease.ask.request_id, None)
        if held is not None:
            held[2].cancel()


#: What is to be ended at exit.
_running: set[LeaseThread] = set()


@atexit.register
def _exit() -> None:
    for running in list(_running):
        running.exit()
