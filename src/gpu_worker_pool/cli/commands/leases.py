"""`gpu-pool leases` lists who holds which GPU, and since when."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool leases
  gpu-pool leases --json | jq -r '.leases[] | select(.is_idle) | .lease_id'
"""
)
@json_option
@endpoint_option
def leases(*, as_json: bool, endpoints: tuple[str, ...]) -> None:
    """List all leases: who holds which GPU, since when, how much memory is reserved and how much is used."""
    from gpu_worker_pool.cli.views.lists import print_list

    print_list("leases", endpoints, as_json=as_json)
