"""`gpu-pool explain` says GPU by GPU why a request waits or would wait."""

from __future__ import annotations

from typing import Any

import click

from gpu_worker_pool.cli.completion import complete_request_ids
from gpu_worker_pool.cli.options import endpoint_option, json_option, requirements_options


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool explain
  gpu-pool explain -n 2 --model A100
  gpu-pool explain --request 5f3a…          a waiting request; gpu-pool queue shows the ids
"""
)
@requirements_options
@click.option(
    "--request",
    "request_id",
    metavar="ID",
    shell_complete=complete_request_ids,
    help="Explain this waiting request instead of a new one.",
)
@json_option
@endpoint_option
def explain(
    *, requirement_options: dict[str, Any], request_id: str | None, as_json: bool, endpoints: tuple[str, ...]
) -> None:
    """Say for every GPU why it would not be granted now.

    This makes no request and takes no place in the queue.
    """
    from gpu_worker_pool.cli.output import print_json
    from gpu_worker_pool.cli.views.explanation import explanations, print_explanations

    found = explanations(endpoints, requirement_options, request_id)
    if as_json:
        bodies = [{"endpoint": each.endpoint.endpoint_id, **each.body} for each in found]
        print_json(found[0].body if len(found) == 1 else {"endpoints": bodies})
    else:
        print_explanations(found)
