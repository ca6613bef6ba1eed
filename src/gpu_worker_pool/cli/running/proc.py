"""Finds the descendants and ancestors of a process in /proc."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.hardware.proc import process_stat


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, without zombies."""
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
    """Its parent, grandparent, and so on, without pid 1."""
    found: list[int] = []
    while (stat := process_stat(pid)) is not None and stat.parent > 1:
        pid = stat.parent
        found.append(pid)
    return found


def has_children(pid: int, besides: int) -> bool:
    """Whether it has another child; cheap if the kernel lists children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return any(child != besides for child in descendants(pid))
    return any(int(child) != besides for child in children)
