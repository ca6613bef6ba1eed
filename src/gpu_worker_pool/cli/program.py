"""The program `gpu-pool`: its commands, imported when they are called, and how whatever goes wrong is told."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from gpu_worker_pool._version import __version__
from gpu_worker_pool.cli.failures import CommandError
from gpu_worker_pool.cli.interrupts import die_of_interrupt
from gpu_worker_pool.cli.statuses import KILLED, Status, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Each is `name` in `commands/name.py`, and this is what `--help` says of it.
COMMANDS: Final = {
    "run": "Wait for a GPU, run a command on it, give it back.",
    "wait": "Wait for a GPU for the calling shell.",
    "status": "Show GPUs, who holds them and who waits.",
    "top": "The same, live.",
    "queue": "List who waits, in order, and why.",
    "leases": "List who holds what, and since when.",
    "release": "End a lease, or take a request out of the queue.",
    "explain": "Say GPU by GPU why a request would wait.",
    "serve": "Serve this host's GPUs over HTTP.",
    "doctor": "Check what this host needs, and say what to do.",
    "config": "Show every setting and where it came from.",
    "demo": "See a dozen workers share a few GPUs.",
}

#: A server has a log of its own, and for these another process does what could be logged.
_OWN_LOGS: Final = frozenset({"serve", "demo", "run", "wait"})

EPILOG: Final = """\
\b
Try it without a GPU (GPU_BACKEND=simulated:1 pretends to have one), in two shells:
  export GPU_BACKEND=simulated:1
  gpu-pool run -- sleep 30          the first one gets the GPU
  gpu-pool run -- python train.py   the second one waits, and is told why
  gpu-pool status                   who has it, who waits
  gpu-pool explain                  why one more would wait

\b
Completion: add to ~/.bashrc (zsh and fish: put their name in the place of bash)
  eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"
"""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # the signature is click's
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in COMMANDS:
            return None
        command = getattr(import_module(f"gpu_worker_pool.cli.commands.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1) if args else []
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name="gpu-pool", message="%(prog)s %(version)s")
@click.pass_context
def gpu_pool(context: click.Context) -> None:
    """A GPU that is really free, and nobody else gets it until you are done."""
    if context.invoked_subcommand not in _OWN_LOGS:
        from gpu_worker_pool.cli.logs import configure_logs

        configure_logs()


def run_program(arguments: Sequence[str]) -> int:
    """The exit status. Whatever goes wrong is told in a sentence; `GPU_POOL_DEBUG=1` shows where."""
    try:
        status = gpu_pool.main(args=list(arguments), prog_name="gpu-pool", standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CommandError as error:
        return error.tell()
    except (click.Abort, KeyboardInterrupt):
        return die_of_interrupt()
    except BrokenPipeError:
        # Whoever read has enough. Nothing more may be written, not by the interpreter's end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return KILLED + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("GPU_POOL_DEBUG"):
            raise
        return _told(error)
    return status if isinstance(status, int) else 0


def _told(error: Exception) -> int:
    from gpu_worker_pool.errors import GPUWorkerPoolError

    if isinstance(error, GPUWorkerPoolError):
        told = CommandError(str(error), status_of(error))
    elif isinstance(error, OSError):
        told = CommandError(str(error), Status.FAILED)
    else:
        told = CommandError(
            f"this is a fault of gpu-pool itself ({type(error).__name__}: {error}); GPU_POOL_DEBUG=1 shows where",
            Status.BUG,
        )
    return told.tell()
