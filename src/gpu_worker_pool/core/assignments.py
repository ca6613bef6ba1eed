"""Leases, and which GPU is held by which of them. An assignment within one process is a lease without a TTL."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.moves import LEASE_MOVES, LIVE_LEASE_STATES, IllegalMoveError, LeaseState
from gpu_worker_pool.core.record import record
from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.fair_share import FairShare
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
class LeaseUse:
    """How a held lease used its GPUs, up to a reading. Time that no process observed is not included."""

    #: When the last of these readings began.
    seen_until: float
    observed_seconds: float
    #: Of these, in which none of its GPUs computed; None where a GPU does not report that.
    idle_seconds: float | None
    #: When one of its GPUs last computed, else when it was first observed.
    busy_at: float | None
    #: The most that was in use on all its GPUs, above what was in use before the grant; None where that is unknown.
    most_memory_mb: float | None


@record
class LeaveAsked:
    """Its holder was asked to give it back."""

    at: float
    #: For the holder to read.
    reason: str
    #: When the lease ends if it stays idle; None: it may be kept.
    ends_at: float | None = None
    #: The waiting request that asks; None: a person does, or the policy.
    request_id: str | None = None


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
    #: As it was last stored; None before that.
    use: LeaseUse | None = None
    asked: LeaveAsked | None = None
    #: The time limit of the policy when it was granted; None: it had none.
    longest_seconds: float | None = None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LEASE_STATES

    @property
    def ends_at(self) -> float | None:
        """When its time limit ends it, however often it is renewed; None: it has none."""
        if self.request.max_seconds is None and self.longest_seconds is None:
            return None
        return self.granted_at + min(self.request.max_seconds or math.inf, self.longest_seconds or math.inf)

    def renewed_until(self, now: float, ttl_seconds: float | None) -> float | None:
        """Until when a renewal holds it: for its TTL, but never beyond its time limit."""
        ends_at = self.ends_at
        if ttl_seconds is None:
            return ends_at
        return now + ttl_seconds if ends_at is None else min(now + ttl_seconds, ends_at)

    def why_expired(self, now: float) -> str:
        """Why it ends if it was not renewed in time, which it cannot be beyond its time limit."""
        if self.ends_at is None or now < self.ends_at:
            return "its lease was not renewed in time"
        whose = "the policy's" if self.request.max_seconds is None else "its"
        return f"it reached {whose} time limit of {spoken_seconds(self.ends_at - self.granted_at)}"

    @property
    def is_shareable(self) -> bool:
        return self.request.requirements.share

    @property
    def within(self) -> str | None:
        """The lease inside which it was granted."""
        return self.request.within

    @property
    def worker(self) -> str:
        return self.request.worker

    def moved(self, target: LeaseState, **changes: Any) -> Lease:
        if target not in LEASE_MOVES[self.state]:
            raise IllegalMoveError(f"a lease cannot go from {self.state} to {target}")
        return replace(self, state=target, **changes)

    def extended(self, expires_at: float | None, poll_id: str = "") -> Lease:
        """Renewed by its holder or by a poll; `poll_id` stays only if it is the poll that delivered the grant."""
        return replace(self, expires_at=expires_at, poll_id=poll_id if poll_id == self.poll_id else "")


def with_limit(lease: Lease) -> Lease:
    """The same, not held beyond its time limit."""
    ends_at, expires_at = lease.ends_at, lease.expires_at
    if ends_at is None or (expires_at is not None and expires_at <= ends_at):
        return lease
    return replace(lease, expires_at=ends_at)


class WorkerAssignmentTracker:
    """All leases that are held, offered or in quarantine. Belongs to one thread."""

    def __init__(self, gpus: Mapping[str, GPUResourceState], fair_share: FairShare | None = None) -> None:
        #: The use of accounts, to which leases count from their grant to their end; None: use is not counted.
        self.fair_share = fair_share
        #: The moment of the event that is being applied.
        self.now: float = -math.inf
        #: Read-only outside: `assign` and `release` change it.
        self.by_id: dict[str, Lease] = {}
        self._gpus = gpus
        #: How many of each account.
        self._of_account: Counter[str] = Counter()
        #: Leases inside a lease, by the id of that lease; read-only outside. Empty for most pools, which then skip all
        #: that concerns them.
        self.inner: dict[str, dict[str, Lease]] = {}
        #: By account, how many of its leases are on each GPU; without those inside a lease.
        self._held_by: dict[str, Counter[str]] = {}

    def held_by(self, account: str) -> Collection[str]:
        """The GPUs on which this account holds leases, also those in quarantine: its processes may still use them."""
        return self._held_by.get(account, Counter())

    def assign(self, lease: Lease) -> None:
        """Add a lease, or replace it by its new version."""
        lease_id, account, within = lease.lease_id, lease.request.account, lease.request.within
        if account and lease_id not in self.by_id:
            self._of_account[account] += 1
            if within is None:
                self._held_by.setdefault(account, Counter()).update(lease.gpu_ids)
        self.by_id[lease_id] = lease
        if self.fair_share is not None:
            (self.fair_share.began if lease.quarantine is None else self.fair_share.ended)(lease, self.now)
        if within is None:
            for gpu_id in lease.gpu_ids:
                gpu = self._gpus[gpu_id]
                gpu.leases[lease_id] = lease
                gpu.known_holders = None
        else:
            self.inner.setdefault(within, {})[lease_id] = lease
            self._place(lease)
        if self.inner:
            for inner in self.inside(lease_id):
                self._place(inner)

    def release(self, lease: Lease) -> None:
        lease_id, within = lease.lease_id, lease.request.within
        del self.by_id[lease_id]
        if account := lease.request.account:
            self._of_account[account] -= 1
            if not self._of_account[account]:
                del self._of_account[account]
            if within is None:
                held = self._held_by[account]
                held -= Counter(lease.gpu_ids)  # and what is 0 then
                if held:
                    self._held_by[account] = held
                else:
                    del self._held_by[account]
        if self.fair_share is not None:
            self.fair_share.ended(lease, self.now)
        if within is None:
            for gpu_id in lease.gpu_ids:
                gpu = self._gpus[gpu_id]
                del gpu.leases[lease_id]
                gpu.known_holders = None
        else:
            for gpu_id in lease.gpu_ids:
                gpu = self._gpus[gpu_id]
                gpu.known_holders = None
                if gpu.leases.pop(lease_id, None) is None:
                    del gpu.inner_leases[lease_id]
            beside = self.inner[within]
            del beside[lease_id]
            if not beside:
                del self.inner[within]
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
            gpu.known_holders = None

    def of_account(self, account: str) -> int:
        """How many leases this account has."""
        return self._of_account[account]

    def inside(self, lease_id: str) -> list[Lease]:
        """The leases directly inside this one."""
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
