"""Rule 4, the order: who of all who wait is served next. Decides that; `Pool.grant_waiter` grants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.keeping import can_judge, gpus_to_await, gpus_to_keep

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Line, Waiter


def assign(pool: Pool, now: float) -> None:
    """Grant whatever can be granted to those who wait, in order."""
    pool.has_new_line = False
    line = pool.queue.only_line()
    if line is not None:
        _serve(pool, line, now)
        return
    #: What whoever comes later cannot have.
    withheld: set[str] = set()
    overtaken: list[Waiter] = []
    for line, waiter in pool.queue.heads():
        gpus = _choose(pool, line, withheld, now) if pool.improved or not line.tried else None
        if gpus is not None:
            pool.grant_waiter(waiter, gpus, now)
            # Whoever could not be kept anything before may lack only what was granted just now.
            _keep_for_first(pool, overtaken, withheld, now)
            continue
        line.tried = True
        if pool.allocator.freed:
            withheld.update(gpus_to_await(pool.allocator, line.wishes, now))
        if waiter.may_keep and now - waiter.enqueued_at >= pool.settings.max_bypass_seconds:
            overtaken.append(waiter)
            _keep_for_first(pool, overtaken[-1:], withheld, now)
    pool.improved.clear()


def _serve(pool: Pool, line: Line, now: float) -> None:
    """The same where all wait for the same thing, as they mostly do: nobody can be passed over."""
    while line.waiters:
        gpus = pool.allocator.best_plain((), now) if line.is_plain else _choose(pool, line, (), now)
        if gpus is None:
            line.tried = True
            break
        pool.grant_waiter(line.head, gpus, now)
    pool.improved.clear()


def _choose(pool: Pool, line: Line, withheld: Collection[str], now: float) -> tuple[GPUResourceState, ...] | None:
    allocator, wishes = pool.allocator, line.wishes
    if line.is_plain:
        return allocator.best_plain(withheld, now)
    candidates: Iterable[GPUResourceState] = allocator.gpus.values()
    if line.tried:
        changed = [gpu for gpu in pool.improved.values() if allocator.is_eligible(gpu, wishes, now)]
        if not changed:
            return None
        if wishes.count == 1:
            candidates = changed
    return allocator.best(wishes, candidates, withheld, now)


def _keep_for_first(pool: Pool, overtaken: list[Waiter], withheld: set[str], now: float) -> None:
    """Keep GPUs for the first of those that were overtaken for long enough; who comes after it cannot have them."""
    for waiter in overtaken:
        keeper = pool.keeper
        if keeper is not None and keeper.order < waiter.order:
            return  # they are kept for an earlier one
        if not can_judge(pool.allocator, waiter):
            if waiter is keeper:
                withheld.update(keeper.kept)
                return
            continue
        kept = gpus_to_keep(pool.allocator, waiter, pool.improved.values() if waiter is keeper else None, now)
        if kept and waiter is keeper and kept == keeper.kept:
            withheld.update(kept)
            return
        if keeper is not None and (kept or waiter is keeper):
            pool.improve(keeper.kept)
            pool.keep(keeper, ())
        if kept:
            pool.keep(waiter, kept)
            withheld.update(kept)
            return
