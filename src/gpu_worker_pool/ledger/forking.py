"""A process that forks while it has ledgers open: the child closes them unharmed, and may open ledgers of its own.

SQLite keeps one record of every file that a process has open, with the locks it has on it. A child inherits the record
and not the locks: a connection of its own, beside the inherited one, would write and read unlocked and spoil the file.
A connection at rest can be closed in the child, because the locks are the parent's and stay. So a fork waits for that;
where it takes too long, the child is kept away from the file altogether.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from gpu_worker_pool import forks
from gpu_worker_pool.errors import LedgerUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    import apsw

#: How long a fork waits for a transaction to end.
PATIENCE_SECONDS: Final = 1.0
#: Held by whoever opens a ledger file.
OPENING: Final = threading.Lock()


class OpenFile(Protocol):
    path: Path
    connection: apsw.Connection
    #: Held by whoever uses the connection.
    in_use: threading.Lock
    is_inherited: bool


def watch(file: OpenFile) -> None:
    _open.add(file)


def check_not_inherited(path: Path) -> None:
    """Raises `LedgerUnavailableError` where this process has a record of the file that it must not use."""
    if _was_opening or path in _never_to_open:
        raise LedgerUnavailableError(
            f"this process was forked while its parent wrote to the ledger {path}: start it as a program of its own"
        )


_open: WeakSet[OpenFile] = WeakSet()
_never_to_open: set[Path] = set()
_was_opening = False
#: By the thread that forks: what it waited for, and whether it came to rest.
_forking: dict[int, tuple[bool, list[tuple[OpenFile, bool]]]] = {}


def _before() -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS

    def acquired(lock: threading.Lock) -> bool:
        return lock.acquire(timeout=max(deadline - time.monotonic(), 0.0))

    is_opened = acquired(OPENING)
    _forking[threading.get_ident()] = is_opened, [(file, acquired(file.in_use)) for file in list(_open)]


def _in_parent() -> None:
    is_opened, files = _forking.pop(threading.get_ident())
    for file, is_at_rest in files:
        if is_at_rest:
            file.in_use.release()
    if is_opened:
        OPENING.release()


def _in_child() -> None:
    global _was_opening  # noqa: PLW0603  # there is one of it a process, as there is of forks
    is_opened, files = _forking.pop(threading.get_ident())
    _was_opening = _was_opening or not is_opened
    for file, is_at_rest in files:
        file.is_inherited = True
        if is_at_rest:
            file.connection.close()
        else:
            forks.leave_alone(file.connection)  # even to collect it as garbage would close it
            _never_to_open.add(file.path)
    if is_opened:
        OPENING.release()
    _open.clear()
    _forking.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
