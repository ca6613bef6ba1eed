"""Helpers for tests, ours and yours: a fake clock, readings in one call, histories that can be replayed.

With them a program that uses a pool can be tested without GPUs and without waiting.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core import Event, Observed, Pool, PoolSettings, Reading, restore, save
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.models import gpu_id_in_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.core import Effect

__all__ = ["FakeClock", "History", "gpu", "gpus", "replay", "snapshot"]


@dataclass
class _Timer:
    callback: Callable[[], object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeClock:
    """A clock for a `WorkerPoolManager`; its time passes only in `advance`.

    >>> clock = FakeClock()
    >>> clock.advance(1.5)
    >>> clock.now()
    1.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, _Timer]] = []
        self._serial = count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer(callback)
        heappush(self._timers, (when, next(self._serial), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass; each callback that is due is called at its own time."""
        if seconds < 0:
            raise ValueError(f"time does not go back, not even by {-seconds} s")
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heappop(self._timers)
            if not timer.is_cancelled:
                self._now = max(self._now, when)
                timer.callback()
        self._now = end

    async def run(self, seconds: float) -> None:
        """`advance`, and let tasks run before and after it."""
        for step_seconds in (0.0, seconds):
            self.advance(step_seconds)
            for _ in range(10):
                await asyncio.sleep(0)


def gpu(index: int, *, endpoint_id: str = "", **reading: Any) -> Reading:
    """A reading of an idle GPU with 80 GB; arguments replace its fields."""
    idle: dict[str, Any] = {
        "gpu_id": gpu_id_in_pool(endpoint_id, index),
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{endpoint_id or 'host'}-{index}",
        "memory_total_mb": 80_000.0,
        "memory_used_mb": 0.0,
        "utilization_percent": 0.0,
        "processes": (),
    }
    return Reading(**{**idle, **reading})


def gpus(number: int, *, endpoint_id: str = "", **reading: Any) -> tuple[Reading, ...]:
    """Readings of idle GPUs of one host; arguments replace their fields."""
    return tuple(gpu(index, endpoint_id=endpoint_id, **reading) for index in range(number))


def snapshot(readings: Iterable[Reading], *, at: float, endpoint_id: str = "") -> Observed:
    """The event that a host's GPUs were read at that time."""
    return Observed(endpoint_id, tuple(readings), begun_at=at)


@dataclass
class History:
    """A pool that records its events, so that they can be replayed: apply events here instead.

    With `checks`, the pool's invariants are checked after every event, which is slow.
    """

    settings: PoolSettings = field(default_factory=PoolSettings)
    checks: bool = True
    #: The initial state, as `save` returns it; None: an empty pool.
    start: dict[str, Any] | None = None
    steps: list[tuple[Event, float, tuple[Effect, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool: Pool = Pool(self.settings) if self.start is None else restore(self.start, self.settings)

    def apply(self, event: Event, now: float) -> tuple[Effect, ...]:
        effects = self.pool.apply(event, now)
        self.steps.append((event, now, effects))
        if self.checks:
            check_invariants(self.pool)
        return effects


def replay(history: History) -> Pool:
    """The pool after the same events; raises AssertionError if their effects or the pool differ."""
    again = History(history.settings, checks=False, start=history.start)
    for number, (event, now, effects) in enumerate(history.steps):
        repeated = again.apply(event, now)
        if repeated != effects:
            raise AssertionError(f"step {number}, {event} at {now}: {repeated} instead of {effects}")
    if save(again.pool) != save(history.pool):
        raise AssertionError("the same events led to a different pool")
    return again.pool
