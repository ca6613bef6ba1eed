"""The rows that the dispatcher keeps in the database: what they hold, and which of them have changed."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.saved import request_of, to_json
from gpu_worker_pool.fleet.store import OUTCOMES, REQUESTS, TABLES, Delete, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_worker_pool.core.events import Request

#: The key of what the dispatcher counts, in the table of accounts; no account has this name.
COUNTERS: Final = "#counters"


def request_document(
    request: Request, ticket: int, enqueued_at: float, *, may_reserve: bool, waits_at: str = ""
) -> dict[str, Any]:
    """Without its polls: the next dispatcher gives every client time to poll again.

    `waits_at`: the host in whose ledger it waits. To a dispatcher that does not know this it is a request of a client
    that does not poll.
    """
    row = {"request": to_json(request), "ticket": ticket, "enqueued_at": enqueued_at, "may_reserve": may_reserve}
    return {**row, "waits_at": waits_at} if waits_at else row


def outcome_document(
    request: Request, state: str, at: float, reasons: Iterable[str] = (), host: str = "", lease_id: str = ""
) -> dict[str, Any]:
    """`state`: as `core.RequestState` has it, or "held" where it was granted a lease, which may have ended since."""
    return {
        "request": to_json(request),
        "state": state,
        "at": at,
        "reasons": list(reasons),
        "host": host,
        "lease_id": lease_id,
    }


def request_in(document: Mapping[str, Any]) -> Request:
    return request_of(dict(document["request"]))


class ChangedRows:
    """Which rows differ from what is stored.

    `document_of` says what a row of another table than the outcomes holds now; None: it is gone.
    """

    def __init__(
        self,
        stored: Mapping[str, Mapping[str, Mapping[str, Any]]],
        document_of: Callable[[str, str], Mapping[str, Any] | None],
        most_outcomes: int,
    ) -> None:
        self._document_of = document_of
        self._most_outcomes = most_outcomes
        #: The keys that the database may have.
        self._stored: dict[str, dict[str, None]] = {table: dict.fromkeys(stored.get(table, ())) for table in TABLES}
        self._changed: dict[tuple[str, str], None] = {}
        self._batch = 0
        #: The batch, and whether each of its rows will exist after the commit.
        self._under_way: dict[tuple[str, str], bool] = {}
        #: How requests ended, or where they are held; the oldest come first and are forgotten first.
        self.outcomes: OrderedDict[str, Mapping[str, Any]] = OrderedDict(
            sorted(stored.get(OUTCOMES, {}).items(), key=lambda item: float(item[1].get("at", 0.0)))
        )

    def __bool__(self) -> bool:
        return bool(self._changed)

    def mark(self, table: str, key: str) -> None:
        self._changed[table, key] = None

    def mark_outcome(self, key: str, document: Mapping[str, Any] | None) -> None:
        """None: forget it."""
        self.outcomes.pop(key, None)
        if document is not None:
            self.outcomes[key] = document
        self._changed[OUTCOMES, key] = None

    def take(self) -> tuple[int, Sequence[Put | Delete]]:
        """What to store next; offered again after `lost`."""
        self._prune()
        changes: list[Put | Delete] = []
        for table, key in self._changed:
            document = self.outcomes.get(key) if table == OUTCOMES else self._document_of(table, key)
            if document is not None:
                changes.append(Put(table, key, document))
                self._stored[table][key] = None
            elif key in self._stored[table]:
                changes.append(Delete(table, key))
            self._under_way[table, key] = document is not None
        self._changed.clear()
        self._batch += 1
        return self._batch, changes

    def take_all(self, everything: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> int:
        """Write all rows again."""
        self._stored = {table: dict.fromkeys(everything.get(table, ())) for table in TABLES}
        self._under_way = {(table, key): True for table in TABLES for key in self._stored[table]}
        self._changed.clear()
        self._batch += 1
        return self._batch

    def stored(self, batch: int) -> list[str]:
        """The requests whose rows are committed now."""
        if batch != self._batch:
            return []
        done = [key for (table, key), is_there in self._under_way.items() if table == REQUESTS and is_there]
        for (table, key), is_there in self._under_way.items():
            if not is_there:
                self._stored[table].pop(key, None)
        self._under_way.clear()
        return done

    def lost(self) -> None:
        """The last batch may not have been committed."""
        self._changed = dict.fromkeys((*self._under_way, *self._changed))
        self._under_way.clear()

    def _prune(self) -> None:
        while len(self.outcomes) > self._most_outcomes:
            key, _ = self.outcomes.popitem(last=False)
            self._changed[OUTCOMES, key] = None
