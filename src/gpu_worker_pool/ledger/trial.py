"""Tries a ledger as a request would use it, without changing anything, and says who uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

#: Users are looked for among this many requests, the newest.
_NEWEST: Final = 20_000


class Seen(NamedTuple):
    held: int
    waiting: int
    #: Accounts of holders and waiters, and of requests that ended within a day.
    accounts: frozenset[str]


def try_ledger(path: Path) -> Seen:
    """Open it, or make it, and take its write lock. Raises `LedgerUnavailableError` where a request would."""
    file = LedgerFile(path, SCHEMA, FORMAT)
    try:
        with file.errors(), file.in_use:
            execute = file.connection.execute
            execute("BEGIN IMMEDIATE")
            try:
                return Seen(
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
                )
            finally:
                execute("ROLLBACK")
    finally:
        file.connection.close()
