"""The click program `gpu-pool`: imports commands when they are called, and turns errors into messages and statuses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from gpu_worker_pool._version import __version__
from gpu_worker_pool.cli.exits import die_of_interrupt, status_after

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Each is in `commands/<name>.py`; with its line in `--help`.
COMMANDS: Final = {
    "run": "Wait for a GPU, run a command on it, release it.",
    "map": "Run a command for each of many arguments, each on a GPU.",
    "wait": "Wait for a GPU for the calling shell.",
    "status": "Show GPUs, who holds them and who waits.",
    "top": "The same as status, live.",
    "queue": "List waiting requests in order, with the reasons.",
    "leases": "List leases: who holds which GPU, and since when.",
    "release": "End a lease, or take a request out of the queue.",
    "report": "Say who used how many GPU hours, and how long requests waited.",
    "yield": "Ask the holder of a lease to give it back.",
    "keep": "Say that a lease is still needed, although its GPU is idle.",
    "explain": "Say GPU by GPU why a request would wait.",
    "setup": "Let all users of this host share its GPUs (as root).",
    "serve": "Serve this host's GPUs over HTTP.",
    "fleet": "Set up a fleet of several hosts with one queue, and administer its hosts.",
    "cert": "Make a TLS certificate for a server, or show its fingerprint.",
    "doctor": "Check this host and its endpoints, and say how to fix problems.",
    "config": "Show every setting and where it came from.",
    "simulate": "Show what other rules, or more GPUs, would do to a recorded workload.",
    "demo": "Show a dozen workers that share a few GPUs.",
}

#: Commands whose name is a keyword of Python.
_MODULES: Final = {"yield": "ask_back"}
#: A server configures its own log; for the others, what could be logged happens in another process.
_OWN_LOGS: Final = frozenset({"serve", "demo", "run", "map", "wait"})

EPILOG: Final = """\
\b
Try it without a GPU (GPU_BACKEND=simulated:1 simulates one), in two shells:
  export GPU_BACKEND=simulated:1
  gpu-pool run -- sleep 30          the first one gets the GPU
  gpu-pool run -- python train.py   the second one waits, and says why
  gpu-pool status                   who holds it, who waits
  gpu-pool explain                  why one more request would wait

\b
Completion: add to ~/.bashrc (for zsh or fish, replace bash)
  eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"
"""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # the signature is click's
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in COMMANDS:
            return None
        module = _MODULES.get(name, name)
        command: click.Command = getattr(import_module(f"gpu_worker_pool.cli.commands.{module}"), module)
        command.short_help = COMMANDS[name]
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
    cls=_Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, "-V", "--version", prog_name="gpu-pool", message="%(prog)s %(version)s")
@click.pass_context
def gpu_pool(context: click.Context) -> None:
    """Get a GPU that is really free, and keep it until you are done."""
    if context.invoked_subcommand not in _OWN_LOGS:
        from gpu_worker_pool.cli.logs import configure_logs

        configure_logs()


def run_program(arguments: Sequence[str]) -> int:
    """Returns the exit status; errors are printed."""
    return status_after(lambda: _parse_and_run(arguments))


def _parse_and_run(arguments: Sequence[str]) -> int:
    try:
        status = gpu_pool.main(args=list(arguments), prog_name="gpu-pool", standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return die_of_interrupt()
    return status if isinstance(status, int) else 0
