"""Taking over what was decided elsewhere: what was saved before a restart, or what another process has committed.

Nothing is decided here. Whoever adopts lets an event follow, and that serves whom the news may serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.queue import RequestClass, Waiter
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.remembered import Outcome


@record
class GPUHistory:
    """What the ledger knows of a GPU beside the leases on it; its readings are nobody's to pass on."""

    gpu_id: str
    endpoint_id: str
    last_fence: int
    freed_at: float
    read_after: float


def replicate(pool: Pool, news: Iterable[Waiter | Lease | Outcome], histories: Iterable[GPUHistory] = ()) -> None:
    """Each replaces what the pool knows of its request. Waiters that are new to it must come in order of arrival."""
    histories = list(histories)
    touched = {history.gpu_id: pool.allocator.gpu(history.gpu_id, history.endpoint_id) for history in histories}
    for known in news:
        touched.update(_replicate(pool, known))
    for history in histories:
        gpu = touched[history.gpu_id]
        gpu.last_fence, gpu.read_after = history.last_fence, history.read_after
        if history.freed_at > gpu.freed_at:
            gpu.freed_at, gpu.readings_wanted = history.freed_at, 0
            if not any(lease.is_live and lease.granted_at >= gpu.freed_at for lease in gpu.leases.values()):
                pool.allocator.freed[gpu.gpu_id] = gpu  # its reading may be this process's to take
            if gpu.reading is not None and gpu.endpoint.begun_at > gpu.freed_at:
                gpu.as_held = gpu.held_as_read(gpu.reading)  # it was read here since
    pool.allocator.reindex(touched.values())
    for request_class in pool.queue.request_classes():
        request_class.tried = False
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
                gpu.as_held = held  # the last reading shows the load of the one who had it
    if isinstance(known, Waiter):
        _enqueue(pool, known)
    elif isinstance(known, Lease):
        is_new = not isinstance(before, Lease) or before.lease_id != known.lease_id
        for gpu_id in known.gpu_ids:
            touched[gpu_id] = pool.allocator.gpu(gpu_id, known.endpoint_id)
            if is_new:
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
    requirements = waiter.request.requirements
    request_class = pool.queue.request_class(requirements) or RequestClass(
        requirements, is_plain=pool.allocator.is_plain(requirements)
    )
    waiter.is_replicated = True
    pool.queue.enqueue(waiter, request_class)
    pool.requests[waiter.request.request_id] = waiter
    pool.set_waiter_timer(waiter)
    pool.reserved_for = waiter if waiter.reserved else pool.reserved_for


def _update(pool: Pool, waiter: Waiter, known: Waiter) -> None:
    """Its place in line is its own object's, so that one stays."""
    waiter.deadline, waiter.poll_deadline, waiter.gives_up_at = known.deadline, known.poll_deadline, known.gives_up_at
    waiter.may_reserve, waiter.reserved_at, waiter.poll_id = known.may_reserve, known.reserved_at, known.poll_id
    if waiter.reserved != known.reserved:
        if waiter is pool.reserved_for:
            pool.reserved_for = None
        waiter.reserved = known.reserved
        pool.reserved_for = waiter if known.reserved else pool.reserved_for
    pool.requests[waiter.request.request_id] = waiter
    pool.set_waiter_timer(waiter)
