"""Reads /proc: the state, parents and descendants of processes. Loads fast: the command line needs it first."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


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
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command is in brackets, and may contain brackets and blanks.
    command, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessStat(command, fields[0], int(fields[1]), int(fields[19]) / _TICKS_PER_SECOND)


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
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := process_stat(int(entry.name))) is not None and stat.state != "Z":
            parents.setdefault(stat.parent, []).append(int(entry.name))
    found: list[int] = []
    unseen = [pid]
    while unseen:
        children = parents.get(unseen.pop(), [])
        found += children
        unseen += children
    return found


def has_children(pid: int, besides: int) -> bool:
    """Whether one of our own processes has another child than `besides`; cheap where the kernel lists children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return any(child != besides for child in descendants(pid))
    return any(int(child) != besides for child in children)
