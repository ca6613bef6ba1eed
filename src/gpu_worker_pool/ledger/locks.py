"""Finds processes that use a ledger: who has locked it, who reads it, who has it open although it was deleted.

It never opens the file, which would drop this process's own locks on it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Where SQLite locks the shared memory beside a database for the one process that writes.
_WRITE_LOCK_BYTE = 120
#: Where it locks it for those who read an older state, which must not be overwritten meanwhile.
_READ_LOCK_BYTES = range(124, 128)
#: Where all who have it open hold a lock, readers and writers, for as long as they have it open.
_USE_LOCK_BYTE = 128
#: The files of a database in use: what is added to its name.
_ENDINGS = ("", "-wal", "-shm")


class _Lock(NamedTuple):
    pid: int
    is_write: bool
    first_byte: int
    last_byte: int
    inode: str


def lock_holder(database: Path) -> str | None:
    """The process that writes to it now, as `python (pid 17), which is stopped`; None where that cannot be known."""
    for lock in _locks_on(database):
        if lock.is_write and lock.first_byte <= _WRITE_LOCK_BYTE <= lock.last_byte:
            return _describe(lock.pid)
    return None


def readers(database: Path) -> list[str]:
    """The processes that read an older state of it now: what has been written since cannot be cleared away."""
    pids = {lock.pid for lock in _locks_on(database) if not lock.is_write and lock.first_byte in _READ_LOCK_BYTES}
    return [_describe(pid) for pid in sorted(pids)]


def user_of_deleted(database: Path) -> str | None:
    """A process that uses files of this name which were deleted or replaced; None also where that cannot be seen."""
    deleted = {f"{database.resolve()}{ending} (deleted)" for ending in _ENDINGS}
    # First the processes that use the present files, as only one of these may have been replaced; else all of them.
    users = {lock.pid for lock in _locks_on(database)}
    for pid in users or users_of_databases():
        with suppress(OSError):  # another user's, or gone by now
            if any(str(file.readlink()) in deleted for file in Path("/proc", str(pid), "fd").iterdir()):
                return _describe(pid)
    return None


def users_of_databases() -> set[int]:
    """The processes that have any SQLite database open as ledgers are: only their open files need to be searched."""
    return {lock.pid for lock in _locks() if lock.first_byte <= _USE_LOCK_BYTE <= lock.last_byte}


def _locks_on(database: Path) -> Iterator[_Lock]:
    """Of all processes. SQLite locks the shared memory beside a database."""
    try:
        inode = str(database.with_name(database.name + "-shm").stat().st_ino)
    except OSError:
        return
    yield from (lock for lock in _locks() if lock.inode == inode)


def _locks() -> Iterator[_Lock]:
    """Of all processes that this one can see, on any file."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 4711 fd:01:131072 120 120
        fields = line.split()
        if len(fields) == 8:
            with suppress(ValueError):  # the last byte may be EOF
                inode = fields[5].rpartition(":")[2]
                yield _Lock(int(fields[4]), fields[3] == "WRITE", int(fields[6]), int(fields[7]), inode)


def _describe(pid: int) -> str:
    try:
        text = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return f"pid {pid}"
    name, _, rest = text.partition("(")[2].rpartition(")")
    is_stopped = rest.split()[:1] in (["T"], ["t"])
    return f"{name} (pid {pid}){', which is stopped: continue it, or end it' if is_stopped else ''}"
