"""`gpu-pool doctor`: what this host needs, what is wrong, and what to do."""

from __future__ import annotations

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.command(
    short_help="Check what this host needs, and say what to do.",
    epilog="""\
\b
Examples:
  gpu-pool doctor
  gpu-pool doctor -e http://gpu-1:8000
  gpu-pool doctor --json | jq '.checks[] | select(.status == "wrong")'
""",
)
@json_option
@endpoint_option
def doctor(*, as_json: bool, endpoints: tuple[str, ...]) -> int:
    """Check the driver, NVML, visible devices, endpoints, versions, clocks, the state directory, keys and settings.

    Changes nothing. The exit status is 1 if something is wrong.
    """
    from gpu_worker_pool.cli.checking.diagnosis import diagnose
    from gpu_worker_pool.cli.output import print_json
    from gpu_worker_pool.cli.tables import print_line, print_table

    findings = diagnose(endpoints)
    is_well = all(finding.status != "wrong" for finding in findings)
    if as_json:
        print_json({"ok": is_well, "checks": [finding._asdict() for finding in findings]})
    else:
        print_table(("", "check", "what"), [[each.status, each.check, each.told] for each in findings])
        wrong = sum(finding.status == "wrong" for finding in findings)
        print_line("all is well" if is_well else f"{wrong} thing{'s' if wrong > 1 else ''} wrong: see above what to do")
    return 0 if is_well else 1
