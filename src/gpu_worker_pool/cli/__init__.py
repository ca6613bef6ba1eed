"""`gpu-pool`, the command line. Whatever it does is done by the package: commands parse, call and print."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

#: These need a process that keeps their lease.
_WITH_LEASE = ("run", "wait")
#: These have others' code running in them, which may have something to tidy up.
_HOSTS = ("serve", "demo")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; also `python -m gpu_worker_pool`. Ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing yet to tidy up, nor to tell
    _open_missing_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Anything but this comes later: what it loads takes longer than all the rest.
    if words[:1] and words[0] in _WITH_LEASE and not {"-h", "--help"} & set(words):
        status = _run_with_lease_process(words)
    else:
        status = _run(words)
    if words[:1] and words[0] in _HOSTS:
        sys.exit(status)
    _exit(status)


def _open_missing_streams() -> None:
    """Whoever was started with a closed stdin, stdout or stderr must not find its own files there.

    A command that is run finds them closed again, as if it had been started alone.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is not open, which is this one
    # `sys.__stdout__` still tells that there was none.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for the whole life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show must not keep the rest from being shown.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run_with_lease_process(words: Sequence[str]) -> int:
    from gpu_worker_pool.cli.failures import CommandError
    from gpu_worker_pool.cli.running.lease_process import LeaseProcess

    try:
        with LeaseProcess.prepared(words):
            return _run(words)
    except CommandError as error:  # there is none on this system
        return error.tell()


def _exit(status: int) -> NoReturn:
    """At once: to take everything apart that was loaded takes as long as some commands."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads it any more
        status = status or 1
    os._exit(status)


def _run(words: Sequence[str]) -> int:
    from gpu_worker_pool.cli.program import run_program

    if words[:1] and words[0] not in _WITH_LEASE and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_program(words)
