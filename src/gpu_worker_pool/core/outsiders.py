"""Rule 1, idle: which processes use a GPU without a lease, and how much memory in use no process explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.assignments import HeldGPU
    from gpu_worker_pool.core.readings import ProcessReading, Reading
    from gpu_worker_pool.core.settings import PoolSettings


def foreign_processes(reading: Reading, before: HeldGPU | None) -> Sequence[ProcessReading] | None:
    """Compute processes that belong to no holder: on a leased GPU, those that were there before the first holder.

    `before`: the GPU before its first holder; None without a lease. None where processes cannot be seen.
    """
    if reading.processes is None or before is None:
        return reading.processes
    if before.processes is None:
        return None
    return [process for process in reading.processes if process.identity in before.processes]


def graphics_that_count(reading: Reading, settings: PoolSettings) -> Sequence[ProcessReading]:
    """A desktop is on many GPUs and does not count, unless it uses much memory; then its processes do."""
    graphics = reading.graphics or ()
    used_mb = sum(process.memory_used_mb or 0.0 for process in graphics)
    return graphics if used_mb > settings.idle_graphics_mb else ()


def unexplained_memory_mb(reading: Reading) -> float | None:
    """Memory in use that no visible process accounts for; None if unknown, or a process does not report its memory."""
    processes = reading.processes or ()
    if reading.memory_used_mb is None or any(process.memory_used_mb is None for process in processes):
        return None
    return reading.memory_used_mb - sum(
        process.memory_used_mb or 0.0 for process in (*processes, *(reading.graphics or ()))
    )


def allowed_memory_mb(reading: Reading, settings: PoolSettings) -> float:
    """Unexplained memory must stay below this: the driver itself uses some."""
    share_mb = (reading.memory_total_mb or 0.0) * settings.idle_unexplained_percent / 100.0
    return max(share_mb, settings.idle_unexplained_mb)
