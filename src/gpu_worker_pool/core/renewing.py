"""How leases and waiters stay alive: renewals, outages, observed use, abandoned polls. Part of `Pool`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core import leaving
from gpu_worker_pool.core.assignments import with_limit
from gpu_worker_pool.core.effects import Granted
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.core.service import extended_end

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease, LeaseUse
    from gpu_worker_pool.core.events import PollAbandoned, Renewed, Resumed, UseSeen
    from gpu_worker_pool.core.pool import Pool


# ---- Rule 9: renewing


def renewed(pool: Pool, event: Renewed, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    assert lease is not None  # else it was not legal
    if event.is_busy:
        lease = leaving.kept_busy(lease, now)
    pool.effects.append(Granted(renew(pool, leaving.told(pool, lease, now), now)))


def renew(pool: Pool, lease: Lease, now: float, poll_id: str = "") -> Lease:
    """Held for another TTL; an offer is held from now on."""
    expires_at = lease.renewed_until(now, lease.request.ttl_seconds)
    if lease.state is LeaseState.OFFERED:
        pool.timers.clear("lease", lease.lease_id)
        lease = lease.moved(LeaseState.HELD, expires_at=expires_at, poll_id=poll_id)
    else:
        lease = lease.extended(expires_at, poll_id)
    pool.replace_lease(lease)
    return lease


def poll_abandoned(pool: Pool, event: PollAbandoned, now: float) -> None:
    known = pool.requests.get(event.request_id)
    if known is None or isinstance(known, Outcome) or not event.poll_id or known.poll_id != event.poll_id:
        return
    if isinstance(known, Waiter):
        # In the past: a grant at this very moment must already be an offer.
        known.poll_deadline = now - 1.0
        # Most clients that hang up are gone for good, and others wait behind them.
        settings = pool.settings
        known.gives_up_at = now + (settings.offer_ttl_seconds if event.is_gone else settings.queue_ttl_seconds)
        pool.set_waiter_timer(known)
        pool.requests[event.request_id] = known
    elif (
        known.state is LeaseState.HELD
        and not pool.leases.inside(known.lease_id)
        and not pool.queue.inside(known.lease_id)
    ):
        # Its client does not know of it; with others inside it, it does.
        offer_deadline = now + pool.settings.offer_ttl_seconds
        pool.replace_lease(known.moved(LeaseState.OFFERED, expires_at=offer_deadline))


def use_seen(pool: Pool, event: UseSeen, now: float) -> None:  # noqa: ARG001  # as all handlers are called
    for lease_id, use in event.uses.items():
        lease = pool.leases.lookup(lease_id)
        if lease is not None and lease.state is LeaseState.HELD:
            note_use(pool, lease, use)


def note_use(pool: Pool, lease: Lease, use: LeaseUse) -> Lease:
    """The latest observation counts: it includes what was stored before."""
    if lease.use is None or use.seen_until > lease.use.seen_until:
        lease = replace(lease, use=use)
        pool.replace_lease(lease)
    return lease


# ---- Rule 10: time in which no process served the ledger does not count


def resumed(pool: Pool, event: Resumed, now: float) -> None:
    if pool.fair_share is not None:
        pool.fair_share.resumed(event.unserved_seconds or 0.0)  # a new clock began at the last stamp
    for lease in pool.leases:
        if lease.is_live and lease.expires_at is not None:
            ttl_seconds = lease.request.ttl_seconds or pool.settings.default_ttl_seconds
            if lease.state is LeaseState.OFFERED:  # it may never be claimed
                ttl_seconds = min(ttl_seconds, pool.settings.offer_ttl_seconds)
            end = extended_end(lease.expires_at, ttl_seconds, event.unserved_seconds, now)
            # An idle holder may not have learned that it is asked to leave: its next renewal tells it again.
            asked = None if lease.asked is not None and lease.asked.ends_at is not None else lease.asked
            pool.replace_lease(replace(with_limit(lease.extended(end)), asked=asked))
    for waiter in pool.queue.in_order():
        if waiter.gives_up_at is not None:
            # Not for a whole TTL, which may be an hour: the client may be gone, and GPUs may be reserved for it.
            default_seconds = pool.settings.default_ttl_seconds
            ttl_seconds = min(waiter.request.ttl_seconds or default_seconds, default_seconds)
            waiter.gives_up_at = extended_end(waiter.gives_up_at, ttl_seconds, event.unserved_seconds, now)
        if waiter.deadline is not None:
            waiter.deadline += event.unserved_seconds or 0.0
        pool.set_waiter_timer(waiter)
        pool.requests[waiter.request.request_id] = waiter
