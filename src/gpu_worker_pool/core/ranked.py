"""A set that knows its best member: for the GPUs of an endpoint and the endpoints of a pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class RankedSet(Generic[Item]):
    """Lowest rank first. Changing one member costs the logarithm of the number of members.

    A rank ends with the member itself. Before it comes something unique, so that members are never compared.
    """

    def __init__(self) -> None:
        self._rank: dict[Item, tuple[Any, ...]] = {}
        #: May hold outdated entries; `_rank` says which are current.
        self._heap: list[tuple[Any, ...]] = []

    def put(self, rank: tuple[Any, ...]) -> None:
        """Add the member that the rank ends with, or move it there."""
        ranks, heap, item = self._rank, self._heap, rank[-1]
        if item in ranks and ranks[item] == rank:
            return
        ranks[item] = rank
        heappush(heap, rank)
        if len(heap) > 2 * len(ranks) + 64:
            self._heap = list(ranks.values())
            heapify(self._heap)

    def discard(self, item: Item) -> None:
        # Mostly the best is removed, and then no outdated entry stays behind.
        if self._rank.pop(item, None) is not None and self._heap[0][-1] is item:
            heappop(self._heap)

    def best(self) -> Item | None:
        heap, ranks = self._heap, self._rank
        while heap:
            rank = heap[0]
            item: Item = rank[-1]
            if ranks.get(item) is rank:
                return item
            heappop(heap)
        return None

    def first(self, is_acceptable: Callable[[Item], bool]) -> Item | None:
        """The best that is acceptable; costs something for each better one that is not."""
        passed_over = []
        while (item := self.best()) is not None and not is_acceptable(item):
            passed_over.append(heappop(self._heap))
        for entry in passed_over:
            heappush(self._heap, entry)
        return item

    def best_of(self, number: int, is_acceptable: Callable[[Item], bool] | None = None) -> list[Item]:
        """As many of the best that are acceptable, if there are; costs something for each that is looked at."""
        found: list[Item] = []
        looked_at: dict[Item, tuple[Any, ...]] = {}
        while len(found) < number and (item := self.best()) is not None:
            entry = heappop(self._heap)
            # A member that left and came back with the same rank is in the heap twice.
            if item not in looked_at and (is_acceptable is None or is_acceptable(item)):
                found.append(item)
            looked_at[item] = entry
        for entry in looked_at.values():
            heappush(self._heap, entry)
        return found

    def __len__(self) -> int:
        return len(self._rank)

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        return iter(self._rank)

    def __contains__(self, item: object) -> bool:
        return item in self._rank
