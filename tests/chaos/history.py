"""What workers wrote down of their GPUs, put together and judged: whatever was killed, nobody had another one's."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: What those who ask may be told instead of a grant, whatever is killed: that nobody answered, or no GPU came free.
EXPECTED_REFUSALS = frozenset({"WorkerTimeoutError", "ServiceUnavailableTimeoutError"})


@dataclass
class Holding:
    """One grant, as its holder saw it, on the clock that all processes share."""

    worker: int
    request: str
    gpu: str
    fence: int
    told_at: float
    #: When it began to give the GPU back, or was killed; infinite while it has it.
    until: float = math.inf
    lost_at: float | None = None


@dataclass
class Span:
    """A time in which somebody could do nothing."""

    begun_at: float
    ended_at: float

    def meets(self, begun_at: float, ended_at: float) -> bool:
        return self.begun_at <= ended_at and begun_at <= self.ended_at


@dataclass
class History:
    holdings: list[Holding]
    #: Requests that ended otherwise, by what their askers were told.
    refused: dict[str, str]
    #: Requests of which nobody knows how they ended: their askers were killed.
    unknown: list[str]
    #: Requests whose asker lives and was told nothing.
    forgotten: list[str]
    #: By worker, when workers stood still: they were paused, or got no processor.
    stalls: dict[int, list[Span]]
    #: When there was no server, or nobody could write to the ledger.
    away: Sequence[Span] = ()

    @classmethod
    def read(cls, folder: Path, killed_at: dict[int, float], away: Sequence[Span] = ()) -> History:
        """From what every worker wrote into a file of its own; `killed_at`: those that were killed, and when."""
        stalls: dict[int, list[Span]] = defaultdict(list)
        holdings: list[Holding] = []
        refused: dict[str, str] = {}
        open_requests: dict[str, int] = {}
        for path in sorted(folder.glob("worker-*.jsonl")):
            worker = int(path.stem.partition("-")[2])
            held: dict[str, Holding] = {}
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # half a line: killed while it wrote
                request = entry["request"]
                match entry["what"]:
                    case "asked":
                        open_requests[request] = worker
                    case "granted":
                        open_requests.pop(request)
                        held[request] = Holding(worker, request, entry["gpu"], entry["fence"], entry["at"])
                        holdings.append(held[request])
                    case "releasing":
                        held[request].until = entry["at"]
                    case "lost":
                        held[request].until = min(held[request].until, entry["at"])
                        held[request].lost_at = held[request].lost_at or entry["at"]
                    case "stalled":
                        stalls[worker].append(Span(entry["since"], entry["at"]))
                    case "refused":
                        open_requests.pop(request, None)
                        refused[request] = entry["why"]
            for holding in held.values():
                holding.until = min(holding.until, killed_at.get(worker, math.inf))
        unknown = [request for request, worker in open_requests.items() if worker in killed_at]
        forgotten = [request for request, worker in open_requests.items() if worker not in killed_at]
        return cls(holdings, refused, unknown, forgotten, stalls, away)

    def problems(self) -> list[str]:
        """Everything that must never be; empty if nothing is."""
        found = []
        by_gpu: dict[str, list[Holding]] = defaultdict(list)
        for holding in self.holdings:
            by_gpu[holding.gpu].append(holding)
        for gpu, holdings in by_gpu.items():
            holdings.sort(key=lambda holding: holding.fence)
            for before, after in itertools.pairwise(holdings):
                if after.told_at < before.until:
                    found.append(
                        f"{gpu} was held twice: by {before.request} of {before.worker} until {before.until:.4f}, "
                        f"and by {after.request} of {after.worker} from {after.told_at:.4f}"
                    )
        fences = [holding.fence for holding in self.holdings]
        if len(set(fences)) != len(fences):
            found.append("two grants have one fence")
        requests = [holding.request for holding in self.holdings]
        if len(set(requests)) != len(requests):
            found.append("a request was granted twice")
        found += [f"{request} was told nothing" for request in self.forgotten]
        found += [
            f"{request} was refused: {why}"
            for request, why in self.refused.items()
            if why.partition(":")[0] not in EXPECTED_REFUSALS
        ]
        found += [
            f"{holding.request} lost {holding.gpu} without a reason"
            for holding in self.holdings
            if holding.lost_at is not None and not self._is_excused(holding, holding.lost_at)
        ]
        return found

    def _is_excused(self, holding: Holding, lost_at: float) -> bool:
        """Whether a loss is no wonder: its holder stood still meanwhile, or nobody was there to renew it."""
        return any(span.meets(holding.told_at, lost_at) for span in [*self.stalls[holding.worker], *self.away])
