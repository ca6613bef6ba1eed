"""Rules 9 and 11, the refusals: which events are illegal. Looks, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.events import Cancelled, Event, QuarantineEnded, Released, Renewed, Requested
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.errors import (
    IllegalEventError,
    LeaseEndedError,
    NotYourLeaseError,
    RequestMismatchError,
    UnknownLeaseError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.pool import Pool


def check_legal(pool: Pool, event: Event, now: float) -> None:
    """Raises `IllegalEventError` for an event that must not happen."""
    check = _CHECKS.get(type(event))
    if check is not None:
        check(pool, event, max(now, pool.now))


def _check_requested(pool: Pool, event: Requested, now: float) -> None:
    known = _known_request(pool, event.request.request_id)
    if known is not None and known != event.request:
        raise RequestMismatchError(
            f"request id {event.request.request_id!r} was used for another request; choose a new id for a new wish"
        )


def _check_cancelled(pool: Pool, event: Cancelled, now: float) -> None:
    known = _known_request(pool, event.request_id)
    if known is not None and event.by is not None and event.by != known.owner:
        raise NotYourLeaseError(f"request {event.request_id!r} belongs to somebody else")


def _check_released(pool: Pool, event: Released, now: float) -> None:
    lease = _check_holder(pool, event)
    if lease is None:
        outcome = pool.outcomes.of_lease(event.lease_id)
        assert outcome is not None  # else `_check_holder` would have raised
        if outcome.lease_state is not LeaseState.RELEASED:
            raise LeaseEndedError(f"{event.lease_id} was lost before it was released: {'; '.join(outcome.reasons)}")
    else:
        _check_not_lost(pool, lease, now)


def _check_renewed(pool: Pool, event: Renewed, now: float) -> None:
    lease = _check_holder(pool, event)
    if lease is None:
        raise LeaseEndedError(f"{event.lease_id} has ended; ask for a new GPU")
    _check_not_lost(pool, lease, now)
    if lease.state is LeaseState.OFFERED:
        raise IllegalEventError(f"{event.lease_id} has not been claimed yet; ask again with its request id")


def _check_quarantine_ended(pool: Pool, event: QuarantineEnded, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is None or lease.state is not LeaseState.QUARANTINED:
        raise IllegalEventError(f"{event.lease_id} is not in quarantine")


def _check_holder(pool: Pool, event: Released | Renewed) -> Lease | None:
    """That the lease is known and the speaker's; None if it has ended."""
    lease = pool.leases.lookup(event.lease_id)
    known = lease
    if known is None:
        outcome = pool.outcomes.of_lease(event.lease_id)
        known = outcome.lease if outcome is not None else None
    if known is None:
        raise UnknownLeaseError(f"there is no {event.lease_id}, or it ended long ago")
    if event.by is not None and event.by != known.request.owner:
        raise NotYourLeaseError(f"{event.lease_id} belongs to somebody else")
    if event.fence is not None and event.fence != known.fence:
        raise LeaseEndedError(f"{event.lease_id} has fence {known.fence}, not {event.fence}: the message is outdated")
    return lease


def _check_not_lost(pool: Pool, lease: Lease, now: float) -> None:
    if lease.state is LeaseState.QUARANTINED:
        raise LeaseEndedError(f"{lease.lease_id} was lost: {lease.quarantine_reason}")
    ends_at = pool.timers.get(("lease", lease.lease_id))
    if ends_at is not None and ends_at <= now and not pool.was_unserved(now):
        raise LeaseEndedError(f"{lease.lease_id} was lost: its lease was not renewed in time")


def _known_request(pool: Pool, request_id: str) -> Request | None:
    waiter = pool.queue.lookup(request_id)
    if waiter is not None:
        return waiter.request
    lease = pool.leases.lookup_request(request_id)
    if lease is not None:
        return lease.request
    outcome = pool.outcomes.of_request(request_id)
    return outcome.request if outcome is not None else None


_CHECKS: Mapping[type[Any], Callable[[Pool, Any, float], None]] = {
    Requested: _check_requested,
    Cancelled: _check_cancelled,
    Released: _check_released,
    Renewed: _check_renewed,
    QuarantineEnded: _check_quarantine_ended,
}
