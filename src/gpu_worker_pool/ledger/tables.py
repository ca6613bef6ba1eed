"""Reads and writes the tables of a ledger file, within transactions that `SQLiteLedger` begins and ends.

Every row has the revision that wrote it, so that a process reads only what others have changed. Ended requests stay in
the file; they are looked up one by one when they are needed again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.fair_share import Use
from gpu_worker_pool.core.fleet_order import FleetOrder
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.core.replication import Counters, GPUHistory
from gpu_worker_pool.core.saved import (
    after_reboot,
    lease_of,
    moment_of,
    outcome_of,
    to_json,
    waiter_of,
    with_later_fields,
    with_later_lease_fields,
    without_later_fields,
    without_later_lease_fields,
)
from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.ledger.policy_file import StoredPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import apsw

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.remembered import Outcome

FORMAT: Final = 1
#: How many ended requests the file keeps at most: a busy day must not fill the disk.
MOST_REMEMBERED: Final = 200_000
#: How many are removed in one transaction at most.
_REMOVED_AT_ONCE: Final = 5_000
#: How large the file may become before more of them are removed; and how many of them at once, as they may be small.
MOST_BYTES: Final = 256 * 1024 * 1024
_REMOVED_FOR_SPACE: Final = 20_000
#: How many records wait at most for a usage file that cannot be written, and how many are written at once.
MOST_UNRECORDED: Final = 20_000
_RECORDED_AT_ONCE: Final = 1_000

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

#: Fences of a ledger begin at the time when it was made, in milliseconds since then: a later ledger has higher ones.
FENCES_BEGAN_AT: Final = 1_735_689_600  # 2025-01-01


def schema_from(first_fence: int | None = None) -> str:
    """For a new ledger. No fence, and so no lease id, is ever repeated, whatever became of an older ledger."""
    if first_fence is None:
        passed = time.time() - FENCES_BEGAN_AT
        # A host without a clock begins in 1970 with every boot.
        first_fence = int(passed * 1000) if passed > 0 else int.from_bytes(os.urandom(4))
    return f"{SCHEMA}UPDATE meta SET fence = {first_fence:d};"  # noqa: S608  # a number


#: What the first version did not have; `Tables` adds it to a ledger without it. Older versions do not look at it, and
#: their transactions run the trigger.
LATER_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS later_fields (request_id TEXT PRIMARY KEY, data TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS later_fields_forgotten AFTER DELETE ON requests
BEGIN DELETE FROM later_fields WHERE request_id = old.request_id; END;
CREATE TABLE IF NOT EXISTS later_lease_fields (request_id TEXT PRIMARY KEY, data TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS later_lease_fields_forgotten AFTER DELETE ON requests
BEGIN DELETE FROM later_lease_fields WHERE request_id = old.request_id; END;
-- Records of what has ended, until they are in the usage files.
CREATE TABLE IF NOT EXISTS unrecorded (number INTEGER PRIMARY KEY, record TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, data TEXT NOT NULL) STRICT, WITHOUT ROWID;
-- The last policy that could be read.
CREATE TABLE IF NOT EXISTS policy (
    id INTEGER PRIMARY KEY CHECK (id = 1), source TEXT NOT NULL, text TEXT NOT NULL
) STRICT;
-- On a host of a fleet: until when its dispatcher says whose turn it is, and what else it said of that.
CREATE TABLE IF NOT EXISTS fleet_order (
    id INTEGER PRIMARY KEY CHECK (id = 1), until REAL NOT NULL, data TEXT NOT NULL, revision INTEGER NOT NULL
) STRICT;
"""
#: The last of its names: a ledger that has it has all of them.
_LAST_OF_SCHEMA: Final = "fleet_order"
#: The same for what came with fair share, where use counts.
USE_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS used (
    account TEXT PRIMARY KEY, gpu_seconds REAL NOT NULL, at REAL NOT NULL, revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


@frozen
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
    def __init__(self, connection: apsw.Connection, *, stores_use: bool = False) -> None:
        """`stores_use`: of accounts, for fair share."""
        self._stores_use = stores_use
        self._execute = connection.execute
        names = "SELECT 1 FROM sqlite_schema WHERE name = ?"
        if connection.execute(names, (_LAST_OF_SCHEMA,)).fetchone() is None:
            with connection:
                connection.execute(LATER_SCHEMA)
        if stores_use and connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'used'").fetchone() is None:
            with connection:
                connection.execute(USE_SCHEMA)
        #: The rows of the table `gpus`, as far as this process knows.
        self._gpu_rows: dict[str, tuple[Any, ...]] = {}
        #: What the table `fleet_order` says, as far as this process knows.
        self._order: FleetOrder | None = None

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
            self._order = None
        else:
            found = self._execute(f"{_ROWS} WHERE revision > ?", (since_revision,))
        news = [_known(*row) for row in found]
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
        uses: list[Use] = []
        if pool.fair_share is not None:
            found = self._execute(
                "SELECT account, gpu_seconds, at FROM used WHERE revision > ?",
                (-1 if since_revision is None else since_revision,),
            )
            uses = [Use(*row) for row in found]
        order = self._order_since(-1 if since_revision is None else since_revision)
        pool.replicate(news, histories, counters, uses, order)

    def ended_request(self, request_id: str) -> Outcome | None:
        return self._outcome("request_id", request_id)

    def ended_lease(self, lease_id: str) -> Outcome | None:
        return self._outcome("lease_id", lease_id)

    def live_lease(self, lease_id: str) -> Lease | None:
        row = self._execute(f"{_ROWS} WHERE lease_id = ? AND kind = 'lease'", (lease_id,)).fetchone()
        return None if row is None else lease_of(_with_later(*row[1:]))

    def _outcome(self, column: str, value: str) -> Outcome | None:
        row = self._execute(f"{_ROWS} WHERE {column} = ? AND kind = 'outcome'", (value,)).fetchone()
        return None if row is None else outcome_of(_with_later(*row[1:]))

    # --- the order of a fleet ---

    def _order_since(self, revision: int) -> FleetOrder | None:
        row = self._execute("SELECT until, data FROM fleet_order WHERE revision > ?", (revision,)).fetchone()
        if row is None:
            return None
        data = json.loads(row[1])
        self._order = FleetOrder(
            row[0],
            data.get("positions", {}),
            tuple(data.get("reserved", ())),
            data.get("reserved_for", ""),
            data.get("reserved_name", ""),
            data.get("note", ""),
            data.get("process", ""),
        )
        return self._order

    def is_other_order(self, order: FleetOrder | None) -> bool:
        """Whether this one is to be written."""
        return order is not None and order != self._order

    def _write_order(self, order: FleetOrder, revision: int) -> None:
        data = {
            "positions": dict(order.positions),
            "reserved": list(order.reserved),
            "reserved_for": order.reserved_for,
            "reserved_name": order.reserved_name,
            "note": order.note,
            "process": order.process,
        }
        self._execute("INSERT OR REPLACE INTO fleet_order VALUES (1, ?, ?, ?)", (order.until, _encode(data), revision))
        self._order = order

    # --- the policy, and what has ended ---

    def policy(self) -> StoredPolicy | None:
        row = self._execute("SELECT source, text FROM policy").fetchone()
        return None if row is None else StoredPolicy(*row)

    def store_policy(self, policy: StoredPolicy | None) -> None:
        if policy is None:
            self._execute("DELETE FROM policy")
        else:
            self._execute("INSERT OR REPLACE INTO policy VALUES (1, ?, ?)", policy)

    def to_record(self, records: Iterable[dict[str, Any]]) -> bool:
        """Store these records, in the transaction that ends their requests; whether there are any."""
        is_any = False
        for record in records:
            is_any = True
            self._execute("INSERT INTO unrecorded (record) VALUES (?)", (_encode(record),))
        return is_any

    def has_unrecorded(self, count: int) -> bool:
        """Whether there are at least this many of them."""
        select = "SELECT count(*) FROM (SELECT 1 FROM unrecorded LIMIT ?)"
        return int(self._execute(select, (count,)).get) >= count

    def unrecorded(self) -> list[tuple[int, str]]:
        """The oldest of them, with their numbers."""
        select = "SELECT number, record FROM unrecorded ORDER BY number LIMIT ?"
        rows: list[tuple[Any, ...]] = self._execute(select, (_RECORDED_AT_ONCE,)).fetchall()
        return [(number, record) for number, record in rows]

    def recorded(self, last_number: int) -> None:
        """Remove the records up to this one, which are in a usage file."""
        self._execute("DELETE FROM unrecorded WHERE number <= ?", (last_number,))

    def forget_unrecorded(self) -> int:
        """Remove the oldest beyond a limit: the ledger must not grow without bound. Returns how many were lost."""
        newest = self._execute("SELECT max(number) FROM unrecorded").get or 0
        self._execute("DELETE FROM unrecorded WHERE number <= ?", (newest - MOST_UNRECORDED,))
        return int(self._execute("SELECT changes()").get)

    def totals(self) -> dict[str, Any]:
        """What is counted over the whole life of the ledger, by name."""
        return {name: json.loads(data) for name, data in self._execute("SELECT name, data FROM totals")}

    def store_totals(self, totals: Mapping[str, Any]) -> None:
        for name, data in totals.items():
            self._execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (name, _encode(data)))

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
        if pool.fair_share is not None:
            for use in pool.fair_share.uses(pool.fair_share.changed):
                self._execute(
                    "INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?)", (use.account, use.gpu_seconds, use.at, revision)
                )
            pool.stored_use()
        if pool.fleet_order is not None and self.is_other_order(pool.fleet_order):
            self._write_order(pool.fleet_order, revision)
        meta = Meta(revision, pool.fence, pool.ticket, boot_id, pool.now, _tally(pool), before.forgotten)
        self._execute(
            "UPDATE meta SET revision = ?, fence = ?, ticket = ?, boot_id = ?, now = ?, tally = ?",
            (revision, meta.fence, meta.ticket, boot_id, meta.now, meta.tally),
        )
        return meta

    def stamp(self, before: Meta, now: float) -> Meta:
        """Only show that a process serves the ledger."""
        self._execute("UPDATE meta SET now = ?", (now,))
        return replace(before, now=now)

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
        of_lease = {} if kind == _WAITER else without_later_lease_fields(row)
        self._execute(
            "INSERT INTO requests VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (request_id) DO UPDATE"
            " SET kind = ?2, lease_id = ?3, ended_at = ?4, revision = ?5, data = ?6",
            (known.request.request_id, kind, lease_id, ended_at, revision, _encode(row)),
        )
        if later:  # a request never changes, so once is enough
            self._execute(
                "INSERT OR IGNORE INTO later_fields VALUES (?, ?)", (known.request.request_id, _encode(later))
            )
        if of_lease:
            self._execute(
                "INSERT OR REPLACE INTO later_lease_fields VALUES (?, ?)", (known.request.request_id, _encode(of_lease))
            )
        elif kind != _WAITER:  # such as the yield request of a client that has left
            self._execute("DELETE FROM later_lease_fields WHERE request_id = ?", (known.request.request_id,))

    def _write_gpu(self, gpu: GPUResourceState, revision: int) -> None:
        endpoint_id, freed_at, read_after = gpu.endpoint.endpoint_id, to_json(gpu.freed_at), to_json(gpu.read_after)
        row = (gpu.gpu_id, endpoint_id, gpu.last_fence, freed_at, read_after)
        if self._gpu_rows.get(gpu.gpu_id) != row:
            self._gpu_rows[gpu.gpu_id] = row
            self._execute("INSERT OR REPLACE INTO gpus VALUES (?, ?, ?, ?, ?, ?)", (*row, revision))

    def forget_ended(self, before: float) -> bool:
        """Remove requests that ended before that time, and the oldest if they are too many or need too much space.

        Returns whether more should be removed soon: requests that end all the time could fill the disk.
        """
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
        excess = self._bytes_in_use() - MOST_BYTES
        if excess > 0:
            removed += self._execute(
                "DELETE FROM requests WHERE rowid IN (SELECT rowid FROM (SELECT rowid, sum(length(data)) OVER"
                " (ORDER BY ended_at, rowid) - length(data) AS older FROM"
                " (SELECT rowid, ended_at, data FROM requests WHERE ended_at IS NOT NULL ORDER BY ended_at LIMIT ?))"
                " WHERE older < ?) RETURNING revision",
                (_REMOVED_FOR_SPACE, excess),
            ).fetchall()
        if removed:
            self._execute("UPDATE meta SET forgotten = max(forgotten, ?)", (max(removed)[0],))
        return excess > 0 and bool(removed)

    def _bytes_in_use(self) -> int:
        """Without the pages that were freed: these are used again."""
        pages = self._execute("PRAGMA page_count").get - self._execute("PRAGMA freelist_count").get
        return int(pages * self._execute("PRAGMA page_size").get)

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
        rows = self._execute("SELECT request_id, data FROM later_lease_fields").fetchall()
        for request_id, data in rows:
            self._execute(
                "UPDATE later_lease_fields SET data = ? WHERE request_id = ?",
                (_encode(after_reboot(json.loads(data), later)), request_id),
            )
        self._execute(
            "UPDATE gpus SET freed_at = freed_at + ?1, read_after = read_after + ?1, revision = ?2", (later, revision)
        )
        if self._stores_use:
            self._execute("UPDATE used SET at = at + ?1, revision = ?2", (later, revision))
        self._execute("DELETE FROM fleet_order")  # its server says so again
        self._gpu_rows.clear()
        return replace(meta, revision=revision, now=now, boot_id=boot_id)


_ROWS: Final = (
    "SELECT kind, requests.data, later_fields.data, later_lease_fields.data FROM requests"
    " LEFT JOIN later_fields USING (request_id) LEFT JOIN later_lease_fields USING (request_id)"
)


def _with_later(data: str, later: str | None, of_lease: str | None) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(data)
    if later is not None:
        with_later_fields(row, json.loads(later))
    return row if of_lease is None else with_later_lease_fields(row, json.loads(of_lease))


def _known(kind: str, data: str, later: str | None, of_lease: str | None) -> Waiter | Lease | Outcome:
    row = _with_later(data, later, None if kind == _WAITER else of_lease)
    if kind == _WAITER:
        return waiter_of(row)
    return lease_of(row) if kind == _LEASE else outcome_of(row)


#: Made once: `json.dumps` would make an encoder per row.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _tally(pool: Pool) -> str:
    return _encode({state.value: count for state, count in pool.tally.items() if count})
