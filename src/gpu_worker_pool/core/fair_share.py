"""Fair share: how much each account used lately, and the order that follows from it.

Use is measured in GPU seconds, from the grant of a lease to its end; a share counts in proportion to its memory. It
decays with a half-life, so that a day of heavy use does not count against an account for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.settings import PoolSettings


@record
class Use:
    """What an account had used by a moment, and how many GPUs it has used since."""

    account: str
    gpu_seconds: float
    at: float


@dataclass(slots=True, eq=False)
class _Account:
    #: GPU seconds until `at`, decayed until then.
    used: float
    at: float
    #: How many GPUs it has had since.
    rate: float = 0.0


def weight_of(lease: Lease, gpus: Mapping[str, GPUResourceState]) -> tuple[float, bool]:
    """How many GPUs a lease counts as, a share by its part of the memory; and whether all of that memory is known."""
    requirements = lease.request.requirements
    if not requirements.share or requirements.memory_mb is None:
        return float(len(lease.gpu_ids)), True
    seen = [gpus[gpu_id].last_seen for gpu_id in lease.gpu_ids]
    totals = [None if reading is None else reading.memory_total_mb for reading in seen]
    return sum(min(requirements.memory_mb / total, 1.0) if total else 1.0 for total in totals), all(totals)


class FairShare:
    """The use of all accounts. Belongs to one thread."""

    def __init__(self, settings: PoolSettings, gpus: Mapping[str, GPUResourceState]) -> None:
        self._gpus = gpus
        self._age_seconds = settings.fair_share_age_seconds
        #: The rate of decay: use falls by the factor exp(-rate) per second.
        self._decay = math.log(2.0) / (settings.fair_share_half_life_seconds or 1.0)
        #: The moment whose use and ages decide the order: it stays the same between two assignments.
        self.now: float = -math.inf
        self._accounts: dict[str, _Account] = {}
        #: By lease that counts: how many GPUs. Read-only outside.
        self.weights: dict[str, float] = {}
        #: Shares on GPUs whose memory is not known yet: they count as whole GPUs until it is.
        self._unsure: dict[str, Lease] = {}
        #: Accounts whose use changed, for a ledger that stores it.
        self.changed: set[str] = set()

    # What counts

    def began(self, lease: Lease, now: float) -> None:
        """A lease counts from now on; nothing happens if it does already."""
        request, lease_id = lease.request, lease.lease_id
        if lease_id in self.weights or not request.account or request.within is not None:
            return
        weight, is_sure = weight_of(lease, self._gpus) if request.requirements.share else (len(lease.gpu_ids), True)
        if not is_sure:
            self._unsure[lease_id] = lease
        self.weights[lease_id] = weight
        self._add(request.account, weight, now)

    def ended(self, lease: Lease, now: float) -> None:
        weight = self.weights.pop(lease.lease_id, None)
        if weight is not None:
            if self._unsure:
                self._unsure.pop(lease.lease_id, None)
            self._add(lease.request.account, -weight, now)

    def observed(self, now: float) -> None:
        """The memory of GPUs may be known now."""
        for lease in list(self._unsure.values()):
            self.ended(lease, now)
            self.began(lease, now)

    def resumed(self, unserved_seconds: float) -> None:
        """Time in which no process served the ledger adds no use and causes no decay."""
        for name, account in self._accounts.items():
            account.at += unserved_seconds
            self.changed.add(name)

    def _add(self, name: str, weight: float, now: float) -> None:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(0.0, now)
        passed = now - account.at
        if passed > 0:
            account.used, account.at = self._decayed(account, passed), now
        account.rate += weight
        if account.rate < 1e-9:  # sums of shares are not exact
            account.rate = 0.0
        self.changed.add(name)

    def _decayed(self, account: _Account, passed: float) -> float:
        left = math.exp(-self._decay * passed)
        return account.used * left + account.rate * (1.0 - left) / self._decay

    # What was used

    def used(self, name: str, now: float) -> float:
        """In GPU seconds, decayed until now."""
        account = self._accounts.get(name)
        if account is None:
            return 0.0
        passed = now - account.at
        return self._decayed(account, passed) if passed > 0 else account.used

    def gpus_of(self, name: str) -> float:
        """How many GPUs it uses now; a share counts in proportion to its memory."""
        account = self._accounts.get(name)
        return 0.0 if account is None else account.rate

    def uses(self, names: Iterable[str] | None = None) -> Iterator[Use]:
        """As they are stored, sorted by name: their order of arrival differs between processes."""
        for name in sorted(self._accounts if names is None else names):
            yield Use(name, self._accounts[name].used, self._accounts[name].at)

    def replicate(self, uses: Iterable[Use]) -> None:
        """What another process stored; how many GPUs are in use follows from the leases."""
        for use in uses:
            account = self._accounts.setdefault(use.account, _Account(0.0, use.at))
            account.used, account.at = use.gpu_seconds, use.at
        self.changed.clear()

    def stored(self) -> None:
        """All changes are on disk."""
        self.changed.clear()

    # The order

    def order(self, waiter: Waiter) -> tuple[Any, ...]:
        """Priority; then age beyond the bound, by arrival; then the account's use, lowest first; then arrival."""
        request = waiter.request
        return self.order_of(
            request.requirements.priority, request.account, request.within, waiter.enqueued_at, waiter.ticket
        )

    def order_of(
        self, priority: int, account: str, within: str | None, enqueued_at: float, ticket: int
    ) -> tuple[Any, ...]:
        if within is not None:  # the lease around it already counts as use of its holder
            return (-priority, 0, 0.0, ticket)
        if self.now - enqueued_at > self._age_seconds:
            return (-priority, 0, 0.0, ticket)
        return (-priority, 1, self.used(account, self.now), ticket)
