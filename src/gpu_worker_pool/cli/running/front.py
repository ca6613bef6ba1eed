"""`gpu-pool` itself while another process asks for the GPU: it hears signals and the keeper, and decides nothing else.

One thread, no event loop: what is forked from here later must find nothing half done.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.failures import CommandError
from gpu_worker_pool.cli.interrupts import die_of_interrupt
from gpu_worker_pool.cli.running.lease_process import PASSED_ON, LeaseProcess
from gpu_worker_pool.cli.running.linux import SignalInfo, SignalQueue
from gpu_worker_pool.cli.statuses import KILLED, Status

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress

#: These end whoever waits.
ENDING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
#: So long the keeper may take to give back a GPU; a server that is away is not waited for.
FAREWELL_SECONDS: Final = 6.0
#: Whoever ends the waiting wants to be gone: the keeper gives up the place alone, if it takes longer.
PLACE_FAREWELL_SECONDS: Final = 0.5
LAST_MOMENT_SECONDS: Final = 0.3
TICK_SECONDS: Final = 1.0


class InterruptedBySignal(Exception):  # noqa: N818  # nothing went wrong
    def __init__(self, info: SignalInfo) -> None:
        super().__init__(signal.Signals(info.number).name)
        self.info = info


class Front:
    def __init__(self, spec: LeaseSpec, progress: Progress) -> None:
        self.progress = progress
        self.lease_process = LeaseProcess.take()
        self._signals = SignalQueue([*PASSED_ON, signal.SIGCHLD])
        self.lease_process.send("ask", asked=spec.as_message())
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(self.lease_process.channel, select.POLLIN)
        self._is_lease_process_heard = True
        self.granted: dict[str, Any] | None = None

    # --- waiting ---

    def until_granted(self) -> dict[str, Any]:
        """What the keeper got. Raises `CommandError`, or `InterruptedBySignal` when the place was given up."""
        while self.granted is None:
            self.turn(TICK_SECONDS if self.progress.wants_ticks else None)
            if self.granted is None:
                self.progress.tick()
        self.progress.pause()
        return self.granted

    def turn(self, seconds: float | None) -> None:
        """Hear what there is to hear, or wait for it for so long."""
        ready = dict(self._poll.poll(None if seconds is None else max(seconds, 0) * 1000))
        # The keeper first: what it heard of a signal decides what is done about it.
        if self._is_lease_process_heard and self.lease_process.channel.fileno() in ready:
            messages = self.lease_process.channel.receive()
            for message in messages or ():
                self.on_message(message)
            if messages is None:
                self._poll.unregister(self.lease_process.channel)
                self._is_lease_process_heard = False
                self.on_keeper_gone()
        if self._signals.fileno() in ready:
            # Children last: what was stopped together with us may have gone on together with us.
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

    def on_keeper_gone(self) -> None:
        raise CommandError("the lease process has ended; was it killed?", Status.FAILED)

    def on_signal(self, info: SignalInfo) -> None:
        if info.number in ENDING:
            self.progress.pause()
            self.lease_process.send("stop")
            self.until_keeper_is_gone(PLACE_FAREWELL_SECONDS)
            raise InterruptedBySignal(info)
        if info.number == signal.SIGTSTP:
            self.stop_myself()

    # --- the end ---

    def until_keeper_is_gone(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Or until somebody becomes impatient."""
        deadline = time.monotonic() + seconds
        farewell = select.poll()
        farewell.register(self.lease_process.channel, select.POLLIN)
        farewell.register(self._signals, select.POLLIN)
        while self._is_lease_process_heard and (left := deadline - time.monotonic()) > 0:
            ready = dict(farewell.poll(left * 1000))
            if self.lease_process.channel.fileno() in ready:
                messages = self.lease_process.channel.receive()
                self._is_lease_process_heard = messages is not None
                for message in messages or ():
                    if message["kind"] == "told":
                        self.progress.say(message["text"])
            if self._signals.fileno() in ready and any(info.number in ENDING for info in self._signals.read()):
                return
        if not self._is_lease_process_heard:
            self._see_keeper_off()

    def _see_keeper_off(self) -> None:
        """It is about to end, unless its server is away: where nobody looks after orphans, it would stay for ever."""
        deadline = time.monotonic() + LAST_MOMENT_SECONDS
        with suppress(ChildProcessError):
            while self.lease_process.exit_status is None and time.monotonic() < deadline:
                pid, wait_status = os.waitpid(self.lease_process.pid, os.WNOHANG)
                if pid:
                    self.lease_process.reaped(wait_status)
                else:
                    time.sleep(0.001)

    def stop_myself(self) -> None:
        """As Ctrl-Z does; returns when somebody lets us go on."""
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
                self.lease_process.reaped(wait_status)
            else:
                self.on_child_ended(pid, wait_status)

    def on_child_ended(self, pid: int, wait_status: int) -> None:
        """A child but the keeper: the command, or an orphan of its."""

    def on_child_stopped(self, pid: int) -> None:
        """Any child."""


def end_like(info: SignalInfo) -> int:
    """The exit status for whoever was interrupted; Ctrl-C ends us by the signal itself."""
    if info.number == signal.SIGINT and info.is_from_kernel:
        return die_of_interrupt()
    return KILLED + info.number
