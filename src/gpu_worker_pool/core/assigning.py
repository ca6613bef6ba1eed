"""Rule 4, the order: chooses which waiter is served next. Part of `Pool`, which grants (`Pool.grant_waiter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.inside import enclosure_of, holds_back_later
from gpu_worker_pool.core.reservation import can_judge, gpus_to_await, gpus_to_reserve

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import RequestClass, Waiter


def assign(pool: Pool, now: float) -> None:
    """Grant whatever can be granted to waiters, in order."""
    pool.has_new_class = False
    request_class = pool.queue.only_class()
    if request_class is not None:
        _serve(pool, request_class, now)
        return
    #: GPUs that later waiters cannot have.
    withheld: set[str] = set()
    overtaken: list[Waiter] = []
    #: Leases inside which an earlier waiter has waited long enough: later ones inside them wait for it.
    held_back: set[str] = set()
    for request_class, waiter in pool.queue.heads():
        if request_class.within is not None:
            _serve_inside(pool, request_class, waiter, held_back, now)
            continue
        gpus = _choose(pool, request_class, withheld, now) if pool.improved or not request_class.tried else None
        if gpus is not None:
            pool.grant_waiter(waiter, gpus, now)
            # Perhaps GPUs can be reserved for an earlier waiter now, including the one just granted, once it is free.
            _reserve_for_first(pool, overtaken, withheld, now)
            continue
        request_class.tried = True
        if pool.allocator.freed:
            withheld.update(gpus_to_await(pool.allocator, request_class.requirements, now))
        if waiter.may_reserve and now - waiter.enqueued_at >= pool.settings.max_bypass_seconds:
            overtaken.append(waiter)
            _reserve_for_first(pool, overtaken[-1:], withheld, now)
    pool.improved.clear()


def _serve_inside(pool: Pool, request_class: RequestClass, waiter: Waiter, held_back: set[str], now: float) -> None:
    """Serve the head of a class inside a lease, if that lease has what it needs."""
    within = request_class.within
    assert within is not None
    around = enclosure_of(pool.leases, within)
    if around is None:
        pool.reject_inside(within, now)
    elif within not in held_back:
        gpus = pool.leases.gpus_of(around.lease)
        chosen = pool.allocator.best(request_class.requirements, gpus, (), now, around)
        if chosen is not None:
            pool.grant_waiter(waiter, chosen, now)
        elif holds_back_later(gpus, waiter, around, pool.settings, now):
            held_back.add(within)


def _serve(pool: Pool, request_class: RequestClass, now: float) -> None:
    """The same for a single request class, the usual case, in which no waiter can be overtaken."""
    while request_class.waiters and request_class.within is not None:
        waiter = request_class.head
        _serve_inside(pool, request_class, waiter, set(), now)
        if request_class.waiters and request_class.head is waiter:
            break
    while request_class.waiters and request_class.within is None:
        gpus = pool.allocator.best_free((), now) if request_class.is_any_gpu else _choose(pool, request_class, (), now)
        if gpus is None:
            request_class.tried = True
            break
        pool.grant_waiter(request_class.head, gpus, now)
    pool.improved.clear()


def _choose(
    pool: Pool, request_class: RequestClass, withheld: Collection[str], now: float
) -> tuple[GPUResourceState, ...] | None:
    allocator, requirements = pool.allocator, request_class.requirements
    if request_class.is_any_gpu:
        return allocator.best_free(withheld, now)
    candidates: Iterable[GPUResourceState] = allocator.gpus.values()
    if request_class.tried:
        changed = [gpu for gpu in pool.improved.values() if allocator.is_eligible(gpu, requirements, now)]
        if not changed:
            return None
        if requirements.count == 1:
            candidates = changed
    return allocator.best(requirements, candidates, withheld, now)


def _reserve_for_first(pool: Pool, overtaken: list[Waiter], withheld: set[str], now: float) -> None:
    """Reserve GPUs for the first waiter that was overtaken for long enough; later waiters cannot have them."""
    for waiter in overtaken:
        reserved_for = pool.reserved_for
        if reserved_for is not None and reserved_for.order < waiter.order:
            return  # GPUs are reserved for an earlier one
        if not can_judge(pool.allocator, waiter):
            if waiter is reserved_for:
                withheld.update(reserved_for.reserved)
                return
            continue
        reserved = gpus_to_reserve(
            pool.allocator, waiter, pool.improved.values() if waiter is reserved_for else None, now
        )
        if reserved and waiter is reserved_for and reserved == reserved_for.reserved:
            withheld.update(reserved)
            return
        if reserved_for is not None and (reserved or waiter is reserved_for):
            pool.improve(reserved_for.reserved)
            pool.reserve(reserved_for, ())
        if reserved:
            pool.reserve(waiter, reserved)
            withheld.update(reserved)
            return
