"""`gpu-pool run` waits for a GPU, runs a command on it, and releases it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from gpu_worker_pool.cli.options import lease_options
from gpu_worker_pool.cli.running.command import CommandOnGPU, check_command
from gpu_worker_pool.cli.running.environment import named_variables
from gpu_worker_pool.hardware.origin import program_of_command, worker_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress

    # Older versions of click have no types for these.
    _Action = click.ParamType[int | None]
else:
    _Action = click.ParamType


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


class _RunCommand(click.Command):
    """`--ssh` has a value only after `=`: in `run --ssh python train.py` the next word is the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_explicit_values(args))

    def _with_explicit_values(self, words: list[str]) -> list[str]:
        takes_value = {
            name for each in self.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        found = list(words)
        position = 0
        while position < len(found) and found[position].startswith("-") and found[position] != "--":
            word = found[position]
            if word == "--ssh":
                found[position] = "--ssh="
            elif word in takes_value or (word[1] != "-" and _ends_with_option(word, takes_value)):
                position += 1
            position += 1
        return found


def _ends_with_option(word: str, takes_value: set[str]) -> bool:
    """Whether the last letter of `-qn` needs the next word; in `-n2` it is a value."""
    first = next((index for index, letter in enumerate(word) if f"-{letter}" in takes_value), None)
    return first == len(word) - 1


class YieldAction(_Action):
    """The signal that the command gets; None: none."""

    name = "ACTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "ignore" or not isinstance(value, str):
            return None if value == "ignore" else value
        if value == "terminate":
            return signal.SIGTERM
        name = value.removeprefix("signal=").upper().removeprefix("SIG")
        found = getattr(signal, f"SIG{name}", None) if value.startswith("signal=") and name.isalnum() else None
        if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP):
            self.fail(f"{value!r} is not terminate, ignore, or signal= with a name such as signal=USR1.", param, ctx)
        return int(found)


@click.command(
    cls=_RunCommand,
    # Options behind the command belong to the command.
    context_settings={"allow_interspersed_args": False},
    epilog="""\
\b
Examples:
  gpu-pool run -- python train.py
  gpu-pool run -n 2 --model A100 -- torchrun --nproc-per-node 2 train.py
  gpu-pool run --memory 8GiB --share -- python serve.py
  gpu-pool run --timeout 30m --label "nightly" -- make experiment
  gpu-pool run -e http://gpu-1:8000 --ssh -- python train.py
  gpu-pool run --no-wait -- nvidia-smi || echo "nothing free (status $?)"

\b
Exit status: the command's own, 128+N if signal N killed it, 126 or 127 if it cannot be run;
65 if the request can never be granted, 69 if no endpoint answered or the connection of --ssh
failed, 75 if nothing is free now (--no-wait), 77 if you may not use the shared ledger, 124 if it
was not granted in time (--timeout).
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
@click.option(
    "--on-yield",
    type=YieldAction(),
    default="ignore",
    show_default=True,
    metavar="terminate|ignore|signal=NAME",
    help="What to do if another user asks for the GPU back: send the command a signal, or only print a message.",
)
@click.option("--notify", metavar="CMD", help="When the GPU is granted, run CMD with a shell; nothing waits for it.")
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND [ARGUMENT]...",
    shell_complete=_complete_command,
)
@click.option(
    "--ssh",
    metavar="[=USER@HOST]",
    help="If the GPU is on another host, run COMMAND there, by ssh.  [default host: the endpoint's]",
)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Pass this variable on with --ssh; or set it."
)
def run(
    *,
    spec: LeaseSpec,
    progress: Progress,
    uuids: bool,
    on_lost: str,
    on_yield: int | None,
    notify: str | None,
    command: tuple[str, ...],
    ssh: str | None,
    variables: tuple[str, ...],
) -> int:
    """Wait until a GPU is really free, run COMMAND on it, and release it.

    CUDA_VISIBLE_DEVICES shows COMMAND this GPU and no other. No other request gets the GPU until COMMAND has ended.
    While it waits, the place in the queue and the reason are printed on stderr.
    """
    run_command: type[CommandOnGPU] = CommandOnGPU
    try:
        more_variables = named_variables(variables)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    if ssh is None:
        check_command(command)
    else:
        run_command = _check_ssh(ssh, is_here=spec.is_here)
    spec = spec._replace(
        worker_id=worker_name(command[0]), program=program_of_command(command), pid=os.getpid(), ssh_target=ssh
    )
    return run_command(
        command,
        spec,
        progress,
        by_uuid=uuids,
        terminates_when_lost=on_lost == "terminate",
        yield_signal=on_yield,
        notify=notify,
        more_variables=more_variables,
    ).run()


def _check_ssh(target: str, *, is_here: bool) -> type[CommandOnGPU]:
    from gpu_worker_pool.cli.running.remote_command import CommandOverSSH
    from gpu_worker_pool.cli.running.ssh import check_target, ssh_program

    if is_here:
        raise click.UsageError("--ssh and --here exclude each other: give only one of them.")
    if target:
        try:
            check_target(target)
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    ssh_program()
    return CommandOverSSH
