"""Starts the lease process of an executor, and represents it in the executor's process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.leases.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.workers.worker_spec import WorkerSpec

#: Signals that a whole process group or service receives: the executor decides what they mean for its workers.
BLOCKED: Final = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)
#: How long to wait for it to exit after the last worker; if a server is down, it keeps running alone.
END_SECONDS: Final = 6.0
#: Where this package is, for interpreters that are started without the changes of `sys.path` that found it here.
_FOLDER: Final = str(Path(__file__).parents[2])


def python_command(module: str) -> list[str]:
    """Runs `main` of a module with one descriptor, the number that is to follow."""
    code = (
        f"import sys; sys.path.append({_FOLDER!r}); from gpu_worker_pool.workers.{module} import main; "
        "main(int(sys.argv[1]))"
    )
    # `-P`: a file beside the user's script must not stand in for a module of the standard library.
    # As `multiprocessing` starts its own: with the options of this interpreter.
    options: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *options, "-P", "-c", code]


class WorkerLeaseProcess:
    """Starts at once; nothing here waits."""

    def __init__(self, spec: WorkerSpec, variables: Mapping[str, str | None]) -> None:
        """`variables`: set in its environment; a value of None removes the variable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Blocked from the start, because Python itself would end at Ctrl-C; its workers get the mask as it was.
        signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            # Not `fork`: this process may have threads, and much memory.
            self._process = subprocess.Popen(  # noqa: S603
                [*python_command("lease_program"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in {**os.environ, **variables}.items() if value is not None},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
            theirs.close()
        self.channel: Channel = Channel(ours)
        self.channel.send("ask", asked=spec._asdict(), signal_mask=[int(each) for each in signal_mask])

    def start_worker(self, number: int) -> socket.socket:
        """Asks for a worker; returns the end of the connection to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = os.memfd_create("environment")
        try:
            with theirs, os.fdopen(environment, "wb", closefd=False) as file:
                # As this process has it now; an environment may be larger than a message.
                file.write(json.dumps(dict(os.environ)).encode())
                file.flush()
                os.lseek(environment, 0, os.SEEK_SET)
                self.channel.send("start", [theirs.fileno(), environment], worker=number)
        finally:
            os.close(environment)
        return ours

    def send(self, kind: str, **message: Any) -> None:
        self.channel.send(kind, **message)

    def end(self) -> None:
        """After the end of its last worker: wait until it has given back every GPU."""
        self.channel.send("over")
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it keeps running alone, and is not waited for
        self.channel.close()

    def reap(self) -> None:
        """Wait for it after it has closed its end of the channel."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.channel.close()

    def forked(self) -> None:
        """In a forked child, which must not keep the connection open."""
        self._process.returncode = 0  # it is no child of this process
        self.channel.close()
