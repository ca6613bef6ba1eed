"""Reads workload files: CSV with named columns, SWF of the Parallel Workloads Archive, and what a pool has recorded."""

from __future__ import annotations

import csv
import io
import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.simulation.recordings import is_recording, jobs_of
from gpu_worker_pool.simulation.workload import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: The columns that a CSV file must have, and those that it may have.
COLUMNS: Final = ("arrival_seconds", "duration_seconds", "gpus", "account")
OPTIONAL_COLUMNS: Final = ("expected_seconds",)
#: More would not fit into memory with all that is computed of them.
MOST_JOBS: Final = 5_000_000
MOST_GPUS: Final = 1024
#: Some 30,000 years; a moment in seconds since 1970 is far below.
MOST_SECONDS: Final = 1e12
_SWF_FIELDS: Final = 18
_EXPECTED: Final = f"CSV with the columns {', '.join(COLUMNS)}, SWF, or usage-….jsonl of a pool"


class Workload(NamedTuple):
    #: In the order of the file.
    jobs: list[Job]
    #: Lines without a usable job, such as those of jobs that never ran.
    skipped: int
    #: Whether arrivals are moments, in seconds since 1970.
    is_recording: bool = False


class WorkloadError(ValueError):
    """A file cannot be used; says which line and what was expected."""


def read_workloads(paths: Iterable[Path]) -> Workload:
    """Several files as one; what is recorded of one's own pool begins at 0. Raises as `read_workload` does."""
    jobs: list[Job] = []
    recorded: list[Job] = []
    skipped = 0
    for path in paths:
        found = read_workload(path, len(jobs) + len(recorded))
        (recorded if found.is_recording else jobs).extend(found.jobs)
        skipped += found.skipped
    begin = min((job.arrival_seconds for job in recorded), default=0.0)
    jobs += [job._replace(arrival_seconds=job.arrival_seconds - begin) for job in recorded]
    return Workload(jobs, skipped, is_recording=bool(recorded))


def read_workload(path: Path, number_from: int = 0) -> Workload:
    """Raises a `WorkloadError` that names the line, or an `OSError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: this is not a text file; expected {_EXPECTED}") from None
    is_swf, is_recorded = path.suffix == ".swf" or text.lstrip().startswith(";"), is_recording(text)
    read = _recorded_jobs if is_recorded else _swf_jobs if is_swf else _csv_jobs
    jobs: list[Job] = []
    skipped = 0
    try:
        for found in read(text):
            if found is None:
                skipped += 1
                continue
            jobs.append(found._replace(number=number_from + len(jobs)))
            if len(jobs) > MOST_JOBS:
                raise _BadLineError(f"more than {MOST_JOBS:,} jobs")  # noqa: TRY301
    except (_BadLineError, csv.Error) as error:
        raise WorkloadError(f"{path}: {error}") from None
    if not jobs:
        raise WorkloadError(f"{path}: no jobs in it; expected {_EXPECTED}")
    return Workload(jobs, skipped, is_recorded)


class _BadLineError(ValueError):
    pass


def _recorded_jobs(text: str) -> Iterator[Job | None]:
    for number, job in enumerate(jobs_of(text.split("\n")), 1):
        if job is not None and job.gpus > MOST_GPUS:
            raise _BadLineError(f"record {number}: more than {MOST_GPUS} GPUs")
        yield job


def _csv_jobs(text: str) -> Iterator[Job | None]:
    rows = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(rows, [])]
    if missing := [name for name in COLUMNS if name not in header]:
        raise _BadLineError(
            f"line 1: the column {missing[0]} is missing; expected a header with {', '.join(COLUMNS)} and, where it is "
            f"declared, {OPTIONAL_COLUMNS[0]}"
        )
    places = {name: header.index(name) for name in (*COLUMNS, *OPTIONAL_COLUMNS) if name in header}
    for row in rows:
        line = rows.line_num
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(header):
            raise _BadLineError(f"line {line}: {len(row)} columns, but the header has {len(header)}")
        cells = {name: row[place].strip() for name, place in places.items()}
        expected = cells.get("expected_seconds", "")
        yield Job(
            0,
            _number(cells["arrival_seconds"], "arrival_seconds", line),
            _number(cells["duration_seconds"], "duration_seconds", line),
            _gpus(cells["gpus"], line),
            cells["account"],
            _number(expected, "expected_seconds", line, above=0.0) if expected else None,
        )


def _number(text: str, name: str, line: int, *, above: float | None = None) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= MOST_SECONDS) or (above is not None and value <= above):
        raise _BadLineError(f"line {line}: {name} must be a number of seconds, not {text[:40]!r}")
    return value


def _gpus(text: str, line: int) -> int:
    if re.fullmatch("[0-9]{1,4}", text) is None or not 1 <= int(text) <= MOST_GPUS:
        raise _BadLineError(f"line {line}: gpus must be a whole number from 1 to {MOST_GPUS}, not {text[:40]!r}")
    return int(text)


def _swf_jobs(text: str) -> Iterator[Job | None]:
    """One job per line, with 18 numbers; -1 is unknown. Its processors are taken for GPUs."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(";"):
            continue
        try:
            values = [float(word) for word in words]
        except ValueError:
            values = []
        if len(values) != _SWF_FIELDS or not all(map(math.isfinite, values)):
            raise _BadLineError(f"line {number}: expected {_SWF_FIELDS} numbers, as SWF has them")
        submitted, ran, allocated, requested, requested_seconds, user = (values[i] for i in (1, 3, 4, 7, 8, 11))
        if max(submitted, ran) > MOST_SECONDS:
            raise _BadLineError(f"line {number}: more than {MOST_SECONDS:g} seconds")
        gpus = int(allocated if allocated > 0 else requested)
        if submitted < 0 or ran < 0 or not 1 <= gpus <= MOST_GPUS:
            yield None  # it was cancelled before it ran
            continue
        expected = requested_seconds if requested_seconds > 0 else None
        yield Job(0, submitted, ran, gpus, f"user {user:.0f}" if user >= 0 else "", expected)
