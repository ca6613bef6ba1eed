"""A pool as a server's own must look, from what the server tells of its GPUs, leases and queue.

To be explained, not to grant from: the same rules then say the same as they say there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.assignments import HeldGPU, Lease, Quarantine
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.readings import ProcessReading, Reading
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.core.wishes import Wishes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Row = dict[str, Any]


def pool_of(stats: Row, leases: Iterable[Row], queue: Iterable[Row], now: float) -> Pool:
    """Raises what rows of another shape make Python raise."""
    pool = Pool(PoolSettings())
    age = float(stats.get("sample_age_seconds") or 0.0)
    pool.allocator.observe("", tuple(_readings(stats["gpus"])), now - age)
    for row in leases:
        lease = _lease(row, now)
        for held in lease.held:
            pool.allocator.gpu(held.gpu_id, "")
        pool.leases.assign(lease)
        pool.fence = max(pool.fence, lease.fence)
    for row in queue:
        pool.ticket += 1
        wishes = Wishes(count=row.get("count", 1), priority=row.get("priority", 0))
        request = Request(row["request_id"], wishes, row.get("worker_id") or "")
        pool.queue.enqueue(Waiter(request, pool.ticket, now - float(row["waiting_seconds"])))
    return pool


def _readings(rows: Iterable[Row]) -> Iterator[Reading]:
    for row in rows:
        if row.get("mig_enabled") or row.get("mig_devices"):
            for device in row["mig_devices"]:
                yield _reading(
                    row, device, f"{row['name']} MIG {device['name']}", reports_utilization=False, is_mig_device=True
                )
        else:
            yield _reading(row, row, row["name"], reports_utilization=row.get("reports_utilization", True))


def _reading(row: Row, device: Row, name: str, *, reports_utilization: bool, is_mig_device: bool = False) -> Reading:
    memory = device["memory"]
    return Reading(
        device.get("uuid") or str(row["gpu_id"]),
        row["gpu_id"],
        name,
        device.get("uuid"),
        memory["total_mb"],
        memory["used_mb"],
        memory["usage_percent"],
        row["utilization_percent"] if not is_mig_device else None,
        reports_utilization=reports_utilization,
        fault=device.get("fault") or row.get("fault"),
        processes=_processes(device.get("processes")),
        is_mig_device=is_mig_device,
    )


def _processes(rows: list[Row] | None) -> tuple[ProcessReading, ...] | None:
    if rows is None:
        return None
    return tuple(
        ProcessReading(row["pid"], name=row["name"], user=row["user"], memory_used_mb=row["memory_used_mb"])
        for row in rows
    )


def _lease(row: Row, now: float) -> Lease:
    wishes = Wishes(count=len(row["gpus"]), memory_mb=row.get("memory_mb"), share=row.get("share", False))
    held = tuple(
        HeldGPU(gpu["uuid"] or str(gpu["gpu_id"]), gpu["gpu_id"], gpu["uuid"], gpu["name"]) for gpu in row["gpus"]
    )
    quarantine = row.get("quarantine")
    since = now - float(quarantine["seconds"]) if quarantine else now
    granted_at = now - float(row.get("held_seconds") or 0.0)
    return Lease(
        lease_id=row["lease_id"],
        request=Request(row["request_id"], wishes, row.get("worker_id") or "", label=row.get("label")),
        endpoint_id="",
        gpu_ids=tuple(gpu.gpu_id for gpu in held),
        held=held,
        fence=row["fence"],
        state=LeaseState(row["state"]),
        requested_at=granted_at,
        granted_at=granted_at,
        expires_at=None,
        quarantine=Quarantine(quarantine["reason"], since, since) if quarantine else None,
    )
