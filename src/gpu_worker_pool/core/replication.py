"""Applies what was decided elsewhere: saved before a restart, or committed by another process.

Part of `Pool`, called by `Pool.replicate` only. Nothing is decided here: waiters are served by the next event.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpu_worker_pool.core.fair_share import Use
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.remembered import Outcome


@record
class GPUHistory:
    """What the ledger knows about a GPU besides its leases; readings are not replicated."""

    gpu_id: str
    endpoint_id: str
    last_fence: int
    freed_at: float
    read_after: float
    is_gone: bool = False

    @classmethod
    def of(cls, gpu: GPUResourceState) -> GPUHistory:
        return cls(gpu.gpu_id, gpu.endpoint.endpoint_id, gpu.last_fence, gpu.freed_at, gpu.read_after, gpu.is_gone)


@record
class Counters:
    """What a pool counts over its whole life."""

    fence: int
    ticket: int
    now: float
    #: By state; a missing state counts as 0.
    tally: Mapping[str, int]


def replicate(
    pool: Pool,
    news: Iterable[Waiter | Lease | Outcome],
    histories: Iterable[GPUHistory],
    counters: Counters | None,
    uses: Iterable[Use] = (),
) -> None:
    histories, is_new = list(histories), counters is not None and pool.ticket == 0
    if counters is not None:
        pool.fence, pool.ticket, pool.now = counters.fence, counters.ticket, max(pool.now, counters.now)
        pool.leases.now = pool.now
        pool.tally.update({state: counters.tally.get(state, 0) for state in pool.tally})
    touched = {history.gpu_id: pool.allocator.gpu(history.gpu_id, history.endpoint_id) for history in histories}
    for known in news:
        touched.update(_replicate(pool, known))
    if pool.fair_share is not None:
        pool.fair_share.replicate(uses)  # after the leases, whose beginnings and ends this states exactly
    for history in histories:
        gpu = touched[history.gpu_id]
        gpu.last_fence, gpu.read_after = history.last_fence, history.read_after
        gpu.is_gone = gpu.is_gone or history.is_gone
        if history.freed_at > gpu.freed_at:
            gpu.freed_at, gpu.readings_wanted = history.freed_at, 0
            if not any(lease.is_live and lease.granted_at >= gpu.freed_at for lease in gpu.leases.values()):
                pool.allocator.freed[gpu.gpu_id] = gpu  # this process may have to read it
            if gpu.reading is not None and gpu.endpoint.begun_at > gpu.freed_at:
                gpu.baseline = gpu.baseline_of(gpu.reading)  # it was read here since
    if is_new:
        pool.first_fence = pool.fence - len(pool.leases) - sum(pool.tally[state] for state in LeaseState)
    pool.allocator.reindex(touched.values())
    for request_class in pool.queue.request_classes():
        request_class.tried = False
    if pool.allocator.read_at > -math.inf:  # without a reading no waiter can be served
        pool.improved.update(pool.allocator.gpus)
        pool.has_new_class = bool(pool.queue)


def _replicate(pool: Pool, known: Waiter | Lease | Outcome) -> dict[str, GPUResourceState]:
    request_id = known.request.request_id
    before = pool.requests.get(request_id)
    touched: dict[str, GPUResourceState] = {}
    if isinstance(before, Waiter):
        if isinstance(known, Waiter):
            _update(pool, before, known)
            return touched
        pool.queue.remove(before)
        pool.timers.clear("waiter", request_id)
        pool.reserved_for = None if before is pool.reserved_for else pool.reserved_for
    elif isinstance(before, Lease):
        pool.leases.release(before)
        pool.timers.clear("lease", before.lease_id)
        pool.quarantined.pop(before.lease_id, None)
        has_ended = not isinstance(known, Lease) or known.lease_id != before.lease_id
        for held in before.held:
            gpu = touched[held.gpu_id] = pool.allocator.gpus[held.gpu_id]
            if has_ended and not gpu.leases:
                gpu.baseline = held  # the last reading shows the holder's load
    if isinstance(known, Waiter):
        _enqueue(pool, known)
    elif isinstance(known, Lease):
        is_new = not isinstance(before, Lease) or before.lease_id != known.lease_id
        for gpu_id in known.gpu_ids:
            touched[gpu_id] = pool.allocator.gpu(gpu_id, known.endpoint_id)
            if is_new and known.within is None:
                pool.allocator.freed.pop(gpu_id, None)
        pool.requests[request_id] = known
        pool.leases.assign(known)
        pool.set_lease_timer(known)
        if known.quarantine is not None:
            pool.quarantined[known.lease_id] = None
    elif known != before:
        pool.outcomes.add(known)
    return touched


def _enqueue(pool: Pool, waiter: Waiter) -> None:
    request = waiter.request
    request_class = pool.queue.class_of(request) or pool.queue.new_class(
        request, is_any_gpu=request.within is None and pool.allocator.is_any_gpu(request.requirements)
    )
    waiter.is_replicated = True
    pool.queue.enqueue(waiter, request_class)
    pool.requests[waiter.request.request_id] = waiter
    pool.set_waiter_timer(waiter)
    pool.reserved_for = waiter if waiter.reserved else pool.reserved_for


def _update(pool: Pool, waiter: Waiter, known: Waiter) -> None:
    """The queue refers to `waiter`, so that object stays."""
    waiter.deadline, waiter.poll_deadline, waiter.gives_up_at = known.deadline, known.poll_deadline, known.gives_up_at
    waiter.may_reserve, waiter.reserved_at, waiter.poll_id = known.may_reserve, known.reserved_at, known.poll_id
    if waiter.reserved != known.reserved:
        if waiter is pool.reserved_for:
            pool.reserved_for = None
        waiter.reserved = known.reserved
        pool.reserved_for = waiter if known.reserved else pool.reserved_for
    pool.requests[waiter.request.request_id] = waiter
    pool.set_waiter_timer(waiter)
