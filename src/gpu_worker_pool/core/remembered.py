"""Rule 9, the memory: how requests ended, so that whoever asks again is told the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

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
    """Outcomes in the order they came, forgotten after a time or when there are too many."""

    def __init__(self, seconds: float, at_most: int | None) -> None:
        self._seconds = seconds
        self._at_most = at_most
        self._by_request: OrderedDict[str, Outcome] = OrderedDict()
        self._by_lease: dict[str, Outcome] = {}

    def add(self, outcome: Outcome) -> None:
        self._by_request[outcome.request.request_id] = outcome
        if outcome.lease is not None:
            self._by_lease[outcome.lease.lease_id] = outcome
        if self._at_most is not None and len(self._by_request) > self._at_most:
            self._forget_first()

    def forget_old(self, now: float) -> None:
        while self._by_request:
            first = next(iter(self._by_request.values()))
            if now - first.at < self._seconds:
                return
            self._forget_first()

    def _forget_first(self) -> None:
        _, outcome = self._by_request.popitem(last=False)
        if outcome.lease is not None:
            del self._by_lease[outcome.lease.lease_id]

    def of_request(self, request_id: str) -> Outcome | None:
        return self._by_request.get(request_id)

    def of_lease(self, lease_id: str) -> Outcome | None:
        return self._by_lease.get(lease_id)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)
