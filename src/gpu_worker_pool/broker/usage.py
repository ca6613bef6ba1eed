"""How holders use their GPUs: the memory they use, and how long they have been idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.assignments import LeaseUse
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.hardware.samples import DriverAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.policy import IdleRule
    from gpu_worker_pool.hardware.samples import HostSample

#: How old the ledger's use of held leases may become.
STORE_SECONDS: Final = 30.0
#: The longest gap between two samples; after a longer one the GPUs count as not observed.
LONGEST_GAP_SECONDS: Final = 15.0


@frozen
class LeaseUsage:
    #: On all its GPUs now, above what was in use before the grant; None where that is unknown.
    memory_used_mb: float | None = None
    #: How long none of its GPUs has computed; None where a GPU does not report utilization.
    idle_seconds: float | None = None
    #: Whether that is longer than `idle_after_seconds`.
    is_idle: bool = False


class LeaseUsages:
    """Follows samples; idle time counts from the first sample at the earliest, of this process or of another one."""

    def __init__(self, idle_after_seconds: float) -> None:
        self.idle_after_seconds = idle_after_seconds
        self._memory_used_mb: dict[str, float | None] = {}
        self._uses: dict[str, LeaseUse] = {}

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
        known = self._uses
        self._memory_used_mb, self._uses = {}, {}
        for lease in leases:
            if lease.state is not LeaseState.HELD:
                continue
            used = [
                None if (now_used := memory.get(held.gpu_id)) is None or held.memory_used_mb is None
                else max(now_used - held.memory_used_mb, 0.0)
                for held in lease.held
            ]  # fmt: skip
            used_mb = None if None in used else sum(one for one in used if one is not None)
            self._memory_used_mb[lease.lease_id] = used_mb
            computed = [utilization.get(gpu_id) for gpu_id in lease.gpu_ids]
            is_busy = None if None in computed else any(computed)
            self._uses[lease.lease_id] = _extended(lease, known.get(lease.lease_id), sample.begun_at, is_busy, used_mb)

    def of(self, lease: Lease, now: float) -> LeaseUsage:
        use = self._uses.get(lease.lease_id)
        idle = None if use is None or use.busy_at is None else max(now - use.busy_at, 0.0)
        return LeaseUsage(
            self._memory_used_mb.get(lease.lease_id), idle, idle is not None and idle >= self.idle_after_seconds
        )

    def use_of(self, lease_id: str) -> LeaseUse | None:
        """All that was seen of it; None if this process has seen nothing."""
        return self._uses.get(lease_id)

    def to_store(self, leases: Iterable[Lease], idle: IdleRule) -> dict[str, LeaseUse]:
        """The use that the ledger should have by now. All processes see the same, so one of them is enough."""
        found = {}
        seconds = min(STORE_SECONDS, idle.after_seconds / 2, max(idle.grace_seconds / 2, 1.0))
        for lease in leases:
            stored_at = lease.granted_at if lease.use is None else lease.use.seen_until
            use = self._uses.get(lease.lease_id)
            if use is None:
                continue
            # A holder that is about to lose its lease for idleness must keep it once it computes again.
            is_urgent = lease.asked is not None and use.busy_at is not None and use.busy_at > lease.asked.at
            if use.seen_until - stored_at >= (0.5 if is_urgent else seconds):
                found[lease.lease_id] = use
        return found


def _extended(
    lease: Lease, own: LeaseUse | None, seen_at: float, is_busy: bool | None, used_mb: float | None
) -> LeaseUse:
    """With one more sample; `is_busy`: whether one of its GPUs computed, None where that is not reported."""
    before, is_own = own, True
    if lease.use is not None and (own is None or lease.use.seen_until > own.seen_until):
        before, is_own = lease.use, False
    if before is None:
        before = LeaseUse(lease.granted_at, 0.0, 0.0, None, None)
    seconds = max(seen_at - before.seen_until, 0.0)
    # Unobserved time was neither idle nor busy.
    counted = seconds if seconds <= LONGEST_GAP_SECONDS else 0.0
    idle, busy_at = before.idle_seconds, before.busy_at
    if is_busy is None:
        idle = busy_at = None
    else:
        idle = None if idle is None else idle + (0.0 if is_busy else counted)
        if is_busy or busy_at is None or not (is_own or counted):
            busy_at = seen_at
    if busy_at is not None and lease.use is not None and lease.use.busy_at is not None:
        busy_at = max(busy_at, lease.use.busy_at)  # its holder may have said that it is not idle
    most = [each for each in (before.most_memory_mb, used_mb) if each is not None]
    return LeaseUse(
        max(seen_at, before.seen_until),
        before.observed_seconds + counted,
        idle,
        busy_at,
        max(most) if most else None,
    )
