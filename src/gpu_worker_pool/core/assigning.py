"""Rule 4, the order: chooses which waiter is served next. Part of `Pool`, which grants (`Pool.grant_waiter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    for request_class, waiter in pool.queue.heads():
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


def _serve(pool: Pool, request_class: RequestClass, now: float) -> None:
    """The same for a single request class, the usual case, in which no waiter can be overtaken."""
    while request_class.waiters:
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
