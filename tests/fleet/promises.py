"""What clients of a fleet wrote down, judged by its promises alone: it knows nothing of how the fleet keeps them."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

#: A placement at a host that is silent is given up after 15 s and somewhat more; until then others may be served.
SILENT_HOST_SECONDS = 25.0
#: For how long a large request may be overtaken by smaller ones.
OVERTAKEN_SECONDS = 60.0
#: A holder that was told of a loss this much before its lease ran out: clocks, and the time messages take.
MARGIN_SECONDS = 0.05
#: Longer than a lease of the chaos lives, and than a place is kept, without a poll: what a client may be told then.
GIVEN_UP_SECONDS = 5.0
GIVEN_UP = ("given_up", "its lease was not renewed in time")


@dataclass
class Asked:
    """One request, as its client saw it, on the clock that all processes share."""

    request: str
    pid: int
    asked_at: float
    count: int
    #: When each poll was sent that was answered with a place in the queue, and when the answer came.
    waits: list[tuple[float, float]] = field(default_factory=list)
    told_at: float | None = None
    gpus: tuple[str, ...] = ()
    fence: int = 0
    lease: str = ""
    #: Until when it holds the GPUs, by what it knows.
    until: float = math.inf
    refused: str | None = None
    lost: str | None = None
    #: When it was last answered.
    last_at: float = 0.0
    longest_silence: float = 0.0

    @property
    def is_told(self) -> bool:
        return self.told_at is not None or self.refused is not None


@dataclass
class Span:
    begun_at: float
    ended_at: float


def read(folder: Path, killed_at: dict[int, float]) -> list[Asked]:
    """From the files of all clients; `killed_at`: those that were killed, and when."""
    found: dict[str, Asked] = {}
    for path in sorted(folder.glob("client-*.jsonl")):
        pid = int(path.stem.partition("-")[2])
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # half a line: killed while it wrote
            at, request = entry["at"], entry["request"]
            if entry["what"] == "asked":
                found[request] = Asked(request, pid, at, entry["count"], last_at=at)
                continue
            it = found[request]
            it.longest_silence = max(it.longest_silence, at - it.last_at)
            if entry["what"] != "silent":
                it.last_at = at
            match entry["what"]:
                case "waiting":
                    it.waits.append((entry["sent_at"], at))
                case "granted":
                    it.told_at, it.gpus, it.fence, it.lease = at, tuple(entry["gpus"]), entry["fence"], entry["lease"]
                    it.until = entry["valid_until"]
                case "renewed":
                    it.until = entry["valid_until"]
                case "lost":
                    if at < entry["valid_until"] - MARGIN_SECONDS:
                        it.lost = f"{entry['status']} {entry['said']}"
                    it.until = min(it.until, at)
                case "releasing" | "overdue":
                    it.until = min(it.until, at)
                case "refused":
                    it.refused = f"{entry['status']} {entry['said']}"
                case "given up":
                    it.refused = "nothing, for longer than it waits"
    for it in found.values():
        it.until = min(it.until, killed_at.get(it.pid, math.inf))
    return list(found.values())


def problems(asked: list[Asked], killed_at: dict[int, float], lost_places: list[Span]) -> list[str]:
    """Everything that must never be; empty if nothing is.

    `lost_places`: when a failover lost commits and the dispatcher died with it, which may cost places in the queue.
    """
    granted = [it for it in asked if it.told_at is not None]
    return [
        *_held_twice(granted),
        *_overtaken(asked, granted, lost_places),
        *(f"{it.request} was told nothing" for it in asked if not it.is_told and it.pid not in killed_at),
        *(f"{it.request} was told {it.refused}" for it in asked if it.refused is not None and not _may_be_refused(it)),
        *(f"{it.request} lost {it.lease}: {it.lost}" for it in granted if it.lost is not None),
    ]


def _may_be_refused(it: Asked) -> bool:
    """A client that had no answer for a while has given up its place, or the lease that it was not told of."""
    return it.longest_silence > GIVEN_UP_SECONDS and any(reason in str(it.refused) for reason in GIVEN_UP)


def _held_twice(granted: list[Asked]) -> list[str]:
    found = []
    by_gpu: dict[str, list[Asked]] = defaultdict(list)
    for it in granted:
        if len(set(it.gpus)) != it.count or len({gpu.partition("/")[0] for gpu in it.gpus}) != 1:
            found.append(f"{it.request} asked for {it.count} GPUs of one host and got {it.gpus}")
        for gpu in it.gpus:
            by_gpu[gpu].append(it)
    for gpu, holders in by_gpu.items():
        holders.sort(key=lambda it: it.fence)
        for before, after in itertools.pairwise(holders):
            assert after.told_at is not None
            if before.fence == after.fence:
                found.append(f"{gpu}: {before.request} and {after.request} have the same fence {before.fence}")
            if after.told_at < before.until:
                found.append(
                    f"{gpu} was held twice: by {before.request} until {before.until:.3f} (fence {before.fence}), "
                    f"and by {after.request} from {after.told_at:.3f} (fence {after.fence})"
                )
    leases = [it.lease for it in granted]
    found += [f"{lease} was granted twice" for lease in sorted({each for each in leases if leases.count(each) > 1})]
    return found


def _overtaken(asked: list[Asked], granted: list[Asked], lost_places: list[Span]) -> list[str]:
    """By one that came later than it was told its place, and would have served it: while it was told to wait on."""
    found = []
    for it in asked:
        if not it.waits:
            continue
        told_place_at, still_waits_at = it.waits[0][1], it.waits[-1][0]
        for other in granted:
            if other.asked_at <= told_place_at or other is it:
                continue
            assert other.told_at is not None
            may_until = other.told_at + SILENT_HOST_SECONDS
            if other.count < it.count:
                may_until = max(may_until, told_place_at + OVERTAKEN_SECONDS + SILENT_HOST_SECONDS)
                if other.told_at < told_place_at + OVERTAKEN_SECONDS:
                    continue
            if any(told_place_at <= span.ended_at and other.told_at >= span.begun_at for span in lost_places):
                continue
            if still_waits_at > may_until:
                found.append(
                    f"{it.request} ({it.count} GPUs) was told its place at {told_place_at:.3f} and waited still at "
                    f"{still_waits_at:.3f}: {other.request} ({other.count}) asked at {other.asked_at:.3f} and was "
                    f"served at {other.told_at:.3f}"
                )
                break
    return found
