"""Finds the process that has locked a file, or has it open after it was deleted, to name it in an error.

It never opens the file, which would drop this process's own locks on it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

#: Where SQLite locks the shared memory beside a database for the one process that writes.
_WRITE_LOCK_BYTE = 120


def lock_holder(database: Path) -> str | None:
    """The process that writes to it now, as `python (pid 17), which is stopped`; None where that cannot be known."""
    try:
        inode = str(database.with_name(database.name + "-shm").stat().st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 4711 fd:01:131072 120 120
        fields = line.split()
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5].rpartition(":")[2] != inode:
            continue
        with suppress(ValueError):
            if int(fields[6]) <= _WRITE_LOCK_BYTE <= int(fields[7]):
                return _describe(int(fields[4]))
    return None


def user_of_deleted(database: Path) -> str | None:
    """A process that has a file of this name open which was deleted since; None also where that cannot be seen."""
    deleted = f"{database.resolve()} (deleted)"
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # another user's, or gone by now
            if any(str(file.readlink()) == deleted for file in folder.iterdir()):
                return _describe(int(folder.parent.name))
    return None


def _describe(pid: int) -> str:
    try:
        text = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return f"pid {pid}"
    name, _, rest = text.partition("(")[2].rpartition(")")
    is_stopped = rest.split()[:1] in (["T"], ["t"])
    return f"{name} (pid {pid}){', which is stopped: continue it, or end it' if is_stopped else ''}"
