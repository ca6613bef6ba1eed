"""What the shells need of time, so that tests can give them another: now, and to be called at a moment."""

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
    """Monotonic time, whatever the loop's own time is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    now = staticmethod(monotonic)

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        return self._loop.call_later(when - monotonic(), callback)


def boot_time() -> float:
    """Seconds since this machine booted: they pass while it sleeps, too, for all its processes; nobody sets them."""
    return time.clock_gettime(_BOOT_TIME)


#: Only Linux has it; elsewhere a sleep is noticed when the next message is answered.
_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
