"""What readings change: who can be served now, who never can, which quarantines end, and what is to be read again.

Part of `Pool`, which calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core import ending, leaving
from gpu_worker_pool.core.effects import ReadingWanted
from gpu_worker_pool.core.moves import RequestState

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import GPUsVanished, Observed, Unreachable
    from gpu_worker_pool.core.pool import Pool


def observed(pool: Pool, event: Observed, now: float) -> None:
    endpoint = pool.allocator.endpoint(event.endpoint_id)
    was_known = endpoint.present > 0
    if not pool.allocator.observe(event.endpoint_id, event.readings, min(event.begun_at, now)):
        return
    if pool.fair_share is not None:
        pool.fair_share.observed(now)
    for lease_id in list(pool.quarantined):
        lease = pool.leases.lookup(lease_id)
        if lease is not None and lease.endpoint_id == event.endpoint_id:
            ending.review(pool, lease, now)
    if pool.queue:
        leaving.ask_holders(pool, now)
        pool.improved.update(endpoint.gpus)
        if not was_known:
            _reject_impossible(pool, now)
    else:
        for gpu in list(pool.allocator.freed.values()):
            if gpu.endpoint is endpoint and gpu.freed_at < endpoint.begun_at:
                del pool.allocator.freed[gpu.gpu_id]


def unreachable(pool: Pool, event: Unreachable, now: float) -> None:
    pool.allocator.forget_readings(event.endpoint_id)
    if event.is_removed:
        pool.allocator.remove(event.endpoint_id)
        _reject_impossible(pool, now)


def vanished(pool: Pool, event: GPUsVanished, now: float) -> None:
    ending.gpus_vanished(pool, event, now)
    _reject_impossible(pool, now)


def want_readings(pool: Pool, now: float) -> None:
    delays = pool.settings.reading_delays_seconds
    wanted: dict[str, None] = {}
    for gpu in list(pool.allocator.freed.values()):
        endpoint_id = gpu.endpoint.endpoint_id
        while gpu.freed_at + delays[gpu.readings_wanted] <= now:
            wanted[endpoint_id] = None
            gpu.readings_wanted += 1
            if gpu.readings_wanted == len(delays):
                # It was not read in time: no longer withhold it.
                del pool.allocator.freed[gpu.gpu_id]
                pool.improved[gpu.gpu_id] = gpu
                break
        else:
            at = gpu.freed_at + delays[gpu.readings_wanted]
            known_at = pool.timers.get("reading", endpoint_id)
            if known_at is None or at < known_at:
                pool.timers.set("reading", endpoint_id, at)
    pool.effects.extend(map(ReadingWanted, wanted))


def _reject_impossible(pool: Pool, now: float) -> None:
    for request_class in pool.queue.request_classes():
        reasons = pool.impossible(request_class.requirements, request_class.within)
        if reasons:
            for waiter in list(request_class.waiters.values()):
                if not waiter.is_replicated:  # the process that accepted it may see other GPUs
                    pool.end_request(waiter, RequestState.REJECTED, now, reasons)
