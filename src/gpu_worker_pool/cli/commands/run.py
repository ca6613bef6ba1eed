"""`gpu-pool run` waits for a GPU, runs a command on it, and releases it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from gpu_worker_pool.cli.options import lease_options
from gpu_worker_pool.cli.running.command import CommandOnGPU, check_command
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec, worker_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gpu_worker_pool.cli.running.progress import Progress


def _complete_command(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Like a shell: a program first, then files."""
    from click.shell_completion import CompletionItem

    if context.params.get("command") or "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    found = set()
    for folder in os.get_exec_path():
        with suppress(OSError), os.scandir(folder) as entries:
            found |= {each.name for each in entries if each.name.startswith(incomplete) and os.access(each, os.X_OK)}
    return [CompletionItem(name) for name in sorted(found)]


@click.command(
    # Options behind the command belong to the command.
    context_settings={"allow_interspersed_args": False},
    epilog="""\
\b
Examples:
  gpu-pool run -- python train.py
  gpu-pool run -n 2 --model A100 -- torchrun --nproc-per-node 2 train.py
  gpu-pool run --memory 8GiB --share -- python serve.py
  gpu-pool run --timeout 30m --label "nightly" -- make experiment
  gpu-pool run --no-wait -- nvidia-smi || echo "nothing free (status $?)"

\b
Exit status: the command's own, 128+N if signal N killed it, 126 or 127 if it cannot be run;
65 if the request can never be granted, 69 if no endpoint answered, 75 if nothing is free now
(--no-wait), 124 if it was not granted in time (--timeout).
""",
)
@lease_options
@click.option(
    "--on-lost",
    type=click.Choice(["warn", "terminate"]),
    default="warn",
    show_default=True,
    help="What to do with the command if its lease is lost.",
)
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND [ARGUMENT]...",
    shell_complete=_complete_command,
)
def run(*, spec: LeaseSpec, progress: Progress, uuids: bool, on_lost: str, command: tuple[str, ...]) -> int:
    """Wait until a GPU is really free, run COMMAND on it, and release it.

    CUDA_VISIBLE_DEVICES shows COMMAND this GPU and no other. No other request gets the GPU until COMMAND has ended.
    While it waits, the place in the queue and the reason are printed on stderr.
    """
    check_command(command)
    spec = spec._replace(worker_id=worker_name(command[0]))
    return CommandOnGPU(command, spec, progress, by_uuid=uuids, terminates_when_lost=on_lost == "terminate").run()
