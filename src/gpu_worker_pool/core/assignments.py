"""Leases, and which GPU is held by which of them. An assignment within one process is a lease without a TTL."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.moves import LEASE_MOVES, LIVE_LEASE_STATES, IllegalMoveError, LeaseState
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.gpus import GPUResourceState


@record
class HeldGPU:
    """A GPU of a lease, with its state before the grant: rule 11 waits until it looks like that again."""

    gpu_id: str
    #: When it was granted; unlike the UUID, the index may change.
    index: int = 0
    uuid: str | None = None
    name: str = ""
    #: Before the first of the holders that share the GPU now.
    memory_used_mb: float | None = None
    memory_usage_percent: float | None = None
    #: Before this grant; None where processes cannot be seen.
    processes: frozenset[tuple[int, float | None]] | None = None


@record
class Quarantine:
    """Why a lease is in quarantine, since when, and until when at least."""

    reason: str
    since: float
    until: float


@record
class Lease:
    lease_id: str
    request: Request
    endpoint_id: str
    gpu_ids: tuple[str, ...]
    #: For each of `gpu_ids`.
    held: tuple[HeldGPU, ...]
    #: The fencing token: grows with every grant, so that a late message of an old holder is recognised.
    fence: int
    state: LeaseState
    requested_at: float
    granted_at: float
    #: For the holder; the pool itself waits `expiry_grace_seconds` longer.
    expires_at: float | None
    quarantine: Quarantine | None = None
    #: The poll that delivered the grant; empty once another poll or a renewal may have.
    poll_id: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LEASE_STATES

    @property
    def is_shareable(self) -> bool:
        return self.request.requirements.share

    @property
    def worker(self) -> str:
        """Its holder's name in explanations to others."""
        return self.request.worker_id or self.request.request_id

    def moved(self, target: LeaseState, **changes: Any) -> Lease:
        if target not in LEASE_MOVES[self.state]:
            raise IllegalMoveError(f"a lease cannot go from {self.state} to {target}")
        return replace(self, state=target, **changes)

    def extended(self, expires_at: float | None, poll_id: str = "") -> Lease:
        """Renewed by its holder or by a poll; `poll_id` stays only if it is the poll that delivered the grant."""
        return replace(self, expires_at=expires_at, poll_id=poll_id if poll_id == self.poll_id else "")


class WorkerAssignmentTracker:
    """All leases that are held, offered or in quarantine. Belongs to one thread."""

    def __init__(self, gpus: Mapping[str, GPUResourceState]) -> None:
        #: Read-only outside: `assign` and `release` change it.
        self.by_id: dict[str, Lease] = {}
        self._gpus = gpus

    def assign(self, lease: Lease) -> None:
        """Add a lease, or replace it by its new version."""
        lease_id = lease.lease_id
        self.by_id[lease_id] = lease
        for gpu_id in lease.gpu_ids:
            self._gpus[gpu_id].leases[lease_id] = lease

    def release(self, lease: Lease) -> None:
        lease_id = lease.lease_id
        del self.by_id[lease_id]
        for gpu_id in lease.gpu_ids:
            del self._gpus[gpu_id].leases[lease_id]

    def lookup(self, lease_id: str) -> Lease | None:
        return self.by_id.get(lease_id)

    def gpus_of(self, lease: Lease) -> list[GPUResourceState]:
        return [self._gpus[gpu_id] for gpu_id in lease.gpu_ids]

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self.by_id.values()))

    def __len__(self) -> int:
        return len(self.by_id)
