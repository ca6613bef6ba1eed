"""Makes forks safe for a process with open ledgers: the child closes them, and may open ledgers itself.

SQLite keeps one record of every file that a process has open, with the locks it has on it. A child inherits the record
but not the locks: a second connection beside the inherited one would read and write unlocked and damage the file. An
idle connection can be closed in the child, because the locks are the parent's and stay. So a fork waits until the
connection is idle; where that takes too long, the child must not open the file at all.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from gpu_worker_pool import forks
from gpu_worker_pool.errors import LedgerUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker_pool.ledger.file import LedgerFile

#: How long a fork waits for a transaction to end.
FORK_WAIT_SECONDS: Final = 1.0
#: Held while a ledger file is opened.
OPENING: Final = threading.Lock()


def watch(file: LedgerFile) -> None:
    _open.add(file)


def check_not_inherited(path: Path) -> None:
    """Raises `LedgerUnavailableError` where this process inherited a record of the file that it must not use."""
    if _was_opening or path in _never_to_open:
        raise LedgerUnavailableError(
            f"this process was forked while its parent wrote to the ledger {path}: start it as a separate program"
        )


_open: WeakSet[LedgerFile] = WeakSet()
_never_to_open: set[Path] = set()
_was_opening = False
#: By the thread that forks: the files it waited for, and whether each became idle.
_forking: dict[int, tuple[bool, list[tuple[LedgerFile, bool]]]] = {}


def _before() -> None:
    deadline = time.monotonic() + FORK_WAIT_SECONDS

    def acquired(lock: threading.Lock) -> bool:
        return lock.acquire(timeout=max(deadline - time.monotonic(), 0.0))

    is_opened = acquired(OPENING)
    _forking[threading.get_ident()] = is_opened, [(file, acquired(file.in_use)) for file in list(_open)]


def _in_parent() -> None:
    is_opened, files = _forking.pop(threading.get_ident())
    for file, is_idle in files:
        if is_idle:
            file.in_use.release()
    if is_opened:
        OPENING.release()


def _in_child() -> None:
    global _was_opening  # noqa: PLW0603  # one per process, as there is of forks
    is_opened, files = _forking.pop(threading.get_ident())
    _was_opening = _was_opening or not is_opened
    for file, is_idle in files:
        file.is_inherited = True
        if is_idle:
            file.connection.close()
        else:
            forks.leave_alone(file.connection)  # collecting it as garbage would close it
            _never_to_open.add(file.path)
    if is_opened:
        OPENING.release()
    _open.clear()
    _forking.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
