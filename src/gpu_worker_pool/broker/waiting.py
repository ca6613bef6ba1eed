"""Describes waiting requests in words: their place in the queue, and why each GPU does not serve them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core import Waiter, explain
from gpu_worker_pool.core.fleet_order import position_in_fleet
from gpu_worker_pool.core.origins import process_names
from gpu_worker_pool.core.record import frozen

if TYPE_CHECKING:
    from gpu_worker_pool.core import Explanation, Pool, Request

#: Explanations take the ledger's time, and any client may read the queue.
EXPLAINED_CLASSES: Final = 20


@frozen
class Waiting:
    """A request that waits."""

    request: Request
    #: 1 is next; inside a lease, among those inside it.
    position: int
    waiting_seconds: float
    #: One sentence on the whole, then one for each GPU.
    reasons: tuple[str, ...]


def describe(pool: Pool, request_id: str, now: float) -> Waiting | None:
    """None if it does not wait."""
    explanation, waiter = explain(pool, request_id, now), pool.requests.get(request_id)
    if explanation is None or not isinstance(waiter, Waiter):
        return None
    reasons = (explanation.summary, *_gpu_reasons(pool, explanation))
    return Waiting(waiter.request, explanation.position, explanation.waiting_seconds, reasons)


def describe_queue(pool: Pool, now: float) -> list[Waiting]:
    """All waiting requests, in order. Only the first classes of equal requests are explained."""
    explained: dict[tuple[int, tuple[object, ...]], tuple[Explanation, tuple[str, ...]] | None] = {}
    holders = {name for lease in pool.leases for name in process_names(lease.request)}
    rows = []
    positions: Counter[str | None] = Counter()
    for waiter in pool.queue.in_order():
        positions[waiter.request.within] += 1  # each lease has its own queue for the requests inside it
        position = position_in_fleet(pool, waiter.request.request_id, now) or positions[waiter.request.within]
        # Only waiters whose own process holds a GPU are told so.
        names = process_names(waiter.request)
        request_class = (id(waiter.request_class), () if holders.isdisjoint(names) else names)
        if request_class not in explained:
            explanation = explain(pool, waiter.request.request_id, now) if len(explained) < EXPLAINED_CLASSES else None
            explained[request_class] = None if explanation is None else (explanation, _gpu_reasons(pool, explanation))
        reasons: tuple[str, ...] = ()
        if (known := explained[request_class]) is not None:
            explanation, gpu_reasons = known
            reasons = (explanation.summary_at(position), *gpu_reasons)
        rows.append(Waiting(waiter.request, position, now - waiter.enqueued_at, reasons))
    return rows


def _gpu_reasons(pool: Pool, explanation: Explanation) -> tuple[str, ...]:
    return tuple(
        f"{_name(pool, gpu.gpu_id)}: {'; '.join(map(str, gpu.obstacles)) or 'could serve it'}"
        for gpu in explanation.gpus
    )


def _name(pool: Pool, gpu_id: str) -> str:
    """The index of the GPU; MIG devices of one GPU share it, so the beginning of their UUID follows."""
    gpu = pool.allocator.gpus[gpu_id]
    if gpu.last_seen is None or not gpu.last_seen.is_mig_device:
        return f"GPU {gpu.index}"
    # With older drivers the UUID begins with the GPU's, and the device's part comes last.
    return f"GPU {gpu.index} {gpu_id if '/' in gpu_id else gpu_id[:12]}"
