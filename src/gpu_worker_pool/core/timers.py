"""Timers: what is due when. Setting or clearing one never walks over the others."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Literal

#: Of a pool, then of the dispatcher of a fleet.
Kind = Literal["waiter", "lease", "reading", "fleet", "poll", "placement", "pool", "hearing", "order"]
POOL_KINDS: tuple[Kind, ...] = ("waiter", "lease", "reading", "fleet")


class Timers:
    """At most one timer per kind and name."""

    def __init__(self, kinds: tuple[Kind, ...] = POOL_KINDS) -> None:
        self._at: dict[Kind, dict[str, float]] = {kind: {} for kind in kinds}
        #: May hold outdated entries; `_at` says which are current.
        self._heap: list[tuple[float, Kind, str]] = []
        self._size = 0
        #: Nothing is due before this. Cheap to compare with; `next_at` makes it exact.
        self.not_before: float = math.inf

    def set(self, kind: Kind, name: str, at: float) -> None:
        moments = self._at[kind]
        known_at = moments.get(name)
        if known_at == at:
            return
        if known_at is None:
            self._size += 1
        moments[name] = at
        if at < self.not_before:
            self.not_before = at
        heappush(self._heap, (at, kind, name))
        if len(self._heap) > 2 * self._size + 64:
            self._heap = self.items()
            heapify(self._heap)

    def clear(self, kind: Kind, name: str) -> None:
        if self._at[kind].pop(name, None) is not None:
            self._size -= 1

    def get(self, kind: Kind, name: str) -> float | None:
        return self._at[kind].get(name)

    def next_at(self) -> float:
        """Infinity if nothing is set."""
        heap = self._heap
        while heap:
            at, kind, name = heap[0]
            if self._at[kind].get(name) == at:
                self.not_before = at
                return at
            heappop(heap)
        self.not_before = math.inf
        return math.inf

    def pop_due(self, now: float) -> tuple[Kind, str] | None:
        if self.not_before > now or self.next_at() > now:
            return None
        _, kind, name = heappop(self._heap)
        self.clear(kind, name)
        return kind, name

    def items(self) -> list[tuple[float, Kind, str]]:
        return [(at, kind, name) for kind, moments in self._at.items() for name, at in moments.items()]

    def __len__(self) -> int:
        return self._size
