"""One request at one or several endpoints, with one outcome: the first grant wins, and the others are withdrawn.

Endpoints are asked one after the other, best first. If none grants it at once, the request waits at all of them.
Runs in the loop of a `LeaseEngine`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.errors import GPUWorkerPoolError, ImpossibleRequestError, PoolStoppedError, ServiceRefusedError
from gpu_worker_pool.leases import endpoint
from gpu_worker_pool.leases.endpoint import EndpointRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.endpoint import LeaseEndpoint
    from gpu_worker_pool.leases.engine import LeaseEngine
    from gpu_worker_pool.leases.lease import HeldLease

#: With a timeout of 0: how long to wait for the first answers.
FIRST_ANSWER_SECONDS = 2.0
#: Total wait of all first polls: enough to read again a GPU that was just released.
FIRST_WAIT_SECONDS = 0.3


class Candidate(NamedTuple):
    """An endpoint to ask, and the request as it is sent there."""

    endpoint: LeaseEndpoint
    request: Request
    #: Readings show nothing free, so its first poll need not wait.
    is_busy: bool = False
    #: False: the request is sent, but its first answer is not waited for.
    is_answering: bool = True


class Acquisition:
    """Call its methods only in the engine's loop. `requests` and `was_blocked` may be read from any thread."""

    def __init__(
        self,
        engine: LeaseEngine,
        first: Iterable[Candidate],
        then: Iterable[Candidate] = (),
        *,
        begun_at: float | None = None,
        timeout_seconds: float = math.inf,
        first_answer_seconds: float = FIRST_ANSWER_SECONDS,
        poll_seconds: float | None = None,
        on_news: Callable[[EndpointRequest], object] = lambda _: None,
        on_blocked: Callable[[], object] = lambda: None,
    ) -> None:
        """`first` are asked one after the other, then `then` all at once.

        `begun_at`: when its worker asked, on the monotonic clock, if that was earlier. `poll_seconds`: see
        `EndpointRequest`. `on_news` is called with every answer of an endpoint; `on_blocked` once, when no endpoint can
        grant it at once.
        """
        self._engine = engine
        self._first = deque(first)
        self._then = list(then)
        self._first_wait_seconds = FIRST_WAIT_SECONDS / max(len(self._first) + len(self._then), 1)
        self._poll_seconds = poll_seconds
        self._on_news = on_news
        self._on_blocked = on_blocked
        self.begun_at: float = time.monotonic() if begun_at is None else begun_at
        self._deadline = self.begun_at + timeout_seconds
        self._first_answers_until = self.begun_at + first_answer_seconds
        #: By endpoint id.
        self.requests: dict[str, EndpointRequest] = {}
        #: By endpoint id, why some cannot be used at all.
        self.refused: dict[str, GPUWorkerPoolError] = {}
        self.was_blocked: bool = False
        self._news = asyncio.Event()
        self._is_stopped = False
        #: The one endpoint that may reserve GPUs for it.
        self._reserving: EndpointRequest | None = None
        self._won: EndpointRequest | None = None

    # --- endpoints that come and go ---

    def join(self, candidate: Candidate) -> None:
        name = candidate.endpoint.endpoint_id
        if name not in self.requests and all(each.endpoint is not candidate.endpoint for each in self._candidates):
            self.refused.pop(name, None)
            self._then.append(candidate)
            self._news.set()

    def leave(self, endpoint_id: str) -> None:
        self._first = deque(each for each in self._first if each.endpoint.endpoint_id != endpoint_id)
        self._then = [each for each in self._then if each.endpoint.endpoint_id != endpoint_id]
        self.refused.pop(endpoint_id, None)
        request = self.requests.get(endpoint_id)
        if request is not None and request is not self._won:  # else it has already granted
            del self.requests[endpoint_id]
            request.withdraw()
        self._news.set()

    def refuse(self, endpoint_id: str, error: GPUWorkerPoolError) -> None:
        """An endpoint cannot take part."""
        self.leave(endpoint_id)
        self.refused[endpoint_id] = error

    def withdraw(self) -> None:
        """End it, and give back what it was granted."""
        self._is_stopped = True
        for request in self.requests.values():
            request.withdraw()
        self._news.set()

    @property
    def _candidates(self) -> list[Candidate]:
        return [*self._first, *self._then]

    # --- the outcome ---

    async def run(self) -> HeldLease:
        """Raises a plain `TimeoutError` when time runs out: the caller can explain it better."""
        self._engine.acquisitions.add(self)
        try:
            # First come, first served, also across endpoints: a later request is sent nowhere before this one has been
            # sent everywhere or granted.
            await self._until_its_turn()
            try:
                while self._first and not self._is_decided() and time.monotonic() < self._deadline:
                    await self._until_answered(self._begin(self._first.popleft()))
                self._begin_the_rest()
            finally:
                self._engine.turn.release()
            while not self._is_decided():
                self._begin_the_rest()
                self._reserve_at_one_endpoint()
                if self._is_hopeless():
                    raise self._final_error()
                self._report_if_blocked()
                await self._news_until(self._raise_if_out_of_time())
            if self._is_stopped or self._won is None or self._won.lease is None:
                raise PoolStoppedError
            return self._won.lease
        finally:
            self._engine.acquisitions.discard(self)
            for request in self.requests.values():
                if request is not self._won:
                    request.withdraw()

    async def _until_its_turn(self) -> None:
        last = max(self._deadline, self._first_answers_until)
        async with asyncio.timeout(None if last == math.inf else max(last - time.monotonic(), 0.0)):
            await self._engine.turn.acquire()

    async def _until_answered(self, request: EndpointRequest) -> None:
        silent_at = time.monotonic() + endpoint.SILENCE_SECONDS
        while not (self._has_answered(request) or request.endpoint.is_silent or self._is_decided()):
            if not await self._news_until(min(silent_at, self._deadline)):
                return

    def _is_decided(self) -> bool:
        if self._won is None:
            self._won = next((each for each in self.requests.values() if each.lease is not None), None)
        return self._is_stopped or self._won is not None

    async def _news_until(self, wake_at: float) -> bool:
        """Wait until then; returns whether there was news."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wake_at == math.inf else max(wake_at - time.monotonic(), 0.0)):
                await self._news.wait()
        is_news = self._news.is_set()
        self._news.clear()
        return is_news

    def _begin_the_rest(self) -> None:
        candidates = self._candidates
        self._first.clear()
        self._then.clear()
        for candidate in candidates:
            if not self._is_decided():
                self._begin(candidate)

    def _begin(self, candidate: Candidate) -> EndpointRequest:
        begun = EndpointRequest(
            self._engine,
            candidate.endpoint,
            candidate.request,
            self._on_change,
            first_wait_seconds=0.0 if candidate.is_busy else self._first_wait_seconds,
            poll_seconds=self._poll_seconds,
        )
        begun.has_answered = not candidate.is_answering
        self.requests[begun.name] = begun
        if self._reserving is None:
            self._reserving, begun.may_reserve = begun, True
        return begun

    def _on_change(self, request: EndpointRequest) -> None:
        if self.requests.get(request.name) is request:
            self._on_news(request)
            self._news.set()

    def _has_answered(self, request: EndpointRequest) -> bool:
        return request.has_answered or request.endpoint.is_left_alone

    def _reserve_at_one_endpoint(self) -> None:
        """Rule 4: one endpoint at a time may reserve GPUs for it; another one when that fails."""
        able = [each for each in self.requests.values() if each.error is None and each.trouble is None]
        other = next((each for each in able if each.waiting is not None), None)
        if self._reserving in able or other is None:
            return
        if self._reserving is not None:
            self._reserving.may_reserve = False
        self._reserving, other.may_reserve = other, True

    def _raise_if_out_of_time(self) -> float:
        """Returns when to check again."""
        now = time.monotonic()
        if now < self._deadline:
            return self._deadline
        until = max(self._deadline, self._first_answers_until)
        if now >= until or all(self._has_answered(each) for each in self.requests.values()):
            raise TimeoutError
        return until

    def _is_hopeless(self) -> bool:
        """Every endpoint refused it for good."""
        has_any = bool(self.requests or self.refused)
        return has_any and all(each.error is not None for each in self.requests.values())

    def _final_error(self) -> Exception:
        errors: list[tuple[str, Exception]] = [*self.refused.items()]
        for name, request in self.requests.items():
            if request.error is not None:
                errors.append((name, request.error))
                request.error = None  # with the traceback it would make a cycle
        if any(isinstance(error, PoolStoppedError) for _, error in errors):
            return PoolStoppedError()
        if len(errors) == 1:
            return errors[0][1]
        return _all_of(errors)

    def _report_if_blocked(self) -> None:
        requests = self.requests.values()
        if not self.was_blocked and all(self._has_answered(each) or each.endpoint.is_silent for each in requests):
            self.was_blocked = True
            self._on_blocked()


def _all_of(errors: Iterable[tuple[str, Exception]]) -> GPUWorkerPoolError:
    """One error that lists the error of each endpoint."""
    said = list(errors)
    if all(isinstance(error, ImpossibleRequestError) for _, error in said):
        reasons = [
            reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
            for name, error in said
            if isinstance(error, ImpossibleRequestError)
            for reason in error.reasons or (str(error),)
        ]
        return ImpossibleRequestError(reasons=tuple(reasons))
    statuses = [error.status for _, error in said if isinstance(error, ServiceRefusedError)]
    return ServiceRefusedError(
        "; ".join(f"{name}: {error}" for name, error in said), status=statuses[0] if statuses else None
    )
