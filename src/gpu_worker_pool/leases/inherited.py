"""The lease inside which a program runs: its GPUs are handed to the program's own workers, and to nobody else.

Somebody else holds it, renews it and releases it. Whoever asks here for more than it has would wait for itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import LeaseEndedError
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.suitable import check_suitable, suitable
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU, StillWaiting

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.leases.values import LeaseAsk


class InheritedLease:
    """Belongs to one event loop."""

    def __init__(self, endpoint_id: str, lease: Lease) -> None:
        self._endpoint_id = endpoint_id
        self._lease = lease
        self._free = [LeasedGPU(held.index, held.uuid, held.name) for held in lease.held]
        self.indices = frozenset(held.index for held in lease.held)
        self._taken: dict[str, tuple[LeasedGPU, ...]] = {}
        self._changed = asyncio.Event()

    async def take(self, ask: LeaseAsk, wait_seconds: float) -> HeldLease | StillWaiting:
        every = [*self._free, *(gpu for gpus in self._taken.values() for gpu in gpus)]
        check_suitable(self._lease.lease_id, every, ask.requirements)
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while len(found := suitable(self._free, ask.requirements)) < ask.requirements.count:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                reason = f"other workers of this program have the GPUs of {self._lease.lease_id}, inside which it runs"
                return StillWaiting(None, (reason,))
        gpus = tuple(found[: ask.requirements.count])
        self._free = [gpu for gpu in self._free if gpu not in gpus]
        self._taken[ask.request_id] = gpus
        life = LeaseLife(ask.ttl_seconds, boot_time())
        return HeldLease(self._endpoint_id, self._lease.lease_id, self._lease.fence, gpus, ask, life)

    @property
    def lease_id(self) -> str:
        return self._lease.lease_id

    def has(self, lease: HeldLease) -> bool:
        return lease.ask.request_id in self._taken

    def give_back(self, lease: HeldLease) -> bool:
        """Whether it was of these."""
        gpus = self._taken.pop(lease.ask.request_id, None)
        if gpus is None:
            return False
        self._free.extend(gpus)
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    def check(self, lease: Lease | None) -> None:
        """What has become of it, as the ledger says."""
        if lease is None or not lease.is_live:
            raise LeaseEndedError(f"{self._lease.lease_id}, inside which this program runs, has ended")
