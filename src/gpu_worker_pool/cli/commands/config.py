"""`gpu-pool config` shows every setting, where it came from, and any problem."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool config
  gpu-pool config --changed            only what differs from the default
  gpu-pool config --json | jq '.settings[] | select(.problem)'
"""
)
@click.option("--changed", is_flag=True, help="Only settings that are not at their default.")
@json_option
def config(*, changed: bool, as_json: bool) -> int:
    """Show every setting: its value, where it came from, what uses it, and any problem.

    Keys are never shown. The exit status is 1 if there is a problem.
    """
    from dataclasses import asdict

    from gpu_worker_pool.cli.checking.settings_list import all_settings
    from gpu_worker_pool.cli.output import print_json
    from gpu_worker_pool.cli.tables import print_table

    settings = [each for each in all_settings() if not changed or each.source != "default" or each.problem]
    if as_json:
        print_json({"settings": [asdict(each) for each in settings]})
    else:
        rows = [[each.name, each.value, each.source, each.used_by, each.problem or ""] for each in settings]
        print_table(("setting", "value", "from", "used by", "problem"), rows, nothing="everything is at its default")
    return 1 if any(each.problem for each in settings) else 0
