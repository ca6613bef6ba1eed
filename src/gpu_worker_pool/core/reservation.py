"""Chooses the GPUs that are withheld from later waiters, because an earlier one is to have them soon.

Rule 4, the bound on being overtaken: GPUs are reserved for a waiter that others have overtaken for long enough: as many
GPUs of one endpoint as it requested, of those it could have now or as soon as the leases on them end. If there are too
few, none is reserved: a GPU that a foreign process fills may stay full for ever, and must not block other waiters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.obstacles import lasting_obstacles, lease_obstacles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.requirements import Requirements

NOW, AFTER_LEASES = 0, 1


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
    requirements = waiter.request.requirements
    if improved is not None and _is_still_right(allocator, waiter, improved, now):
        return waiter.reserved
    best: tuple[int, tuple[str, ...]] | None = None
    for endpoint in allocator.endpoints.values():
        usable = [
            (when, gpu.gpu_id not in waiter.reserved, -(gpu.memory_left_mb() or 0.0), gpu.rank, gpu.gpu_id)
            for gpu in endpoint.gpus.values()
            if (when := _when_usable(allocator, gpu, requirements, now)) is not None
        ]
        if len(usable) >= requirements.count:
            # GPUs it could have now, then those reserved before: a reservation that moves waits twice.
            chosen = sorted(usable)[: requirements.count]
            lacking = sum(when for when, *_ in chosen)
            if best is None or lacking < best[0]:
                best = (lacking, tuple(gpu_id for *_, gpu_id in chosen))
    return best[1] if best is not None else ()


def _is_still_right(allocator: GPUAllocator, waiter: Waiter, improved: Iterable[GPUResourceState], now: float) -> bool:
    requirements = waiter.request.requirements
    return all(
        _when_usable(allocator, allocator.gpus[gpu_id], requirements, now) is not None for gpu_id in waiter.reserved
    ) and not any(_when_usable(allocator, gpu, requirements, now) == NOW for gpu in improved)


def _when_usable(allocator: GPUAllocator, gpu: GPUResourceState, requirements: Requirements, now: float) -> int | None:
    """Whether the waiter could have the GPU now, or once the leases on it end, or (None) perhaps never."""
    reading, settings = gpu.reading, allocator.settings
    if reading is None or reading.fault is not None or reading.is_leased_elsewhere:
        return None
    if not allocator.is_fresh(gpu.endpoint, now):
        return None
    if next(lasting_obstacles(reading, requirements, settings), None) is not None:
        return None
    if allocator.is_eligible(gpu, requirements, now):
        return NOW
    # A quarantine or a foreign process may last for ever, so only the first seconds after a release count: then a GPU
    # may look busy because utilization is a trailing average and memory takes a while to return.
    is_held = gpu.leases and all(lease.is_live for lease in gpu.leases.values())
    if is_held or now - gpu.freed_at <= settings.settle_seconds:
        return AFTER_LEASES
    return None


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
