"""Rule 4, the order: chooses which waiter is served next. Part of `Pool`, which grants (`Pool.grant_waiter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.fleet_order import follows_fleet
from gpu_worker_pool.core.inside import enclosure_of, holds_back_later
from gpu_worker_pool.core.limits import only_on
from gpu_worker_pool.core.reservation import can_judge, gpus_to_await, gpus_to_reserve, lending_window

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gpu_worker_pool.core.fair_share import FairShare
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import RequestClass, Waiter


#: How many waiters of a class are looked at for backfill at once.
MOST_BACKFILLED: Final = 100


def assign(pool: Pool, now: float) -> None:
    """Grant whatever can be granted to waiters, in order."""
    _assign(pool, now)
    # A grant may have brought its account to its limit; no GPU is reserved for requests that the limit keeps waiting.
    while pool.has_limits and (waiter := pool.reserved_for) is not None and _is_kept_back(pool, waiter):
        _end_reservation(pool, waiter)
        _assign(pool, now)


def _assign(pool: Pool, now: float) -> None:
    pool.has_new_class = False
    if pool.fair_share is not None:
        _renew_order(pool, pool.fair_share, now)
    #: Whether only those inside a lease are served: the others, when a fleet's dispatcher says so.
    in_fleet = follows_fleet(pool, now)
    request_class = pool.queue.only_class()
    if request_class is not None:
        if not in_fleet or request_class.within is not None:
            _serve(pool, request_class, now)
        pool.improved.clear()
        return
    #: GPUs that later waiters cannot have.
    withheld: set[str] = set()
    overtaken: list[Waiter] = []
    #: Leases inside which an earlier waiter has waited long enough: later ones inside them wait for it.
    held_back: set[str] = set()
    for request_class, waiter in pool.queue.heads(pool.reserved_for):
        if request_class.within is not None:
            _serve_inside(pool, request_class, waiter, held_back, now)
            continue
        if in_fleet:
            continue
        if pool.has_limits and _is_kept_back(pool, waiter):
            _serve_by_limit(pool, request_class, withheld, now)
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
        if request_class.declared and pool.reserved_for is not None:
            _backfill(pool, request_class, withheld, now)
    pool.improved.clear()


def _is_kept_back(pool: Pool, waiter: Waiter) -> bool:
    """Whether a limit keeps it from some GPUs at least."""
    return only_on(pool, waiter.request) is not None


def _serve_by_limit(pool: Pool, request_class: RequestClass, withheld: Collection[str], now: float) -> bool:
    """Serve the head of a class that a limit keeps waiting, if it may still share a GPU; nothing waits for it."""
    # It is looked at again with every GPU once its account holds less.
    request_class.tried = False
    waiter, allocator = pool.queue.head(request_class), pool.allocator
    if waiter is pool.reserved_for:
        _end_reservation(pool, waiter)
    gpus = [allocator.gpus[gpu_id] for gpu_id in only_on(pool, waiter.request) or ()]
    chosen = allocator.best(request_class.requirements, gpus, withheld, now)
    if chosen is None:
        return False
    pool.grant_waiter(waiter, chosen, now)
    return True


def _end_reservation(pool: Pool, waiter: Waiter) -> None:
    pool.improve(waiter.reserved)
    pool.reserve(waiter, ())


def _renew_order(pool: Pool, fair_share: FairShare, now: float) -> None:
    """Passing time alone can put others ahead of the waiter for whom GPUs are reserved or awaited."""
    fair_share.now = now
    if pool.reserved_for is not None:
        pool.improve(pool.reserved_for.reserved)
    pool.improved.update(pool.allocator.freed)


def _backfill(pool: Pool, request_class: RequestClass, withheld: set[str], now: float) -> None:
    """Lend reserved GPUs to those that declare that they will be done before their turn comes."""
    reserved_for = pool.reserved_for
    assert reserved_for is not None
    window = lending_window(pool, reserved_for, now)
    if window is None:
        return
    seconds, lendable = window
    for waiter in request_class.first_declared(MOST_BACKFILLED):
        declared = waiter.request.declared_seconds
        assert declared is not None  # as it is among those
        if declared > seconds or pool.queue.order(waiter) < pool.queue.order(reserved_for):
            continue
        if pool.has_limits and _is_kept_back(pool, waiter):
            return
        gpus = _choose_any(pool, request_class, withheld - lendable, now)
        if gpus is None:
            return
        pool.grant_waiter(waiter, gpus, now)
        lendable -= {gpu.gpu_id for gpu in gpus}


def _choose_any(
    pool: Pool, request_class: RequestClass, withheld: Collection[str], now: float
) -> tuple[GPUResourceState, ...] | None:
    allocator, requirements = pool.allocator, request_class.requirements
    if request_class.is_any_gpu:
        return allocator.best_free(requirements.count, withheld, now)
    return allocator.best(requirements, allocator.gpus.values(), withheld, now)


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
        waiter = pool.queue.head(request_class)
        _serve_inside(pool, request_class, waiter, set(), now)
        if request_class.waiters and pool.queue.head(request_class) is waiter:
            break
    while request_class.waiters and request_class.within is None:
        if pool.has_limits and _is_kept_back(pool, pool.queue.head(request_class)):
            if _serve_by_limit(pool, request_class, (), now):
                continue
            break
        if request_class.is_any_gpu:
            gpus = pool.allocator.best_free(request_class.requirements.count, (), now)
        else:
            gpus = _choose(pool, request_class, (), now)
        if gpus is None:
            request_class.tried = True
            break
        pool.grant_waiter(pool.queue.head(request_class) if request_class.lines else request_class.head, gpus, now)


def _choose(
    pool: Pool, request_class: RequestClass, withheld: Collection[str], now: float
) -> tuple[GPUResourceState, ...] | None:
    allocator, requirements = pool.allocator, request_class.requirements
    if request_class.is_any_gpu:
        return allocator.best_free(requirements.count, withheld, now)
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
        if reserved_for is not None and pool.queue.order(reserved_for) < pool.queue.order(waiter):
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
