"""Rule 3 for several GPUs: of those that a request could have, the ones that are linked best, where that is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.gpus import GPUResourceState


def distance(first: GPUResourceState, second: GPUResourceState) -> float:
    """How far apart two GPUs of a host are, as `Reading.distances` has it; what is unknown is farthest."""
    reading = first.reading
    if reading is None or second.index >= len(reading.distances):
        return math.inf
    found = reading.distances[second.index]
    return math.inf if found is None else found


def best_linked(gpus: Sequence[GPUResourceState], count: int) -> tuple[GPUResourceState, ...]:
    """Chooses `count` of these, which come best first: the farthest pair as near as possible, then all, then the best.

    Around each GPU its nearest are gathered. That finds the best set where links form groups, as they do on nearly all
    hosts, and a good one elsewhere; trying all sets would take too long with 16 GPUs.
    """
    best: tuple[tuple[float, float, tuple[int, ...]], tuple[GPUResourceState, ...]] | None = None
    for start in range(len(gpus)):
        chosen, others = [start], [place for place in range(len(gpus)) if place != start]
        farthest = total = 0.0
        while len(chosen) < count:
            found = []
            for place in others:
                away = [distance(gpus[place], gpus[other]) for other in chosen]
                found.append((max(away), sum(away), place))
            far, near, place = min(found)
            farthest, total = max(farthest, far), total + near
            chosen.append(place)
            others.remove(place)
        places = tuple(sorted(chosen))
        if best is None or (farthest, total, places) < best[0]:
            best = ((farthest, total, places), tuple([gpus[place] for place in places]))
    assert best is not None  # there are at least as many as are wanted
    return best[1]
