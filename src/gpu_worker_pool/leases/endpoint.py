"""One endpoint that gives leases, as all requests of this program share it: order, connections, and failures.

While it fails, one request probes it, and the others wait for the result.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpu_worker_pool.core.breaker import Breaker
from gpu_worker_pool.errors import GPUWorkerPoolError, RetryableError, ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.leases.service import LeaseService, StillWaiting

logger = logging.getLogger(__name__)

#: Most long polls at one endpoint, and at all together: each has an open connection. Further requests keep their
#: places by short polls.
MOST_POLLS = 256
MOST_POLLS_IN_ALL = 1024
#: The pause before an endpoint that does not answer is probed again, doubled each time. After a short outage that is
#: sooner than the server drops the waiters whose connections broke.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 3.0


class Polls:
    """How many more long polls may be open. Belongs to one thread, as everything here."""

    def __init__(self, most: int, within: Polls | None = None) -> None:
        self._left = most
        self._within = within

    @classmethod
    def of_a_process(cls) -> Polls:
        """At most a quarter of the files that it may open."""
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
    def __init__(self, service: LeaseService, polls: Polls) -> None:
        self.service = service
        self.endpoint_id = service.endpoint_id
        self.polls = Polls(MOST_POLLS, polls)
        #: First come, first served: the first poll of a request is sent when the one before has been answered.
        self.first_polls = asyncio.Lock()
        #: A first poll went unanswered for so long that the next endpoint was asked: requests do not wait for this one.
        self.is_silent = False
        self._breaker = Breaker(SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        #: Why the last poll failed; None while it answers.
        self.last_error: RetryableError | None = None
        self._changed = asyncio.Event()
        self._returned = asyncio.Event()
        #: Requests of this program that wait there.
        self.waiting = 0

    def __repr__(self) -> str:
        return f"<LeaseEndpoint {self.endpoint_id}, {self.waiting} waiting, {self._breaker!r}>"

    @property
    def is_failing(self) -> bool:
        """May be read from any thread."""
        return self.last_error is not None

    def is_back(self) -> None:
        """It answered something else: probe it now instead of later."""
        self._breaker.probe_soon(time.monotonic())
        self._notify_changed()
        self._notify_returned()

    async def until_it_returns(self) -> None:
        """The next sign of life of an endpoint that fails."""
        await self._returned.wait()

    async def until_it_may_be_polled(self, report: Callable[[GPUWorkerPoolError], object]) -> None:
        """While it fails, one request may probe it and the others wait for the result.

        Must be followed by `poll`, at once.
        """
        while not self._breaker.try_enter(time.monotonic()):
            if self.last_error is not None:
                report(self.last_error)
            await self._until_changed()

    async def poll(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        is_long = wait_seconds > 0
        if is_long:
            self._breaker.left()  # others need not wait until it is over
        try:
            answer = await self.service.acquire(request, wait_seconds=wait_seconds, may_reserve=may_reserve)
        except GPUWorkerPoolError as error:
            if isinstance(error, RetryableError):
                self._failed(error, is_inside=not is_long)
            else:
                self._answered(is_inside=not is_long)
            raise
        except BaseException:  # which says nothing about the endpoint
            if not is_long:
                self._breaker.left()
            raise
        else:
            self._answered(is_inside=not is_long)
            return answer
        finally:
            self._notify_changed()

    def _answered(self, *, is_inside: bool) -> None:
        now = time.monotonic()
        self.is_silent = False
        self._breaker.probe_soon(now)
        if is_inside or self._breaker.try_enter(now):
            self._breaker.succeeded()
        if self.last_error is not None:
            self.last_error = None
            logger.info("%s answers lease requests again", self.endpoint_id)
            self._notify_returned()

    def _failed(self, error: RetryableError, *, is_inside: bool) -> None:
        if self.last_error is None:
            logger.warning("%s does not answer lease requests; retrying: %s", self.endpoint_id, error)
        self.last_error = error
        now = time.monotonic()
        wanted = error.retry_after_seconds if isinstance(error, ServiceRetryableError) else None
        if is_inside or self._breaker.try_enter(now):
            not_before = now + min(wanted or 0.0, LONGEST_PAUSE_SECONDS)
            self._breaker.failed(now, random.random(), not_before=not_before)  # noqa: S311

    async def _until_changed(self) -> None:
        retry_at = self._breaker.retry_at
        changed = self._changed
        # Past that moment another request probes it, and notifies the others.
        left = None if retry_at is None or retry_at <= time.monotonic() else retry_at - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                await changed.wait()

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _notify_returned(self) -> None:
        self._returned.set()
        self._returned = asyncio.Event()
