"""Reads /proc: the state, parents and descendants of processes. Loads fast: the command line needs it first."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: How long a process may take to start another program, until it counts as one without an environment.
_EXEC_SECONDS = 0.5
#: The kernel's flags for its own threads, which never have an environment, and for a process that is ending.
_KERNEL_THREAD = 0x00200000
_ENDS = 0x00000004


class ProcessStat(NamedTuple):
    command: str
    #: One letter: `T` and `t` are stopped, `Z` is a zombie.
    state: str
    parent: int
    #: Seconds since the host booted: with the pid it identifies a process for good.
    started_at: float


def process_stat(pid: int) -> ProcessStat | None:
    """None if the process is gone or hidden."""
    try:
        text = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The command is in brackets, and may contain brackets and blanks.
    command, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessStat(command, fields[0], int(fields[1]), int(fields[19]) / _TICKS_PER_SECOND)


def environment_of(pid: int) -> list[bytes]:
    """The variables of a process when it began, as far as we may read them.

    A process that is just starting another program has neither variables nor arguments for a moment, which is not
    to be mistaken for a process without variables.
    """
    latest = time.monotonic() + _EXEC_SECONDS
    try:
        while not (text := _bytes(f"/proc/{pid}/environ")) and _may_have_variables(pid):
            if time.monotonic() > latest:
                break
            time.sleep(0.001)
        return text.split(b"\0")
    except OSError:
        return []


def _may_have_variables(pid: int) -> bool:
    """False if it surely has none. While it starts another program, the kernel does not know where they will be."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if fields[0] in "ZX" or int(fields[6]) & (_KERNEL_THREAD | _ENDS):
        return False
    begin, end = int(fields[47]), int(fields[48])
    return end == 0 or begin < end


@lru_cache(maxsize=256)
def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ancestors_of(pid: int) -> list[int]:
    """Its parent, the parent of that, and so on, but not the first process of the host."""
    found: list[int] = []
    while (stat := process_stat(pid)) is not None and stat.parent > 1:
        pid = stat.parent
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on, without zombies."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # loads faster
        if name.isdecimal() and (stat := process_stat(int(name))) is not None and stat.state != "Z":
            parents.setdefault(stat.parent, []).append(int(name))
    found: list[int] = []
    unseen = [pid]
    while unseen:
        children = parents.get(unseen.pop(), [])
        found += children
        unseen += children
    return found


def has_children(pid: int, besides: int) -> bool:
    """Whether one of our own processes has another child than `besides`."""
    return any(child != besides for child in children_of(pid))


def children_of(pid: int) -> list[int]:
    """Those of one of our own processes, zombies too; where the kernel does not list them, all its descendants."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # loads faster
        lists = [_read(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    except OSError:
        return descendants(pid)
    return [int(child) for words in lists for child in words.split()]


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  # loads faster
        return file.read()


def _read(path: str) -> str:
    with open(path, errors="replace") as file:  # noqa: PTH123  # loads faster
        return file.read()
