"""Rule 11, the evidence: what a reading still shows of a lease that ended without being released."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.settings import PoolSettings


def trace_of(lease: Lease, gpu: GPUResourceState, settings: PoolSettings) -> str | None:
    """What speaks against the GPU being empty; None if a reading begun after the quarantine shows nothing left."""
    if gpu.is_gone:
        return None
    reading = gpu.reading
    if reading is None or lease.quarantine is None or gpu.endpoint.begun_at <= lease.quarantine.since:
        return "not read since"
    before = lease.held[lease.gpu_ids.index(gpu.gpu_id)]
    if reading.processes is not None and before.processes is not None:
        # Not by the process's age: a worker is often older than its grant, and comes onto the GPU after it.
        newcomers = [process for process in reading.processes if process.identity not in before.processes]
        if newcomers:
            return f"{newcomers[0]} came after the grant"
        if not reading.processes:
            return None
        # One that was there before may be the holder's own: several workers can live in one process.
    if reading.memory_used_mb is not None and before.memory_used_mb is not None:
        limit = before.memory_used_mb + settings.returned_memory_slack_mb
        used = reading.memory_used_mb
        return f"{used:.0f} MB used, {limit:.0f} MB expected" if used > limit else None
    if reading.memory_usage_percent is not None and before.memory_usage_percent is not None:
        limit = before.memory_usage_percent + settings.returned_memory_slack_percent
        used = reading.memory_usage_percent
        return f"memory {used:.1f} % used, {limit:.1f} % expected" if used > limit else None
    return "neither processes nor memory can be seen"
