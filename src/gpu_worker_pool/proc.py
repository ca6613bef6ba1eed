"""Reads /proc: the state, parents and descendants of processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on; those that have ended and were not yet looked at are not among them."""
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


def ancestors_of(pid: int) -> list[int]:
    """Its parent, the parent of that, and so on; not the first process of the host, whose child everybody is."""
    found: list[int] = []
    while (stat := process_stat(pid)) is not None and stat.parent > 1:
        pid = stat.parent
        found.append(pid)
    return found


def has_children(pid: int, besides: int) -> bool:
    """Whether a process of ours has a child but the one named; cheap, where the kernel tells."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return any(child != besides for child in descendants(pid))
    return any(int(child) != besides for child in children)


class ProcessStat(NamedTuple):
    command: str
    state: str
    parent: int
    #: In ticks since the host booted: with the pid it names a process for good.
    started_ticks: int


def process_stat(pid: int) -> ProcessStat | None:
    """None if it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command stands in brackets and may hold brackets and blanks of its own.
    command, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    try:
        return ProcessStat(command, fields[0], int(fields[1]), int(fields[19]))
    except (IndexError, ValueError):
        return None
