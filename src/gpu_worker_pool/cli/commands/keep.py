"""`gpu-pool keep` says that a lease is still needed, although its GPU is idle."""

from __future__ import annotations

import os

import click

from gpu_worker_pool.cli.completion import complete_ids
from gpu_worker_pool.cli.options import endpoint_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool keep lease-12
  gpu-pool keep               inside gpu-pool run: the lease it runs in

\b
The GPU counts as used now: the idle time of the policy starts again.
"""
)
@click.argument("identifiers", metavar="[LEASE]...", nargs=-1, shell_complete=complete_ids)
@endpoint_option
def keep(*, identifiers: tuple[str, ...], endpoints: tuple[str, ...]) -> int:
    """Say that leases of yours are still needed, although their GPUs are idle."""
    from gpu_worker_pool.cli.views.asking import keep_leases

    names = identifiers or tuple(filter(None, [os.environ.get("GPU_POOL_LEASE_ID", "").strip()]))
    if not names:
        raise click.UsageError("name a lease, as gpu-pool leases lists them; inside gpu-pool run none is needed.")
    return keep_leases(endpoints, names)
