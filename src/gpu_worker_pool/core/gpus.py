"""The state of each GPU and each endpoint: the last reading, and the leases on it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import HeldGPU
from gpu_worker_pool.core.ranked import RankedSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.readings import ProcessReading, Reading


class EndpointState:
    """One GPU statistics server, or this host."""

    __slots__ = (
        "begun_at",
        "endpoint_id",
        "free",
        "gpus",
        "is_answering",
        "is_removed",
        "last_fence",
        "order",
        "present",
        "turn",
    )

    def __init__(self, endpoint_id: str, order: int) -> None:
        self.endpoint_id = endpoint_id
        #: The order in which endpoints became known; breaks ties.
        self.order = order
        self.gpus: dict[str, GPUResourceState] = {}
        #: Whether the last attempt to read it succeeded.
        self.is_answering = False
        #: Whether it is no longer used.
        self.is_removed = False
        #: How many GPUs the last reading showed; 0 also while the endpoint does not answer.
        self.present = 0
        #: When the last reading began.
        self.begun_at = -math.inf
        #: The GPUs that a request for any GPU could have now, best first (rule 3).
        self.free: RankedSet[GPUResourceState] = RankedSet()
        #: For the balancing strategies.
        self.last_fence = 0
        self.turn = 0.0

    def __repr__(self) -> str:
        return f"<{self.endpoint_id or 'endpoint'}: {len(self.free)} of {self.present} GPUs free>"


class GPUResourceState:
    __slots__ = (
        "baseline",
        "endpoint",
        "freed_at",
        "gpu_id",
        "index",
        "is_gone",
        "is_usable",
        "last_fence",
        "last_seen",
        "leases",
        "rank",
        "read_after",
        "reading",
        "readings_wanted",
        "usage_percent",
    )

    def __init__(self, gpu_id: str, endpoint: EndpointState) -> None:
        self.gpu_id = gpu_id
        self.endpoint = endpoint
        #: None while the GPU is missing from its endpoint's readings.
        self.reading: Reading | None = None
        #: Memory and utilization added up, to rank by; what is unknown counts as 100 %.
        self.usage_percent = 200.0
        self.index = 0
        #: The last reading there was, for what does not change: a missing GPU is still part of the host.
        self.last_seen: Reading | None = None
        #: True once it no longer exists, as happens to MIG devices.
        self.is_gone = False
        #: What the next lease will remember: the last reading, or the state before a lease that ended since.
        self.baseline = HeldGPU(gpu_id)
        #: Whether a request for any GPU could have it, by its reading alone.
        self.is_usable = False
        #: All leases on it: held, offered and in quarantine.
        self.leases: dict[str, Lease] = {}
        #: When the last lease on it ended, and how many readings were requested since (rule 8).
        self.freed_at = -math.inf
        self.readings_wanted = 0
        #: Readings begun before this do not show whether it is free.
        self.read_after = -math.inf
        #: The fence of the last grant: the lower, the longer ago.
        self.last_fence = 0
        #: Rule 3: the least used, then the one granted longest ago, then by id.
        self.rank = (self.usage_percent, 0, 0, gpu_id, self)

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
        declared = sum(lease.request.requirements.memory_mb or math.inf for lease in self.leases.values())
        return reading.memory_total_mb - max(reading.memory_used_mb, used_before + declared)

    def foreign_processes(self) -> Iterable[ProcessReading] | None:
        """Processes that belong to no holder: on a held GPU, those that were there before the first holder."""
        reading = self.reading
        if reading is None or reading.processes is None:
            return None
        if not self.leases:
            return reading.processes
        before = self._first_held().processes
        if before is None:
            return None
        return [process for process in reading.processes if process.identity in before]

    def _first_held(self) -> HeldGPU:
        first = min(self.leases.values(), key=lambda lease: lease.fence)
        return first.held[first.gpu_ids.index(self.gpu_id)]

    def __repr__(self) -> str:
        leases = ", ".join(f"{lease.lease_id} {lease.state}" for lease in self.leases.values())
        return f"<GPU {self.gpu_id}: {leases or 'no lease'}>"
