"""Rule 9, the memory: remembers how requests ended, so that a repeated request gets the same answer."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.moves import LeaseState, RequestState


@record
class Outcome:
    """How a request ended; if it was granted, also how its lease did."""

    request: Request
    state: RequestState
    at: float
    reasons: tuple[str, ...] = ()
    lease: Lease | None = None
    lease_state: LeaseState | None = None


class RememberedOutcomes:
    """Outcomes in order, forgotten after a time or when there are too many.

    `requests` is `Pool.requests`: what is forgotten is removed from it.
    """

    def __init__(self, requests: dict[str, Any], seconds: float, at_most: int | None) -> None:
        self._requests = requests
        self._seconds = seconds
        self._at_most = math.inf if at_most is None else at_most
        self._outcomes: deque[Outcome] = deque()
        self._by_lease: dict[str, Outcome] = {}

    def add(self, outcome: Outcome) -> None:
        self._requests[outcome.request.request_id] = outcome
        self._outcomes.append(outcome)
        if outcome.lease is not None:
            self._by_lease[outcome.lease.lease_id] = outcome
        if len(self._outcomes) > self._at_most:
            self._forget_first()

    def forget_all_but(self, most: int) -> None:
        """The last `most` stay."""
        while len(self._outcomes) > most:
            self._forget_first()

    def forget(self, outcome: Outcome) -> None:
        """Its id may be used again."""
        if self._requests.get(outcome.request.request_id) is outcome:
            del self._requests[outcome.request.request_id]
        if outcome.lease is not None and self._by_lease.get(outcome.lease.lease_id) is outcome:
            del self._by_lease[outcome.lease.lease_id]

    def forget_old(self, now: float) -> None:
        while self._outcomes and self.is_old(self._outcomes[0], now):
            self._forget_first()

    def is_old(self, outcome: Outcome, now: float) -> bool:
        return now - outcome.at >= self._seconds

    def _forget_first(self) -> None:
        self.forget(self._outcomes.popleft())

    def of_lease(self, lease_id: str, now: float) -> Outcome | None:
        outcome = self._by_lease.get(lease_id)
        return None if outcome is None or self.is_old(outcome, now) else outcome

    def __iter__(self) -> Iterator[Outcome]:
        """Those whose id was not used again since."""
        return (outcome for outcome in self._outcomes if self._requests.get(outcome.request.request_id) is outcome)

    def __len__(self) -> int:
        return len(self._outcomes)
