"""What tests have worker processes do; imported there."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def whoami() -> tuple[int, str]:
    """The pid, and the GPU."""
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def initial_environment() -> dict[str, str]:
    """As the kernel has it: what the process was started with."""
    words = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(word.decode().split("=", 1) for word in words if word)


def square(number: int) -> int:
    return number * number


def blocked_signals() -> list[int]:
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def fail(text: str) -> None:
    raise ValueError(text)


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def wait_for(path: str) -> int:
    """Until there is such a file; says in another one beside it that it has begun."""
    Path(f"{path}.{os.getpid()}").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def die_once(path: str) -> str:
    """Only the first time."""
    file = Path(path)
    if not file.exists():
        file.touch()
        die()
    return "done"


def leave(status: int) -> None:
    os._exit(status)


def block(seconds: float) -> bool:
    """Computes without letting another thread run, as some C code does."""
    sys.setswitchinterval(seconds * 10)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
    return True


class OnlyHereError(Exception):
    """Cannot be read by another process."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def raise_only_here() -> None:
    raise OnlyHereError("the text", "more")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Allows no changes, not even of its traceback."""

    text: str


class DisguisedError(Exception):
    """Is read as a number, and has no text."""

    def __reduce__(self) -> Any:
        return len, ("abc",)

    def __str__(self) -> str:
        raise ValueError(self.args[0])


def raise_frozen(text: str) -> None:
    raise FrozenError(text)


def raise_disguised(what: str) -> None:
    raise DisguisedError(what)


class EndsItsReader:
    """A value whose reader ends, where the executor is."""

    def __init__(self, executor_pid: int) -> None:
        self.executor_pid = executor_pid

    def __reduce__(self) -> Any:
        return end_if, (self.executor_pid,)


class ReadElsewhereError(Exception):
    """An exception where it is raised, and a number where the executor is."""

    def __init__(self, executor_pid: int) -> None:
        super().__init__(executor_pid)
        self.executor_pid = executor_pid

    def __reduce__(self) -> Any:
        return number_if, (self.executor_pid,)


def end_if(pid: int) -> int:
    if os.getpid() == pid:
        sys.exit(3)
    return 0


def number_if(pid: int) -> Any:
    return 3 if os.getpid() == pid else ReadElsewhereError(pid)


def raise_read_elsewhere(pid: int) -> None:
    raise ReadElsewhereError(pid)


def unpicklable() -> Any:
    return threading.Lock()


def note_interrupt(path: str) -> str:
    """Takes a moment after Ctrl-C, as one that saves what it has computed."""
    Path(path).touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.5)
        Path(f"{path}.saved").touch()
        raise
    return "not interrupted"


greeting = "none"


def set_greeting(text: str) -> None:
    global greeting  # noqa: PLW0603  # what initializers do
    greeting = text


def get_greeting() -> str:
    return greeting


def refuse_to_begin() -> None:
    raise RuntimeError("no licence")


def start_child(path: str) -> int:
    """One that outlives the worker until there is such a file."""
    pid = os.fork()
    if pid == 0:
        while not Path(path).exists():
            time.sleep(0.01)
        os._exit(0)
    return pid


def wait_deaf(path: str) -> int:
    """Like `wait_for`, and SIGTERM does not end it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait_for(path)


def append_line(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


def sleep_and_name(seconds: float) -> tuple[int, str]:
    time.sleep(seconds)
    return whoami()
