"""Computes status and metrics of one or several pools; it never changes them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.models import PoolStatus, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_worker_pool.core import Explanation, Pool, Waiter
    from gpu_worker_pool.models import GPUId


def pool_status(
    pool: Pool, now: float, blocked_workers: int, workers: Mapping[str, WorkerInfo] = MappingProxyType({})
) -> PoolStatus:
    """`workers`: by id, the workers for which a `WorkerInfo` was given."""
    assignments: dict[GPUId, list[WorkerInfo]] = {}
    live, wall = [lease for lease in pool.leases if lease.is_live], datetime.now()
    for lease in sorted(live, key=lambda lease: lease.fence):
        worker_id = lease.request.worker_id
        worker = workers.get(worker_id) or WorkerInfo(worker_id, wall - timedelta(seconds=now - lease.requested_at))
        for gpu in {gpu.gpu_id: gpu for gpu in lease.held}.values():  # two MIG devices may belong to one GPU
            assignments.setdefault(gpu.gpu_id if lease.endpoint_id else gpu.index, []).append(worker)
    return PoolStatus(
        total_gpus=sum(endpoint.present for endpoint in pool.allocator.endpoints.values()),
        available_gpus=pool.allocator.available(now),
        active_workers=len(live),
        blocked_workers=blocked_workers,
        gpu_assignments=assignments,
    )


def gpu_metrics(pool: Pool, now: float) -> list[dict[str, Any]]:
    """Every GPU of the pool, also one that is missing in the last statistics."""
    found = []
    for gpu in sorted(pool.allocator.gpus.values(), key=lambda gpu: (gpu.endpoint.order, gpu.index)):
        if gpu.is_gone or gpu.last_seen is None:
            continue
        reading = gpu.reading
        workers = [lease.worker for lease in gpu.leases.values() if lease.is_live]
        found.append(
            {
                "gpu_id": gpu.gpu_id if gpu.endpoint.endpoint_id else gpu.index,
                "name": gpu.last_seen.name,
                "uuid": gpu.last_seen.uuid,
                "memory_usage_percent": None if reading is None else reading.memory_usage_percent,
                "utilization_percent": None if reading is None else reading.utilization_percent,
                "is_available": pool.allocator.is_eligible(gpu, ANY_GPU, now),
                "fault": None if reading is None else reading.fault,
                "assigned_workers": workers,
            }
        )
    return found


def assignment_metrics(pools: Sequence[Pool], now: float) -> dict[str, Any]:
    leases = [lease for pool in pools for lease in pool.leases]
    live = [lease for lease in leases if lease.is_live]
    return {
        "total_assignments": len(live),
        "assigned_gpus": sum(len(lease.gpu_ids) for lease in live),
        "quarantined": len(leases) - len(live),
        "granted_total": sum(pool.fence for pool in pools),
        "longest_held_seconds": max((now - lease.granted_at for lease in live), default=None),
        "assignments": [
            {
                "worker_id": lease.worker,
                "gpu_ids": [gpu.gpu_id if lease.endpoint_id else gpu.index for gpu in lease.held],
                "held_seconds": now - lease.granted_at,
                "waited_seconds": lease.granted_at - lease.requested_at,
                "label": lease.request.label,
            }
            for lease in sorted(live, key=lambda lease: (lease.granted_at, lease.fence))
        ],
    }


def queue_metrics(waiters: Sequence[Waiter], now: float) -> dict[str, Any]:
    return {
        "queue_size": len(waiters),
        "longest_wait_seconds": max((now - waiter.enqueued_at for waiter in waiters), default=None),
        "waiting": [
            {
                "worker_id": waiter.worker,
                "wishes": str(waiter.request.requirements),
                "waiting_seconds": now - waiter.enqueued_at,
                "label": waiter.request.label,
            }
            for waiter in waiters
        ],
    }


def gpu_counts(pools: Sequence[Pool], now: float) -> dict[str, tuple[int, int]]:
    """By endpoint: the number of its GPUs, and how many of them are free."""
    # An endpoint that moved is now in the last of its pools.
    return {
        name: (endpoint.present, len(endpoint.free) if pool.allocator.is_fresh(endpoint, now) else 0)
        for pool in pools
        for name, endpoint in pool.allocator.endpoints.items()
    }


def held_uuids(pools: Sequence[Pool]) -> dict[str, str]:
    """By UUID, the id of each GPU that is assigned or in quarantine."""
    leases = [lease for pool in pools for lease in pool.leases]
    return {gpu.uuid: gpu.gpu_id for lease in leases for gpu in lease.held if gpu.uuid is not None}


def gpus_in_use(pool: Pool, endpoint_id: str) -> set[int]:
    """The indices of an endpoint's GPUs that are assigned or in quarantine."""
    return {gpu.index for lease in pool.leases if lease.endpoint_id == endpoint_id for gpu in lease.held}


def added(one: PoolStatus, other: PoolStatus) -> PoolStatus:
    """Combines the status of pools without common GPUs."""
    return replace(
        one,
        total_gpus=one.total_gpus + other.total_gpus,
        available_gpus=one.available_gpus + other.available_gpus,
        active_workers=one.active_workers + other.active_workers,
        blocked_workers=one.blocked_workers + other.blocked_workers,
        gpu_assignments=one.gpu_assignments | other.gpu_assignments,
    )


def explained(one: Explanation, other: Explanation) -> Explanation:
    """Combines the explanations of pools without common GPUs."""
    if not other.gpus or not one.gpus:
        return one if one.gpus else other
    can_be_served = [each for each in (one, other) if not each.impossible]
    relevant = can_be_served or [one, other]
    return replace(
        one,
        position=max(one.position, other.position),
        gpus=(*one.gpus, *other.gpus),
        impossible=() if can_be_served else (*one.impossible, *other.impossible),
        verdict="; ".join(dict.fromkeys(each.verdict for each in relevant)),
        is_queued=any(each.is_queued for each in relevant),
    )
