"""Tries the ledger as each user would use it: in a child process with that user's rights, all of them at once."""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, SCHEMA, Tables
from gpu_worker_pool.ledger.trial import try_ledger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpu_worker_pool.cli.setup.accounts import Person

_TABLE: Final = "CREATE TABLE trial (who INTEGER)"
_SECONDS: Final = 30.0
#: Who has them, no file of this host is theirs.
_NOBODY: Final = 65534


class _Child(NamedTuple):
    who: str
    pid: int
    #: What it says is read here; it goes on when the other pipe is closed.
    says: int
    go: int


def nobody_in(gid: int) -> Person:
    """A user without rights, except by the group."""
    from gpu_worker_pool.cli.setup.accounts import Person

    return Person("nobody", _NOBODY, gid, (gid,))


def root() -> Person:
    from gpu_worker_pool.cli.setup.accounts import Person

    return Person("root", 0, 0, (0,))


def make_ledger(path: Path) -> None:
    """With everything that a program adds when it first opens it."""
    file = LedgerFile(path, SCHEMA, FORMAT)
    try:
        Tables(file.connection)
    finally:
        file.connection.close()


def try_ledgers(directory: Path, ledgers: Sequence[Path], people: Sequence[Person]) -> dict[str, str | None]:
    """By name: what went wrong, or None.

    The first one makes a ledger for the trial with umask 077. All have it open and write to it at the same time, and
    open the given ones for writing.
    """
    trial = directory / f"ledger-trial-{os.getpid()}-{secrets.token_hex(4)}-v{FORMAT}.db"
    outcomes: dict[str, str | None] = {}
    children: list[_Child] = []
    deadline = time.monotonic() + _SECONDS
    try:
        for each in people:
            child = _start(each, trial, ledgers, [other.go for other in children])
            children.append(child)
            outcomes[each.name] = _failure(_hear(child, deadline), "open")
        for child in children:
            os.close(child.go)
        for child in children:
            outcomes[child.who] = outcomes[child.who] or _failure(_hear(child, deadline), "done")
    finally:
        for child in children:
            os.close(child.says)
            os.kill(child.pid, signal.SIGKILL)  # it has ended, or hangs
            os.waitpid(child.pid, 0)
        for suffix in ("", "-wal", "-shm"):
            trial.with_name(trial.name + suffix).unlink(missing_ok=True)
        trial.with_suffix(".identity").unlink(missing_ok=True)
    return outcomes


def _failure(said: str, expected: str) -> str | None:
    return None if said == expected else said or "the trial ended without an answer"


def _hear(child: _Child, deadline: float) -> str:
    ready, _, _ = select.select([child.says], [], [], max(deadline - time.monotonic(), 0.0))
    if not ready:
        return f"no answer for {_SECONDS:g} s"
    return os.read(child.says, 4096).decode(errors="replace").strip()


def _start(who: Person, trial: Path, ledgers: Sequence[Path], inherited: Sequence[int]) -> _Child:
    says, said = os.pipe()
    waits, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        for descriptor in (says, go, *inherited):  # else the others would not see them closed
            os.close(descriptor)
        _try_and_exit(who, trial, ledgers, said, waits)
    os.close(said)
    os.close(waits)
    return _Child(who.name, pid, says, go)


def _try_and_exit(who: Person, trial: Path, ledgers: Sequence[Path], said: int, waits: int) -> NoReturn:
    try:
        os.setgroups(who.groups)
        os.setgid(who.gid)
        os.setuid(who.uid)
        os.umask(0o077)
        file = LedgerFile(trial, _TABLE, FORMAT)
        with file.errors():
            file.connection.execute("INSERT INTO trial VALUES (?)", (who.uid,))
        os.write(said, b"open\n")
        os.read(waits, 1)  # until all have it open
        with file.errors():
            file.connection.execute("INSERT INTO trial VALUES (?)", (who.uid,))
        for path in ledgers if who.uid else ():  # not as root: other users can put files beside them
            try_ledger(path)
        file.connection.close()
        os.write(said, b"done\n")
    except BaseException as error:
        os.write(said, str(error).encode()[:4000] or b"failed")
    finally:
        os._exit(0)
