"""The front process of `gpu-pool run` and `wait`: handles signals and messages while the lease process gets the GPU.

One thread and no event loop, so that it can fork safely later.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.exits import KILLED, CommandError, Status, die_of_interrupt
from gpu_worker_pool.cli.running.lease_process import FORWARDED, LeaseProcess
from gpu_worker_pool.hardware.linux import SignalInfo, SignalQueue

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress

#: Signals that end the wait.
ENDING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
#: Time limit for the lease process to release the GPU: do not hang on a server that does not answer.
RELEASE_SECONDS: Final = 6.0
#: Time limit for cancelling the request; the lease process finishes alone if it takes longer.
CANCEL_SECONDS: Final = 0.5
EXIT_SECONDS: Final = 0.3
TICK_SECONDS: Final = 1.0


class InterruptedBySignal(CommandError):  # noqa: N818  # nothing went wrong
    """Ends `gpu-pool` without a message: with the status of the signal or by Ctrl-C itself."""

    def __init__(self, info: SignalInfo) -> None:
        super().__init__(signal.Signals(info.number).name, KILLED + info.number)
        self._info = info

    def report(self) -> int:
        is_ctrl_c = self._info.number == signal.SIGINT and self._info.is_from_kernel
        return die_of_interrupt() if is_ctrl_c else self.status


class Front:
    def __init__(self, spec: LeaseSpec, progress: Progress) -> None:
        self.progress = progress
        self.lease_process: LeaseProcess = LeaseProcess.take()
        self._signals = SignalQueue([*FORWARDED, signal.SIGCHLD])
        self.lease_process.channel.send("ask", asked=spec._asdict())
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(self.lease_process.channel, select.POLLIN)
        self._is_lease_process_heard = True
        self.granted: dict[str, Any] | None = None

    # --- waiting ---

    def until_granted(self) -> dict[str, Any]:
        """The `granted` message. Raises `CommandError`, or `InterruptedBySignal` after the request was cancelled."""
        while self.granted is None:
            self.turn(TICK_SECONDS if self.progress.wants_ticks else None)
            if self.granted is None:
                self.progress.tick()
        self.progress.pause()
        return self.granted

    def turn(self, seconds: float | None) -> None:
        """Handle messages and signals, or wait for them at most this long."""
        ready = dict(self._poll.poll(None if seconds is None else max(seconds, 0) * 1000))
        # Messages first: they may say which signals the lease process got too.
        if self._is_lease_process_heard and self.lease_process.channel.fileno() in ready:
            messages = self.lease_process.channel.receive()
            for message in messages or ():
                self.on_message(message)
            if messages is None:
                self._poll.unregister(self.lease_process.channel)
                self._is_lease_process_heard = False
                self.on_lease_process_gone()
        if self._signals.fileno() in ready:
            # Children last: a child that was stopped together with us may have continued together with us.
            for info in sorted(self._signals.read(), key=lambda info: info.number == signal.SIGCHLD):
                if info.number == signal.SIGCHLD:
                    self._reap()
                else:
                    self.on_signal(info)

    def on_message(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "waiting" | "trouble":
                self.progress.hear(message)
            case "granted":
                self.granted = message
            case "failed":
                self.progress.pause()
                raise CommandError(message["text"], message["status"])

    def on_lease_process_gone(self) -> None:
        raise CommandError("the lease process has ended; was it killed?", Status.FAILED)

    def on_signal(self, info: SignalInfo) -> None:
        if info.number in ENDING:
            self.progress.pause()
            self.lease_process.channel.send("stop")
            self.until_lease_process_is_gone(CANCEL_SECONDS)
            raise InterruptedBySignal(info)
        if info.number == signal.SIGTSTP:
            self.stop_myself()

    # --- the end ---

    def until_lease_process_is_gone(self, seconds: float = RELEASE_SECONDS) -> None:
        """Or until another ending signal arrives."""
        deadline = time.monotonic() + seconds
        while self._is_lease_process_heard and (left := deadline - time.monotonic()) > 0:
            ready = dict(self._poll.poll(left * 1000))
            if self.lease_process.channel.fileno() in ready:
                messages = self.lease_process.channel.receive()
                self._is_lease_process_heard = messages is not None
                for message in messages or ():
                    if message["kind"] == "told":
                        self.progress.say(message["text"])
            if self._signals.fileno() in ready and any(info.number in ENDING for info in self._signals.read()):
                return
        if not self._is_lease_process_heard:
            self._reap_lease_process()

    def _reap_lease_process(self) -> None:
        """It is about to exit: without an init process that reaps orphans, it would stay a zombie."""
        deadline = time.monotonic() + EXIT_SECONDS
        with suppress(ChildProcessError):
            while not self.lease_process.is_reaped and time.monotonic() < deadline:
                pid, _ = os.waitpid(self.lease_process.pid, os.WNOHANG)
                self.lease_process.is_reaped = pid != 0
                if pid == 0:
                    time.sleep(0.001)

    def stop_myself(self) -> None:
        """As Ctrl-Z does; returns after SIGCONT."""
        self.progress.pause()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])

    # --- children ---

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(wait_status):
                self.on_child_stopped(pid)
            elif pid == self.lease_process.pid:
                self.lease_process.is_reaped = True
            else:
                self.on_child_ended(pid, wait_status)

    def on_child_ended(self, pid: int, wait_status: int) -> None:
        """Any child but the lease process: the command, or an orphan of it."""

    def on_child_stopped(self, pid: int) -> None:
        """Also called for the lease process."""
