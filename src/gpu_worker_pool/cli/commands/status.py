"""`gpu-pool status` shows GPUs, who holds them and who waits."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool status
  gpu-pool status --json | jq '.endpoints[].gpus[] | {gpu_id, utilization_percent}'
  gpu-pool status -e http://gpu-1:8000 -e http://gpu-2:8000
"""
)
@json_option
@endpoint_option
def status(*, as_json: bool, endpoints: tuple[str, ...]) -> None:
    """Show the GPUs, what they do, who holds them since when, how much was promised and is used, and who waits."""
    from gpu_worker_pool.cli.output import print_json
    from gpu_worker_pool.cli.views import overview
    from gpu_worker_pool.cli.views.queries import check_answers, query_any

    answers = query_any(endpoints, overview.everything_of, is_every_host=True)
    if as_json:
        print_json(overview.as_json(answers))
    check_answers(answers)
    if not as_json:
        overview.print_parts(answers)
