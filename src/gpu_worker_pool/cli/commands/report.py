"""`gpu-pool report` says who used how much, how much of it idle, and how long requests waited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpu_worker_pool.cli.options import json_option
from gpu_worker_pool.cli.quantities import Duration

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.report import By


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool report
  gpu-pool report --since 7d --by label
  gpu-pool report --since 30d --by day --csv > month.csv
  gpu-pool report --since 24h --plot day.svg

\b
It reads the usage files beside this host's ledger: what its server granted, and what programs
were granted without a server. Leases that are still held count up to now.
"""
)
@click.option("--since", type=Duration(1.0), default="30d", show_default=True, help="How far back.")
@click.option(
    "--by",
    type=click.Choice(["user", "label", "gpu", "day"]),
    default="user",
    show_default=True,
    help="What to sum up.",
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with one line per row.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE.svg",
    help="Draw GPUs held and requests waiting over time.",
)
def report(*, since: float, by: By, as_json: bool, as_csv: bool, plot: str | None) -> None:
    """Say who used how many GPU hours, how many of them idle, and how long requests waited."""
    from gpu_worker_pool.cli.views.report import print_report

    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give only one of them.")
    print_report(since, by, form="json" if as_json else "csv" if as_csv else "table", plot=plot)
