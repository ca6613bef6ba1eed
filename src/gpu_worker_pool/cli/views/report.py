"""Reads the usage files of this host's ledger and prints their sums."""

from __future__ import annotations

import asyncio
import csv
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_worker_pool.api.lease_rows import person_of
from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.output import print_json, print_line, printable
from gpu_worker_pool.cli.quantities import spoken_seconds
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.leases.endpoint_choice import local_backend, local_state_directory
from gpu_worker_pool.ledger.reading import read_host_usage
from gpu_worker_pool.ledger.report import Row, Span, course_of, summarize, total_of
from gpu_worker_pool.ledger.report_svg import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.ledger.report import By
    from gpu_worker_pool.ledger.usage_files import UsageRead

#: How finely a picture is drawn.
STEPS: Final = 240
_COLUMNS: Final = ("leases", "GPU hours", "idle", "wait median", "wait 90 %", "refused", "not served")


def print_report(since_seconds: float, by: By, *, form: Literal["table", "json", "csv"], plot: str | None) -> None:
    now = time.time()
    span = Span(now - since_seconds, now)
    usage = asyncio.run(read_host_usage(local_state_directory(), local_backend(), span.begin))
    rows = summarize(usage.records, by, span, person_of)
    total = total_of(usage.records, span)
    if plot is not None:
        _write_plot(Path(plot), usage, span)
    if form == "json":
        print_json({**_facts(usage, span, by), "rows": [row.as_json() for row in rows], "total": total.as_json()})
    elif form == "csv":
        _print_csv(rows, by)
    else:
        title = f"the last {spoken_seconds(since_seconds)}, by {by}"
        cells = [_cells(row) for row in rows]
        if len(rows) > 1:
            cells.append(_cells(total))
        print_table((by, *_COLUMNS), cells, title=title, nothing=f"nothing was used in {title}")
    _say_what_is_missing(usage)
    if plot is not None and form == "table":
        print_line(f"drawn: {plot}")


def _facts(usage: UsageRead, span: Span, by: str) -> dict[str, Any]:
    return {
        "since_seconds": round(span.end - span.begin, 3),
        "by": by,
        "broken_lines": usage.broken_lines,
        "unreadable": usage.unreadable,
    }


def _cells(row: Row) -> list[str]:
    found = row.as_json()
    return [
        row.name,
        str(row.leases),
        f"{found['gpu_hours']:.1f}",
        _idle(row),
        _seconds(found["wait_median_seconds"]),
        _seconds(found["wait_p90_seconds"]),
        str(row.refused or ""),
        str(row.not_served or ""),
    ]


def _idle(row: Row) -> str:
    if row.observed_gpu_seconds <= 0:
        return "?" if row.gpu_seconds else ""
    return f"{row.idle_gpu_seconds / row.observed_gpu_seconds:.0%}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else spoken_seconds(seconds)


def _print_csv(rows: Sequence[Row], by: str) -> None:
    names = [name for name in Row("").as_json() if name != "name"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([by, *names])
    for row in rows:
        # A spreadsheet would read a label that begins like this as a formula.
        name = f"'{row.name}" if row.name[:1] in "=+-@" else row.name
        found = row.as_json()
        writer.writerow([name, *(found[each] for each in names)])


def _write_plot(path: Path, usage: UsageRead, span: Span) -> None:
    course = course_of(usage.records, span, STEPS)
    try:
        path.write_text(draw(course, f"GPUs, the last {spoken_seconds(span.end - span.begin)}"), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


def _say_what_is_missing(usage: UsageRead) -> None:
    if usage.broken_lines:
        what = "1 line" if usage.broken_lines == 1 else f"{usage.broken_lines} lines"
        sys.stderr.write(f"gpu-pool: {what} of the usage files cannot be read, and not counted\n")
    for problem in usage.unreadable:
        sys.stderr.write(f"gpu-pool: {printable(problem)}\n")
