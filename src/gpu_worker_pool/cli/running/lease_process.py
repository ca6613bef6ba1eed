"""Starts the lease process, which requests, renews and releases the lease, and represents it in the front process.

It is separate because a stopped process (Ctrl-Z) renews nothing, and because it must release the GPU after the
command's end even if `gpu-pool` itself was killed. It is forked first of all, so that it loads its modules while the
front process parses the command line.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.leases.channel import Channel, channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Signals that are forwarded to the command, and must neither end nor stop the front and the lease process.
FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGTSTP,
    signal.SIGCONT,
)
_HEARD: Final = (*FORWARDED, signal.SIGCHLD)

#: The name of every lease process: the `gpu-pool run` around it knows it by that.
PROCESS_NAME: Final = "gpu-pool-lease"

#: Forked before it is known whether it is needed.
_prepared: list[LeaseProcess] = []


class LeaseProcess:
    """Forks at once. The child waits for a lease spec; both processes block every signal in `_HEARD`."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        """`words`: the command line, not parsed yet."""
        if sys.platform != "linux":
            raise CommandError("gpu-pool run and wait need Linux; from here, use the Python client and a GPU server")
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # must not raise in a child
        # Our parent may ignore SIGCHLD; we need it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        #: The signals that were blocked before we started: the command gets this mask.
        self.mask_before: set[int | signal.Signals] = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self.channel: Channel
        self.channel, theirs = channel()
        self.pid: int = os.fork()
        if self.pid == 0:
            self.channel.close()
            _run_and_exit(theirs, words)
        theirs.close()
        self.is_reaped = False

    @classmethod
    @contextmanager
    def prepared(cls, words: Sequence[str]) -> Iterator[None]:
        """A process for `take`; killed if it was not taken."""
        _prepared.append(cls(words))
        try:
            yield
        finally:
            while _prepared:
                unneeded = _prepared.pop()
                os.kill(unneeded.pid, signal.SIGKILL)
                os.waitpid(unneeded.pid, 0)
                signal.pthread_sigmask(signal.SIG_SETMASK, unneeded.mask_before)

    @classmethod
    def take(cls) -> LeaseProcess:
        """The one that was prepared, or a new one."""
        return _prepared.pop() if _prepared else cls()


def _run_and_exit(theirs: Channel, words: Sequence[str]) -> None:
    status = 1
    try:
        # At once: a `gpu-pool run` around us knows by it that we are about to end, and nothing that uses a GPU.
        with suppress(OSError), open("/proc/self/comm", "w") as name:  # noqa: PTH123  # loads faster
            name.write(PROCESS_NAME)
        # A background command that uses the terminal stops the whole group; the lease must still be renewed.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN, signal.SIGTTOU])
        # stderr stays open for errors. An open stdout would keep its reader waiting for the end of file.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        gc.disable()  # importing makes many objects, and no garbage
        from gpu_worker_pool.cli.running.lease_program import run_lease_program

        run_lease_program(theirs, words)
        status = 0
    except BaseException as error:
        theirs.send("failed", status=int(Status.BUG), text=f"the lease process failed: {type(error).__name__}: {error}")
        if os.environ.get("GPU_POOL_DEBUG"):
            import traceback

            traceback.print_exc()
    finally:
        # Run no exit handlers of the parent.
        os._exit(status)
