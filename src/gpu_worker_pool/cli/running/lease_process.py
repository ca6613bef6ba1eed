"""The process that keeps a lease: forked from `gpu-pool` before anything heavy is loaded, seen from there.

A process of its own, because whoever is stopped (Ctrl-Z) renews nothing, and because it is still there to wait for the
command's end, and then to give the GPU back, when `gpu-pool` itself was killed. It is forked first of all, so that it
loads what it needs while the command line is being read.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.failures import CommandError
from gpu_worker_pool.cli.running.channel import Channel, channel
from gpu_worker_pool.cli.statuses import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: What is passed on to a command, and so must not end or stop whoever passes it on, nor the keeper.
PASSED_ON: Final = (
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
_HEARD: Final = (*PASSED_ON, signal.SIGCHLD)

#: The one that was forked before it was known whether it is needed.
_prepared: list[LeaseProcess] = []


class LeaseProcess:
    """Forks at once. The child waits until it is told what to ask for; both have every signal in `_HEARD` blocked."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        """`words`: the command line, as far as it is known before anybody has read it."""
        if sys.platform != "linux":
            raise CommandError("gpu-pool run and wait need Linux; from here, use the Python client and a GPU server")
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left unblocked in a child must not raise there
        # Whoever started us may have chosen not to hear of its children; we must.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self.channel, theirs = channel()
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            _run_and_exit(theirs, words)
        theirs.close()
        #: How it ended; None while it has not, as far as we know.
        self.exit_status: int | None = None

    @classmethod
    @contextmanager
    def prepared(cls, words: Sequence[str]) -> Iterator[None]:
        """One that waits to be taken; it is ended if nobody does."""
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

    @property
    def mask_before(self) -> Iterable[int]:
        """The signals that were blocked before: what a command is to find."""
        return self._mask_before

    def send(self, kind: str, **message: Any) -> bool:
        return self.channel.send(kind, **message)

    def reaped(self, wait_status: int) -> None:
        self.exit_status = os.waitstatus_to_exitcode(wait_status)


def _run_and_exit(theirs: Channel, words: Sequence[str]) -> None:
    status = 1
    try:
        # In the background, a command that wants the terminal stops the whole group; but the lease must be renewed.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN, signal.SIGTTOU])
        # Not stderr: what goes wrong must be told. But nobody may wait for an end of file that does not come.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        gc.disable()  # loading makes much, and nothing that could be collected
        from gpu_worker_pool.cli.running.lease_program import run_lease_program

        run_lease_program(theirs, words)
        status = 0
    except BaseException as error:
        theirs.send("failed", status=int(Status.BUG), text=f"the lease process failed: {type(error).__name__}: {error}")
        if os.environ.get("GPU_POOL_DEBUG"):
            import traceback

            traceback.print_exc()
    finally:
        # Nothing of the parent's is to be cleaned up here.
        os._exit(status)
