"""Rules 9 and 11, the refusals: checks events, raises `IllegalEventError`, and changes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.limits import check_waiting
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.errors import (
    IllegalEventError,
    LeaseEndedError,
    NotYourLeaseError,
    RequestMismatchError,
    TooManyLeasesError,
    TooManyWaitingError,
    UnknownLeaseError,
)

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import (
        Cancelled,
        GrantRefused,
        LeaveRequested,
        QuarantineEnded,
        Released,
        Renewed,
        Requested,
    )
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Waiter


#: The quarantine of a lease that its holder released while others are held inside it.
RELEASED_AROUND_OTHERS = "it was released while leases inside it are held"


def check_requested(pool: Pool, event: Requested, now: float) -> None:
    request = event.request
    if request.ttl_seconds is not None and not 0 < request.ttl_seconds < math.inf:
        raise IllegalEventError(f"ttl_seconds must be a number above 0, not {request.ttl_seconds!r}")
    if (seconds := request.expected_seconds) is not None and not 0 < seconds < math.inf:
        raise IllegalEventError(f"expected_seconds must be a number above 0, not {seconds!r}")
    if (seconds := request.max_seconds) is not None and not 0 < seconds < math.inf:
        raise IllegalEventError(f"max_seconds must be a number above 0, not {seconds!r}")
    if request.request_id in pool.requests and (known := _known(pool, request.request_id, now)) is not None:
        if known.request != request:
            raise RequestMismatchError(
                f"request id {request.request_id!r} was used for another request; choose a new id"
            )
        return
    if request.account and event.may_wait:  # if it may not wait, its fleet's dispatcher has counted it
        _check_account(pool, request.account)
    if (most := pool.settings.most_leases) is not None and pool.queue.waiting + len(pool.leases) >= most:
        raise TooManyLeasesError(
            f"there are {most} leases and waiting requests, as many as this server allows: wait until some are "
            "released, or let an administrator raise GPU_POOL_MOST_LEASES"
        )
    if pool.has_limits and event.may_wait:
        check_waiting(pool, request)


def check_grant_refused(pool: Pool, event: GrantRefused, now: float) -> None:  # at any time
    if pool.leases.lookup(event.lease_id) is None:
        raise UnknownLeaseError(f"there is no {event.lease_id}, or it has ended")


def _check_account(pool: Pool, account: str) -> None:
    settings, waiting = pool.settings, pool.queue.of_account(account)
    if (most := settings.most_waiting_of_an_account) is not None and waiting >= most:
        raise TooManyWaitingError(f"{most} requests of yours wait already; wait for one of them, or cancel it")
    # What waits counts, too: it may all be granted at once.
    most = settings.most_leases_of_an_account
    if most is not None and waiting + pool.leases.of_account(account) >= most:
        raise TooManyLeasesError(
            f"you have {most} leases and waiting requests, as many as this server allows one caller: release one, or "
            "let an administrator raise GPU_POOL_MOST_LEASES_OF_A_CALLER"
        )


def check_cancelled(pool: Pool, event: Cancelled, now: float) -> None:
    known = _known(pool, event.request_id, now)
    if known is not None and event.by is not None and event.by != known.request.owner:
        raise NotYourLeaseError(f"request {event.request_id!r} is not yours")


def check_released(pool: Pool, event: Released, now: float) -> None:
    lease = pool.leases.by_id.get(event.lease_id)
    if lease is not None:
        if event.by is not None or event.fence is not None:
            _check_holder(pool, event, now)
        if lease.quarantine is not None and lease.quarantine.reason == RELEASED_AROUND_OTHERS:
            return  # releasing twice is harmless
        if lease.expires_at is not None or lease.quarantine is not None:
            _check_not_lost(pool, lease, now)
        return
    _check_holder(pool, event, now)
    outcome = pool.outcomes.of_lease(event.lease_id, now)
    if outcome is not None and outcome.lease_state is not LeaseState.RELEASED:
        raise LeaseEndedError(f"{event.lease_id} was lost before it was released: {_why_it_ended(outcome)}")


def check_renewed(pool: Pool, event: Renewed, now: float) -> None:
    lease = _check_holder(pool, event, now)
    if lease is None:
        outcome = pool.outcomes.of_lease(event.lease_id, now)
        raise LeaseEndedError(f"{event.lease_id} has ended: {_why_it_ended(outcome)}")
    _check_not_lost(pool, lease, now)
    if lease.state is LeaseState.OFFERED:
        raise IllegalEventError(f"{event.lease_id} is not claimed yet; repeat the request with its id")


def check_leave_requested(pool: Pool, event: LeaveRequested, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is None:
        raise UnknownLeaseError(f"there is no {event.lease_id}, or it has ended")
    if lease.state is not LeaseState.HELD:
        raise IllegalEventError(f"{event.lease_id} has no holder that could give it back")


def _why_it_ended(outcome: Outcome | None) -> str:
    if outcome is None or not outcome.reasons:
        return "it was released"
    # Its holder wants to know why it was lost, not why the GPU is free again.
    quarantine = outcome.lease.quarantine if outcome.lease is not None else None
    return "; ".join(outcome.reasons) if quarantine is None else quarantine.reason


def check_quarantine_ended(pool: Pool, event: QuarantineEnded, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is None or lease.state is not LeaseState.QUARANTINED:
        raise IllegalEventError(f"{event.lease_id} is not in quarantine")


def _known(pool: Pool, request_id: str, now: float) -> Waiter | Lease | Outcome | None:
    """What ended too long ago is unknown, even if it is still in memory."""
    known = pool.requests.get(request_id)
    return None if isinstance(known, Outcome) and pool.outcomes.is_old(known, now) else known


def _check_holder(pool: Pool, event: Released | Renewed, now: float) -> Lease | None:
    """The lease, which must be known and the caller's; None if it has ended."""
    known = lease = pool.leases.lookup(event.lease_id)
    if known is None:
        outcome = pool.outcomes.of_lease(event.lease_id, now)
        known = outcome.lease if outcome is not None else None
    if known is None:
        raise UnknownLeaseError(f"there is no {event.lease_id}, or it ended long ago")
    if event.by is not None and event.by != known.request.owner:
        raise NotYourLeaseError(f"{event.lease_id} is not yours")
    if event.fence is not None and event.fence != known.fence:
        raise LeaseEndedError(f"{event.lease_id} has fence {known.fence}, not {event.fence}: the message is outdated")
    return lease


def _check_not_lost(pool: Pool, lease: Lease, now: float) -> None:
    if lease.quarantine is not None:
        raise LeaseEndedError(f"{lease.lease_id} was lost: {lease.quarantine.reason}")
    if pool.is_overdue(lease, now):
        raise LeaseEndedError(f"{lease.lease_id} was lost: {lease.why_expired(now)}")
