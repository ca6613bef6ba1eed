"""One endpoint that gives leases: what all who wait there have to do with each other.

In the thread of the `LeaseThread`. While it fails one of them asks, and the others wait for what that one finds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_worker_pool.core.breaker import Breaker
from gpu_worker_pool.errors import GPUWorkerPoolError, RetryableError, ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.client.lease_thread import LeaseThread
    from gpu_worker_pool.leases.values import HeldLease, LeaseAsk, LeaseService, StillWaiting

logger = logging.getLogger(__name__)

#: So many of a client's requests are told at once when one endpoint grants them, and so many at all endpoints together:
#: each has an open connection, of which a process may not have very many. Further ones keep their places by asking.
MOST_POLLS = 256
MOST_POLLS_IN_ALL = 1024
#: So many ask an endpoint for the first time at once.
MOST_FIRST_ASKS = 64
#: An endpoint that does not answer is asked again after so long, doubled each time, by one place at a time: after a
#: short trouble sooner than the places of those whose connections broke are given up.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 3.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """It was asked in vain, and is asked again."""

    error: GPUWorkerPoolError


class Polls:
    """How many connections wait for a grant. Belongs to one thread, as everything here."""

    def __init__(self, most: int, within: Polls | None = None) -> None:
        self._left = most
        self._within = within

    @classmethod
    def of_a_process(cls) -> Polls:
        """A quarter of what it may open, at most."""
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(MOST_POLLS_IN_ALL if most_files < 0 else min(MOST_POLLS_IN_ALL, most_files // 4))

    def take(self) -> bool:
        if not self._left or (self._within is not None and not self._within.take()):
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        self._left += 1
        if self._within is not None:
            self._within.give_back()


class LeaseEndpoint:
    """One service, and what all the places at it have to do with each other."""

    def __init__(self, thread: LeaseThread, service: LeaseService, polls: Polls) -> None:
        self.thread = thread
        self.service = service
        self.endpoint_id = service.endpoint_id
        self.polls = Polls(MOST_POLLS, polls)
        self.first_asks = asyncio.Semaphore(MOST_FIRST_ASKS)
        self._breaker = Breaker(SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        #: Why it was last asked in vain; None while it answers.
        self._last_error: RetryableError | None = None
        self._changed = asyncio.Event()
        self._returned = asyncio.Event()
        #: Whoever expects to wait asks for the first time in turn: they arrive in the order in which they came.
        self.turn = asyncio.Lock()
        #: Requests of ours that wait there.
        self.waiting = 0

    def __repr__(self) -> str:
        return f"<LeaseEndpoint {self.endpoint_id}, {self.waiting} waiting, {self._breaker!r}>"

    @property
    def is_failing(self) -> bool:
        """To be looked at from any thread."""
        return self._last_error is not None

    def is_back(self) -> None:
        """Somebody else got an answer from it: no need to wait any longer with asking."""
        self._breaker.probe_soon(time.monotonic())
        self._tell_changed()
        self._tell_returned()

    async def until_it_returns(self) -> None:
        """The next sign of life of one that fails."""
        await self._returned.wait()

    async def until_it_may_be_asked(self, tell: Callable[[Trouble], object]) -> None:
        """While it fails, one of all who want to may ask it, and the others wait for what that one finds.

        Must be followed by `ask`, at once.
        """
        while not self._breaker.try_enter(time.monotonic()):
            if self._last_error is not None:
                tell(Trouble(self._last_error))
            await self._until_changed()

    async def ask(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        is_long = wait_seconds > 0
        if is_long:
            self._breaker.left()  # nobody must wait until it is over
        has_verdict = False
        try:
            answer = await self.service.acquire(ask, wait_seconds=wait_seconds, may_reserve=may_reserve)
        except RetryableError as error:
            has_verdict = True
            self._failed(error, is_inside=not is_long)
            raise
        except GPUWorkerPoolError:
            has_verdict = True
            self._answered(is_inside=not is_long)
            raise
        else:
            has_verdict = True
            self._answered(is_inside=not is_long)
            return answer
        finally:
            if not has_verdict and not is_long:
                self._breaker.left()
            self._tell_changed()

    def _answered(self, *, is_inside: bool) -> None:
        now = time.monotonic()
        self._breaker.probe_soon(now)
        if is_inside or self._breaker.try_enter(now):
            self._breaker.succeeded(now)
        if self._last_error is not None:
            self._last_error = None
            logger.info("%s answers again when it is asked for leases", self.endpoint_id)
            self._tell_returned()

    def _failed(self, error: RetryableError, *, is_inside: bool) -> None:
        if self._last_error is None:
            logger.warning("asking %s for leases fails, and is tried again: %s", self.endpoint_id, error)
        self._last_error = error
        now = time.monotonic()
        asked_for = error.retry_after_seconds if isinstance(error, ServiceRetryableError) else None
        if is_inside or self._breaker.try_enter(now):
            not_before = now + min(asked_for or 0.0, LONGEST_PAUSE_SECONDS)
            self._breaker.failed(now, random.random(), not_before=not_before)  # noqa: S311

    async def _until_changed(self) -> None:
        retry_at = self._breaker.retry_at
        changed = self._changed
        # Past that moment somebody is asking it, and will tell.
        left = None if retry_at is None or retry_at <= time.monotonic() else retry_at - time.monotonic()
        try:
            async with asyncio.timeout(left):
                await changed.wait()
        except TimeoutError:
            pass

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell_returned(self) -> None:
        self._returned.set()
        self._returned = asyncio.Event()
