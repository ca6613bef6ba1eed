"""Which GPUs those who come later cannot have, because one who came before them is to have them soon.

Rule 4, the bound on being overtaken: GPUs are kept for a waiter that others have passed for long enough. Kept are as
many GPUs of one endpoint as it asked for: those it could have now, and those it could have as soon as the leases on
them end. Unless there are so many, none is kept: a GPU that an outsider fills may stay full for ever, and must not
keep others waiting beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.obstacles import lasting_obstacles, promise_obstacles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.requirements import Requirements

NOW, AFTER_LEASES = 0, 1


def can_judge(allocator: GPUAllocator, waiter: Waiter) -> bool:
    """Whether what was decided for it may be changed here: not by older readings, nor by one who sees less.

    Processes that share a ledger would otherwise undo each other's decisions for ever.
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
    """`improved`: the only GPUs that can have changed for the better since GPUs were last kept for this waiter."""
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
            # What it could have now, then what was kept before: a choice that changes its mind waits twice.
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
    if reading is None or reading.fault is not None or reading.is_promised_elsewhere:
        return None
    if not allocator.is_fresh(gpu.endpoint, now):
        return None
    if next(lasting_obstacles(reading, requirements, settings), None) is not None:
        return None
    if allocator.is_eligible(gpu, requirements, now):
        return NOW
    # A quarantine may last for ever, as an outsider may; it counts only at first, as what was just released does: that
    # may look busy for a moment, because utilization is a trailing average and memory takes a while to return.
    is_held = gpu.leases and all(lease.is_live for lease in gpu.leases.values())
    if is_held or now - gpu.freed_at <= settings.settle_seconds:
        return AFTER_LEASES
    return None


def gpus_to_await(allocator: GPUAllocator, requirements: Requirements, now: float) -> list[str]:
    """Rule 8: GPUs given back since they were last read, that a waiter may have as soon as they are read again.

    A reading from before the release shows its holder's load. It must not send the GPU past this waiter to a later
    one that does not mind the load: so nobody after it may have it until it was read, or could not be for a while.
    """
    awaited: dict[EndpointState, list[str]] = {}
    for gpu in allocator.freed.values():
        reading, endpoint = gpu.reading, gpu.endpoint
        if reading is None or gpu.leases or endpoint.begun_at > gpu.freed_at or not allocator.is_fresh(endpoint, now):
            continue
        is_possible = next(lasting_obstacles(reading, requirements, allocator.settings), None) is None
        is_unpromised = next(promise_obstacles(gpu, requirements, now), None) is None
        if is_possible and is_unpromised and not allocator.is_eligible(gpu, requirements, now):
            awaited.setdefault(endpoint, []).append(gpu.gpu_id)
    if requirements.count > 1:
        for endpoint in list(awaited):
            eligible = sum(allocator.is_eligible(gpu, requirements, now) for gpu in endpoint.gpus.values())
            if eligible + len(awaited[endpoint]) < requirements.count:
                del awaited[endpoint]
    return [gpu_id for gpu_ids in awaited.values() for gpu_id in gpu_ids]
