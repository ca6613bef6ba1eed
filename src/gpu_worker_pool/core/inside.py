"""Requests inside a lease divide its GPUs: one request per GPU unless they share, first come, first served.

For all other requests the lease around them stands for them, so rules 1 to 4 do not look at them. Inside it, the load
that readings show does not count: it may be that of the program which holds the lease.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.obstacles import (
    Obstacle,
    ObstacleKind,
    age_obstacles,
    by_index,
    choice_obstacles,
    free_memory_obstacles,
    holder_obstacles,
    left_memory_obstacles,
    size_obstacles,
)
from gpu_worker_pool.core.record import record
from gpu_worker_pool.wording import spoken_gpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_worker_pool.core.assignments import Lease, WorkerAssignmentTracker
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.core.settings import PoolSettings

#: Obstacles that end with a lease inside the same lease.
_PASSING = frozenset({ObstacleKind.HELD, ObstacleKind.QUARANTINED, ObstacleKind.TOO_LITTLE_LEFT})


@record
class Enclosure:
    """The lease around a request."""

    lease: Lease
    #: What it may use of each GPU; None: the whole GPU.
    memory_mb: float | None


def enclosure_of(leases: WorkerAssignmentTracker, lease_id: str) -> Enclosure | None:
    """None if that lease is not held: nothing can run inside it."""
    lease = leases.by_id.get(lease_id)
    if lease is None or lease.state is not LeaseState.HELD:
        return None
    sharing: Lease | None = lease
    while sharing is not None and not sharing.is_shareable:
        sharing = leases.enclosing(sharing)
    return Enclosure(lease, None if sharing is None else sharing.request.requirements.memory_mb)


def obstacles_inside(
    gpu: GPUResourceState,
    requirements: Requirements,
    around: Enclosure,
    settings: PoolSettings,
    now: float,
    request: Request | None = None,
) -> Iterator[Obstacle]:
    """Why a request inside this lease cannot have this GPU of it now."""
    reading = gpu.reading
    if reading is None:
        yield Obstacle(ObstacleKind.NOT_SEEN, "missing from the last reading")
        return
    yield from _lasting_obstacles(reading, requirements, around)
    yield from age_obstacles(gpu, settings, now)
    beside = [lease for lease in gpu.inner_leases.values() if lease.within == around.lease.lease_id]
    yield from holder_obstacles(beside, requirements, settings, now, request)
    needed = requirements.memory_mb
    if needed is not None:
        memory_mb = reading.memory_total_mb if around.memory_mb is None else around.memory_mb
        declared_mb = sum(lease.request.requirements.memory_mb or math.inf for lease in beside)
        yield from left_memory_obstacles(None if memory_mb is None else memory_mb - declared_mb, needed)
    if reading.fault is not None:
        yield Obstacle(ObstacleKind.UNHEALTHY, f"unhealthy: {reading.fault}")
    yield from free_memory_obstacles(reading, requirements)


def _lasting_obstacles(reading: Reading, requirements: Requirements, around: Enclosure) -> Iterator[Obstacle]:
    """Why this GPU could never serve the request inside this lease."""
    yield from choice_obstacles(reading, requirements)
    yield from size_obstacles(reading, requirements)
    reserved = requirements.memory_mb
    if around.memory_mb is not None and reserved is not None and reserved > around.memory_mb:
        text = f"{around.lease.lease_id} has {around.memory_mb:.10g} MB of it, {reserved:.10g} MB are needed"
        yield Obstacle(ObstacleKind.TOO_SMALL, text, around.memory_mb, reserved)


def impossible_inside(leases: WorkerAssignmentTracker, requirements: Requirements, lease_id: str) -> tuple[str, ...]:
    """Why this lease can never serve the request; empty while it could."""
    around = enclosure_of(leases, lease_id)
    if around is None:
        return (has_ended(lease_id),)
    lease, count = around.lease, requirements.count
    name = f"{lease.lease_id}, inside which this runs, has {spoken_gpus(len(lease.gpu_ids))}"
    if count > len(lease.gpu_ids):
        return (f"{name}; {count} were requested",)
    why_not: dict[str, list[int]] = {}
    for gpu in leases.gpus_of(lease):
        if gpu.last_seen is not None:
            lasting = next(_lasting_obstacles(gpu.last_seen, requirements, around), None)
            if lasting is not None:
                why_not.setdefault(lasting.text, []).append(gpu.index)
    possible = len(lease.gpu_ids) - sum(map(len, why_not.values()))
    if possible >= count:
        return ()
    return (f"{name}; {possible or 'none'} of them could ever serve it ({by_index(why_not)})",)


def has_ended(lease_id: str) -> str:
    """The reason for what was inside a lease that has ended."""
    return f"{lease_id}, inside which this runs, has ended"


def holds_back_later(
    gpus: Iterable[GPUResourceState], waiter: Waiter, around: Enclosure, settings: PoolSettings, now: float
) -> bool:
    """Whether later requests inside this lease wait until this one is served: the bound on being overtaken (rule 4).

    Not if more than the leases beside it is in its way: that may last for ever.
    """
    if now - waiter.enqueued_at < settings.max_bypass_seconds:
        return False
    requirements = waiter.request.requirements
    soon = sum(
        all(each.kind in _PASSING for each in obstacles_inside(gpu, requirements, around, settings, now))
        for gpu in gpus
    )
    return soon >= requirements.count
