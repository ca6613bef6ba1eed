"""The state of each GPU and each endpoint: the last reading, and the leases on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import HeldGPU
from gpu_worker_pool.core.ranked import RankedSet
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.readings import Reading


@dataclass(slots=True, eq=False, repr=False)
class EndpointState:
    """One GPU statistics server, or this host."""

    endpoint_id: str
    #: The order in which endpoints became known; breaks ties.
    order: int
    gpus: dict[str, GPUResourceState] = field(default_factory=dict)
    #: Whether the last attempt to read it succeeded.
    is_answering: bool = False
    #: Whether it is no longer used.
    is_removed: bool = False
    #: How many GPUs the last reading showed; 0 also while the endpoint does not answer.
    present: int = 0
    #: When the last reading began.
    begun_at: float = -math.inf
    #: The GPUs that a request for any GPU could have now, best first (rule 3).
    free: RankedSet[GPUResourceState] = field(default_factory=RankedSet)
    #: Whether any reading showed one: a request for several GPUs cannot have those.
    has_mig_devices: bool = False
    #: Whether some of its GPUs are nearer to each other than others.
    has_distances: bool = False
    #: For the balancing strategies.
    last_fence: int = 0
    turn: float = 0.0

    def __repr__(self) -> str:
        return f"<{self.endpoint_id or 'endpoint'}: {len(self.free)} of {self.present} GPUs free>"


@record
class GPUHolders:
    """What requests that share need to know of the leases on a GPU."""

    #: Those that do not share it.
    unshared: tuple[Lease, ...]
    #: What all of them declared; infinite if one declared nothing.
    declared_mb: float
    #: The lowest fence; None without a lease.
    first: Lease | None


@dataclass(slots=True, eq=False, repr=False)
class GPUResourceState:
    gpu_id: str
    endpoint: EndpointState
    #: None while the GPU is missing from its endpoint's readings.
    reading: Reading | None = None
    #: Memory and utilization added up, to rank by; what is unknown counts as 100 %.
    usage_percent: float = 200.0
    index: int = 0
    is_mig_device: bool = False
    #: The last reading there was, for what does not change: a missing GPU is still part of the host.
    last_seen: Reading | None = None
    #: True once it no longer exists, as happens to MIG devices.
    is_gone: bool = False
    #: What the next lease will remember: the last reading, or the state before a lease that ended since.
    baseline: HeldGPU = field(init=False)
    #: Whether a request for any GPU could have it, by its reading alone.
    is_usable: bool = False
    #: All leases on it: held, offered and in quarantine. Each stands for those inside it.
    leases: dict[str, Lease] = field(default_factory=dict)
    #: What `holders` returned last; the tracker of assignments sets it to None when one of `leases` changes.
    known_holders: GPUHolders | None = None
    #: The leases inside those.
    inner_leases: dict[str, Lease] = field(default_factory=dict)
    #: When the last lease on it ended, and how many readings were requested since (rule 8).
    freed_at: float = -math.inf
    readings_wanted: int = 0
    #: Readings begun before this do not show whether it is free.
    read_after: float = -math.inf
    #: The fence of the last grant: the lower, the longer ago.
    last_fence: int = 0
    #: Rule 3: the least used, then the one granted longest ago, then by id.
    rank: tuple[float, int, int, str, GPUResourceState] = field(init=False)

    def __post_init__(self) -> None:
        self.baseline = HeldGPU(self.gpu_id)
        self.rank = (self.usage_percent, self.last_fence, self.index, self.gpu_id, self)

    def baseline_of(self, reading: Reading) -> HeldGPU:
        return HeldGPU(
            self.gpu_id,
            reading.index,
            reading.uuid,
            reading.name,
            reading.memory_used_mb,
            reading.memory_usage_percent,
            reading.process_identities,
        )

    def baseline_now(self) -> HeldGPU:
        """All holders that share a GPU remember the memory used before the first of them."""
        if not self.leases:
            return self.baseline
        first = self._first_held()
        return replace(
            self.baseline, memory_used_mb=first.memory_used_mb, memory_usage_percent=first.memory_usage_percent
        )

    def memory_left_mb(self) -> float | None:
        """Rule 1: total - max(used now, used before the first lease + everything declared since)."""
        reading = self.reading
        if reading is None or reading.memory_total_mb is None or reading.memory_used_mb is None:
            return None
        if not self.leases:
            return reading.memory_total_mb - reading.memory_used_mb
        used_before = self._first_held().memory_used_mb
        if used_before is None:
            return None
        return reading.memory_total_mb - max(reading.memory_used_mb, used_before + self.holders().declared_mb)

    def before_leases(self) -> HeldGPU | None:
        """Its state before the first of its holders; None without a lease."""
        return self._first_held() if self.leases else None

    def holders(self) -> GPUHolders:
        """Added up again only after a change: thousands may share a GPU, and every request looks at every GPU."""
        if self.known_holders is None:
            leases = self.leases.values()
            self.known_holders = GPUHolders(
                tuple([lease for lease in leases if not lease.is_shareable]),
                sum(lease.request.requirements.memory_mb or math.inf for lease in leases),
                min(leases, key=lambda lease: lease.fence, default=None),
            )
        return self.known_holders

    def _first_held(self) -> HeldGPU:
        first = self.holders().first
        assert first is not None  # else it is not asked for
        return first.held[first.gpu_ids.index(self.gpu_id)]

    def __repr__(self) -> str:
        leases = ", ".join(f"{lease.lease_id} {lease.state}" for lease in self.leases.values())
        return f"<GPU {self.gpu_id}: {leases or 'no lease'}>"
