"""What a client knows of the endpoints that give leases: their readings, what it holds there, and who of its own waits.

It grants nothing: that is what those servers do. It says where to ask first, and answers whoever wants to look, with
the same pool and the same words as for GPUs that are assigned in process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpu_worker_pool.core import HeldGPU, Lease, LeaseState, Pool, Request, Waiter
from gpu_worker_pool.core.balancing import balancer_for
from gpu_worker_pool.models import gpu_id_in_pool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core import PoolSettings, Requirements
    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.leases.values import HeldLease


class EndpointView:
    """Belongs to the client's event loop. Endpoints are known by their ids in the pool: one alone has the empty one."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._balancer = balancer_for(settings.strategy)
        #: To look at. Events never go in here: with those it would grant.
        self.pool = Pool(settings)

    # --- readings ---

    def observe(self, endpoint_id: str, readings: Iterable[Reading], begun_at: float) -> None:
        known = self.pool.allocator.endpoints.get(endpoint_id)
        mine = {} if known is None else known.gpus
        # Those held here are promised, but not to somebody else.
        own = [
            replace(reading, is_promised_elsewhere=False)
            if reading.is_promised_elsewhere and (gpu := mine.get(reading.gpu_id)) is not None and gpu.leases
            else reading
            for reading in readings
        ]
        self.pool.allocator.observe(endpoint_id, own, begun_at)

    def lost(self, endpoint_id: str, *, is_removed: bool = False) -> None:
        """It does not answer, or not yet, or is not asked any more."""
        self.pool.allocator.forget_readings(endpoint_id)
        if is_removed:
            self.pool.allocator.remove(endpoint_id)

    # --- who has what, and who waits ---

    def wait(self, request: Request, now: float) -> Waiter:
        self.pool.ticket += 1
        waiter = Waiter(request, self.pool.ticket, now)
        self.pool.queue.enqueue(waiter)
        return waiter

    def wait_no_more(self, waiter: Waiter) -> None:
        self.pool.queue.remove(waiter)

    def granted(self, held: HeldLease, endpoint_id: str, waiter: Waiter, now: float) -> Lease:
        pool = self.pool
        name_of = partial(gpu_id_in_pool, endpoint_id)
        names = dict.fromkeys(name_of(gpu.index) for gpu in held.gpus)  # two MIG devices may be of one GPU
        gpus = [pool.allocator.gpu(name, endpoint_id) for name in names]
        pool.fence += 1
        lease = Lease(
            # Servers number their leases alike, and several of us may have parts of one.
            lease_id=held.ask.request_id,
            request=waiter.request,
            endpoint_id=endpoint_id,
            gpu_ids=tuple(names),
            held=tuple(HeldGPU(name_of(gpu.index), gpu.index, gpu.uuid, gpu.name) for gpu in held.gpus),
            fence=pool.fence,  # in the order of the grants, as no two servers' fences are
            state=LeaseState.HELD,
            requested_at=waiter.enqueued_at,
            granted_at=now,
            expires_at=None,
        )
        pool.leases.assign(lease)
        pool.allocator.granted(gpus, pool.fence)
        # A reading may have shown the promise before we heard that it was made to us.
        if any(gpu.reading is not None and gpu.reading.is_promised_elsewhere for gpu in gpus):
            endpoint = pool.allocator.endpoint(endpoint_id)
            known = [gpu.reading for gpu in endpoint.gpus.values() if gpu.reading is not None]
            self.observe(endpoint_id, known, endpoint.begun_at)
        return lease

    def ended(self, lease: Lease, now: float) -> bool:
        """Whether its GPUs look free again; if not, a fresh reading would tell."""
        pool = self.pool
        pool.leases.release(lease)
        unique = {gpu.gpu_id: gpu for gpu in lease.held}
        pool.allocator.ended(unique.values(), now, None)
        pool.allocator.freed.clear()  # nothing is handed on here
        return all(pool.allocator.gpus[name] in pool.allocator.gpus[name].endpoint.free for name in lease.gpu_ids)

    # --- where to ask ---

    def at(self, now: float) -> Pool:
        """The pool as it is now, for those who want to explain it."""
        self.pool.now = now
        return self.pool

    def able(self, requirements: Requirements, now: float) -> list[EndpointState]:
        """The endpoints that show what is wished for; whether they really have it, they know."""
        return able_endpoints(self.pool.allocator, requirements, now)

    def in_order(self, endpoints: Iterable[EndpointState]) -> list[EndpointState]:
        """As the balancing strategy would have them; they may be of different pools."""
        ranked = [(self._balancer.rank(endpoint)[:-1], number, endpoint) for number, endpoint in enumerate(endpoints)]
        return [endpoint for _, _, endpoint in sorted(ranked, key=lambda entry: entry[:2])]


def able_endpoints(allocator: GPUAllocator, requirements: Requirements, now: float) -> list[EndpointState]:
    if allocator.is_plain(requirements):
        return [each for each in allocator.endpoints.values() if len(each.free) and allocator.is_fresh(each, now)]
    return [
        endpoint
        for endpoint in allocator.endpoints.values()
        if sum(allocator.is_eligible(gpu, requirements, now) for gpu in endpoint.gpus.values()) >= requirements.count
    ]
