"""A pool that shows what was granted elsewhere, so that it can be explained. It never grants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.errors import IllegalEventError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    from gpu_worker_pool.core.assignments import HeldGPU
    from gpu_worker_pool.core.events import Event, Request
    from gpu_worker_pool.core.readings import Reading


class MirrorPool(Pool):
    """Its methods record what others decided; events, which would make it decide, are refused."""

    def apply(self, event: Event, now: float) -> NoReturn:  # noqa: ARG002  # refused at any time
        raise IllegalEventError(f"this pool only shows what others decided, and takes no {type(event).__name__}")

    def advance(self, now: float) -> None:
        self.now: float = max(self.now, now)

    def observe(self, endpoint_id: str, readings: Iterable[Reading], begun_at: float) -> None:
        known = self.allocator.endpoint(endpoint_id).gpus
        # A GPU that this client holds is not leased to another one.
        own = [
            replace(reading, is_leased_elsewhere=False)
            if reading.is_leased_elsewhere and (gpu := known.get(reading.gpu_id)) is not None and gpu.leases
            else reading
            for reading in readings
        ]
        # Of the same sample a later reply knows more leases, though its age makes it look a moment older.
        self.allocator.observe(endpoint_id, own, max(begun_at, self.allocator.endpoint(endpoint_id).begun_at))

    def lost(self, endpoint_id: str, *, is_removed: bool = False) -> None:
        """The endpoint does not answer, or is no longer used."""
        self.allocator.forget_readings(endpoint_id)
        if is_removed:
            self.allocator.remove(endpoint_id)

    def granted(
        self,
        lease_id: str,
        request: Request,
        endpoint_id: str,
        held: tuple[HeldGPU, ...],
        *,
        requested_at: float,
        now: float,
    ) -> Lease:
        """`held` may name a GPU twice: two MIG devices of one GPU."""
        names = tuple(dict.fromkeys(gpu.gpu_id for gpu in held))
        gpus = [self.allocator.gpu(name, endpoint_id) for name in names]
        self.fence += 1  # in the order of the grants, which the fences of several servers do not tell
        lease = Lease(
            lease_id,
            request,
            endpoint_id,
            names,
            held,
            self.fence,
            LeaseState.HELD,
            requested_at=requested_at,
            granted_at=now,
            expires_at=None,
        )
        self.leases.assign(lease)
        self.allocator.granted(gpus, self.fence)
        # A reading may have shown the lease before the answer said that it is this client's.
        if any(gpu.reading is not None and gpu.reading.is_leased_elsewhere for gpu in gpus):
            endpoint = self.allocator.endpoint(endpoint_id)
            known = [gpu.reading for gpu in endpoint.gpus.values() if gpu.reading is not None]
            self.observe(endpoint_id, known, endpoint.begun_at)
        return lease

    def ended(self, lease: Lease, now: float) -> bool:
        """Whether its GPUs look free again; if not, a fresh reading is worth requesting."""
        self.leases.release(lease)
        self.allocator.ended({gpu.gpu_id: gpu for gpu in lease.held}.values(), now, None)
        self.allocator.freed.clear()  # nothing is granted here
        return all(gpu in gpu.endpoint.free for gpu in map(self.allocator.gpus.__getitem__, lease.gpu_ids))
