"""Sums up records of usage: GPU hours, idle hours, waits and refusals, by person, label, GPU or day. Reads no files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from gpu_worker_pool.ledger.records import UNCLAIMED, idle_gpu_seconds, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

By = Literal["user", "label", "gpu", "day"]
BY: Final[tuple[By, ...]] = get_args(By)
#: What a lease without a label is listed as.
NO_LABEL: Final = "(no label)"
ALL: Final = "all"
#: The row of requests that were not granted.
REFUSED: Final = "rejected"


class Span(NamedTuple):
    """A period, in seconds since 1970."""

    begin: float
    end: float


@dataclass
class Row:
    """Sums of one person, label, GPU or day."""

    name: str
    leases: int = 0
    gpu_seconds: float = 0.0
    #: Idle GPU seconds among the observed ones; the others may have been idle, too.
    idle_gpu_seconds: float = 0.0
    observed_gpu_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    #: Requests that ended before they were granted: timed out, cancelled, or their program was gone.
    not_served: int = 0

    def as_json(self) -> dict[str, Any]:
        is_observed = self.observed_gpu_seconds > 0
        return {
            "name": self.name,
            "leases": self.leases,
            "gpu_hours": _hours(self.gpu_seconds),
            "idle_gpu_hours": _hours(self.idle_gpu_seconds) if is_observed else None,
            "observed_gpu_hours": _hours(self.observed_gpu_seconds),
            "wait_median_seconds": percentile(self.waits, 50),
            "wait_p90_seconds": percentile(self.waits, 90),
            "refused": self.refused,
            "not_served": self.not_served,
        }


def summarize(
    records: Iterable[dict[str, Any]], by: By, span: Span, name_of: Callable[[dict[str, Any]], str]
) -> list[Row]:
    summary = UsageSums(by, span, name_of)
    for record in records:
        summary.add(record)
    return summary.rows()


class UsageSums:
    """Sums of records that are added one at a time, so that they need not all fit into memory.

    Only the part of a lease within `span` counts; its wait counts where it was granted.
    """

    def __init__(self, by: By, span: Span, name_of: Callable[[dict[str, Any]], str]) -> None:
        """`name_of`: the person of a record."""
        self._by: By = by
        self._span = span
        self._name_of = name_of
        self._rows: dict[str, Row] = {}

    def _row(self, name: str) -> Row:
        found = self._rows.get(name)
        if found is None:
            found = self._rows[name] = Row(name)
        return found

    def add(self, record: dict[str, Any]) -> None:
        if record.get("within") is not None:
            return  # it is part of another lease
        if record["how"] == UNCLAIMED:
            return  # its program never learned of it
        if record["kind"] != "lease":
            _add_request(record, self._by, self._span, self._row, self._name_of)
            return
        held = held_span(record)
        if held is None:
            return
        for name, part, share in _parts(record, held, self._by, self._span, self._name_of):
            row = self._row(name)
            _add_part(row, record, held, part, share)
            if held.begin >= part.begin and held.begin <= self._span.end:
                row.leases += 1
                row.waits.append(record["waited_seconds"])

    def rows(self) -> list[Row]:
        """Those with the most GPU hours first, days in order."""
        if self._by == "day":
            return sorted(self._rows.values(), key=lambda each: each.name)
        return sorted(self._rows.values(), key=lambda each: (-each.gpu_seconds, each.name))


def total_of(records: Iterable[dict[str, Any]], span: Span) -> Row:
    """The sums of all rows; a lease of several GPUs or days counts once."""
    return next(iter(summarize(records, "user", span, lambda _: ALL)), Row(ALL))


def _parts(
    record: dict[str, Any], held: Span, by: By, span: Span, name_of: Callable[[dict[str, Any]], str]
) -> Iterator[tuple[str, Span, float]]:
    """Each row that it counts in: its name, the part of the time, and the share of its GPUs."""
    part = Span(max(held.begin, span.begin), min(held.end, span.end))
    if part.end < part.begin:
        return
    match by:
        case "user":
            yield name_of(record), part, 1.0
        case "label":
            yield record.get("label") or NO_LABEL, part, 1.0
        case "gpu":
            for name in gpu_names(record):
                yield name, part, 1 / len(record["gpus"])
        case "day":
            for day in _days(part):
                yield _day_name(day.begin), day, 1.0


def _add_part(row: Row, record: dict[str, Any], held: Span, part: Span, share: float) -> None:
    seconds = held.end - held.begin
    fraction = share * ((part.end - part.begin) / seconds if seconds > 0 else 1.0)
    row.gpu_seconds += record["gpu_seconds"] * fraction
    idle = idle_gpu_seconds(record)
    if idle is not None and record["held_seconds"] > 0:
        observed = min(record.get("observed_seconds", 0.0) / record["held_seconds"], 1.0)
        row.idle_gpu_seconds += idle * fraction
        row.observed_gpu_seconds += record["gpu_seconds"] * observed * fraction


def _add_request(
    record: dict[str, Any],
    by: By,
    span: Span,
    row: Callable[[str], Row],
    name_of: Callable[[dict[str, Any]], str],
) -> None:
    at = seconds_of(record["ended"])
    if at is None or not span.begin <= at <= span.end or by == "gpu":
        return
    names = {"user": name_of(record), "label": record.get("label") or NO_LABEL, "day": _day_name(at)}
    if record["how"] == REFUSED:
        row(names[by]).refused += 1
    else:
        row(names[by]).not_served += 1


def held_span(record: dict[str, Any]) -> Span | None:
    begin, end = seconds_of(record["granted"]), seconds_of(record["ended"])
    return None if begin is None or end is None else Span(begin, max(begin, end))


def gpu_names(record: dict[str, Any]) -> list[str]:
    """The index when it was granted, and the beginning of its UUID."""
    gpus, indices = record["gpus"], record.get("indices")
    known = indices if isinstance(indices, list) and len(indices) == len(gpus) else [None] * len(gpus)
    return [
        gpu if index is None or gpu == str(index) else f"{index} ({gpu[:12]})"
        for gpu, index in zip(gpus, known, strict=True)
    ]


def _days(part: Span) -> Iterator[Span]:
    """Days of this host's time zone."""
    begin = part.begin
    while True:
        midnight = datetime.fromtimestamp(begin).astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        end = (midnight + timedelta(days=1)).timestamp()
        if end <= begin:  # the clock was put back
            end = begin + 86_400.0
        if part.end <= end:
            yield Span(begin, part.end)
            return
        yield Span(begin, end)
        begin = end


def _day_name(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().date().isoformat()


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` of the values do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)], 3)


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 3)


# --- over time ---


class Course(NamedTuple):
    """Averages over steps of equal length."""

    span: Span
    #: How many GPUs were held, and how many requests waited that were granted later.
    gpus_held: list[float]
    waiting: list[float]
    #: How many different GPUs the records name.
    gpus: int


def course_of(records: Iterable[dict[str, Any]], span: Span, steps: int) -> Course:
    held, waiting = [0.0] * steps, [0.0] * steps
    gpus: set[str] = set()
    for record in records:
        if record["kind"] != "lease" or record.get("within") is not None:
            continue
        during, asked = held_span(record), seconds_of(record["asked"])
        if during is None or asked is None or during.end < span.begin or during.begin > span.end:
            continue
        gpus.update(record["gpus"])
        seconds = during.end - during.begin
        if seconds > 0:
            _spread(held, span, during, record["gpu_seconds"] / seconds)
        _spread(waiting, span, Span(asked, during.begin), 1.0)
    return Course(span, held, waiting, len(gpus))


def _spread(into: list[float], span: Span, part: Span, amount: float) -> None:
    step = (span.end - span.begin) / len(into)
    first = max(int((part.begin - span.begin) / step), 0)
    last = min(int((part.end - span.begin) / step), len(into) - 1)
    for number in range(first, last + 1):
        begin = span.begin + number * step
        overlap = min(part.end, begin + step) - max(part.begin, begin)
        into[number] += amount * max(overlap, 0.0) / step
