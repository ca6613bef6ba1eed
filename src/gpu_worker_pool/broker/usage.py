"""How holders use their GPUs: the memory they use, and how long they have been idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.hardware.samples import DriverAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.hardware.samples import HostSample


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    #: On all its GPUs now, above what was in use before the grant; None where that is unknown.
    memory_used_mb: float | None = None
    #: How long none of its GPUs has computed; None where a GPU does not report utilization.
    idle_seconds: float | None = None
    #: Whether that is longer than `idle_after_seconds`.
    is_idle: bool = False


class LeaseUsages:
    """Follows samples; idle time counts from the first sample at the earliest."""

    def __init__(self, idle_after_seconds: float) -> None:
        self.idle_after_seconds = idle_after_seconds
        self._memory_used_mb: dict[str, float | None] = {}
        #: By lease; None where one of its GPUs does not report utilization.
        self._busy_at: dict[str, float | None] = {}

    def take(self, sample: HostSample, leases: Iterable[Lease]) -> None:
        assert isinstance(sample.answer, DriverAnswer)
        memory: dict[str, float | None] = {}
        utilization: dict[str, float | None] = {}
        for gpu in sample.answer.gpus:
            # Other programs use unified memory, too: it says nothing about the holder.
            memory[gpu.identity] = None if gpu.unified_memory else gpu.memory_used_mb
            utilization[gpu.identity] = gpu.utilization_percent
            for device in gpu.mig_devices:
                memory[device.uuid], utilization[device.uuid] = device.memory_used_mb, None
        known = self._busy_at
        self._memory_used_mb, self._busy_at = {}, {}
        for lease in leases:
            if lease.state is not LeaseState.HELD:
                continue
            used = [
                None if (now_used := memory.get(held.gpu_id)) is None or held.memory_used_mb is None
                else max(now_used - held.memory_used_mb, 0.0)
                for held in lease.held
            ]  # fmt: skip
            self._memory_used_mb[lease.lease_id] = None if None in used else sum(one for one in used if one is not None)
            computed = [utilization.get(gpu_id) for gpu_id in lease.gpu_ids]
            if None in computed:
                self._busy_at[lease.lease_id] = None
            elif any(computed):
                self._busy_at[lease.lease_id] = sample.begun_at
            else:
                since = known.get(lease.lease_id)
                self._busy_at[lease.lease_id] = sample.begun_at if since is None else since

    def of(self, lease: Lease, now: float) -> LeaseUsage:
        busy_at = self._busy_at.get(lease.lease_id)
        idle = None if busy_at is None else max(now - busy_at, 0.0)
        return LeaseUsage(
            self._memory_used_mb.get(lease.lease_id), idle, idle is not None and idle >= self.idle_after_seconds
        )
