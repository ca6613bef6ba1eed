"""`gpu-pool map` runs a command once for each argument, each on a GPU of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_worker_pool.cli.mapping.front import MapFront
from gpu_worker_pool.cli.mapping.halt import Halt
from gpu_worker_pool.cli.mapping.outputs import Outputs
from gpu_worker_pool.cli.mapping.states import States
from gpu_worker_pool.cli.mapping.words import SEPARATOR, arguments_of_lines, has_placeholder, jobs_of, split_words
from gpu_worker_pool.cli.options import lease_options
from gpu_worker_pool.cli.running.command import check_command
from gpu_worker_pool.hardware.origin import program_of_command, worker_name

if TYPE_CHECKING:
    from gpu_worker_pool.cli.mapping.words import JobWords
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress


class _HaltType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    name = "when"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return Halt.parse(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


@click.command(
    name="map",
    # Options behind the command belong to the command.
    context_settings={"allow_interspersed_args": False},
    epilog="""\
\b
Examples:
  gpu-pool map -- python train.py --seed {} ::: 1 2 3
  gpu-pool map -j 2 --log-dir logs -- python train.py --lr {1} --seed {2} ::: 0.1 0.01 ::: 1 2 3
  ls configs/*.yaml | gpu-pool map --retries 1 -- python train.py --config {}
  gpu-pool map --memory 8GiB --share -j 16 -- python evaluate.py ::: $(seq 100)

\b
Exit status: the worst of the jobs' own, 0 if all are done; 128+N if signal N ended gpu-pool;
65, 69, 75, 77 and 124 as of gpu-pool run, if there was no GPU.
""",
)
@lease_options
@click.option(
    "-j",
    "--jobs",
    "most_jobs",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Run at most N jobs at once.  [default: one on each GPU that it can get]",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also keep the output of each job, as N.out and N.err in this folder.",
)
@click.option("--retries", type=click.IntRange(0, 1000), default=0, metavar="N", help="Try a failed job N times more.")
@click.option(
    "--halt",
    type=_HaltType(),
    default="never",
    metavar="WHEN",
    help="Stop early, as soon,fail=1 (start no more jobs) or now,fail=10% (also end those that run).  [default: never]",
)
@click.option(
    "--on-lost",
    type=click.Choice(["warn", "terminate"]),
    default="warn",
    show_default=True,
    help="What to do with a job if its lease is lost.",
)
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENT]... [::: ARGUMENT...]"
)
@click.pass_context
def map(  # noqa: A001  # the name of the command
    context: click.Context,
    *,
    spec: LeaseSpec,
    progress: Progress,
    uuids: bool,
    most_jobs: int | None,
    log_dir: Path | None,
    retries: int,
    halt: Halt | None,
    on_lost: str,
    words: tuple[str, ...],
) -> int:
    """Run COMMAND once for each argument, each job with a GPU to itself.

    Arguments are given after ::: or on stdin, one per line. {} in COMMAND is replaced by the argument; without it, the
    argument is appended. After several ::: each combination is a job, and {1} is the argument after the first of them.
    {#} is the number of the job. The stdout of each job is written in one piece when it ends; on stderr are the states
    of the jobs and a summary. A GPU is kept from one job to the next.
    """
    jobs = _jobs(words)
    command = jobs[0].command
    if not has_placeholder(words[0]):
        check_command(command)
    spec = spec._replace(
        worker_id=worker_name(command[0]),
        program=program_of_command(command),
        pid=os.getpid(),
        most_leases=min(most_jobs or len(jobs), len(jobs)),
    )
    outputs = Outputs(log_dir)
    is_quiet = bool(context.params.get("quiet"))
    return MapFront(
        jobs,
        spec,
        progress,
        States(progress, is_quiet=is_quiet),
        outputs,
        retries=retries,
        halt=halt,
        by_uuid=uuids,
        terminates_when_lost=on_lost == "terminate",
    ).run()


def _jobs(words: tuple[str, ...]) -> list[JobWords]:
    command, sources = split_words(words)
    if not command:
        raise click.UsageError(
            f"There is no command before {SEPARATOR}; write gpu-pool map -- COMMAND {SEPARATOR} ARGUMENT"
        )
    try:
        if not sources:
            if sys.stdin.isatty():
                raise click.UsageError(f"Give the arguments after {SEPARATOR}, or on stdin, one per line.")
            sources = [arguments_of_lines(sys.stdin.buffer)]
            if not sources[0]:
                raise click.UsageError("There is nothing to do: stdin has no line with an argument.")
        elif not all(sources):
            raise click.UsageError(f"There is nothing to do: no argument follows {SEPARATOR}.")
        return list(jobs_of(command, sources))
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
