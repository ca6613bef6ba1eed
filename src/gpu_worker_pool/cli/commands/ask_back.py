"""`gpu-pool yield` asks the holder of a lease to give it back."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.completion import complete_ids
from gpu_worker_pool.cli.options import endpoint_option, is_text_for_others


@click.command(
    "yield",
    epilog="""\
\b
Examples:
  gpu-pool yield lease-12
  gpu-pool yield lease-12 --reason "a demo at 3 pm"

\b
The holder learns of it when it renews its lease, within a third of the TTL: gpu-pool run prints
it, and does what --on-yield says; in Python on_yield_asked is called. No holder is forced.
""",
)
@click.argument("identifiers", metavar="LEASE...", nargs=-1, required=True, shell_complete=complete_ids)
@click.option("--reason", metavar="TEXT", help="Shown to the holder.")
@endpoint_option
def ask_back(*, identifiers: tuple[str, ...], reason: str | None, endpoints: tuple[str, ...]) -> int:
    """Ask holders to give their GPUs back; gpu-pool leases shows the ids."""
    from gpu_worker_pool.cli.views.asking import ask_holders

    if reason is not None and not is_text_for_others(reason):
        raise click.UsageError("--reason must be at most 200 characters, all of them printable.")
    return ask_holders(endpoints, identifiers, reason)
