"""`gpu-pool top` shows what `status` does, live."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option
from gpu_worker_pool.cli.quantities import Duration


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool top
  gpu-pool top --interval 5s
  gpu-pool top --count 3 > seen.txt    three updates, as plain text
"""
)
@click.option("--interval", type=Duration(0.2, 3600.0), default="1s", show_default=True, help="Time between updates.")
@click.option("-n", "--count", type=click.IntRange(1), metavar="N", help="Number of updates.  [default: until Ctrl-C]")
@json_option
@endpoint_option
def top(*, interval: float, count: int | None, as_json: bool, endpoints: tuple[str, ...]) -> None:
    """Show the GPUs, who holds them and who waits, and keep it up to date until Ctrl-C.

    Without a terminal it prints plain text at every interval; with --json, one line of JSON.
    """
    from gpu_worker_pool.cli.views.live import show_live

    show_live(endpoints, interval, count, as_json=as_json)
