"""The `gpu-pool` command line: its commands parse arguments, call the package and print the result."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

#: These need a lease process.
_WITH_LEASE = ("run", "map", "wait")
#: These run uvicorn or rich in this process, which clean up at exit.
_HOSTS = ("serve", "demo")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; also `python -m gpu_worker_pool`. Ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up yet
    _open_missing_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # First of all: the modules that the lease process loads take the longest.
    if words[:1] and words[0] in _WITH_LEASE and not {"-h", "--help"} & set(words):
        status = _run_with_lease_process(words)
    else:
        status = _run(words)
    if words[:1] and words[0] in _HOSTS:
        sys.exit(status)
    _exit(status)


def _open_missing_streams() -> None:
    """Occupy a closed stdin, stdout or stderr, so that no file of ours gets its number.

    The command of `run` finds it closed again, as if it had been started without `gpu-pool`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    # `sys.__stdout__` still says that it was closed.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for the whole life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not hide the rest.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run_with_lease_process(words: Sequence[str]) -> int:
    from gpu_worker_pool.cli.exits import CommandError, status_after
    from gpu_worker_pool.cli.running.lease_process import LeaseProcess

    try:
        with LeaseProcess.prepared(words):
            if words[:2] == ["run", "--"] and words[2:]:
                from gpu_worker_pool.cli.running.plain import run_plain

                return status_after(lambda: run_plain(words[2:]))
            return _run(words)
    except CommandError as error:  # not available on this system
        return error.report()


def _exit(status: int) -> NoReturn:
    """At once: a regular interpreter shutdown takes as long as some commands."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader is gone
        status = status or 1
    os._exit(status)


def _run(words: Sequence[str]) -> int:
    from gpu_worker_pool.cli.program import run_program

    if words[:1] and words[0] not in _WITH_LEASE and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_program(words)
