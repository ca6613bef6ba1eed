"""Timers: what is due when. Setting and clearing never looks at the others."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Literal

#: What is due, and for whom.
TimerKey = tuple[Literal["waiter", "lease", "reading"], str]


class Timers:
    def __init__(self) -> None:
        self._at: dict[TimerKey, float] = {}
        #: May hold entries that were set anew or cleared since; `_at` tells which are current.
        self._heap: list[tuple[float, TimerKey]] = []
        #: Nothing is due before this. Cheap to compare with; `next_at` makes it exact.
        self.not_before = math.inf

    def set(self, key: TimerKey, at: float) -> None:
        if self._at.get(key) == at:
            return
        self._at[key] = at
        if at < self.not_before:
            self.not_before = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    def clear(self, key: TimerKey) -> None:
        self._at.pop(key, None)

    def get(self, key: TimerKey) -> float | None:
        return self._at.get(key)

    def next_at(self) -> float:
        """Infinity if nothing is set."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        self.not_before = heap[0][0] if heap else math.inf
        return self.not_before

    def pop_due(self, now: float) -> TimerKey | None:
        if self.not_before > now or self.next_at() > now:
            return None
        _, key = heappop(self._heap)
        del self._at[key]
        return key

    def items(self) -> dict[TimerKey, float]:
        return dict(self._at)

    def __len__(self) -> int:
        return len(self._at)
