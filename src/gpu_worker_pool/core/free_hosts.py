"""Rules 3 and 4, the index: which endpoints have how many free GPUs, for requests that only say how many they want."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.ranked import RankedSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.gpus import EndpointState


class FreeHosts:
    """Endpoints with a free GPU, in one ranked set per number of free GPUs: a look-up never walks over endpoints."""

    def __init__(self) -> None:
        #: At the place of each number, the endpoints that have as many. A host has few GPUs, so there are few sets.
        self._with: list[RankedSet[EndpointState]] = [RankedSet()]
        self._free_of: dict[EndpointState, int] = {}

    def put(self, endpoint: EndpointState, rank: tuple[Any, ...]) -> None:
        """It has a new rank, or a new number of free GPUs."""
        free, before = len(endpoint.free), self._free_of.get(endpoint, 0)
        if free != before:
            if before:
                self._with[before].discard(endpoint)
            if not free:
                del self._free_of[endpoint]
                return
            self._free_of[endpoint] = free
            while len(self._with) <= free:
                self._with.append(RankedSet())
        if free:
            self._with[free].put(rank)

    def first(
        self,
        count: int,
        rank: Callable[[EndpointState], tuple[Any, ...]],
        is_acceptable: Callable[[EndpointState], bool],
    ) -> EndpointState | None:
        """The acceptable one with the lowest rank of those that have at least as many."""
        best: EndpointState | None = None
        for ranked in self._with[count:]:
            if not len(ranked):
                continue
            found = ranked.first(is_acceptable)
            if found is not None and (best is None or rank(found) < rank(best)):
                best = found
        return best
