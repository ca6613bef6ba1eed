"""`gpu-pool release` ends a lease, or takes a request out of the queue."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.completion import complete_ids
from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool release lease-12
  GPU_POOL_ADMIN_KEY=… gpu-pool release lease-12 -e https://gpu-1.example.org

\b
The holder keeps running and is informed that its lease is lost; gpu-pool run --on-lost terminate
ends the command then. When a command ends, its GPU is released automatically.
"""
)
@click.argument("identifiers", metavar="ID...", nargs=-1, required=True, shell_complete=complete_ids)
@json_option
@endpoint_option
def release(*, identifiers: tuple[str, ...], as_json: bool, endpoints: tuple[str, ...]) -> int:
    """End leases, or take requests out of the queue; gpu-pool leases and gpu-pool queue show their ids.

    You can release your own; root, or an administrator's key in GPU_POOL_ADMIN_KEY, can release all, and quarantines.
    """
    from gpu_worker_pool.cli.output import print_json, printable
    from gpu_worker_pool.cli.views.release import release_all

    outcomes = release_all(endpoints, identifiers)
    if as_json:
        print_json({"released": [outcome.as_json() for outcome in outcomes]})
    else:
        for outcome in outcomes:
            click.echo(printable(str(outcome)), err=not outcome.is_done)
    return next((int(outcome.status) for outcome in outcomes if not outcome.is_done), 0)
