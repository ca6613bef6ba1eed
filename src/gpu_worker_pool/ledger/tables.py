"""Reads and writes the tables of a ledger file, within transactions that `SQLiteLedger` begins and ends.

Every row has the revision that wrote it, so that a process reads only what others have changed. Ended requests stay in
the file; they are looked up one by one when they are needed again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.replication import Counters, GPUHistory
from gpu_worker_pool.core.saved import (
    after_reboot,
    lease_of,
    moment_of,
    outcome_of,
    to_json,
    waiter_of,
    with_later_fields,
    without_later_fields,
)
from gpu_worker_pool.errors import LedgerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import apsw

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.remembered import Outcome

FORMAT: Final = 1
#: How many ended requests the file keeps at most: a busy day must not fill the disk.
MOST_REMEMBERED: Final = 200_000
#: How many are removed in one transaction at most.
_REMOVED_AT_ONCE: Final = 5_000

_WAITER, _LEASE, _OUTCOME = "waiter", "lease", "outcome"

SCHEMA: Final = """
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    revision INTEGER NOT NULL, fence INTEGER NOT NULL, ticket INTEGER NOT NULL,
    boot_id TEXT NOT NULL, now REAL, tally TEXT NOT NULL, forgotten INTEGER NOT NULL, secret TEXT NOT NULL
) STRICT;
INSERT INTO meta VALUES (1, 0, 0, 0, '', NULL, '{}', 0, lower(hex(randomblob(16))));

CREATE TABLE requests (
    request_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL, lease_id TEXT, ended_at REAL, revision INTEGER NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE INDEX changed ON requests (revision);
CREATE UNIQUE INDEX leased ON requests (lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX ended ON requests (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX live ON requests (kind) WHERE ended_at IS NULL;

CREATE TABLE gpus (
    gpu_id TEXT PRIMARY KEY, endpoint_id TEXT NOT NULL,
    last_fence INTEGER NOT NULL, freed_at REAL, read_after REAL, revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Whatever a program believes: a GPU is promised to one, or to several who all share it.
CREATE TABLE promised (
    gpu_id TEXT NOT NULL, lease_id TEXT NOT NULL, is_shared INTEGER NOT NULL, PRIMARY KEY (gpu_id, lease_id)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX promised_to_one ON promised (gpu_id) WHERE is_shared = 0;
CREATE INDEX promised_by ON promised (lease_id);
CREATE TRIGGER promised_twice BEFORE INSERT ON promised
WHEN EXISTS (SELECT 1 FROM promised WHERE gpu_id = new.gpu_id AND (is_shared = 0 OR new.is_shared = 0))
BEGIN SELECT RAISE(ABORT, 'this GPU is promised already'); END;
"""

#: What the first version did not have; `Tables` adds it to a ledger without it. Older versions do not look at it, and
#: their transactions run the trigger.
LATER_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS later_fields (request_id TEXT PRIMARY KEY, data TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS later_fields_forgotten AFTER DELETE ON requests
BEGIN DELETE FROM later_fields WHERE request_id = old.request_id; END;
"""


@dataclass(frozen=True, slots=True)
class Meta:
    """The row of the table `meta`."""

    revision: int
    fence: int
    ticket: int
    boot_id: str
    #: The time of the last transaction, which shows that a process serves the ledger; None for a new ledger.
    now: float | None
    tally: str
    #: The newest revision of a removed row: a process that knows only older revisions must read everything again.
    forgotten: int


class Tables:
    def __init__(self, connection: apsw.Connection) -> None:
        self._execute = connection.execute
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'later_fields_forgotten'").fetchone() is None:
            with connection:
                connection.execute(LATER_SCHEMA)
        #: The rows of the table `gpus`, as far as this process knows.
        self._gpu_rows: dict[str, tuple[Any, ...]] = {}

    def secret(self) -> str:
        return str(self._execute("SELECT secret FROM meta").get)

    def meta(self) -> Meta:
        row: tuple[Any, ...] | None = self._execute(
            "SELECT revision, fence, ticket, boot_id, now, tally, forgotten FROM meta"
        ).fetchone()
        if row is None:
            raise LedgerUnavailableError("the ledger has lost its first row: it is damaged")
        return Meta(*row)

    # --- reading ---

    def load(self, pool: Pool, since_revision: int | None, meta: Meta) -> None:
        """Replicate the changes since that revision into the pool; None: all live requests, into an empty one."""
        if since_revision is None:
            found = self._execute(f"{_ROWS} WHERE ended_at IS NULL")
            self._gpu_rows.clear()
        else:
            found = self._execute(f"{_ROWS} WHERE revision > ?", (since_revision,))
        news = [_known(kind, data, later) for kind, data, later in found]
        # In order of arrival, whichever was written last.
        news.sort(key=lambda known: known.ticket if isinstance(known, Waiter) else 0)
        histories = []
        for row in self._execute(
            "SELECT gpu_id, endpoint_id, last_fence, freed_at, read_after FROM gpus WHERE revision > ?",
            (-1 if since_revision is None else since_revision,),
        ):
            self._gpu_rows[row[0]] = row
            gpu_id, endpoint_id, last_fence, freed_at, read_after = row
            histories.append(GPUHistory(gpu_id, endpoint_id, last_fence, moment_of(freed_at), moment_of(read_after)))
        counters = Counters(meta.fence, meta.ticket, moment_of(meta.now), json.loads(meta.tally))
        pool.replicate(news, histories, counters)

    def ended_request(self, request_id: str) -> Outcome | None:
        return self._outcome("request_id", request_id)

    def ended_lease(self, lease_id: str) -> Outcome | None:
        return self._outcome("lease_id", lease_id)

    def _outcome(self, column: str, value: str) -> Outcome | None:
        row = self._execute(f"{_ROWS} WHERE {column} = ? AND kind = 'outcome'", (value,)).fetchone()
        return None if row is None else outcome_of(_with_later(row[1], row[2]))

    # --- writing ---

    def write(self, pool: Pool, changes: Mapping[str, Waiter | Lease | Outcome], before: Meta, boot_id: str) -> Meta:
        """Write the changes since `before`, and always `meta`, which shows that a process serves the ledger."""
        revision = before.revision + 1
        touched: dict[str, GPUResourceState] = {}
        # Ended leases first: a GPU may go from one lease to the next within one transaction.
        for known in sorted(changes.values(), key=lambda known: isinstance(known, Lease)):
            self._write_request(known, before.fence, revision)
            lease = known if isinstance(known, Lease) else None if isinstance(known, Waiter) else known.lease
            if lease is not None:
                touched.update({gpu_id: pool.allocator.gpus[gpu_id] for gpu_id in lease.gpu_ids})
        for gpu in touched.values():
            self._write_gpu(gpu, revision)
        meta = Meta(revision, pool.fence, pool.ticket, boot_id, pool.now, _tally(pool), before.forgotten)
        self._execute(
            "UPDATE meta SET revision = ?, fence = ?, ticket = ?, boot_id = ?, now = ?, tally = ?",
            (revision, meta.fence, meta.ticket, boot_id, meta.now, meta.tally),
        )
        return meta

    def _write_request(self, known: Waiter | Lease | Outcome, last_fence: int, revision: int) -> None:
        kind, lease_id, ended_at = _WAITER, None, None
        if isinstance(known, Lease):
            kind, lease_id = _LEASE, known.lease_id
            if known.fence > last_fence:
                is_shared = known.request.requirements.share
                # A lease divides its GPUs: each of them is promised to one inside it, too.
                inside = "" if known.within is None else f"{known.within}/"
                for gpu_id in known.gpu_ids:
                    self._execute("INSERT INTO promised VALUES (?, ?, ?)", (inside + gpu_id, lease_id, is_shared))
        elif not isinstance(known, Waiter):
            kind, ended_at = _OUTCOME, known.at
            if known.lease is not None:
                lease_id = known.lease.lease_id
                self._execute("DELETE FROM promised WHERE lease_id = ?", (lease_id,))
        row = to_json(known)
        later = without_later_fields(row)
        self._execute(
            "INSERT INTO requests VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (request_id) DO UPDATE"
            " SET kind = ?2, lease_id = ?3, ended_at = ?4, revision = ?5, data = ?6",
            (known.request.request_id, kind, lease_id, ended_at, revision, _encode(row)),
        )
        if later:  # a request never changes, so once is enough
            self._execute(
                "INSERT OR IGNORE INTO later_fields VALUES (?, ?)", (known.request.request_id, _encode(later))
            )

    def _write_gpu(self, gpu: GPUResourceState, revision: int) -> None:
        endpoint_id, freed_at, read_after = gpu.endpoint.endpoint_id, to_json(gpu.freed_at), to_json(gpu.read_after)
        row = (gpu.gpu_id, endpoint_id, gpu.last_fence, freed_at, read_after)
        if self._gpu_rows.get(gpu.gpu_id) != row:
            self._gpu_rows[gpu.gpu_id] = row
            self._execute("INSERT OR REPLACE INTO gpus VALUES (?, ?, ?, ?, ?, ?)", (*row, revision))

    def forget_ended(self, before: float) -> None:
        """Remove requests that ended before that time, and the oldest if there are too many."""
        removed = self._execute(
            "DELETE FROM requests WHERE rowid IN (SELECT rowid FROM requests WHERE ended_at < ? LIMIT ?)"
            " RETURNING revision",
            (before, _REMOVED_AT_ONCE),
        ).fetchall()
        # By when they ended, not by when they arrived: a lease that was held for days has only just ended.
        too_many = self._execute("SELECT count(*) FROM requests WHERE ended_at IS NOT NULL").get - MOST_REMEMBERED
        if too_many > 0:
            removed += self._execute(
                "DELETE FROM requests WHERE rowid IN"
                " (SELECT rowid FROM requests WHERE ended_at IS NOT NULL ORDER BY ended_at LIMIT ?) RETURNING revision",
                (min(too_many, _REMOVED_AT_ONCE),),
            ).fetchall()
        if removed:
            self._execute("UPDATE meta SET forgotten = max(forgotten, ?)", (max(removed)[0],))

    def restart_clock(self, meta: Meta, now: float, boot_id: str) -> Meta:
        """After a reboot: shift all times to the new clock, and drop the processes, which are gone."""
        later = 0.0 if meta.now is None else now - meta.now
        revision = meta.revision + 1
        rows: list[tuple[Any, ...]] = self._execute("SELECT request_id, ended_at, data FROM requests").fetchall()
        for request_id, ended_at, data in rows:
            row = after_reboot(json.loads(data), later)
            self._execute(
                "UPDATE requests SET ended_at = ?, revision = ?, data = ? WHERE request_id = ?",
                (None if ended_at is None else ended_at + later, revision, _encode(row), request_id),
            )
        self._execute(
            "UPDATE gpus SET freed_at = freed_at + ?1, read_after = read_after + ?1, revision = ?2", (later, revision)
        )
        self._gpu_rows.clear()
        return replace(meta, revision=revision, now=now, boot_id=boot_id)


_ROWS: Final = "SELECT kind, requests.data, later_fields.data FROM requests LEFT JOIN later_fields USING (request_id)"


def _with_later(data: str, later: str | None) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(data)
    return row if later is None else with_later_fields(row, json.loads(later))


def _known(kind: str, data: str, later: str | None) -> Waiter | Lease | Outcome:
    row = _with_later(data, later)
    if kind == _WAITER:
        return waiter_of(row)
    return lease_of(row) if kind == _LEASE else outcome_of(row)


#: Made once: `json.dumps` would make an encoder per row.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _tally(pool: Pool) -> str:
    return _encode({state.value: count for state, count in pool.tally.items() if count})
