"""The pool's numbers: looked at, never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.wishes import PLAIN

if TYPE_CHECKING:
    from gpu_worker_pool.core import Pool


def gpu_metrics(pool: Pool, now: float) -> list[dict[str, Any]]:
    """Every GPU that is part of the pool, also one that is missing from the last reading."""
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
                "is_available": pool.allocator.is_eligible(gpu, PLAIN, now),
                "fault": None if reading is None else reading.fault,
                "assigned_workers": workers,
            }
        )
    return found


def assignment_metrics(pool: Pool, now: float) -> dict[str, Any]:
    live = [lease for lease in pool.leases if lease.is_live]
    return {
        "total_assignments": len(live),
        "assigned_gpus": sum(len(lease.gpu_ids) for lease in live),
        "quarantined": sum(not lease.is_live for lease in pool.leases),
        "granted_total": pool.fence,
        "longest_held_seconds": max((now - lease.granted_at for lease in live), default=None),
        "assignments": [
            {
                "worker_id": lease.worker,
                "gpu_ids": [gpu.gpu_id if lease.endpoint_id else gpu.index for gpu in lease.held],
                "held_seconds": now - lease.granted_at,
                "waited_seconds": lease.granted_at - lease.requested_at,
                "label": lease.request.label,
            }
            for lease in sorted(live, key=lambda lease: lease.fence)
        ],
    }


def queue_metrics(pool: Pool, now: float) -> dict[str, Any]:
    waiters = pool.queue.in_order()
    return {
        "queue_size": len(waiters),
        "longest_wait_seconds": max((now - waiter.enqueued_at for waiter in waiters), default=None),
        "waiting": [
            {
                "worker_id": waiter.worker,
                "wishes": str(waiter.request.wishes),
                "waiting_seconds": now - waiter.enqueued_at,
                "label": waiter.request.label,
            }
            for waiter in waiters
        ],
    }


def gpu_counts(pool: Pool, now: float) -> dict[str, tuple[int, int]]:
    """By endpoint: how many GPUs it shows, and how many of them are free."""
    allocator = pool.allocator
    return {
        name: (endpoint.present, len(endpoint.free) if allocator.is_fresh(endpoint, now) else 0)
        for name, endpoint in allocator.endpoints.items()
    }


def held_uuids(pool: Pool) -> dict[str, str]:
    """By UUID, the id under which a GPU is assigned, or in quarantine."""
    return {gpu.uuid: gpu.gpu_id for lease in pool.leases for gpu in lease.held if gpu.uuid is not None}


def gpus_in_use(pool: Pool, endpoint_id: str) -> set[int]:
    """The numbers of an endpoint's GPUs that are assigned, or in quarantine."""
    return {gpu.index for lease in pool.leases if lease.endpoint_id == endpoint_id for gpu in lease.held}
