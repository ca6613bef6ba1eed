"""Rule 12: explains why a request waits: its place in the queue, and for every GPU why it cannot have it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gpu_worker_pool.core.obstacles import Obstacle, ObstacleKind, obstacles
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.reservation import gpus_to_await

if TYPE_CHECKING:
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.requirements import Requirements


@record
class GPUExplanation:
    gpu_id: str
    endpoint_id: str
    #: None while the GPU has never been read.
    name: str | None
    #: Why the request cannot have it; empty if it can.
    obstacles: tuple[Obstacle, ...]

    def __str__(self) -> str:
        return f"GPU {self.gpu_id}: {'; '.join(map(str, self.obstacles)) or 'could serve it'}"


@record
class Explanation:
    requirements: Requirements
    #: 1 is next; for requirements without a request, the place it would have.
    position: int
    waiting_seconds: float
    gpus: tuple[GPUExplanation, ...]
    #: Why no GPU can ever serve it; such a request is rejected at once.
    impossible: tuple[str, ...]
    #: What it waits for, or what would happen to it.
    verdict: str
    #: Whether its place in the queue matters.
    is_queued: bool

    @property
    def summary(self) -> str:
        """One sentence."""
        return self.summary_at(self.position)

    def summary_at(self, position: int) -> str:
        """The summary for an equal request at another place."""
        place = ""
        if self.is_queued:
            place = "next in line; " if position == 1 else f"number {position} in line; "
        return f"{self.requirements}: {place}{self.verdict}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {gpu}" for gpu in self.gpus)])


def explain(pool: Pool, request_id: str, now: float) -> Explanation | None:
    """Why this request waits; None if it does not."""
    waiter = pool.requests.get(request_id)
    if not isinstance(waiter, Waiter):
        return None
    return _explain(pool, waiter.request.requirements, waiter, max(now, pool.now))


def explain_requirements(pool: Pool, requirements: Requirements, now: float) -> Explanation:
    """Why a request with these requirements would wait now."""
    return _explain(pool, requirements, None, max(now, pool.now))


def _explain(pool: Pool, requirements: Requirements, waiter: Waiter | None, now: float) -> Explanation:
    order = (-requirements.priority, pool.ticket + 1) if waiter is None else waiter.order
    position = pool.queue.position(order)
    waiting_seconds = 0.0 if waiter is None else now - waiter.enqueued_at
    withheld = _withheld(pool, order, now)

    gpus = []
    for gpu in pool.allocator.gpus.values():
        if (gpu.is_gone or gpu.last_seen is None) and not gpu.leases:
            continue  # not seen since this process began, and without a lease
        found = list(obstacles(gpu, requirements, pool.settings, now))
        if gpu.gpu_id in withheld:
            found.append(Obstacle(ObstacleKind.RESERVED, f"reserved for {withheld[gpu.gpu_id]}"))
        name = gpu.last_seen.name if gpu.last_seen is not None else None
        gpus.append(GPUExplanation(gpu.gpu_id, gpu.endpoint.endpoint_id, name, tuple(found)))
    impossible = pool.allocator.impossible(requirements)
    verdict, is_queued = _verdict(pool, requirements, gpus, impossible)
    return Explanation(requirements, position, waiting_seconds, tuple(gpus), impossible, verdict, is_queued)


def _withheld(pool: Pool, order: tuple[int, int], now: float) -> dict[str, str]:
    """The GPUs that are withheld from this place in the order, and for which earlier waiter."""
    withheld = {}
    for request_class, earlier in pool.queue.heads():
        if earlier.order >= order:
            break
        for gpu_id in gpus_to_await(pool.allocator, request_class.requirements, now):
            withheld[gpu_id] = f"{earlier.worker}, which is ahead of you, until it is read again"
        if earlier is pool.reserved_for:
            for gpu_id in earlier.reserved:
                withheld[gpu_id] = f"{earlier.worker}, which has waited longer"
    return withheld


def _verdict(
    pool: Pool, requirements: Requirements, gpus: list[GPUExplanation], impossible: tuple[str, ...]
) -> tuple[str, bool]:
    if impossible:
        return f"can never be granted. {'; '.join(impossible)}", False
    if not gpus:
        silent = [endpoint.endpoint_id for endpoint in pool.allocator.endpoints.values() if endpoint.endpoint_id]
        return "no GPU is known yet" + (f", {', '.join(silent)} did not answer" if silent else ""), False
    free: Counter[str] = Counter(gpu.endpoint_id for gpu in gpus if not gpu.obstacles)
    most = max(free.values(), default=0)
    if most >= requirements.count:
        return "could be granted now", False
    why = Counter(gpu.obstacles[0].kind for gpu in gpus if gpu.obstacles)
    reasons = ", ".join(f"{number} {kind.name.lower().replace('_', ' ')}" for kind, number in why.most_common())
    together = " on one endpoint" if len(pool.allocator.endpoints) > 1 else ""
    lacking = f"{most} of {requirements.count} free{together}; " if requirements.count > 1 else ""
    return f"{lacking}of {len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'}: {reasons}", True
