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
    def within(self) -> str | None:
        """The lease inside which it was granted."""
        return self.request.within

    @property
    def worker(self) -> str:
        """The id of its worker; `name_of` makes its name for people."""
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
        #: Leases inside a lease, by the id of that lease; read-only outside. Empty for most pools, which then skip all
        #: that concerns them.
        self.inner: dict[str, dict[str, Lease]] = {}

    def assign(self, lease: Lease) -> None:
        """Add a lease, or replace it by its new version."""
        lease_id = lease.lease_id
        self.by_id[lease_id] = lease
        if lease.request.within is None:
            for gpu_id in lease.gpu_ids:
                self._gpus[gpu_id].leases[lease_id] = lease
        else:
            self.inner.setdefault(lease.request.within, {})[lease_id] = lease
            self._place(lease)
        if self.inner:
            for inner in self.inside(lease_id):
                self._place(inner)

    def release(self, lease: Lease) -> None:
        lease_id = lease.lease_id
        del self.by_id[lease_id]
        if lease.request.within is None:
            for gpu_id in lease.gpu_ids:
                del self._gpus[gpu_id].leases[lease_id]
        else:
            for gpu_id in lease.gpu_ids:
                gpu = self._gpus[gpu_id]
                if gpu.leases.pop(lease_id, None) is None:
                    del gpu.inner_leases[lease_id]
            beside = self.inner[lease.request.within]
            del beside[lease_id]
            if not beside:
                del self.inner[lease.request.within]
        if self.inner:
            for inner in self.inside(lease_id):
                self._place(inner)

    def _place(self, inner: Lease) -> None:
        """A lease stands for those inside it. One that an older version left behind alone stands for itself."""
        enclosing = self.enclosing(inner)
        for gpu_id in inner.gpu_ids:
            gpu = self._gpus[gpu_id]
            is_covered = enclosing is not None and gpu_id in enclosing.gpu_ids
            before, after = (gpu.leases, gpu.inner_leases) if is_covered else (gpu.inner_leases, gpu.leases)
            before.pop(inner.lease_id, None)
            after[inner.lease_id] = inner

    def inside(self, lease_id: str) -> list[Lease]:
        """The leases right inside this one."""
        return list(self.inner.get(lease_id, {}).values())

    def enclosing(self, lease: Lease) -> Lease | None:
        """The lease around this one; None if there is none."""
        return None if lease.request.within is None else self.by_id.get(lease.request.within)

    def outermost(self, lease: Lease) -> Lease:
        """The lease around all those around this one; the lease itself if there is none."""
        while (enclosing := self.enclosing(lease)) is not None:
            lease = enclosing
        return lease

    def lookup(self, lease_id: str) -> Lease | None:
        return self.by_id.get(lease_id)

    def gpus_of(self, lease: Lease) -> list[GPUResourceState]:
        return [self._gpus[gpu_id] for gpu_id in lease.gpu_ids]

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self.by_id.values()))

    def __len__(self) -> int:
        return len(self.by_id)
