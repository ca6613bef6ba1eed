"""The lease inside which a program runs: its GPUs go to the program's own workers, which need not wait for others.

A process around the program holds the lease, renews it and releases it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.readings import Reading
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import ImpossibleRequestError, LeaseEndedError
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.leases.lease import LeaseService


class InheritedLease:
    """Belongs to one event loop."""

    def __init__(self, service: LeaseService, lease_id: str, fence: int, gpus: Iterable[LeasedGPU]) -> None:
        self.lease_id = lease_id
        self._service = service
        self._fence = fence
        self._free = list(gpus)
        self.indices: frozenset[int] = frozenset(gpu.index for gpu in self._free)
        self._taken: dict[str, tuple[LeasedGPU, ...]] = {}
        self._changed = asyncio.Event()

    async def take(self, request: Request, wait_seconds: float) -> HeldLease | StillWaiting:
        requirements = request.requirements
        every = [*self._free, *(gpu for gpus in self._taken.values() for gpu in gpus)]
        if len(_suitable(every, requirements)) < requirements.count:
            reason = (
                f"this program runs inside {self.lease_id}, which does not have what it asks for ({requirements}): "
                "ask outside of it, or without GPU_POOL_LEASE_ID in the environment"
            )
            raise ImpossibleRequestError(reasons=(reason,))
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while len(found := _suitable(self._free, requirements)) < requirements.count:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                reason = f"other workers of this program have the GPUs of {self.lease_id}, inside which it runs"
                return StillWaiting(None, (reason,))
        gpus = tuple(found[: requirements.count])
        self._free = [gpu for gpu in self._free if gpu not in gpus]
        self._taken[request.request_id] = gpus
        return HeldLease(self._service, request, self.lease_id, self._fence, gpus, boot_time(), is_inherited=True)

    def give_back(self, request: Request) -> None:
        gpus = self._taken.pop(request.request_id, None)
        if gpus is not None:
            self._free.extend(gpus)
            self._changed.set()
            self._changed = asyncio.Event()

    def check(self, lease: Lease | None) -> None:
        """`lease`: what the ledger knows of it now."""
        if lease is None or not lease.is_live:
            raise self.ended()

    def ended(self) -> LeaseEndedError:
        return LeaseEndedError(f"{self.lease_id}, inside which this program runs, has ended")


def _suitable(gpus: Iterable[LeasedGPU], requirements: Requirements) -> list[LeasedGPU]:
    """Only what distinguishes GPUs matters; the rest was checked when the lease was granted."""
    return [gpu for gpu in gpus if _is_suitable(gpu, requirements)]


def _is_suitable(gpu: LeasedGPU, requirements: Requirements) -> bool:
    reading = Reading(str(gpu.index), gpu.index, gpu.name, gpu.uuid)
    return (
        (requirements.gpu_model is None or requirements.gpu_model.casefold() in gpu.name.casefold())
        and (requirements.only is None or any(names_gpu(name, reading) for name in requirements.only))
        and not any(names_gpu(name, reading) for name in requirements.exclude)
    )
