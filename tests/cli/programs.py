"""`gpu-pool` in real processes, in a pipe and on a pseudo-terminal, each test with GPUs and folders of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.waiting import eventually

GPU_POOL = [sys.executable, "-m", "gpu_worker_pool"]
#: A program that says what it gets: `ready` with its variables, then every signal; it ends when it is told to.
LISTENER = """
import os, signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
ends = set(sys.argv[2:])
def got(number, frame):
    name = signal.Signals(number).name
    log.write(name + "\\n")
    if name in ends:
        sys.exit(5)
for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT"):
    signal.signal(getattr(signal, name), got)
log.write("ready\\n")
while True:
    time.sleep(0.05)
"""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Programs:
    """Starts programs in one environment, and ends those that a test left."""

    def __init__(self, folder: Path, **variables: str) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPU_", "CUDA_", "NVIDIA_", "_GPU_POOL"))
            and name not in ("NO_COLOR", "FORCE_COLOR")
        }
        self.folder = folder
        self.environment = inherited | {
            "GPU_BACKEND": "simulated:1",
            "GPU_POOL_STATE_DIR": str(folder / "state"),
            "XDG_STATE_HOME": str(folder / "home-state"),
            "TERM": "xterm-256color",
            "COLUMNS": "120",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **variables,
        }
        self._started: list[Started] = []
        self._terminals: list[Terminal] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._terminals:
            terminal.close()
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        # Not by their groups, whose numbers may be others' by now: those that have our folder in their environment.
        for pid in processes_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- in a pipe ---

    def call(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`gpu-pool` with these arguments, to its end."""
        return self.run([*GPU_POOL, *map(str, arguments)], **options)

    def run(
        self, command: Sequence[str], *, timeout: float = 30, text_in: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment | variables,
            cwd=self.folder,
            input=text_in,
            stdin=subprocess.DEVNULL if text_in is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: object, **variables: str) -> Started:
        """`gpu-pool` with these arguments, in a process group of its own."""
        process = Started(
            [*GPU_POOL, *map(str, arguments)],
            self.environment | variables,
            self.folder,
            self.folder / f"started-{len(self._started)}",
        )
        self._started.append(process)
        return process

    def holding(self, *arguments: object, seconds: float = 60, **variables: str) -> Started:
        """A run that has its GPU."""
        flag = self.folder / f"holding-{len(self._started)}"
        process = self.start("run", *arguments, "--", "sh", "-c", f"touch {flag}; exec sleep {seconds}", **variables)
        eventually(flag.exists)
        return process

    def listening(self, *arguments: object, ends: Sequence[str] = (), **variables: str) -> tuple[Started, Path]:
        """A run whose command says which signals it gets, and the file in which it says so."""
        log = self.folder / f"signals-{len(self._started)}"
        command = [sys.executable, "-c", LISTENER, str(log), *ends]
        process = self.start("run", *arguments, "--", *command, **variables)
        eventually(lambda: log.exists() and "ready" in log.read_text())
        return process, log

    # --- on a terminal ---

    def terminal(self, command: Sequence[str], *, width: int = 120, **variables: str) -> Terminal:
        terminal = Terminal(command, self.environment | {"COLUMNS": str(width)} | variables, self.folder, width)
        self._terminals.append(terminal)
        return terminal

    # --- looking ---

    def leases(self, *arguments: object) -> list[dict[str, Any]]:
        return list(self.json("leases", *arguments)["leases"])

    def waiting(self, *arguments: object) -> list[dict[str, Any]]:
        return list(self.json("queue", *arguments)["queue"])

    def json(self, *arguments: object) -> Any:
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


class Started(subprocess.Popen[str]):
    """A program that runs; what it has written so far can be read at any time."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, files: Path) -> None:
        self._out, self._err = files.with_suffix(".out"), files.with_suffix(".err")
        with self._out.open("w") as out, self._err.open("w") as err:
            super().__init__(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()


class Terminal:
    """A program that has a terminal of its own, as the leader of its session; what it writes is collected."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, width: int) -> None:
        self._collected = ""
        self.status: int | None = None
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            try:
                # Tests may run in the background or under nohup, which ignore them; a shell on a terminal does not.
                for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.chdir(folder)
                os.execvpe(command[0], list(command), environment)  # noqa: S606
            finally:
                os._exit(127)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def written(self) -> str:
        self._collect(0)
        return self._collected

    @property
    def shown(self) -> str:
        """Without what drives the terminal."""
        return _ESCAPE.sub("", self.written)

    def until(self, text: str, within_seconds: float = 15.0, *, times: int = 1) -> str:
        """What was shown once `text` is in it."""
        deadline = time.monotonic() + within_seconds
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} was not shown within {within_seconds} s:\n{self.shown}"
            self._collect(0.05)
        return self.shown

    def wait(self, within_seconds: float = 30.0) -> int:
        """The exit status, negative for the signal that ended it."""
        deadline = time.monotonic() + within_seconds
        while self.status is None:
            assert time.monotonic() < deadline, f"it has not ended:\n{self.shown}"
            self._collect(0.02)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
        self._collect(0)
        return self.status

    def hang_up(self) -> None:
        """Close the window."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def close(self) -> None:
        self.hang_up()
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _collect(self, seconds: float) -> None:
        while self._master >= 0 and select.select([self._master], [], [], seconds)[0]:
            try:
                read = os.read(self._master, 65536)
            except OSError:  # nobody has it open any more
                return
            if not read:
                return
            self._collected += read.decode(errors="replace")
            seconds = 0


def processes_in(folder: Path) -> list[int]:
    """Those whose environment names it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"={folder}/".encode() in environment:
                found.append(int(entry.name))
    return found


def is_there(pid: int) -> bool:
    return state_of(pid) not in ("Z", None)


def state_of(pid: int) -> str | None:
    """The kernel's letter for it; None if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def signals_in(log: Path) -> list[str]:
    return [line for line in log.read_text().split() if line != "ready"]
