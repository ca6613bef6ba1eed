"""Leases, and who holds which GPU by them. An assignment within one process is a lease without a TTL."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.moves import LIVE_LEASE_STATES, LeaseState, check_lease_move
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.gpus import GPUResourceState


@record
class LevelBefore:
    """What was on a GPU before it was granted; rule 11 waits until it looks like that again."""

    #: Before the first of those who share the GPU now.
    memory_used_mb: float | None = None
    memory_usage_percent: float | None = None
    #: Before this grant; None where processes cannot be seen.
    processes: frozenset[tuple[int, float | None]] | None = None


@record
class Lease:
    lease_id: str
    request: Request
    endpoint_id: str
    gpu_ids: tuple[str, ...]
    #: Grows with every grant, so that a late message of an old holder is recognised.
    fence: int
    state: LeaseState
    requested_at: float
    granted_at: float
    #: What the holder is told; the pool itself waits `expiry_grace_seconds` longer.
    expires_at: float | None
    #: For each of `gpu_ids`.
    levels_before: tuple[LevelBefore, ...]
    #: In quarantine: since when, why, and until when at least.
    quarantined_at: float | None = None
    quarantine_reason: str = ""
    quarantined_until: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LEASE_STATES

    @property
    def is_shareable(self) -> bool:
        return self.request.wishes.share

    def moved(self, target: LeaseState, **changes: Any) -> Lease:
        check_lease_move(self.state, target)
        return replace(self, state=target, **changes)

    def changed(self, *, expires_at: float | None) -> Lease:
        return replace(self, expires_at=expires_at)


class WorkerAssignmentTracker:
    """All leases that are held, offered or in quarantine. Belongs to one thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._gpus: dict[str, Sequence[GPUResourceState]] = {}

    def assign(self, lease: Lease, gpus: Sequence[GPUResourceState]) -> None:
        self._by_id[lease.lease_id] = lease
        self._by_request[lease.request.request_id] = lease
        self._gpus[lease.lease_id] = gpus
        for gpu in gpus:
            gpu.leases[lease.lease_id] = lease

    def replace(self, lease: Lease) -> None:
        """Put a changed lease in the place of what it was."""
        self.assign(lease, self._gpus[lease.lease_id])

    def release(self, lease_id: str) -> Sequence[GPUResourceState]:
        """Forget the lease; the GPUs it was on are returned."""
        lease = self._by_id.pop(lease_id)
        del self._by_request[lease.request.request_id]
        gpus = self._gpus.pop(lease_id)
        for gpu in gpus:
            del gpu.leases[lease_id]
        return gpus

    def lookup(self, lease_id: str) -> Lease | None:
        return self._by_id.get(lease_id)

    def lookup_request(self, request_id: str) -> Lease | None:
        return self._by_request.get(request_id)

    def gpus_of(self, lease_id: str) -> Sequence[GPUResourceState]:
        return self._gpus[lease_id]

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)
