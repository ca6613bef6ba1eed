"""Leases, and who holds which GPU by them. An assignment within one process is a lease without a TTL."""

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
    """A GPU as a lease remembers it: which one it is, and what was on it before the grant.

    Rule 11 waits until it looks like that again.
    """

    gpu_id: str
    #: As it was numbered when it was granted; the UUID stays if the numbers change.
    index: int = 0
    uuid: str | None = None
    name: str = ""
    #: Before the first of those who share the GPU now.
    memory_used_mb: float | None = None
    memory_usage_percent: float | None = None
    #: Before this grant; None where processes cannot be seen.
    processes: frozenset[tuple[int, float | None]] | None = None


@record
class Quarantine:
    """Why and since when a GPU is nobody's, and until when at least."""

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
    #: Grows with every grant, so that a late message of an old holder is recognised.
    fence: int
    state: LeaseState
    requested_at: float
    granted_at: float
    #: What the holder is told; the pool itself waits `expiry_grace_seconds` longer.
    expires_at: float | None
    quarantine: Quarantine | None = None
    #: The asking whose answer made it held; empty once anybody may know of it by another one.
    poll_id: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LEASE_STATES

    @property
    def is_shareable(self) -> bool:
        return self.request.requirements.share

    @property
    def worker(self) -> str:
        """Its holder, as others are told."""
        return self.request.worker_id or self.request.request_id

    def moved(self, target: LeaseState, **changes: Any) -> Lease:
        if target not in LEASE_MOVES[self.state]:
            raise IllegalMoveError(f"a lease cannot go from {self.state} to {target}")
        return replace(self, state=target, **changes)

    def extended(self, expires_at: float | None, poll_id: str = "") -> Lease:
        """By its holder, or by an asking; only if that is the one that brought it about, nobody else knows of it."""
        return replace(self, expires_at=expires_at, poll_id=poll_id if poll_id == self.poll_id else "")


class WorkerAssignmentTracker:
    """All leases that are held, offered or in quarantine. Belongs to one thread."""

    def __init__(self, gpus: Mapping[str, GPUResourceState]) -> None:
        #: To look at; only `assign` and `release` change it.
        self.by_id: dict[str, Lease] = {}
        self._gpus = gpus

    def assign(self, lease: Lease) -> None:
        """A new one, or one that has changed, in the place of what it was."""
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
