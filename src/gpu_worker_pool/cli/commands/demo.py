"""`gpu-pool demo` shows a dozen workers that share a few GPUs."""

from __future__ import annotations

import click


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool demo
  gpu-pool demo --simulate 2       fewer GPUs, more waiting
  gpu-pool demo | cat              one line per event
"""
)
@click.option(
    "--simulate", type=click.IntRange(1, 64), metavar="N", help="Use N simulated GPUs even if there are real ones."
)
@click.option("--plain", is_flag=True, help="Print one line per event, also on a terminal.")
def demo(*, simulate: int | None, plain: bool) -> int:
    """Start a server, send a dozen workers with different requirements to it, show who gets what and who waits.

    Uses this host's GPUs if it has any, without putting load on them, else five simulated ones, on one of which a
    notebook without a lease sits idle: it is left alone. All files are in a temporary folder that is removed at the
    end. Takes less than 20 seconds.
    """
    from gpu_worker_pool.cli.demo import demonstrate

    return demonstrate(simulate=simulate, is_plain=plain)
