"""Tries a ledger as a request would use it, without changing anything, and says who uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, schema_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Users are searched for among this many requests, the newest.
_NEWEST: Final = 20_000


class LedgerUse(NamedTuple):
    held: int
    waiting: int
    #: Accounts of holders and waiters, and of requests that ended within a day.
    accounts: frozenset[str]
    #: The file whose policy the ledger remembers; None: it remembers none.
    policy: str | None = None


def _policy(execute: Callable[[str], Any]) -> str | None:
    if execute("SELECT 1 FROM sqlite_schema WHERE name = 'policy'").fetchone() is None:
        return None  # no newer version has opened it yet
    row = execute("SELECT source FROM policy").fetchone()
    return None if row is None else str(row[0])


def try_ledger(path: Path) -> LedgerUse:
    """Open it, or make it, and take its write lock. Raises `LedgerUnavailableError` where a request would."""
    file = LedgerFile(path, schema_from(), FORMAT)
    try:
        with file.errors(), file.in_use:
            execute = file.connection.execute
            execute("BEGIN IMMEDIATE")
            try:
                return LedgerUse(
                    execute("SELECT count(*) FROM requests WHERE kind = 'lease'").get,
                    execute("SELECT count(*) FROM requests WHERE kind = 'waiter'").get,
                    frozenset(
                        account
                        for (account,) in execute(
                            "SELECT DISTINCT json_extract(data, '$.request.account') FROM"
                            " (SELECT data FROM requests ORDER BY rowid DESC LIMIT ?)",
                            (_NEWEST,),
                        )
                        if isinstance(account, str) and account
                    ),
                    _policy(execute),
                )
            finally:
                execute("ROLLBACK")
    finally:
        file.connection.close()
