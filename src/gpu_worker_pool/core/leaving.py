"""Asks holders to give back their leases: on request, or because they are idle and the policy allows it.

A holder that is asked may stay. Only the lease of an idle holder ends, and only if all of this holds: the policy
allows it for its account, a request waits that could use its GPUs, it was warned, and it computed nothing during the
grace period.
Part of `Pool`, which calls it with every reading.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core import ending
from gpu_worker_pool.core.assignments import LeaseUse, LeaveAsked
from gpu_worker_pool.core.limits import limits_of, only_on
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.obstacles import lasting_obstacles
from gpu_worker_pool.core.origins import name_of
from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import LeaveRequested
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Waiter


#: Older readings do not show that a holder is idle.
MOST_UNSEEN_SECONDS: Final = 90.0


def ask_holders(pool: Pool, now: float) -> None:
    """After new readings: ask the holders in the way of a request with `ask`, and idle holders."""
    for waiter in pool.queue.asking():
        _ask_for(pool, waiter, now)
    if not pool.has_limits:
        return
    for lease in pool.leases:
        if lease.state is LeaseState.HELD and lease.within is None:
            _follow_idle(pool, lease, now)


def leave_requested(pool: Pool, event: LeaveRequested, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is None or lease.state is not LeaseState.HELD:  # it has just ended by itself
        return
    pool.replace_lease(replace(lease, asked=LeaveAsked(now, event.reason)))


def withdraw(pool: Pool, request_id: str) -> None:
    """The request that asked no longer waits."""
    for lease in pool.leases:
        if lease.asked is not None and lease.asked.request_id == request_id:
            pool.replace_lease(replace(lease, asked=None))


def told(pool: Pool, lease: Lease, now: float) -> Lease:
    """The lease after a renewal, which tells its holder that it is to end: the grace period starts now."""
    asked = lease.asked
    if asked is None or asked.ends_at is None:
        return lease
    ends_at = min(asked.ends_at, now + pool.policy.idle.grace_seconds)
    return replace(lease, asked=replace(asked, ends_at=ends_at))


def kept_busy(lease: Lease, now: float) -> Lease:
    """Its holder says that it is not idle, whatever readings show."""
    use = lease.use or LeaseUse(now, 0.0, None, now, None)
    asked = lease.asked if lease.asked is not None and lease.asked.ends_at is None else None
    return replace(lease, use=replace(use, busy_at=now), asked=asked)


def idle_seconds(lease: Lease) -> float | None:
    """How long it has certainly computed nothing, according to the stored readings; None if unknown."""
    use = lease.use
    return None if use is None or use.busy_at is None else use.seen_until - use.busy_at


def ends_for_idleness(pool: Pool, lease: Lease, now: float) -> bool:
    """Called when the grace is over; False if it may stay after all."""
    asked = lease.asked
    if asked is None or asked.ends_at is None or asked.ends_at > now:
        return False
    if not _is_idle(pool, lease) or _waiter_for(pool, lease) is None:
        pool.replace_lease(replace(lease, asked=None))
        return False
    idle = spoken_seconds(idle_seconds(lease) or 0.0)
    reason = f"it was idle for {idle} while others waited, and the policy lets them have the GPU then"
    ending.lose(pool, lease, reason, pool.settings.quarantine_seconds, now)
    return True


def _ask_for(pool: Pool, waiter: Waiter, now: float) -> None:
    """Ask the holders of as many GPUs as it needs, starting with those that have held them longest."""
    request_id = waiter.request.request_id
    if only_on(pool, waiter.request) is not None:
        return
    held = sorted(_leases_in_the_way(pool, waiter), key=lambda lease: lease.granted_at)
    if any(lease.asked is not None and lease.asked.request_id == request_id for lease in held):
        return
    needed, gpus = waiter.request.requirements.count, set[str]()
    for lease in held:
        if len(gpus) >= needed:
            break
        gpus.update(lease.gpu_ids)
        if lease.asked is None:
            reason = f"{name_of(waiter.request, pool.settings.host)} waits for it"
            pool.replace_lease(replace(lease, asked=LeaveAsked(now, reason, request_id=request_id)))


def _leases_in_the_way(pool: Pool, waiter: Waiter) -> Iterable[Lease]:
    """The held leases on GPUs that could ever serve it."""
    found: dict[str, Lease] = {}
    for gpu in pool.allocator.gpus.values():
        if gpu.reading is None or next(
            lasting_obstacles(gpu.reading, waiter.request.requirements, pool.settings), None
        ):
            continue
        found.update({lease.lease_id: lease for lease in gpu.leases.values() if lease.state is LeaseState.HELD})
    return found.values()


def _follow_idle(pool: Pool, lease: Lease, now: float) -> None:
    asked = lease.asked
    if asked is not None and asked.ends_at is not None:
        if not _is_idle(pool, lease):
            pool.replace_lease(replace(lease, asked=None))  # it computes again
        return
    if not _is_idle(pool, lease) or (waiter := _waiter_for(pool, lease)) is None:
        return
    # Its holder learns of it with its next renewal, a third of its TTL from now at the latest: `told`.
    ends_at = now + (lease.request.ttl_seconds or 0.0) / 3 + pool.policy.idle.grace_seconds
    idle = spoken_seconds(idle_seconds(lease) or 0.0)
    reason = f"it has been idle for {idle}, and {name_of(waiter.request, pool.settings.host)} waits"
    pool.replace_lease(replace(lease, asked=LeaveAsked(now, reason, ends_at)))


def _is_idle(pool: Pool, lease: Lease) -> bool:
    """Whether it has been idle long enough, and the policy allows its account to be asked."""
    use, idle = lease.use, idle_seconds(lease)
    if use is None or pool.now - use.seen_until > MOST_UNSEEN_SECONDS:
        return False  # perhaps it computes now
    if not limits_of(pool, lease.request).idle_may_be_asked:
        return False
    return idle is not None and idle >= pool.policy.idle.after_seconds


def _waiter_for(pool: Pool, lease: Lease) -> Waiter | None:
    """The first waiting request that could ever use its GPUs."""
    gpus = pool.leases.gpus_of(lease)
    for waiter in pool.queue.in_order():
        request = waiter.request
        if request.within is not None or only_on(pool, request) is not None:
            continue
        for gpu in gpus:
            if gpu.reading is not None and not next(
                lasting_obstacles(gpu.reading, request.requirements, pool.settings), None
            ):
                return waiter
    return None
