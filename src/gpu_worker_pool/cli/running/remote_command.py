"""The front process of `gpu-pool run --ssh`: starts the command by ssh if its GPU is on another host.

The local child is `ssh`, whose standard streams are the command's. Signals go another way, because ssh passes none on:
through the lease process and its connection to the other host (`remote_watch.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.exits import KILLED, CommandError, Status, die_of_interrupt
from gpu_worker_pool.cli.running.command import CommandOnGPU
from gpu_worker_pool.cli.running.environment import variables_of
from gpu_worker_pool.cli.running.front import ENDING
from gpu_worker_pool.cli.running.lease_process import FORWARDED
from gpu_worker_pool.cli.running.remote_script import command_line, scripts, silence_seconds, working_directory
from gpu_worker_pool.cli.running.ssh import command_words, ssh_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.hardware.linux import SignalInfo

#: Longest wait for the other side to say what is left of the command.
OVER_SECONDS: Final = 30.0
#: A Unix socket's path must be short, and ssh makes it longer while it connects.
_LONGEST_FOLDER: Final = 60


class CommandOverSSH(CommandOnGPU):
    """Runs the command here, like its parent, if the endpoint that grants the lease is this host."""

    #: What ssh must survive: the command gets it, and its own end ends ssh.
    blocked_in_child = frozenset(FORWARDED) - {signal.SIGWINCH, signal.SIGCONT}

    _target: str | None = None
    _folder: Path | None = None
    _has_terminal = False
    _is_connected = _is_broken = False
    #: The command's exit status, as soon as the other side has said it.
    _status: int | None = None
    #: What the other side said when it had looked for what the command left behind.
    _remains: dict[str, Any] | None = None

    def run(self) -> int:
        try:
            with _terminal_restored():
                return super().run()
        finally:
            # The lease process removes it too, in case we are killed.
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, granted: dict[str, Any]) -> None:
        self._target = granted["ssh_target"]
        if self._target is None:
            self.blocked_in_child = frozenset()
            super().start(granted)
            return
        self._has_terminal = _has_terminal()
        nonce = secrets.token_hex(16)
        self._folder = folder = Path(tempfile.mkdtemp(prefix="gpu-pool-", dir=_short_folder()))
        self._connect(nonce, folder, granted)
        ssh = command_words(str(folder / "ssh"), has_terminal=self._has_terminal)
        self.start_child([*ssh, "--", self._target, command_line(nonce)], ssh_environment())

    def _connect(self, nonce: str, folder: Path, granted: dict[str, Any]) -> None:
        text = scripts(
            nonce,
            self.command,
            self.more_variables | variables_of(granted, by_uuid=self.by_uuid),
            directory=working_directory(),
            host=granted["host"],
            silence=silence_seconds(granted["ttl_seconds"]),
        )
        with os.fdopen(os.open(folder / "scripts", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        self.lease_process.channel.send("connect", folder=str(folder))
        while not self._is_connected:
            self.turn(None)

    # --- while it runs ---

    def on_message(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "connected":
                self._is_connected = True
            case "status":
                self._status = message["status"]
                if self._ending is not None and (self._status == KILLED + self._ending or self._is_lost):
                    self._end_orphans_there()
            case "ended":
                self._remains = message
                if message["left"]:
                    self._kill_ssh()
            case "disconnected":
                self._broken("the connection")
            case _:
                super().on_message(message)

    def on_lease_process_gone(self) -> None:
        if self._target is None or self._child is None:
            super().on_lease_process_gone()
        else:
            self._broken("the lease process, which had the connection,")

    def _broken(self, what: str) -> None:
        if self._is_broken or self._remains is not None:
            return
        self._is_broken = True
        self.progress.say(f"{what} to {self._target} is gone: the command is ended there, and its GPU not given back")
        self._kill_ssh()

    def _kill_ssh(self) -> None:
        if self._child is not None and self._wait_status is None:
            os.kill(self._child, signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self._target is None:
            super().send_signal(number)
        elif self._wait_status is None:
            self._tell("group" if number == signal.SIGCONT else "signal", number)

    def _from_terminal(self, info: SignalInfo) -> None:
        if self._target is None:
            super()._from_terminal(info)
        elif info.number != signal.SIGWINCH:  # ssh passes on the size of the terminal
            self.group_got(info)

    def group_got(self, info: SignalInfo) -> None:
        """Our group; the command's group is on the other host."""
        if self._target is not None:
            self._tell("group", info.number)
        super().group_got(info)

    def _tell(self, kind: str, number: int) -> None:
        # The other side's process group has no shell that could continue it, so only SIGSTOP stops it.
        self.lease_process.channel.send(kind, name="STOP" if number == signal.SIGTSTP else _name_of(number))

    def _act_on(self, info: SignalInfo) -> None:
        super()._act_on(info)
        if info.number in ENDING and self._status is not None:
            # The command has ended, but what it left behind keeps its session open.
            self._end_orphans_there()

    # --- the end ---

    def _end_orphans_there(self) -> None:
        """By the signal that ended the command; ssh ends when none of them has the command's output open any more."""
        assert self._ending is not None
        self.lease_process.channel.send("over", ending=_name_of(self._ending))

    def finish(self, code: int) -> int:
        if self._target is None:
            return super().finish(code)
        if self._remains is None:
            is_ended_by_signal = self._ending is not None and (code == KILLED + self._ending or self._is_lost)
            ending = _name_of(self._ending) if self._ending is not None and is_ended_by_signal else "-"
            self.lease_process.channel.send("over", ending=ending)
        deadline = time.monotonic() + OVER_SECONDS
        while self._remains is None and not self._is_broken and (left := deadline - time.monotonic()) > 0:
            self.turn(left)
        if self._remains is not None and self._remains["left"]:
            self.say_left_behind(self._remains["left"], f" on {self._target}")
        self.lease_process.channel.send("done", is_clean=self._remains is not None and not self._remains["left"])
        self.until_lease_process_is_gone()
        return self._exit_status(code)

    def _exit_status(self, code: int) -> int:
        status = self._status if self._remains is None else self._remains["status"]
        if status is None and self._is_broken:
            return int(Status.UNAVAILABLE)
        if status is None and code >= 0:
            text = f"ssh could not start the command on {self._target} (it ended with status {code})"
            raise CommandError(text, Status.UNAVAILABLE)
        if status == KILLED + signal.SIGINT and (self._has_terminal or self._is_interrupted):
            return die_of_interrupt()
        return KILLED - code if status is None else int(status)


def _name_of(number: int) -> str:
    return signal.Signals(number).name.removeprefix("SIG")


def _short_folder() -> str | None:
    """Where only this user looks, else the system's own choice."""
    choices = [os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108  # `mkdtemp` makes a private folder there
    usable = [
        each for each in choices if each.startswith("/") and len(each) < _LONGEST_FOLDER and os.access(each, os.W_OK)
    ]
    return usable[0] if usable else None


def _has_terminal() -> bool:
    """Whether the command gets a terminal. Not in the background: ssh would stop there to set ours up."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """A killed ssh leaves the terminal raw, or without echo if it was asking for a password."""
    import termios

    before = None
    with suppress(termios.error, OSError):
        before = termios.tcgetattr(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
    try:
        yield
    finally:
        with suppress(termios.error, OSError):
            if before is not None and os.tcgetpgrp(2) == os.getpgrp() and termios.tcgetattr(2) != before:
                termios.tcsetattr(2, termios.TCSADRAIN, before)
