"""`gpu-pool simulate` says what other rules, or more GPUs, would have done to the waits of a workload."""

from __future__ import annotations

import csv
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.cli.options import json_option
from gpu_worker_pool.cli.output import print_json, print_line
from gpu_worker_pool.cli.quantities import Duration, spoken_seconds
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.settings import FAIR_SHARE_HALF_LIFE_SECONDS, Strategy
from gpu_worker_pool.errors import PolicyError
from gpu_worker_pool.simulation.comparison import ASKED, NAMES, Rules, Schedule, compare
from gpu_worker_pool.simulation.files import WorkloadError, read_workloads
from gpu_worker_pool.simulation.plot import draw
from gpu_worker_pool.simulation.policies import read_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpu_worker_pool.simulation.workload import Job

STARTS_COLUMNS = ("request", "arrival_seconds", "start_seconds", "end_seconds", "host", "gpus")
#: The width of the progress bar.
_BAR = 30


class _HalfLife(Duration):
    name = "OFF|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return 0.0 if value == "off" else super().convert(value, param, ctx)


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool simulate jobs.csv --hosts 2 --gpus-per-host 4
  gpu-pool simulate jobs.csv --add-gpus 2            would two more cards help,
  gpu-pool simulate jobs.csv --strategy pack         or a better rule?
  gpu-pool simulate jobs.swf --load 0.6 --fair-share 1d --json
  gpu-pool simulate /var/lib/gpu-pool/usage-real-v1.jsonl --hosts 1 --policy new.toml

\b
FILE is CSV with the columns arrival_seconds, duration_seconds, gpus, account and, if times are
declared, expected_seconds; SWF; or what this host has recorded. Several files are combined.
"""
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--hosts", type=click.IntRange(1, 100_000), default=8, show_default=True, metavar="N", help="Hosts.")
@click.option(
    "--gpus-per-host", type=click.IntRange(1, 1024), default=8, show_default=True, metavar="N", help="GPUs of each."
)
@click.option("--add-gpus", type=click.IntRange(0, 100_000), default=0, metavar="N", help="Add this many GPUs.")
@click.option(
    "--strategy",
    type=click.Choice(get_args(Strategy)),
    default="pack",
    show_default=True,
    help="Which host serves a request.",
)
@click.option(
    "--fair-share",
    type=_HalfLife(1.0),
    default="off",
    show_default=True,
    help="The half-life of an account's use.",
)
@click.option(
    "--load",
    type=click.FloatRange(0, 100, min_open=True),
    metavar="PART",
    help="Stretch or compress the arrivals until the jobs need this part of the GPUs' time.  [default: as in the file]",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With the limits of this policy file.  [default: no limits]",
)
@click.option(
    "--starts", type=click.Path(path_type=Path), metavar="FILE", help="Write when and where each job began, as CSV."
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw GPUs in use and waiting requests."
)
@json_option
def simulate(
    *,
    files: Sequence[Path],
    hosts: int,
    gpus_per_host: int,
    add_gpus: int,
    strategy: Strategy,
    fair_share: float,
    load: float | None,
    policy: Path | None,
    starts: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Schedule a recorded workload as the pool would, and compare the waits.

    Beside the pool as asked for: the pool as it is configured (GPU_LOAD_BALANCING_STRATEGY, fair share with a half-life
    of one day), without added GPUs; strict first come, first served; and EASY backfill that knows every run time in
    advance, which nobody does. The waits are those of users who never react to them: compare rules by them, do not
    believe hours.
    """
    jobs, skipped = _read(files)
    try:
        asked = Rules(strategy, fair_share or None, None if policy is None else read_policy(policy))
    except PolicyError as error:
        raise CommandError(str(error), Status.USAGE) from None
    configured = Rules(MultiEndpointConfigurationManager().get_load_balancing_strategy(), FAIR_SHARE_HALF_LIFE_SECONDS)
    with _progress() as on_progress:
        found = compare(
            jobs,
            hosts=hosts,
            gpus_per_host=gpus_per_host,
            add_gpus=add_gpus,
            load=load,
            asked=asked,
            configured=configured,
            on_progress=on_progress,
        )
    if as_json:
        print_json(
            {
                "jobs": len(jobs),
                "lines_skipped": skipped,
                "hosts": hosts,
                "gpus_per_host": gpus_per_host,
                "added_gpus": add_gpus,
                "schedules": {NAMES[name]: each.measures() for name, each in found.items()},
            }
        )
    else:
        _print(found, skipped, is_limited=policy is not None)
    # Afterwards: what was computed for minutes is shown also if a file cannot be written.
    for path, write in ((starts, _write_starts), (plot, _write_plot)):
        if path is not None:
            try:
                write(path, found)
            except OSError as error:
                raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    return 0


def _read(files: Sequence[Path]) -> tuple[list[Job], int]:
    try:
        found = read_workloads(files)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}", Status.USAGE) from None
    except WorkloadError as error:
        raise CommandError(str(error), Status.USAGE) from None
    return found.jobs, found.skipped


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, nothing elsewhere."""
    is_shown = sys.stderr.isatty()

    def show(name: str, part: float) -> None:
        if is_shown:
            full = round(part * _BAR)
            sys.stderr.write(f"\r\x1b[K[{'#' * full}{' ' * (_BAR - full)}] {part * 100:3.0f} %  {name}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _write_starts(path: Path, found: dict[str, Schedule]) -> None:
    """One line per job of the pool as asked for; empty where it could never begin."""
    schedule = found[ASKED]
    rows = sorted(zip(schedule.jobs, schedule.starts, strict=True), key=lambda row: row[0].number)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(STARTS_COLUMNS)
        for job, start in rows:
            when: tuple[object, ...] = ("", "", "")
            if start is not None:
                when = (start.seconds, start.seconds + job.duration_seconds, start.host)
            writer.writerow((job.number, job.arrival_seconds, *when, job.gpus))


def _write_plot(path: Path, found: dict[str, Schedule]) -> None:
    path.write_text(draw({name: (each.jobs, each.starts, each.gpus) for name, each in found.items()}), encoding="utf-8")


def _print(found: dict[str, Schedule], skipped: int, *, is_limited: bool) -> None:
    measured = {name: each.measures() for name, each in found.items()}

    def wait(part: dict[str, float | None], which: str) -> str:
        seconds = part[which]
        return "-" if seconds is None else spoken_seconds(seconds)

    def row(name: str, cells: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(cells(each) for each in measured.values())]

    first = measured[ASKED]
    rows = [
        row(f"{which} wait", lambda each, which=which: wait(each["wait_seconds"], which))  # type: ignore[misc]
        for which in ("mean", "median", "p90", "p99")
    ]
    for size in first["wait_seconds_by_gpus"]:
        what = f"mean wait, {size} GPU{'' if size == '1' else 's'}"
        rows.append(row(what, lambda each, size=size: wait(each["wait_seconds_by_gpus"][size], "mean")))  # type: ignore[misc]
    accounts = first["wait_seconds_by_account"]
    shown = sorted(accounts, key=lambda account: -sum(job.account == account for job in found[ASKED].jobs))[:8]
    for account in shown if len(accounts) > 1 else ():
        what = f"mean wait, {account or 'no account'}"
        rows.append(
            row(what, lambda each, account=account: wait(each["wait_seconds_by_account"][account], "mean"))  # type: ignore[misc]
        )
    rows += [
        row("bounded slowdown", lambda each: _number(each["bounded_slowdown"])),
        row("utilization", lambda each: _percent(each["utilization"])),
        row("GPU hours idle while a job waits", lambda each: f"{each['idle_gpu_seconds_while_waiting'] / 3600:.0f}"),
        row("most often overtaken", lambda each: str(each["most_overtaken"])),
        row("fairness between accounts (Jain)", lambda each: _number(each["fairness"])),
        row("GPUs", lambda _: ""),
    ]
    rows[-1] = ["GPUs", *(str(each.gpus) for each in found.values())]
    print_table(("what", *found), rows)
    if skipped:
        print_line(f"lines without a job that ran, which were left out: {skipped}")
    if never := first["never_started"]:
        why = "the policy allows, or a host has" if is_limited else "a host has"
        print_line(f"jobs that ask for more than {why}, and were left out: {never}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
