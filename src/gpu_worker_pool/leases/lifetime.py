"""Whether a lease is still its holder's, as that one may ask from any thread at any moment; it sends nothing.

The answer needs nobody to be awake: a lease that was not renewed for as long as it lives is lost by the clock alone,
also in a process that was stopped and has just woken up.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.clocks import boot_time

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class End(Enum):
    """How a lease ended."""

    #: By its holder, or on its behalf.
    RELEASED = "released"
    LOST = "lost"


class _Ending(NamedTuple):
    how: End
    reason: str


class LeaseLife:
    """Shared by the assignment, which asks, and the thread that renews the lease, which tells."""

    def __init__(self, ttl_seconds: float, sent_at: float, now: Callable[[], float] = boot_time) -> None:
        """`sent_at`, on the clock `now`: when the message was sent whose answer says that the lease is held."""
        self.ttl_seconds = ttl_seconds
        self._now = now
        self._pid = os.getpid()
        #: Until when it is certain to be held, and what came of it. Each is written by one step of the interpreter, so
        #: that no lock is needed, which a fork might catch in a bad moment.
        self._held_until = sent_at + ttl_seconds
        self._endings: list[_Ending] = []
        self._listeners: list[Callable[[], object]] = []

    # --- for the holder ---

    @property
    def is_lost(self) -> bool:
        # A forked child cannot know how it goes on: it is the parent that holds the lease and renews it.
        if not self._endings and self.is_overdue and self._pid == os.getpid():
            # For good: an answer that comes after somebody was told this must not make it wrong.
            self.end(End.LOST, self._overdue_reason)
        return bool(self._endings) and self._endings[0].how is End.LOST

    @property
    def is_released(self) -> bool:
        return bool(self._endings) and self._endings[0].how is End.RELEASED

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self._endings[0].reason if self._endings else ""

    async def wait(self) -> None:
        """Until it is lost; for ever, if it is not."""
        import asyncio  # which is there where this is called; elsewhere it is not worth its time

        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, told)

        self._listeners.append(tell)
        try:
            # It may have ended before anybody listened; one that was released is never lost, and waited for in vain.
            if not self.is_lost:
                await told
        finally:
            self._listeners.remove(tell)

    # --- for whoever renews it ---

    @property
    def held_until(self) -> float:
        return self._held_until

    @property
    def is_overdue(self) -> bool:
        """Whether nobody knows it to be held any more, whatever its server may think."""
        return self._now() >= self._held_until

    @property
    def _overdue_reason(self) -> str:
        return f"it could not be renewed for {self.ttl_seconds:g} s, as long as it lives without that"

    @property
    def has_ended(self) -> bool:
        return bool(self._endings)

    def renewed(self, sent_at: float) -> None:
        self._held_until = max(self._held_until, sent_at + self.ttl_seconds)

    def end(self, how: End, reason: str = "") -> bool:
        """Whether this is what ended it: the first to say so is right."""
        ending = _Ending(how, reason)
        self._endings.append(ending)
        is_first = self._endings[0] is ending
        if is_first and how is End.LOST:
            for tell in list(self._listeners):
                tell()
        return is_first

    # --- it is one thing with one lease: a copied assignment shares it, and in another process it says nothing ---

    def __copy__(self) -> LeaseLife:
        return self

    def __deepcopy__(self, memo: object) -> LeaseLife:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """What is unpickled instead."""


def _settle(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
