"""`gpu-pool demo`: a dozen workers share a few GPUs, and one of them is killed."""

from __future__ import annotations

import click


@click.command(
    short_help="See a dozen workers share a few GPUs.",
    epilog="""\
\b
Examples:
  gpu-pool demo
  gpu-pool demo --simulate 2       with fewer GPUs there is more to wait for
  gpu-pool demo | cat              plain lines, as in a log
""",
)
@click.option(
    "--simulate", type=click.IntRange(1, 64), metavar="N", help="Pretend to have so many GPUs, whatever is there."
)
@click.option("--plain", is_flag=True, help="One line for everything that happens, also on a terminal.")
def demo(*, simulate: int | None, plain: bool) -> int:
    """Start a server, send a dozen workers with different wishes to it, and show who gets what, who waits and why.

    Uses this host's GPUs if it has any, without putting load on them, else four pretended ones. Everything it makes
    is in a temporary folder, and gone afterwards. Takes less than 20 seconds.
    """
    from gpu_worker_pool.cli.demo.demonstration import demonstrate

    return demonstrate(simulate=simulate, is_plain=plain)
