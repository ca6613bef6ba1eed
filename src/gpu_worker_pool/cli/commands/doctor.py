"""`gpu-pool doctor` checks this host and its endpoints, and says how to fix problems."""

from __future__ import annotations

from collections import Counter

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
        counts = Counter(finding.status for finding in findings)
        found = [_counted(counts["wrong"], "problem"), _counted(counts["warning"], "warning")]
        print_line(f"{', '.join(filter(None, found))}: see above" if any(found) else "all is well")
    return 0 if is_well else 1


def _counted(number: int, what: str) -> str:
    return "" if number == 0 else f"{number} {what}{'s' if number > 1 else ''}"
