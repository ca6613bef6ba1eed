"""Clocks: the current time, and callbacks at a given time. Tests replace them."""

from __future__ import annotations

import time
from time import monotonic
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """`gpu_worker_pool.testing.FakeClock` is one for tests."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer: ...


class LoopClock:
    """Monotonic time, independent of the event loop's own time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    now = staticmethod(monotonic)

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        return self._loop.call_later(when - monotonic(), callback)


def boot_time() -> float:
    """Seconds since this machine booted, including its sleep: the same for all processes, and never adjusted."""
    return time.clock_gettime(_BOOT_TIME)


#: Linux only; elsewhere time spent asleep is not counted.
_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
