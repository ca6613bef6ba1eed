"""`gpu-pool wait`: a GPU for the calling shell, for as long as that lives."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option, lease_options, wish_options
from gpu_worker_pool.cli.running.environment import lease_variables, visible_devices
from gpu_worker_pool.cli.running.front import Front, InterruptedBySignal, end_like
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec, worker_name
from gpu_worker_pool.cli.running.processes import calling_shell
from gpu_worker_pool.cli.running.progress import Progress
from gpu_worker_pool.proc import process_stat

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import Patience


@click.command(
    short_help="Wait for a GPU for the calling shell.",
    epilog="""\
\b
Examples:
  eval "$(gpu-pool wait --export || echo exit)"     ends the script if there is none
  CUDA_VISIBLE_DEVICES=$(gpu-pool wait) || exit     the bare value, for your own variables
  export CUDA_VISIBLE_DEVICES
  gpu-pool wait --pid 4242                          for a process that is there already

\b
The GPU is given back when the shell ends, or with gpu-pool release.
""",
)
@wish_options
@lease_options
@click.option("--pid", type=click.IntRange(1), help="Whose end gives the GPU back.  [default: the calling shell]")
@click.option("--uuids", is_flag=True, help="Name GPUs by UUID instead of by number.")
@click.option("--export", is_flag=True, help='Print commands for eval "$(…)" instead of the bare value.')
@click.option("--explain", "with_reasons", is_flag=True, help="While waiting, say GPU by GPU why.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing while waiting.")
@json_option
@endpoint_option
def wait(
    *,
    requirement_options: dict[str, Any],
    patience: Patience,
    label: str | None,
    ttl: float | None,
    pid: int | None,
    uuids: bool,
    export: bool,
    with_reasons: bool,
    quiet: bool,
    as_json: bool,
    endpoints: tuple[str, ...],
) -> int:
    """Wait until a GPU is really free, and print the value for CUDA_VISIBLE_DEVICES.

    Nobody else who asks gets the GPU until the calling shell, or the process --pid, has ended: a process in the
    background keeps it.
    """
    if sys.__stdout__ is None:
        raise click.UsageError("stdout is closed: nobody would know which GPU it is.")
    if as_json and export:
        raise click.UsageError("--json and --export contradict each other: give one of them.")
    if pid is not None and process_stat(pid) is None:
        raise click.UsageError(f"--pid {pid}: there is no such process.")
    for_pid = calling_shell() if pid is None else pid
    holder = process_stat(for_pid)
    asked = LeaseSpec(
        requirement_options,
        patience,
        endpoints,
        worker_name(holder.command if holder else "wait", for_pid),
        label,
        ttl,
        for_pid,
    )
    front = Front(asked, Progress(is_wanted=not quiet, with_reasons=with_reasons))
    try:
        granted = front.until_granted()
    except InterruptedBySignal as interrupted:
        return end_like(interrupted.info)
    variables = lease_variables(granted, by_uuid=uuids)
    if as_json:
        told = {name: granted[name] for name in ("lease_id", "endpoint", "gpus")}
        click.echo(json.dumps({**told, "pid": for_pid, "env": variables}, indent=2))
    elif export:
        click.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
    else:
        click.echo(visible_devices(granted, by_uuid=uuids))
    # Only now: a value that nobody got must not keep a GPU.
    front.lease_process.send("taken")
    return 0
