"""Rule 11, the evidence: what a reading still shows of a lease that ended without being released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.origins import name_of

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import HeldGPU, Lease
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.settings import PoolSettings


def trace_of(lease: Lease, gpu: GPUResourceState, settings: PoolSettings) -> str | None:
    """Why the GPU may not be empty; None if a reading begun after the quarantine shows it empty."""
    if gpu.is_gone:
        return None
    reading = gpu.reading
    if (
        reading is None
        or lease.quarantine is None
        or gpu.endpoint.begun_at <= max(lease.quarantine.since, gpu.read_after)
    ):
        return "not read since the lease ended"
    before = lease.held[lease.gpu_ids.index(gpu.gpu_id)]
    others = [other for other in gpu.leases.values() if other.lease_id != lease.lease_id]
    if others:
        return _trace_beside(others, before, reading, settings)
    if reading.processes is not None and before.processes is not None:
        # Not by the process's age: a worker is often older than its grant, and comes onto the GPU after it.
        newcomers = [process for process in reading.processes if process.identity not in before.processes]
        if newcomers:
            return f"{newcomers[0]} came after the grant"
        if not reading.processes:
            return None
        # One that was there before may be the holder's own: several workers can live in one process.
    if reading.has_unified_memory:
        # The host's memory says nothing about the GPU. Without processes there is no evidence to wait for.
        return None
    if reading.memory_used_mb is not None and before.memory_used_mb is not None:
        limit = before.memory_used_mb + settings.returned_memory_slack_mb
        used = reading.memory_used_mb
        return f"{used:.0f} MB used, {limit:.0f} MB expected" if used > limit else None
    if reading.memory_usage_percent is not None and before.memory_usage_percent is not None:
        limit = before.memory_usage_percent + settings.returned_memory_slack_percent
        used = reading.memory_usage_percent
        return f"memory {used:.1f} % used, {limit:.1f} % expected" if used > limit else None
    return "neither processes nor memory can be seen"


def _trace_beside(others: list[Lease], before: HeldGPU, reading: Reading, settings: PoolSettings) -> str | None:
    """The same on a GPU that others share: what came after the grant may be theirs, up to the memory they declared."""
    there = set() if reading.processes is None else {process.identity for process in reading.processes}
    for other in others:
        then = next(held for held in other.held if held.gpu_id == before.gpu_id)
        if then.processes is not None and before.processes is not None and (then.processes - before.processes) & there:
            return f"a process older than the lease of {name_of(other.request, settings.host)} is still there"
    if reading.has_unified_memory:
        newcomers = there - (there if before.processes is None else before.processes)
        return (
            f"cannot be distinguished from what {name_of(others[0].request, settings.host)} uses" if newcomers else None
        )
    declared_mb = [other.request.requirements.memory_mb for other in others]
    if reading.memory_used_mb is None or before.memory_used_mb is None or None in declared_mb:
        return f"cannot be distinguished from what {name_of(others[0].request, settings.host)} uses"
    limit = before.memory_used_mb + sum(filter(None, declared_mb)) + settings.returned_memory_slack_mb
    used = reading.memory_used_mb
    if used <= limit:
        return None
    return f"{used:.0f} MB used, {limit:.0f} MB expected with {name_of(others[0].request, settings.host)}"
