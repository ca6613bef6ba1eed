"""The front process of `gpu-pool run`: starts the command on its GPU, forwards signals to it, and waits for it.

The command stays in the process group of `gpu-pool`, so that job control (Ctrl-C, Ctrl-Z, fg, bg, a hangup) works as if
it had been started alone. A signal that the whole group got must not be forwarded, or the command would get it twice.
The kernel says whether the whole group got it, or the lease process does, which is in the group too.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.cli.exits import KILLED, CommandError, Status, die_of_interrupt
from gpu_worker_pool.cli.keys import KEPT_FROM_COMMANDS
from gpu_worker_pool.cli.running.environment import shown_gpus, variables_of
from gpu_worker_pool.cli.running.front import ENDING, Front
from gpu_worker_pool.cli.running.lease_process import PROCESS_NAME
from gpu_worker_pool.hardware.linux import SignalInfo, adopt_orphans, die_with_parent
from gpu_worker_pool.hardware.proc import descendants, has_children, process_stat
from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress

#: `timeout` signals us first and then our whole group: the longest time between the two.
GROUP_SECONDS: Final = 0.05
#: Longest wait for the lease process to say which signals it got: it may be stopped itself.
ANSWER_SECONDS: Final = 5.0
#: Time between SIGTERM and SIGKILL after the lease was lost.
TERMINATE_SECONDS: Final = 30.0
#: Time for orphans of the command to end, after a signal ended the command.
ORPHANS_SECONDS: Final = 5.0
#: Time for lease processes inside the command to release their leases.
INNER_LEASES_SECONDS: Final = 5.0


class _Pending(NamedTuple):
    info: SignalInfo
    until: float


class CommandOnGPU(Front):
    #: Signals that do not reach our child.
    blocked_in_child: frozenset[signal.Signals] = frozenset()

    def __init__(
        self,
        command: Sequence[str],
        spec: LeaseSpec,
        progress: Progress,
        *,
        by_uuid: bool,
        terminates_when_lost: bool,
        yield_signal: int | None,
        notify: str | None,
        more_variables: Mapping[str, str],
    ) -> None:
        super().__init__(spec, progress)
        self.command: list[str] = list(command)
        self.more_variables: dict[str, str] = dict(more_variables)
        self.by_uuid = by_uuid
        self._terminates_when_lost = terminates_when_lost
        self._yield_signal = yield_signal
        self._notify = notify
        self._child: int | None = None
        self._wait_status: int | None = None
        #: Signals that may have gone to the whole group, and those that the lease process got too.
        self._pending: list[_Pending] = []
        self._group_signals: list[tuple[int, int, float]] = []
        #: Number of unanswered questions to the lease process about its signals.
        self._questions = 0
        self._is_interrupted = False
        #: The last terminating signal that the command got.
        self._ending: int | None = None
        self._kill_at: float | None = None
        #: When the time limit is reached, once it is near.
        self._limit_at: float | None = None
        #: We terminated the command because its lease was lost.
        self._is_lost = False

    def run(self) -> int:
        granted = self.until_granted()
        if self.progress.has_spoken:
            self.progress.say(f"{shown_gpus(granted)} after {spoken_seconds(self.progress.waited_seconds)}")
        adopt_orphans()
        if self._notify is not None:
            start_notification(self._notify, "granted", os.environ | variables_of(granted, by_uuid=self.by_uuid))
        try:
            self.start(granted)
        except BaseException:
            self.lease_process.channel.send("done", is_clean=True)
            self.until_lease_process_is_gone()
            raise
        while self._wait_status is None:
            self.turn(self._seconds_to_deadline())
            self._forward_due_signals()
        return self.finish(os.waitstatus_to_exitcode(self._wait_status))

    # --- starting ---

    def start(self, granted: dict[str, Any]) -> None:
        variables = self.more_variables | variables_of(granted, by_uuid=self.by_uuid)
        self.start_child(self.command, os.environ | variables)

    def start_child(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        read_end, write_end = os.pipe()
        parent = os.getpid()
        self._child = child = os.fork()
        if child == 0:
            self._become_the_command(command, environment, parent, write_end)
        os.close(write_end)
        self.lease_process.channel.send("child", pid=child)
        with os.fdopen(read_end, "rb") as failure:
            number = failure.read()
        if number:
            os.waitpid(child, 0)
            raise cannot_run(command[0], int(number))

    def _become_the_command(
        self, command: Sequence[str], environment: Mapping[str, str], parent: int, write_end: int
    ) -> None:
        number = errno.EINVAL
        try:
            # If we are killed, its lease ends too.
            die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(KILLED + signal.SIGKILL)
            for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored_by_python, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, {*self.lease_process.mask_before, *self.blocked_in_child})
            passed_on = {name: value for name, value in environment.items() if name not in KEPT_FROM_COMMANDS}
            os.execvpe(command[0], list(command), passed_on)  # noqa: S606  # intended
        except OSError as error:
            number = error.errno or errno.EINVAL
        finally:
            os.write(write_end, str(number).encode())
            os._exit(int(Status.NOT_FOUND))

    # --- while it runs ---

    def on_message(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "signals":
                self._questions -= 1
                until = time.monotonic() + 2 * GROUP_SECONDS
                self._group_signals += [(number, pid, until) for number, pid in message["got"]]
            case "told":
                self.progress.say(message["text"])
            case "lost":
                self._lost(message["text"])
            case "yield":
                self._asked_to_yield(message["text"], is_forced=message["is_forced"])
            case "ending":
                self._time_limit_is_near(message["seconds"])
            case "failed" if self._child is not None:
                self._lost(message["text"])
            case _:
                super().on_message(message)

    def on_lease_process_gone(self) -> None:
        if self._child is None:
            super().on_lease_process_gone()
        self._questions = 0
        self._lost("the lease process has ended")

    def on_signal(self, info: SignalInfo) -> None:
        if self._child is None:
            super().on_signal(info)
            return
        # Even if the answer is not needed: otherwise an old signal could be mistaken for the next one of its kind.
        self._questions += self.lease_process.channel.send("signals")
        if info.number == signal.SIGCONT:
            self.send_signal(info.number)  # twice is harmless
        elif info.is_from_kernel:
            self._from_terminal(info)
        else:
            self._pending.append(_Pending(info, time.monotonic() + GROUP_SECONDS))

    def _from_terminal(self, info: SignalInfo) -> None:
        """The whole group got it, except a hangup, which the kernel sends only to the session leader."""
        if info.number == signal.SIGHUP and os.getsid(0) == os.getpid():
            self.send_signal(info.number)
        self.group_got(info)

    def group_got(self, info: SignalInfo) -> None:
        """The whole process group got this signal, and with it the command."""
        self._act_on(info)

    def _forward_due_signals(self) -> None:
        now = time.monotonic()
        for told in self._group_signals:
            # All of them: `timeout` sends it to us first, then to the group, which includes the command.
            for pending in [each for each in self._pending if (each.info.number, each.info.pid) == told[:2]]:
                self._pending.remove(pending)
                self.group_got(pending.info)
        for pending in [each for each in self._pending if now >= self._forward_at(each)]:
            self._pending.remove(pending)
            self.send_signal(pending.info.number)
            self._act_on(pending.info)
        self._group_signals = [told for told in self._group_signals if now < told[2]]
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.send_signal(signal.SIGKILL)

    def _forward_at(self, pending: _Pending) -> float:
        """When to forward it: later while the lease process still owes an answer."""
        return pending.until + ANSWER_SECONDS if self._questions else pending.until

    def _act_on(self, info: SignalInfo) -> None:
        """React ourselves to a signal that the command got."""
        if info.number in ENDING:
            self._ending = info.number
            self._is_interrupted = info.number == signal.SIGINT and info.is_from_kernel
        elif info.number == signal.SIGTSTP:
            self.stop_myself()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [self._forward_at(pending) for pending in self._pending]
        if self._kill_at is not None:
            deadlines.append(self._kill_at)
        return min(deadlines) - time.monotonic() if deadlines else None

    def send_signal(self, number: int) -> None:
        if self._child is not None and self._wait_status is None:
            os.kill(self._child, number)

    def _lost(self, text: str) -> None:
        if self._wait_status is not None:
            return
        if self._terminates_when_lost and self._kill_at is None:
            self.progress.say(f"the lease is lost: {text}; ending the command")
            self._ending, self._is_lost = signal.SIGTERM, True
            self._kill_at = time.monotonic() + TERMINATE_SECONDS
            self.send_signal(signal.SIGTERM)
        else:
            self.progress.say(f"the lease is lost: {text}; the command keeps running, but its GPU may be granted again")

    def _asked_to_yield(self, text: str, *, is_forced: bool) -> None:
        if self._wait_status is not None:
            return
        hint = "; gpu-pool keep says that you still need it" if is_forced else ""
        self.progress.say(f"{text}{hint}")
        if self._yield_signal is not None:
            self.send_signal(self._yield_signal)
            if self._yield_signal == signal.SIGTERM:
                self._ending = signal.SIGTERM

    def _time_limit_is_near(self, seconds: float) -> None:
        """It has been asked for by `--max-time`, so the command is ended whatever `--on-lost` says."""
        if self._wait_status is not None or self._kill_at is not None:
            return
        self.progress.say(f"the time limit is reached in {spoken_seconds(round(seconds))}; ending the command")
        self._ending, self._is_lost = signal.SIGTERM, True
        self._kill_at = self._limit_at = time.monotonic() + seconds
        self.send_signal(signal.SIGTERM)

    def on_child_ended(self, pid: int, wait_status: int) -> None:
        if pid == self._child:
            self._wait_status = wait_status

    def on_child_stopped(self, pid: int) -> None:
        """Stop with it, as `suspend` does in a shell: our parent gets its terminal back, and `fg` continues both."""
        if pid != self._child:
            return
        try:
            terminal = os.open("/dev/tty", os.O_RDWR)
        except OSError:  # without a terminal we could not be continued
            return
        with os.fdopen(terminal), suppress(OSError):
            # If the command is a shell, it has its own process group.
            theirs = os.getpgid(pid)
            if os.tcgetpgrp(terminal) not in (theirs, os.getpgrp()):
                return
            self._pending = [pending for pending in self._pending if pending.info.number != signal.SIGTSTP]
            self.progress.pause()
            os.kill(os.getpid(), signal.SIGSTOP)
            if os.tcgetpgrp(terminal) == os.getpgrp():
                os.tcsetpgrp(terminal, theirs)

    # --- the end ---

    def finish(self, code: int) -> int:
        left = self._left_behind()
        if left and all(map(_is_lease_process, left)):
            # A `gpu-pool wait` inside the command gives its part of the lease back, now that its shell has ended.
            left = self._until_ended(INNER_LEASES_SECONDS)
        # Only if that signal ended the command: otherwise its children are left alone.
        if left and self._ending is not None and (code < 0 or code == KILLED + self._ending or self._is_lost):
            left = self._end_orphans(self._ending)
        if left and self._limit_at is not None:
            # What it has started is within the limit, too.
            left = self._until_ended(self._limit_at - time.monotonic()) and self._end_orphans(signal.SIGKILL)
        if left:
            self.say_left_behind(left)
        self.lease_process.channel.send("done", is_clean=not left)
        self.until_lease_process_is_gone()
        if code == -signal.SIGINT and self._is_interrupted:
            return die_of_interrupt()
        return KILLED - code if code < 0 else code

    def say_left_behind(self, left: Sequence[int], where: str = "") -> None:
        shown = ", ".join(map(str, left[:5])) + ("…" if len(left) > 5 else "")
        self.progress.say(
            f"the command left processes running{where} ({shown}): its GPU stays reserved while they use it"
        )

    def _left_behind(self) -> list[int]:
        if not has_children(os.getpid(), besides=self.lease_process.pid):
            return []
        lease_processes = {self.lease_process.pid, *descendants(self.lease_process.pid)}
        return [pid for pid in descendants(os.getpid()) if pid not in lease_processes]

    def _end_orphans(self, number: int) -> list[int]:
        """Send them the signal that the command got and did not forward."""
        for pid in self._left_behind():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return self._until_ended(ORPHANS_SECONDS)

    def _until_ended(self, most_seconds: float) -> list[int]:
        """What is still left behind after this time."""
        deadline = time.monotonic() + most_seconds
        while (left := self._left_behind()) and (seconds := deadline - time.monotonic()) > 0:
            self.turn(min(seconds, 0.2))
        return left


def _is_lease_process(pid: int) -> bool:
    found = process_stat(pid)
    return found is None or found.command == PROCESS_NAME


def start_notification(command: str, event: str, environment: Mapping[str, str]) -> None:
    """Run the command of `--notify` with a shell, on its own: nothing waits for it, and it does not use the GPU."""
    if (middle := os.fork()) == 0:
        # Twice, so that it is not our child: the front would take it for something that the command left behind.
        try:
            os.setsid()
            if os.fork() == 0:
                hidden = {"CUDA_VISIBLE_DEVICES": "", "GPU_POOL_EVENT": event}
                hidden["GPU_POOL_GPUS"] = environment.get("CUDA_VISIBLE_DEVICES", "")
                kept = {name: value for name, value in environment.items() if name != "GPU_POOL_LEASE_ID"}
                kept["GPU_POOL_LEASE"] = environment.get("GPU_POOL_LEASE_ID", "")
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.execve("/bin/sh", ["sh", "-c", command], kept | hidden)  # noqa: S606  # the user's own
        finally:
            os._exit(0)
    os.waitpid(middle, 0)


def check_command(command: Sequence[str]) -> None:
    """Fail before a long wait if the program does not exist."""
    name = command[0]
    if _find(name) is not None:
        return
    if os.path.lexists(name) if "/" in name else _find(name, os.F_OK) is not None:
        raise cannot_run(name, errno.EACCES)
    raise cannot_run(name, errno.ENOENT)


def _find(name: str, mode: int = os.X_OK) -> str | None:
    """Like `shutil.which`, which takes longer to load than all of this."""
    found = [name] if "/" in name else [os.path.join(folder, name) for folder in os.get_exec_path()]  # noqa: PTH118
    return next((path for path in found if os.access(path, mode) and not os.path.isdir(path)), None)  # noqa: PTH112


def cannot_run(name: str, number: int) -> CommandError:
    if number in (errno.ENOENT, errno.ENOTDIR) and not os.path.lexists(name):
        hint = "" if "/" in name else "; is it in PATH?"
        return CommandError(f"program {name!r} not found{hint}", Status.NOT_FOUND)
    reason = os.strerror(number).lower()
    if number == errno.ENOENT and (interpreter := _interpreter_of(name)):
        reason = f"its first line names {interpreter!r}, which does not exist"
    if number == errno.ENOEXEC:
        reason += "; a script must begin with a line such as #!/bin/sh"
    elif number == errno.EACCES and os.path.isdir(name):  # noqa: PTH112  # loads faster
        reason = "it is a directory"
    elif number == errno.EACCES:
        reason += "; make it executable with chmod +x"
    return CommandError(f"{name!r} cannot be run: {reason}", Status.CANNOT_EXECUTE)


def _interpreter_of(name: str) -> str | None:
    """The interpreter in the first line of a script."""
    try:
        with open(_find(name) or name, "rb") as script:  # noqa: PTH123  # loads faster
            line = script.readline(200)
    except OSError:
        return None
    words = line.removeprefix(b"#!").split()
    return os.fsdecode(words[0]) if line.startswith(b"#!") and words else None
