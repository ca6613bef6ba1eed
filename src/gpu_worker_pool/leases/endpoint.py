"""One endpoint that gives leases, as all requests of this program share it, and one request at it.

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

from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.core.breaker import Breaker, BreakerState
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    RequestCancelledError,
    RequestEndedError,
    RetryableError,
    ServiceRetryableError,
    TooManyWaitingError,
)
from gpu_worker_pool.leases.lease import HeldLease, with_new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.engine import LeaseEngine
    from gpu_worker_pool.leases.lease import LeaseService, StillWaiting

logger: logging.Logger = logging.getLogger(__name__)

#: Maximum number of long polls at one endpoint, and in total: each needs an open connection. Further requests keep
#: their place in the queue with short polls.
MOST_POLLS = 256
MOST_POLLS_IN_ALL = 1024
#: The pause before an endpoint that does not answer is probed again, doubled each time. Short enough that
#: after a short outage waiters poll again before the server drops them.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 3.0
#: A first poll that takes longer delays no other request: the next endpoint is asked, and the next request is sent.
SILENCE_SECONDS = 1.0
#: Interval of short polls, used when no connection is left for a long one: shorter than the offer TTL.
SHORT_POLL_SECONDS = 4.0
#: Servers do not let a poll wait longer.
LONGEST_POLL_SECONDS = 30.0
CANCEL_TRIES = 3


class PollBudget:
    """Counts how many more long polls may be opened. Not thread-safe, like everything in this file."""

    def __init__(self, most: int, within: PollBudget | None = None) -> None:
        self._left = most
        self._within = within

    @classmethod
    def for_process(cls) -> PollBudget:
        """The limit for this process: at most a quarter of the files it may open."""
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
    def __init__(self, service: LeaseService, polls: PollBudget) -> None:
        self.service = service
        self.endpoint_id: str = service.endpoint_id
        self.polls: PollBudget = PollBudget(MOST_POLLS, polls)
        #: First come, first served: a request's first poll is sent when that of the request before it was answered.
        self.first_polls: asyncio.Lock = asyncio.Lock()
        #: A first poll was not answered for `SILENCE_SECONDS`, nor any other since: requests do not wait for this one.
        self.is_silent: bool = False
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

    @property
    def is_left_alone(self) -> bool:
        """It fails, and the next probe is not due yet: no answer can be expected now."""
        return self.is_failing and self._breaker.state(time.monotonic()) is BreakerState.OPEN

    def returned(self) -> None:
        """It answered another kind of call: probe it now instead of later."""
        self._breaker.probe_soon(time.monotonic())
        self._notify_changed()
        self._notify_returned()

    async def until_it_returns(self) -> None:
        """Wait for the next sign of life of a failing endpoint."""
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
                self._failed(error, has_entered=not is_long)
            else:
                self._answered(has_entered=not is_long)
            raise
        except BaseException:  # such as a cancellation, which says nothing about the endpoint
            if not is_long:
                self._breaker.left()
            raise
        else:
            self._answered(has_entered=not is_long)
            return answer
        finally:
            self._notify_changed()

    def _answered(self, *, has_entered: bool) -> None:
        now = time.monotonic()
        self.is_silent = False
        self._breaker.probe_soon(now)
        if has_entered or self._breaker.try_enter(now):
            self._breaker.succeeded()
        if self.last_error is not None:
            self.last_error = None
            logger.info("%s answers lease requests again", self.endpoint_id)
            self._notify_returned()

    def _failed(self, error: RetryableError, *, has_entered: bool) -> None:
        if self.last_error is None:
            logger.warning("%s does not answer lease requests; retrying: %s", self.endpoint_id, error)
        self.last_error = error
        now = time.monotonic()
        wanted = error.retry_after_seconds if isinstance(error, ServiceRetryableError) else None
        if has_entered or self._breaker.try_enter(now):
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


class EndpointRequest:
    """`changed` is called with it when one of its public attributes changes, but not after it is withdrawn."""

    def __init__(
        self,
        engine: LeaseEngine,
        endpoint: LeaseEndpoint,
        request: Request,
        changed: Callable[[EndpointRequest], object],
        *,
        first_wait_seconds: float = 0.0,
        poll_seconds: float | None = None,
    ) -> None:
        """`first_wait_seconds`: how long the first poll waits: briefly, for a GPU that only needs to be read again.

        `poll_seconds`: how long each further poll waits; by default a third of the TTL, because a lease's TTL starts
        when the poll that brings the lease is sent.
        """
        self.endpoint = endpoint
        #: Whether the endpoint may reserve GPUs for it (rule 4); takes effect with the next poll.
        self.may_reserve = False
        self.has_answered: bool = False
        self.waiting: StillWaiting | None = None
        #: The last error, if the request is being retried.
        self.trouble: GPUWorkerPoolError | None = None
        #: The error that ended the request.
        self.error: Exception | None = None
        self.lease: HeldLease | None = None
        self._engine = engine
        self._request = request
        self._changed = changed
        self._first_wait_seconds = first_wait_seconds
        if poll_seconds is None:
            poll_seconds = min(LONGEST_POLL_SECONDS, (request.ttl_seconds or LONGEST_POLL_SECONDS) / 3)
        self._poll_seconds = poll_seconds
        self._is_withdrawn = False
        #: Whether the server may know of the request, and whether it certainly does.
        self._was_sent = self._is_known = False
        self._is_first_under_way = False
        #: Whether it may send its first poll, and later requests may not.
        self._has_turn = False
        self._task = engine.work_on(self._run())

    @property
    def name(self) -> str:
        return self.endpoint.endpoint_id

    def withdraw(self) -> None:
        """Start to cancel the request, or to give back its lease; harmless if it has already ended."""
        if self._is_withdrawn:
            return
        self._is_withdrawn = True
        if self.lease is not None:
            self._engine.work_on(self._give_back(self.lease))
        # The first poll ends soon; if it were aborted, we would not know whether the server has seen it.
        elif not self._is_first_under_way:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            lease = await self._until_granted()
        except asyncio.CancelledError:
            if not self._is_withdrawn:
                raise
            lease = None
        except GPUWorkerPoolError as error:
            self._fail(error)
            return
        except Exception as error:
            # A bug in this program: report it to the acquisition, and do not leave the request in the queue.
            logger.exception("the lease request to %s failed", self.name)
            self._fail(error)
            if self._was_sent:
                await self._cancel()
            return
        finally:
            self._end_turn()
        if self._is_withdrawn:
            if lease is not None:
                await self._give_back(lease)
            elif self._was_sent:
                await self._cancel()
            return
        assert lease is not None  # else it was withdrawn
        self._engine.hold(lease)
        self.lease = lease
        self._notify()
        # Nothing changes any more, and a cycle with its acquisition would keep a dropped assignment alive.
        self._changed = lambda _: None

    async def _until_granted(self) -> HeldLease | None:
        endpoint = self.endpoint
        # No wait behind other requests of ours: it would be pointless, and delay the first polls of later ones.
        answer = await self._poll_until_answered(0.0 if endpoint.waiting else self._first_wait_seconds)
        endpoint.waiting += 1
        has_long_poll = False
        try:
            while not (self._is_withdrawn or isinstance(answer, HeldLease)):
                self.waiting, self.trouble = answer, None
                self._notify()
                has_long_poll = has_long_poll or endpoint.polls.take()
                if has_long_poll:
                    answer = await self._poll_until_answered(self._poll_seconds)
                else:
                    await asyncio.sleep(SHORT_POLL_SECONDS * (0.75 + random.random() / 2))  # noqa: S311
                    answer = await self._poll_until_answered(0.0)
        finally:
            endpoint.waiting -= 1
            if has_long_poll:
                endpoint.polls.give_back()
        return answer if isinstance(answer, HeldLease) else None

    async def _poll_until_answered(self, wait_seconds: float) -> HeldLease | StillWaiting:
        attempt = 0
        while True:
            if not (self._is_known or self._has_turn):
                await self.endpoint.first_polls.acquire()
                self._has_turn = True
            pause_seconds = 0.0
            await self.endpoint.until_it_may_be_polled(self._report)
            self._was_sent = True
            self._is_first_under_way = not self._is_known
            # A probe must not take long: the others wait for its result.
            seconds = 0.0 if self.endpoint.is_failing else wait_seconds
            patience_seconds = 0.0 if self.endpoint.is_silent else SILENCE_SECONDS
            silence = asyncio.get_running_loop().call_later(patience_seconds, self._end_turn)
            try:
                answer = await self.endpoint.poll(self._request, wait_seconds=seconds, may_reserve=self.may_reserve)
            except RequestEndedError as error:
                self._start_over(error)
                wait_seconds = 0.0  # like every first poll, so that those after it need not wait long
            except TooManyWaitingError as error:
                self._report(error)
                pause_seconds = 0.2 + backoff_seconds(attempt, random.random(), longest=5.0)  # noqa: S311
            except RetryableError as error:
                self._report(error)  # the endpoint decides when to retry
            else:
                self._is_known = True
                return answer
            finally:
                silence.cancel()
                self._is_first_under_way = False
                if self._is_known:
                    self._end_turn()
            if self._is_withdrawn:
                raise asyncio.CancelledError
            await asyncio.sleep(pause_seconds)
            attempt += 1

    def _end_turn(self) -> None:
        """The next request may be sent: the first poll of this one was answered, or is not answered in time."""
        if self._has_turn:
            self._has_turn = False
            self.endpoint.first_polls.release()
            if self._is_first_under_way:
                self.endpoint.is_silent = True
                if not self._is_withdrawn:
                    self._changed(self)

    def _start_over(self, error: RequestEndedError) -> None:
        """The server dropped it, for example because this process was suspended: send it as a new request."""
        if error.state == "cancelled":
            raise RequestCancelledError(f"the request was removed from the queue of {self.name}") from error
        logger.info("%s: requesting again, since %s", self.name, error)
        self._request = with_new_id(self._request)
        self._is_known = False

    def _report(self, error: GPUWorkerPoolError) -> None:
        self.trouble = error
        self._notify()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._notify()

    def _notify(self) -> None:
        self.has_answered = True
        if not self._is_withdrawn:
            self._changed(self)

    # --- withdrawing ---

    async def _give_back(self, lease: HeldLease) -> None:
        try:
            await self._engine.release(lease)
        except GPUWorkerPoolError as error:
            logger.info("%s could not be given back: %s", lease.shown, error)

    async def _cancel(self) -> None:
        for attempt in range(CANCEL_TRIES):
            if await self._try_cancel():
                return
            if self.endpoint.is_failing:
                break
            await asyncio.sleep(backoff_seconds(attempt, random.random()))  # noqa: S311
        self._engine.attempt(self._cancel_later())

    async def _cancel_later(self) -> None:
        """A server that is down still has the request when it returns, and other requests wait behind it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._engine.cancel_seconds):
                is_cancelled = False
                while not is_cancelled:
                    await self.endpoint.until_it_returns()
                    is_cancelled = await self._try_cancel()

    async def _try_cancel(self) -> bool:
        try:
            await self.endpoint.service.cancel(self._request)
        except RetryableError:
            return False
        except GPUWorkerPoolError as error:
            # It is not polled any more: the server drops it, and a lease granted meanwhile is only offered.
            logger.info("%s: the request is left to expire: %s", self.name, error)
        return True
