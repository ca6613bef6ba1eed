"""Measures the core, as ratios within one run, because machines differ and are noisy.

    make bench

Every pair is measured in turns, and the best turn of each side counts, so that noise in one turn does not matter.
`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter

from bench.table import Row, print_table
from gpu_worker_pool.core import Granted, Pool, PoolSettings, Released, Request, Requested
from gpu_worker_pool.testing import gpus, snapshot
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager

TURNS = 7


def timed(run: Callable[[], object]) -> float:
    gc.collect()
    begun = perf_counter()
    run()
    return perf_counter() - begun


async def timed_async(run: Callable[[], Awaitable[object]]) -> float:
    gc.collect()
    begun = perf_counter()
    await run()
    return perf_counter() - begun


async def uncontended(*, with_statement: bool) -> Row:
    """One worker after another, through the public manager, against a semaphore of the same size."""
    cycles = 20_000
    semaphore = asyncio.Semaphore(8)

    async def theirs() -> None:
        if with_statement:
            for _ in range(cycles):
                async with semaphore:
                    pass
        else:
            for _ in range(cycles):
                await semaphore.acquire()
                semaphore.release()

    async with WorkerPoolManager() as manager:

        async def ours() -> None:
            for _ in range(cycles):
                await manager.release_gpu(await manager.request_gpu())

        best_ours = best_theirs = float("inf")
        for _ in range(TURNS):
            manager.observe(gpus(8))
            best_theirs = min(best_theirs, await timed_async(theirs))
            best_ours = min(best_ours, await timed_async(ours))
    how = "async with" if with_statement else "acquire + release"
    what = f"request + release, uncontended, against {how} Semaphore"
    return Row(what, best_ours / cycles * 1e6, best_theirs / cycles * 1e6, 0.04, is_speed=True)


async def contended() -> Row:
    """Many workers at once, each of which yields once while it holds its GPU."""
    workers = 20_000
    semaphore = asyncio.Semaphore(8)

    async def their_worker() -> None:
        async with semaphore:
            await asyncio.sleep(0)

    async def theirs() -> None:
        await asyncio.gather(*(their_worker() for _ in range(workers)))

    async with WorkerPoolManager() as manager:

        async def our_worker() -> None:
            assignment = await manager.request_gpu()
            await asyncio.sleep(0)
            await manager.release_gpu(assignment)

        async def ours() -> None:
            await asyncio.gather(*(our_worker() for _ in range(workers)))

        best_ours = best_theirs = float("inf")
        for _ in range(TURNS):
            manager.observe(gpus(8))
            best_theirs = min(best_theirs, await timed_async(theirs))
            best_ours = min(best_ours, await timed_async(ours))
    what = "20,000 workers through 8 GPUs, against async with Semaphore"
    return Row(what, best_ours / workers * 1e6, best_theirs / workers * 1e6, 0.35, is_speed=True)


class Crowd:
    """A pool with a given number of GPUs and waiters, and one more grant at a time."""

    def __init__(self, number_of_gpus: int, number_of_waiters: int, number_of_hosts: int = 1) -> None:
        self.pool = Pool(PoolSettings(remember_at_most=1000))
        for host in range(number_of_hosts):
            endpoint_id = f"host-{host}" if number_of_hosts > 1 else ""
            readings = gpus(number_of_gpus // number_of_hosts, endpoint_id=endpoint_id)
            self.pool.apply(snapshot(readings, at=0.0, endpoint_id=endpoint_id), 0.0)
        self.serial = 0
        self.held: list[str] = []
        for _ in range(number_of_gpus if number_of_waiters else 1):
            self.ask()
        for _ in range(number_of_waiters):
            self.ask()

    def ask(self) -> None:
        self.serial += 1
        effects = self.pool.apply(Requested(Request(str(self.serial)), deadline=1000.0), 0.0)
        self.held += [effect.lease.lease_id for effect in effects if isinstance(effect, Granted)]

    def grants(self, number: int) -> None:
        for _ in range(number):
            effects = self.pool.apply(Released(self.held.pop()), 0.0)
            self.held += [effect.lease.lease_id for effect in effects if isinstance(effect, Granted)]
            self.ask()


def compared(what: str, large: Crowd, small: Crowd) -> Row:
    number = 5_000
    best_large = best_small = float("inf")
    for _ in range(TURNS):
        best_small = min(best_small, timed(lambda: small.grants(number)))
        best_large = min(best_large, timed(lambda: large.grants(number)))
    return Row(what, best_large / number * 1e6, best_small / number * 1e6, 2.0, is_speed=False)


def main() -> int:
    rows = [asyncio.run(uncontended(with_statement=is_with)) for is_with in (True, False)]
    rows.append(asyncio.run(contended()))
    rows.append(compared("a grant among 10,000 GPUs against 8", Crowd(10_000, 0), Crowd(8, 0)))
    rows.append(compared("  the same, 1,250 hosts of 8 against 8 hosts of 8", Crowd(10_000, 0, 1_250), Crowd(64, 0, 8)))
    rows.append(compared("a grant with 100,000 waiters against 10", Crowd(8, 100_000), Crowd(8, 10)))
    is_reached = print_table(rows, "µs")
    return int("--strict" in sys.argv and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
