"""A host of a fleet: while its dispatcher says whose turn it is, waiting requests are granted only when it says so.

The ledger of the host knows until when that holds, so that no process that uses it grants out of the fleet's order;
after that time the host serves its requests itself. Part of `Pool`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.events import FleetOrdered, TurnCame
    from gpu_worker_pool.core.pool import Pool


@record
class FleetOrder:
    """What a host knows of the fleet's order. Requests inside a lease have an order of their own."""

    #: Unless the dispatcher is heard again.
    until: float
    #: The places of this host's requests in the whole queue, by request id, as far as they were said.
    positions: Mapping[str, int] = field(default_factory=dict)
    #: GPUs of this host that the dispatcher reserves, the request for which it does, and that one's name.
    reserved: tuple[str, ...] = ()
    reserved_for: str = ""
    reserved_name: str = ""
    #: Why nothing is granted here at all; empty: no such reason.
    note: str = ""
    #: The server of this host, which reports who waits.
    process: str = ""


def follows_fleet(pool: Pool, now: float) -> bool:
    """Whether the dispatcher of a fleet says whose turn it is."""
    return pool.fleet_order is not None and now < pool.fleet_order.until


def position_in_fleet(pool: Pool, request_id: str, now: float) -> int | None:
    """The place of this request in the whole queue; None where there is none, or it is not known."""
    if pool.fleet_order is None or not follows_fleet(pool, now):
        return None
    return pool.fleet_order.positions.get(request_id)


def ordered(pool: Pool, event: FleetOrdered, now: float) -> None:
    take_order(pool, event.order)
    if follows_fleet(pool, now) and pool.reserved_for is not None:
        pool.reserve(pool.reserved_for, ())  # the dispatcher reserves, if need be


def take_order(pool: Pool, order: FleetOrder) -> None:
    pool.fleet_order = order
    pool.timers.set("fleet", "", order.until)


def is_over(pool: Pool) -> None:
    """The dispatcher was not heard again: this host serves its requests itself."""
    for request_class in pool.queue.request_classes():
        request_class.tried = False
    pool.improved.update(pool.allocator.gpus)


def turn_came(pool: Pool, event: TurnCame, now: float) -> None:
    """Where it cannot be, nothing changes."""
    waiter = pool.requests.get(event.request_id)
    if not isinstance(waiter, Waiter) or waiter.request.within is not None:
        return
    allocator = pool.allocator
    candidates = [allocator.gpus[gpu_id] for gpu_id in event.gpu_ids if gpu_id in allocator.gpus]
    gpus = allocator.best(waiter.request.requirements, candidates, (), now)
    if gpus is not None:
        pool.grant_waiter(waiter, gpus, now, event.max_seconds)
