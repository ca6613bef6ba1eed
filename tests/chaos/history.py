"""What workers wrote down of their GPUs, put together and judged: whatever was killed, nobody had another one's."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Holding:
    """One grant, as its holder saw it, on the clock that all processes share."""

    pid: int
    request: str
    gpu: str
    fence: int
    told_at: float
    #: When it began to give the GPU back, or was killed; infinite while it has it.
    until: float = math.inf
    was_lost: bool = False


@dataclass
class History:
    holdings: list[Holding]
    #: Requests that ended otherwise, by what their askers were told.
    refused: dict[str, str]
    #: Requests of which nobody knows how they ended: their askers were killed.
    unknown: list[str]
    #: Requests whose asker lives and was told nothing.
    forgotten: list[str]

    @classmethod
    def read(cls, folder: Path, killed_at: dict[int, float]) -> History:
        """From what every worker wrote into a file of its own; `killed_at`: those that were killed, and when."""
        holdings: list[Holding] = []
        refused: dict[str, str] = {}
        open_requests: dict[str, int] = {}
        for path in sorted(folder.glob("worker-*.jsonl")):
            pid = int(path.stem.partition("-")[2])
            held: dict[str, Holding] = {}
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # half a line: killed while it wrote
                request = entry["request"]
                match entry["what"]:
                    case "asked":
                        open_requests[request] = pid
                    case "granted":
                        open_requests.pop(request)
                        held[request] = Holding(pid, request, entry["gpu"], entry["fence"], entry["at"])
                        holdings.append(held[request])
                    case "releasing":
                        held[request].until = entry["at"]
                    case "lost":
                        held[request].until = min(held[request].until, entry["at"])
                        held[request].was_lost = True
                    case "refused":
                        open_requests.pop(request, None)
                        refused[request] = entry["why"]
            for holding in held.values():
                holding.until = min(holding.until, killed_at.get(pid, math.inf))
        unknown = [request for request, pid in open_requests.items() if pid in killed_at]
        forgotten = [request for request, pid in open_requests.items() if pid not in killed_at]
        return cls(holdings, refused, unknown, forgotten)

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
                        f"{gpu} was held twice: by {before.request} of {before.pid} until {before.until:.4f}, "
                        f"and by {after.request} of {after.pid} from {after.told_at:.4f}"
                    )
        fences = [holding.fence for holding in self.holdings]
        if len(set(fences)) != len(fences):
            found.append("two grants have one fence")
        requests = [holding.request for holding in self.holdings]
        if len(set(requests)) != len(requests):
            found.append("a request was granted twice")
        found += [f"{request} was told nothing" for request in self.forgotten]
        return found
