"""`gpu-pool wait` gets a GPU for the calling shell, until the shell ends."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from gpu_worker_pool.cli.options import json_option, lease_options
from gpu_worker_pool.cli.running.environment import variables_of, visible_devices
from gpu_worker_pool.cli.running.front import Front
from gpu_worker_pool.cli.running.processes import calling_shell
from gpu_worker_pool.hardware.origin import program_of_process, worker_name
from gpu_worker_pool.hardware.proc import process_stat

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress


@click.command(
    epilog="""\
\b
Examples:
  eval "$(gpu-pool wait --export || echo exit)"     ends the script if it gets none
  CUDA_VISIBLE_DEVICES=$(gpu-pool wait) || exit     the bare value, for your own variables
  export CUDA_VISIBLE_DEVICES
  gpu-pool wait --pid 4242                          for a process that is already running

\b
The GPU is released when the shell ends, or with gpu-pool release.
"""
)
@lease_options
@click.option("--pid", type=click.IntRange(1), help="Release it when this process ends.  [default: the calling shell]")
@click.option("--export", is_flag=True, help='Print commands for eval "$(…)" instead of the bare value.')
@json_option
def wait(*, spec: LeaseSpec, progress: Progress, uuids: bool, pid: int | None, export: bool, as_json: bool) -> None:
    """Wait until a GPU is really free, and print the value for CUDA_VISIBLE_DEVICES.

    No other request gets the GPU until the calling shell, or the process --pid, has ended: a process in the
    background renews the lease.
    """
    if sys.__stdout__ is None:
        raise click.UsageError("stdout is closed, so the GPU cannot be printed.")
    if as_json and export:
        raise click.UsageError("--json and --export exclude each other: give only one of them.")
    for_pid = calling_shell() if pid is None else pid
    holding_process = process_stat(for_pid)
    if pid is not None and holding_process is None:
        raise click.UsageError(f"--pid {pid}: there is no such process.")
    worker_id = worker_name(holding_process.command if holding_process else "wait", for_pid)
    program = program_of_process(for_pid)
    front = Front(spec._replace(worker_id=worker_id, program=program, pid=for_pid, for_pid=for_pid), progress)
    granted = front.until_granted()
    variables = variables_of(granted, by_uuid=uuids)
    if spec.is_private:
        variables["GPU_POOL_STATE_DIR"] = os.environ["GPU_POOL_STATE_DIR"]
    if as_json:
        lease = {name: granted[name] for name in ("lease_id", "endpoint", "gpus")}
        click.echo(json.dumps({**lease, "pid": for_pid, "env": variables}, indent=2))
    elif export:
        click.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
    else:
        click.echo(visible_devices(granted, by_uuid=uuids))
    # Only now: a value that could not be printed must not hold a GPU.
    front.lease_process.channel.send("taken")
