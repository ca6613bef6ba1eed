"""What a client knows of the servers that grant leases: their readings, the leases it holds there, its own waiters.

It grants nothing: the servers do. It says which server to ask first, and explains why a request waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core import HeldGPU
from gpu_worker_pool.core.balancing import balancer_for
from gpu_worker_pool.core.mirror import MirrorPool
from gpu_worker_pool.models import gpu_id_in_pool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core import Lease, Pool, PoolSettings, Requirements, Waiter
    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState
    from gpu_worker_pool.leases.lease import HeldLease


class EndpointView:
    """Belongs to the client's event loop. Endpoints have their ids in the pool: a single one has the empty id."""

    def __init__(self, settings: PoolSettings) -> None:
        self._balancer = balancer_for(settings.strategy)
        self.pool = MirrorPool(settings)
        self.observe = self.pool.observe
        self.lost = self.pool.lost
        self.wait = self.pool.wait
        self.wait_no_more = self.pool.wait_no_more
        self.ended = self.pool.ended

    def granted(self, held: HeldLease, endpoint_id: str, waiter: Waiter, now: float) -> Lease:
        gpus = [HeldGPU(gpu_id_in_pool(endpoint_id, gpu.index), gpu.index, gpu.uuid, gpu.name) for gpu in held.gpus]
        # Not the server's id: several servers use the same ones, and several waiters may have parts of one lease.
        return self.pool.granted(held.request.request_id, waiter, endpoint_id, tuple(gpus), now)

    def at(self, now: float) -> Pool:
        """The pool as it is now, to be explained."""
        self.pool.advance(now)
        return self.pool

    def able(self, requirements: Requirements, now: float) -> list[EndpointState]:
        """The endpoints whose readings meet the requirements; only the server knows whether it can grant them."""
        return able_endpoints(self.pool.allocator, requirements, now)

    def in_order(self, endpoints: Iterable[EndpointState]) -> list[EndpointState]:
        """As the balancing strategy ranks them; they may be of different pools."""
        ranked = [(self._balancer.rank(endpoint)[:-1], number, endpoint) for number, endpoint in enumerate(endpoints)]
        return [endpoint for _, _, endpoint in sorted(ranked, key=lambda entry: entry[:2])]


def able_endpoints(allocator: GPUAllocator, requirements: Requirements, now: float) -> list[EndpointState]:
    if allocator.is_any_gpu(requirements):
        return [each for each in allocator.endpoints.values() if len(each.free) and allocator.is_fresh(each, now)]
    return [
        endpoint
        for endpoint in allocator.endpoints.values()
        if sum(allocator.is_eligible(gpu, requirements, now) for gpu in endpoint.gpus.values()) >= requirements.count
    ]
