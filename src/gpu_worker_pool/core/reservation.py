"""Chooses the GPUs that are withheld from later waiters, because an earlier one is to have them soon.

Rule 4, the bound on being overtaken: GPUs are reserved for a waiter that others have overtaken for long enough: as many
GPUs of one endpoint as it requested, of those it could have now or as soon as the leases on them end. If there are too
few, none is reserved: a GPU that a foreign process fills may stay full for ever, and must not block other waiters.

Of several endpoints it gets the one whose leases are the youngest, by the oldest of those in its way: what has run for
long will run for long. It stays there until another one, where something has changed, would serve it sooner.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.expectations import expected_end, sure_seconds
from gpu_worker_pool.core.obstacles import lasting_obstacles, lease_obstacles
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.requirements import Requirements

#: Until when leases are in the way of a request, for GPUs that it could have now.
NOTHING_IN_THE_WAY = -math.inf


@record
class Plan:
    """The GPUs of one endpoint that a request would get."""

    gpu_ids: tuple[str, ...]
    #: When the last of the leases on them is expected to end.
    free_at: float


def can_judge(allocator: GPUAllocator, waiter: Waiter) -> bool:
    """Whether this process may change its reservation: not with older readings, nor if it sees fewer GPUs.

    Processes that share a ledger would otherwise undo each other's reservations for ever.
    """
    if waiter.reserved_at is not None and allocator.read_at < waiter.reserved_at:
        return False
    if not waiter.is_replicated:
        return True
    gpus = allocator.gpus
    return all(gpu_id in gpus and gpus[gpu_id].last_seen is not None for gpu_id in waiter.reserved)


def gpus_to_reserve(
    allocator: GPUAllocator, waiter: Waiter, improved: Iterable[GPUResourceState] | None, now: float
) -> tuple[str, ...]:
    """`improved`: the only GPUs that may have become usable since GPUs were last reserved for this waiter."""
    requirements, reserved = waiter.request.requirements, waiter.reserved
    is_any_gpu = waiter.request_class is not None and waiter.request_class.is_any_gpu
    endpoints: Iterable[EndpointState] = allocator.endpoints.values()
    best: Plan | None = None
    if improved is not None and reserved:
        # A reservation that moves waits twice, so it moves only for what is better; elsewhere nothing has changed.
        own = allocator.gpus[reserved[0]].endpoint
        best = _plan(allocator, own, requirements, reserved, is_any_gpu, now)
        if best is not None:
            endpoints = dict.fromkeys(gpu.endpoint for gpu in improved if gpu.endpoint is not own)
    for endpoint in endpoints:
        plan = _plan(allocator, endpoint, requirements, reserved, is_any_gpu, now)
        if plan is not None and (best is None or plan.free_at < best.free_at):
            best = plan
    return best.gpu_ids if best is not None else ()


def _plan(
    allocator: GPUAllocator,
    endpoint: EndpointState,
    requirements: Requirements,
    reserved: tuple[str, ...],
    is_any_gpu: bool,
    now: float,
) -> Plan | None:
    """None if too few GPUs of this endpoint will surely be free."""
    count = requirements.count
    if endpoint.present < count or not allocator.is_fresh(endpoint, now):
        return None
    usable = []
    for gpu in endpoint.gpus.values():
        if is_any_gpu and gpu in endpoint.free and not gpu.is_mig_device:
            free_at: float | None = NOTHING_IN_THE_WAY
        else:
            free_at = _free_at(allocator, gpu, requirements, now)
        if free_at is not None:
            usable.append(
                (
                    free_at,
                    gpu.gpu_id not in reserved,
                    -(gpu.memory_left_mb() or 0.0) if requirements.share else 0.0,
                    gpu.rank,
                    gpu.gpu_id,
                )
            )
    if len(usable) < count:
        return None
    chosen = sorted(usable)[:count]
    return Plan(tuple(gpu_id for *_, gpu_id in chosen), chosen[-1][0])


def _free_at(allocator: GPUAllocator, gpu: GPUResourceState, requirements: Requirements, now: float) -> float | None:
    """When the leases in the way are expected to end; None if perhaps the waiter can never have it."""
    reading, settings = gpu.reading, allocator.settings
    if reading is None or reading.fault is not None or reading.is_leased_elsewhere:
        return None
    if next(lasting_obstacles(reading, requirements, settings), None) is not None:
        return None
    if allocator.is_eligible(gpu, requirements, now):
        return NOTHING_IN_THE_WAY
    if gpu.leases:
        # A quarantine may last for ever.
        is_held = all(lease.is_live for lease in gpu.leases.values())
        return max(expected_end(lease, now) for lease in gpu.leases.values()) if is_held else None
    # So may a foreign process, and only the first seconds after a release count: then a GPU may look busy because
    # utilization is a trailing average and memory takes a while to return.
    return now if now - gpu.freed_at <= settings.settle_seconds else None


def gpus_to_await(allocator: GPUAllocator, requirements: Requirements, now: float) -> list[str]:
    """Rule 8: GPUs released since they were last read, which a waiter may have as soon as they are read again.

    A reading from before the release shows the holder's load. It must not let the GPU go to a later waiter that
    accepts the load: the GPU is withheld until it is read, or could not be read for a while.
    """
    awaited: dict[EndpointState, list[str]] = {}
    for gpu in allocator.freed.values():
        reading, endpoint = gpu.reading, gpu.endpoint
        if reading is None or gpu.leases or endpoint.begun_at > gpu.freed_at or not allocator.is_fresh(endpoint, now):
            continue
        is_possible = next(lasting_obstacles(reading, requirements, allocator.settings), None) is None
        is_unleased = next(lease_obstacles(gpu, requirements, allocator.settings, now), None) is None
        if is_possible and is_unleased and not allocator.is_eligible(gpu, requirements, now):
            awaited.setdefault(endpoint, []).append(gpu.gpu_id)
    if requirements.count > 1:
        for endpoint in list(awaited):
            eligible = sum(allocator.is_eligible(gpu, requirements, now) for gpu in endpoint.gpus.values())
            if eligible + len(awaited[endpoint]) < requirements.count:
                del awaited[endpoint]
    return [gpu_id for gpu_ids in awaited.values() for gpu_id in gpu_ids]


def lending_window(pool: Pool, reserved_for: Waiter, now: float) -> tuple[float, set[str]] | None:
    """For how long the GPUs that are reserved for a waiter can be lent, and which of them are free.

    Only until a lease in the way is declared to end: then lending does not delay the waiter.
    """
    known = pool.allocator.gpus
    if not all(gpu_id in known for gpu_id in reserved_for.reserved):
        return None  # another process reserved them, and sees GPUs that this one does not
    gpus = [known[gpu_id] for gpu_id in reserved_for.reserved]
    lendable = {gpu.gpu_id for gpu in gpus if not gpu.leases}
    if not lendable or len(lendable) == len(gpus):
        return None
    return sure_seconds((lease for gpu in gpus for lease in gpu.leases.values()), now), lendable
