"""`gpu-pool doctor` checks this host and its endpoints, and says how to fix problems."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool doctor
  gpu-pool doctor -e http://gpu-1:8000
  gpu-pool doctor --json | jq '.checks[] | select(.status == "wrong")'
"""
)
@json_option
@endpoint_option
def doctor(*, as_json: bool, endpoints: tuple[str, ...]) -> int:
    """Check the driver, NVML, visible devices, endpoints, versions, clocks, the state directory, keys and settings.

    Changes nothing. The exit status is 1 if there is a problem.
    """
    from gpu_worker_pool.cli.checking.diagnosis import diagnose
    from gpu_worker_pool.cli.output import print_json, print_line
    from gpu_worker_pool.cli.tables import print_table

    findings = diagnose(endpoints)
    is_well = all(finding.status != "wrong" for finding in findings)
    if as_json:
        print_json({"ok": is_well, "checks": [finding._asdict() for finding in findings]})
    else:
        print_table(("", "check", "what"), [[each.status, each.check, each.text] for each in findings])
        wrong = sum(finding.status == "wrong" for finding in findings)
        print_line("all is well" if is_well else f"{wrong} problem{'s' if wrong > 1 else ''}: see above")
    return 0 if is_well else 1
