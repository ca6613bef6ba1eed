"""`gpu-pool explain`: GPU by GPU, why a request waits or would wait."""

from __future__ import annotations

from typing import Any

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option, wish_options


@click.command(
    short_help="Say GPU by GPU why a request would wait.",
    epilog="""\
\b
Examples:
  gpu-pool explain
  gpu-pool explain -n 2 --model A100
  gpu-pool explain --request 5f3a…          one that waits; gpu-pool queue shows the ids
""",
)
@wish_options
@click.option("--request", "request_id", metavar="ID", help="Explain one that waits, instead of wishes.")
@json_option
@endpoint_option
def explain(
    *, requirement_options: dict[str, Any], request_id: str | None, as_json: bool, endpoints: tuple[str, ...]
) -> None:
    """Say for every GPU what keeps it from you: as somebody who asked now would be told.

    Asks for nothing, and takes nobody's place.
    """
    from gpu_worker_pool.cli.output import print_json
    from gpu_worker_pool.cli.views.explanation import explanations, print_explanations

    found = explanations(endpoints, requirement_options, request_id)
    if as_json:
        print_json(found[0].body if len(found) == 1 else {"endpoints": [each.as_json() for each in found]})
    else:
        print_explanations(found)
