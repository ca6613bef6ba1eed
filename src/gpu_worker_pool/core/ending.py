"""How leases end: released, lost, or by a quarantine (rule 11), with the leases inside them. Part of `Pool`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import Quarantine
from gpu_worker_pool.core.effects import LeaseEnded
from gpu_worker_pool.core.evidence import trace_of
from gpu_worker_pool.core.inside import has_ended
from gpu_worker_pool.core.legality import RELEASED_AROUND_OTHERS
from gpu_worker_pool.core.moves import LEASE_MOVES, IllegalMoveError, LeaseState, RequestState
from gpu_worker_pool.core.remembered import Outcome

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import GPUsVanished, HolderGone, QuarantineEnded
    from gpu_worker_pool.core.pool import Pool


#: Needed at every release, where looking up an enum's member costs as much as the rest of a check.
GRANTED, HELD, RELEASED = RequestState.GRANTED, LeaseState.HELD, LeaseState.RELEASED


def give_back(pool: Pool, lease: Lease, now: float) -> None:
    """Its holder has released it; leases held inside it still use its GPUs."""
    if lease.state is HELD and _is_used_inside(pool, lease):
        _quarantine(pool, lease, RELEASED_AROUND_OTHERS, now, now)
    else:
        end_lease(pool, lease, RELEASED, now)


def _is_used_inside(pool: Pool, lease: Lease) -> bool:
    return any(inner.state is not LeaseState.OFFERED for inner in pool.leases.inside(lease.lease_id))


def end_lease(
    pool: Pool, lease: Lease, state: LeaseState, now: float, reason: str = "", *, ends_with_another: bool = False
) -> None:
    """`ends_with_another`: the lease around it ends, too."""
    if state not in LEASE_MOVES[lease.state]:
        raise IllegalMoveError(f"a lease cannot go from {lease.state} to {state}")
    if pool.leases.inner:
        for inner in pool.leases.inside(lease.lease_id):
            end_lease(pool, inner, LeaseState.LOST, now, has_ended(lease.lease_id), ends_with_another=True)
    read_after = None
    if lease.quarantine is not None:
        read_after = lease.quarantine.since
        del pool.quarantined[lease.lease_id]
        pool.timers.clear("lease", lease.lease_id)
    elif lease.expires_at is not None:
        # An offer was never used; an assignment within one process, with a time limit or without, is handed on without
        # a fresh reading.
        read_after = now if lease.state is HELD and lease.request.ttl_seconds is not None else None
        pool.timers.clear("lease", lease.lease_id)
    enclosing = None if lease.request.within is None else pool.leases.enclosing(lease)
    pool.leases.release(lease)
    if enclosing is None:
        pool.allocator.ended(lease.held, now, read_after)
    elif pool.leases.outermost(enclosing).quarantine is not None:
        # Only a reading begun after this shows whether its GPUs are empty.
        pool.allocator.ended(lease.held, now, now)
    if pool.queue.waiting:
        pool.reject_inside(lease.lease_id, now)
        pool.improve(lease.gpu_ids)
    pool.tally[state] += 1
    if state is RELEASED and not pool.settings.remembers_releases:
        del pool.requests[lease.request.request_id]
    else:
        reasons = (reason,) if reason else ()
        pool.outcomes.add(Outcome(lease.request, GRANTED, now, reasons, lease, state))
    if reason:
        pool.effects.append(LeaseEnded(lease, state, reason))
    if enclosing is not None and enclosing.quarantine is not None and not ends_with_another:
        review(pool, enclosing, now)


def lose(pool: Pool, lease: Lease, reason: str, quarantine_seconds: float, now: float) -> None:
    """A held lease ends without being released."""
    is_inner = pool.leases.enclosing(lease) is not None
    if is_inner and not _is_used_inside(pool, lease):
        # The lease around it still has its GPUs, and readings do not show what inside that lease uses them.
        end_lease(pool, lease, LeaseState.RECLAIMED, now, reason)
    else:
        _quarantine(pool, lease, reason, now if is_inner else now + quarantine_seconds, now)


def _quarantine(pool: Pool, lease: Lease, reason: str, until: float, now: float) -> None:
    lease = lease.moved(LeaseState.QUARANTINED, quarantine=Quarantine(reason, now, until))
    pool.replace_lease(lease)
    pool.quarantined[lease.lease_id] = None
    if pool.leases.enclosing(lease) is None:
        pool.allocator.ended(lease.held, now, None)
    pool.effects.append(LeaseEnded(lease, LeaseState.QUARANTINED, reason))
    # Leases held inside it stay, and it stays in quarantine until they have ended.
    for inner in pool.leases.inside(lease.lease_id):
        if inner.state is LeaseState.OFFERED:
            end_lease(pool, inner, LeaseState.LOST, now, has_ended(lease.lease_id))
    pool.reject_inside(lease.lease_id, now)


def review(pool: Pool, lease: Lease, now: float) -> None:
    """End a quarantine if it has lasted long enough and no reading speaks against it."""
    if lease.quarantine is None or now < lease.quarantine.until or pool.leases.inside(lease.lease_id):
        return
    if pool.leases.enclosing(lease) is not None:
        end_lease(pool, lease, LeaseState.RECLAIMED, now, "nothing inside it is held any more")
    elif all(trace_of(lease, gpu, pool.settings) is None for gpu in pool.leases.gpus_of(lease)):
        end_lease(pool, lease, LeaseState.RECLAIMED, now, "readings show nothing of its holder any more")


def quarantine_ended(pool: Pool, event: QuarantineEnded, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is not None:  # else it has just ended by itself
        end_lease(pool, lease, LeaseState.RECLAIMED, now, "an administrator ended its quarantine")


def holder_gone(pool: Pool, event: HolderGone, now: float) -> None:
    lease = pool.leases.lookup(event.lease_id)
    if lease is None or not lease.is_live:
        return
    if lease.state is LeaseState.OFFERED:
        end_lease(pool, lease, LeaseState.RECLAIMED, now, "its client is gone")
    else:
        lose(pool, lease, "its holder is gone", 0.0 if event.is_proven else pool.settings.quarantine_seconds, now)


def gpus_vanished(pool: Pool, event: GPUsVanished, now: float) -> None:
    """A lease ends with the last of its GPUs."""
    gpus = [gpu for gpu_id in event.gpu_ids if (gpu := pool.allocator.gpus.get(gpu_id)) is not None]
    for gpu in gpus:
        pool.allocator.mark_gone(gpu)
    inner = {lease.lease_id: lease for gpu in gpus for lease in gpu.inner_leases.values()}
    for lease in inner.values():
        # If it has other GPUs left, it stays: the lease around it is in quarantine, and ends after it.
        if lease.lease_id in pool.leases.by_id and all(gpu.is_gone for gpu in pool.leases.gpus_of(lease)):
            end_lease(pool, lease, LeaseState.LOST, now, f"GPU {', '.join(lease.gpu_ids)} is gone")
    affected = {lease.lease_id: lease for gpu in gpus for lease in gpu.leases.values()}
    for lease in affected.values():
        its_gpus = pool.leases.gpus_of(lease)
        reason = f"GPU {', '.join(gpu.gpu_id for gpu in its_gpus if gpu.is_gone)} is gone"
        if all(gpu.is_gone for gpu in its_gpus):
            end_lease(pool, lease, LeaseState.LOST, now, reason)
        elif lease.state is HELD:
            # Its other GPUs may still be in use.
            _quarantine(pool, lease, reason, now + pool.settings.quarantine_seconds, now)
        elif lease.state is LeaseState.OFFERED:
            end_lease(pool, lease, LeaseState.RECLAIMED, now, reason)
