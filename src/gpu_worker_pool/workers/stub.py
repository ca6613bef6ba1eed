"""A stub: a process that waits for its GPU and then becomes the worker that uses it.

The lease is requested for the stub's pid, which the worker keeps. So the ledger knows the worker as the holder from the
first moment, and the variables that show it its GPUs are in the environment that its program starts with.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from gpu_worker_pool.hardware.linux import die_with_parent
from gpu_worker_pool.lease_variables import memory_caps

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: Where a stub has its descriptors: the worker's end of the connection, the environment, and the gate.
_END: Final = 3
_ENVIRONMENT: Final = 4
_GATE: Final = 5
#: The exit status of a worker whose program could not be started.
CANNOT_START: Final = 127


class Stub:
    """Forks at once."""

    def __init__(self, command: Sequence[str], end: int, environment: int, signal_mask: Collection[int]) -> None:
        """`environment`: a file with the variables as JSON. Both descriptors are closed here, and go to the child."""
        self.pid: int = 0
        read_end, self._gate = os.pipe()
        parent = os.getpid()
        try:
            with warnings.catch_warnings():
                # Other threads of this process sample GPUs and write to the ledger; the child only becomes another
                # program, and needs none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _become_a_worker([*command, str(_END)], (end, environment, read_end), parent, signal_mask)
        finally:
            for descriptor in (end, environment, read_end):
                os.close(descriptor)

    def start(
        self, variables: Mapping[str, str], share_mb: float | None, memory_totals_mb: Sequence[float | None]
    ) -> None:
        """It becomes the worker, with these variables in its environment, and those for its share of the GPUs."""
        with suppress(BrokenPipeError), os.fdopen(self._gate, "wb") as gate:
            gate.write(json.dumps([dict(variables), share_mb, list(memory_totals_mb)]).encode())
        self._gate = -1

    def kill(self) -> None:
        """If it still is a stub, it has nothing to clean up."""
        self._close_gate()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """After its end: its exit code, negative for a signal."""
        self._close_gate()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1


def _become_a_worker(
    command: list[str], descriptors: tuple[int, int, int], parent: int, signal_mask: Collection[int]
) -> NoReturn:
    try:
        # If the lease process is killed, the lease may be over: no worker may outlive it, whatever it computes.
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(CANNOT_START)
        _keep_only(descriptors)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the worker handles it itself
        if not (gate := _read_all(_GATE)):  # it is not needed any more
            os._exit(0)
        variables, share_mb, memory_totals_mb = json.loads(gate)
        environment = json.loads(_read_all(_ENVIRONMENT))
        if share_mb is not None:
            environment |= memory_caps(share_mb, memory_totals_mb, environment)
        environment |= variables
        for descriptor in (_ENVIRONMENT, _GATE):
            os.close(descriptor)
        os.execve(command[0], command, environment)  # noqa: S606  # intended
    except BaseException as error:
        with suppress(Exception):
            sys.stderr.write(f"gpu-pool: the worker cannot be started: {error}\n")
            sys.stderr.flush()
    finally:
        os._exit(CANNOT_START)


def _keep_only(descriptors: tuple[int, int, int]) -> None:
    """Those of the lease process, such as the lock of the sampler, must not stay open here; and stdin is its own."""
    # First out of the way of where they are to be.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _GATE + 1) for descriptor in descriptors]
    for descriptor, wanted in zip(high, (_END, _ENVIRONMENT, _GATE), strict=True):
        os.dup2(descriptor, wanted)
    os.closerange(_GATE + 1, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)
