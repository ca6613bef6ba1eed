"""A view that is built once for all callers, however many there are: reading must not delay leases."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

#: What was built is shown for this long at most, since ages in it grow old.
OLDEST_SECONDS: Final = 1.0
#: It is not built again for this many times as long as building it took: callers wait for that.
_PAUSE: Final = 9
LONGEST_PAUSE_SECONDS: Final = 1.0


class SharedView(Generic[T]):
    """Belongs to one event loop."""

    def __init__(self, build: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._build = build
        self._clock = clock
        self._building: asyncio.Task[T] | None = None
        self._built: T | None = None
        self._built_at = -OLDEST_SECONDS
        self._took_seconds = 0.0
        self._has_begun = False
        self._is_outdated = True

    def outdate(self) -> None:
        """What it shows has changed."""
        self._is_outdated = True

    async def get(self) -> T:
        """As it was when this was called, or later."""
        if self._built is not None and not self._is_outdated and self._clock() - self._built_at < OLDEST_SECONDS:
            return self._built
        if self._has_begun and self._is_outdated and self._building is not None:
            await asyncio.wait([self._building])  # it may lack the last change
        if self._building is None:
            self._building = asyncio.get_running_loop().create_task(self._rebuild())
            # The callers may be gone by the time it fails.
            self._building.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._building)

    async def _rebuild(self) -> T:
        try:
            pause = min(_PAUSE * self._took_seconds, LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(self._built_at + pause - self._clock())
            self._has_begun, self._is_outdated = True, False
            begun_at = self._clock()
            built = await self._build()
        except BaseException:
            self._is_outdated = True
            raise
        finally:
            self._has_begun, self._building = False, None
        self._built, self._built_at = built, self._clock()
        self._took_seconds = self._built_at - begun_at
        return built
