"""Grants that two pools agree on: the one of a fleet's dispatcher chooses the GPUs, and the one of their host promises.

At the host, a request that may not wait is granted now or refused, and not remembered. At the dispatcher, a grant that
the host refused is undone: the request waits again, in its place. Part of `Pool`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.effects import Ended
from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.core.obstacles import obstacles
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.requirements import names_gpu

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import GrantRefused, Requested
    from gpu_worker_pool.core.pool import Pool

#: How many GPUs a refusal lists.
MOST_EXPLAINED = 8


def grant_or_refuse(pool: Pool, event: Requested, now: float) -> None:
    """A request that may not wait. Whose turn it is was decided elsewhere, and so were the limits of its account."""
    request, allocator = event.request, pool.allocator
    gpus = allocator.best(request.requirements, allocator.gpus.values(), _reserved(pool), now)
    if gpus is None:
        pool.effects.append(Ended(request.request_id, RequestState.REJECTED, _reasons(pool, event, now)))
        return
    pool.ticket += 1
    offer_deadline = None
    if event.poll_deadline is not None and event.poll_deadline < now:
        offer_deadline = now + pool.settings.offer_ttl_seconds
    pool.grant(request, now, offer_deadline, gpus, now, event.poll_id)


def _reserved(pool: Pool) -> tuple[str, ...]:
    return () if pool.reserved_for is None else pool.reserved_for.reserved


def _reasons(pool: Pool, event: Requested, now: float) -> tuple[str, ...]:
    """Why it was refused, for each GPU that it may have."""
    requirements, reasons = event.request.requirements, []
    for gpu in pool.allocator.gpus.values():
        seen = gpu.last_seen
        if seen is None or (
            requirements.only is not None and not any(names_gpu(name, seen) for name in requirements.only)
        ):
            continue
        found = "; ".join(map(str, obstacles(gpu, requirements, pool.settings, now, event.request)))
        if gpu.gpu_id in _reserved(pool):
            found = found or "reserved for a request of this host, which has waited longer"
        if found:
            reasons.append(f"GPU {gpu.index}: {found}")
    return tuple(reasons[:MOST_EXPLAINED]) or ("it has no such GPU now",)


def undo(pool: Pool, event: GrantRefused, now: float) -> None:
    """Its GPUs are left out until their endpoint is read again, so that the same grant is not repeated at once."""
    lease = pool.leases.lookup(event.lease_id)
    assert lease is not None  # else it was not legal
    request = lease.request
    pool.timers.clear("lease", lease.lease_id)
    pool.leases.release(lease)
    pool.allocator.ended(lease.held, now, now)
    pool.first_fence += 1  # as if that grant had not been: its request is neither granted nor ended
    waiter = Waiter(
        request,
        event.ticket,
        lease.requested_at,
        event.deadline,
        event.poll_deadline,
        event.gives_up_at,
        event.may_reserve,
        event.poll_id,
    )
    request_class = pool.queue.class_of(request)
    if request_class is None:
        is_any_gpu = pool.allocator.is_any_gpu(request.requirements)
        request_class = pool.queue.new_class(request, is_any_gpu=is_any_gpu)
    request_class.tried = False
    pool.has_new_class = True
    pool.queue.put_back(waiter, request_class)
    pool.requests[request.request_id] = waiter
    pool.set_waiter_timer(waiter)
