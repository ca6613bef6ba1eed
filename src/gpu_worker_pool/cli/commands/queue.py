"""`gpu-pool queue` lists the waiting requests, in order, with the reasons."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool queue
  gpu-pool queue --json | jq '.queue | length'
"""
)
@json_option
@endpoint_option
def queue(*, as_json: bool, endpoints: tuple[str, ...]) -> None:
    """List the waiting requests in the order in which they will be served, and what each waits for."""
    from gpu_worker_pool.cli.views.lists import print_list

    print_list("queue", endpoints, as_json=as_json)
