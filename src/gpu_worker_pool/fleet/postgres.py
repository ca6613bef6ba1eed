"""The store of a fleet in PostgreSQL. The only file that imports psycopg, which the extra `fleet` brings.

Nothing depends on a session: no prepared statements, no locks beyond a transaction, no LISTEN. So it works behind
PgBouncer in transaction mode. A COMMIT is never cancelled: with synchronous replication PostgreSQL would then report
success for what no replica has. Where an answer is overdue the connection is cut instead, and the outcome is unknown.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, LiteralString, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from gpu_worker_pool.fleet.database_url import VARIABLE, shown_url
from gpu_worker_pool.fleet.overdue import OverdueCutter
from gpu_worker_pool.fleet.schema import NAMESPACE, OLDEST_SERVER, TABLES, VERSION
from gpu_worker_pool.fleet.store import (
    CommitsLost,
    Delete,
    Deposed,
    FleetState,
    Office,
    StoreMismatch,
    StoreUnavailable,
)

try:
    import psycopg
    from psycopg import errors
except ImportError as error:  # also where psycopg is there, but no libpq
    raise StoreMismatch(
        f"a fleet needs psycopg, which cannot be imported ({error}): pip install 'gpu-worker-pool[fleet]'"
    ) from None

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpu_worker_pool.fleet.store import Put

Cursor: TypeAlias = "psycopg.Cursor"
Documents: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, Any]]]"

#: The limit for every statement: the dispatcher must notice quickly that the database is down.
OPERATION_SECONDS: Final = 2.5
#: Added for each row that is written.
ROW_SECONDS: Final = 0.001
#: The limit for reading or writing all rows.
LONG_SECONDS: Final = 12.0
#: A term that ends later than this many terms from now was set before the database's clock went back: it has ended.
_TERMS_AHEAD: Final = 4
_MOST_TEXT: Final = 300
_KEEPALIVES: Final[Mapping[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 2500,
    "connect_timeout": 2,
}
_LOOK: Final[LiteralString] = f"""
    SELECT fleet_id, epoch, revision, dispatcher_name, dispatcher_url,
        CASE WHEN isfinite(until) THEN extract(epoch FROM until - clock_timestamp())::float8 ELSE 0 END,
        extract(epoch FROM clock_timestamp())::float8, schema_version, secret, oldest_schema_user
    FROM {NAMESPACE}.fleet"""
#: The condition of every fenced statement: this dispatcher is still in office.
_OURS: Final[LiteralString] = "epoch = %(epoch)s AND dispatcher_name = %(name)s AND fleet_id = %(fleet_id)s"


class PostgresStore:
    """`FleetStore` for one thread. `fleet/store.py` says what each method does."""

    def __init__(self, url: str, user_name: str = "gpu-pool", *, operation_seconds: float = OPERATION_SECONDS) -> None:
        """`url`: checked by `database_url`. `user_name`: how the database shows this program."""
        self.shown_url: str = shown_url(url)
        self._url, self._user_name, self._operation_seconds = url, user_name, operation_seconds
        self._secrets = _secrets_in(url)
        self._connection: psycopg.Connection | None = None
        self._attempt: _Attempt | None = None
        self._cutter = OverdueCutter()
        #: The fleet that this store belongs to: a database that was recreated under the same URL is not overwritten.
        self._fleet_id: str | None = None
        self._name = self._dispatcher_url = ""
        self._office_seconds = 2.0

    def close(self) -> None:
        self._drop()
        self._cutter.close()

    # --- the one row ---

    def look(self) -> FleetState:
        with self.transaction(is_read_only=True) as cursor:
            return self._look(cursor)

    def _look(self, cursor: Cursor) -> FleetState:
        row = cursor.execute(_LOOK).fetchone()
        if row is None:
            raise StoreMismatch(f"{self.shown_url} has the tables of a fleet, but no fleet: gpu-pool fleet init")
        fleet_id, epoch, revision, name, url, remaining, now, version, secret, oldest_user = row
        if remaining > _TERMS_AHEAD * self._office_seconds:
            remaining = 0.0
        if oldest_user > VERSION:
            raise StoreMismatch(
                f"the tables in {self.shown_url} (version {version}) need a newer gpu-pool than this one, which knows "
                f"version {VERSION}: upgrade gpu-worker-pool on this host"
            )
        if self._fleet_id not in (None, fleet_id):
            raise StoreMismatch(
                f"{self.shown_url} now holds another fleet ({fleet_id}) than before ({self._fleet_id}): "
                "restart the servers if that is intended"
            )
        self._fleet_id = fleet_id
        dispatcher = (name, url or "") if name is not None and remaining > 0 else None
        return FleetState(fleet_id, epoch, revision, dispatcher, remaining, now, version, secret)

    def stand(self, name: str, url: str, lowest_epoch: int, office_seconds: float) -> Office | None:
        if self._fleet_id is None:
            self.look()
        self._name, self._dispatcher_url, self._office_seconds = name, url, office_seconds
        with self.transaction() as cursor:
            cursor.execute(
                f"""UPDATE {NAMESPACE}.fleet SET epoch = greatest(epoch, %(lowest)s) + 1, revision = revision + 1,
                    dispatcher_name = %(name)s, dispatcher_url = %(url)s,
                    until = clock_timestamp() + %(seconds)s * interval '1 second'
                WHERE fleet_id = %(fleet_id)s AND (until < clock_timestamp()
                    OR until > clock_timestamp() + {_TERMS_AHEAD} * %(seconds)s * interval '1 second')
                RETURNING epoch, revision""",
                self._values(lowest=lowest_epoch, url=url, seconds=office_seconds),
            )
            row = cursor.fetchone()
        return None if row is None else Office(*row)

    def renew(self, office: Office, name: str, office_seconds: float) -> None:
        self._office_seconds = office_seconds
        with self.transaction() as cursor:
            cursor.execute(
                f"""UPDATE {NAMESPACE}.fleet SET until = clock_timestamp() + %(seconds)s * interval '1 second'
                WHERE {_OURS}""",
                self._values(office) | {"name": name, "seconds": office_seconds},
            )
            if cursor.rowcount == 0:
                self._refuse(cursor, office)

    def concede(self, office: Office) -> None:
        with self.transaction() as cursor:
            cursor.execute(
                f"UPDATE {NAMESPACE}.fleet SET until = '-infinity' WHERE {_OURS}",
                self._values(office),
            )

    # --- the rows ---

    def load(self, office: Office) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        found: dict[str, dict[str, Mapping[str, Any]]] = {}
        with self.transaction(is_read_only=True, seconds=LONG_SECONDS) as cursor:
            if (
                cursor.execute(f"SELECT 1 FROM {NAMESPACE}.fleet WHERE {_OURS}", self._values(office)).fetchone()
                is None
            ):
                self._refuse(cursor, office)
            for table in TABLES:
                rows = cursor.execute(f"SELECT key, document::text FROM {NAMESPACE}.{table}").fetchall()
                found[table] = {key: json.loads(document) for key, document in rows}
        return found

    def write(self, office: Office, changes: Sequence[Put | Delete]) -> Office:
        statement, values = _fenced_write(changes)
        # With the usual limit, a batch that is too large would never succeed.
        with self.transaction(seconds=self._operation_seconds + len(changes) * ROW_SECONDS) as cursor:
            row = cursor.execute(statement, self._values(office) | values).fetchone()
            if row is None or row[0] == 0:
                self._refuse(cursor, office)
        return Office(office.epoch, office.revision + 1)

    def rewrite(self, office: Office, everything: Documents) -> Office:
        with self.transaction(seconds=LONG_SECONDS) as cursor:
            row = cursor.execute(
                f"""UPDATE {NAMESPACE}.fleet SET epoch = %(epoch)s, revision = greatest(revision, %(revision)s) + 1,
                    dispatcher_name = %(name)s, dispatcher_url = %(url)s,
                    until = clock_timestamp() + %(seconds)s * interval '1 second'
                WHERE fleet_id = %(fleet_id)s
                    AND (epoch < %(epoch)s OR (epoch = %(epoch)s AND dispatcher_name = %(name)s))
                RETURNING revision""",
                self._values(office, url=self._dispatcher_url, seconds=self._office_seconds),
            ).fetchone()
            if row is None:
                raise Deposed(epoch=self._look(cursor).epoch)
            for table in TABLES:
                cursor.execute(f"DELETE FROM {NAMESPACE}.{table}")
                keys, documents = _columns(everything.get(table, {}))
                cursor.execute(
                    f"INSERT INTO {NAMESPACE}.{table} SELECT * FROM unnest(%s::text[], %s::json[])", [keys, documents]
                )
        return Office(office.epoch, row[0])

    def _values(self, office: Office | None = None, **more: object) -> dict[str, object]:
        fence = {} if office is None else {"epoch": office.epoch, "revision": office.revision}
        return {"name": self._name, "fleet_id": self._fleet_id} | fence | more

    def _refuse(self, cursor: Cursor, office: Office) -> None:
        """Nothing was written; a separate statement finds out why."""
        now = self._look(cursor)
        is_ours = now.dispatcher is None or now.dispatcher[0] == self._name
        if now.epoch > office.epoch or (now.epoch == office.epoch and not is_ours):
            raise Deposed(
                f"another dispatcher is in office: epoch {now.epoch}, and this one has {office.epoch}", epoch=now.epoch
            )
        if now.epoch < office.epoch or now.revision < office.revision:
            raise CommitsLost(
                f"a failover of the database lost commits: it is at revision {now.revision} of epoch {now.epoch}, and "
                f"{office.revision} of epoch {office.epoch} was committed",
                revision=now.revision,
            )
        # Only this dispatcher writes in its epoch: a write of it whose outcome was unknown has arrived since.
        raise StoreUnavailable("an earlier write of this dispatcher has been committed only now", is_unknown=True)

    # --- transactions ---

    @contextmanager
    def transaction(self, *, is_read_only: bool = False, seconds: float | None = None) -> Iterator[Cursor]:
        seconds = self._operation_seconds if seconds is None else seconds
        connection = self._connected()
        is_commit_sent = False
        # The server's limits end what waits there; they never concern the COMMIT. A dispatcher that is frozen within
        # a transaction must not keep the row locked.
        milliseconds = int(seconds * 1000)
        isolation: LiteralString = "REPEATABLE READ, READ ONLY" if is_read_only else "READ COMMITTED, READ WRITE"
        begin = (
            f"BEGIN ISOLATION LEVEL {isolation}; SET LOCAL statement_timeout = {milliseconds}; "
            f"SET LOCAL lock_timeout = {milliseconds}; "
            f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}"
        )
        try:
            with self._cutter.limit(connection.fileno(), seconds + 0.5), connection.cursor() as cursor:
                cursor.execute(begin.encode())
                yield cursor
                is_commit_sent = not is_read_only
                cursor.execute("COMMIT")
                assert cursor.statusmessage == "COMMIT", cursor.statusmessage
        except psycopg.Error as error:
            raise self._failure(error, is_commit_sent=is_commit_sent) from None
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            with self._cutter.limit(connection.fileno(), self._operation_seconds):
                connection.execute("ROLLBACK")
        except psycopg.Error:
            self._drop()

    def _failure(self, error: psycopg.Error, *, is_commit_sent: bool) -> StoreUnavailable | StoreMismatch:
        """The connection is not used again: it may lead to a server that is no longer the primary."""
        was_cut, is_broken = self._cutter.has_cut, self._connection is None or self._connection.broken
        self._drop()
        if isinstance(error, (errors.InsufficientPrivilege, errors.InvalidSchemaName, errors.UndefinedTable)):
            return self._mismatch(error)
        if isinstance(error, (errors.UndefinedColumn, errors.DataError)):
            return StoreMismatch(f"{self.shown_url}: {self._said(error)}")
        # If the server refuses a COMMIT, it did not take place, unless the server also ended the session.
        state = error.sqlstate or ""
        is_unknown = is_commit_sent and (was_cut or is_broken or not state or state.startswith(("57P", "08", "XX")))
        if was_cut:
            return StoreUnavailable(f"{self.shown_url} does not answer", is_unknown=is_unknown)
        return StoreUnavailable(f"{self.shown_url}: {self._said(error)}", is_unknown=is_unknown)

    def _mismatch(self, error: psycopg.Error) -> StoreMismatch:
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreMismatch(
                f"{self.shown_url}: {self._said(error)}; `gpu-pool doctor` lists the privileges that the user lacks, "
                "and docs/FLEET.md the ones it needs"
            )
        return StoreMismatch(f"{self.shown_url} has no tables of a fleet yet: gpu-pool fleet init")

    def _said(self, error: psycopg.Error) -> str:
        """What PostgreSQL says, in one line and without secrets."""
        lines = (line.strip() for line in str(error).splitlines())
        text = " ".join(line for line in lines if line)
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"

    # --- the connection ---

    def _connected(self) -> psycopg.Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        self._drop()
        # In a thread: looking up a name cannot be interrupted.
        if self._attempt is None or self._attempt.is_used:
            self._attempt = _Attempt(self._url, self._user_name)
        attempt = self._attempt
        attempt.thread.join(self._operation_seconds)
        if attempt.thread.is_alive():
            raise StoreUnavailable(f"{self.shown_url} cannot be reached: no connection yet")
        attempt.is_used = True
        if attempt.connection is None:
            raise self._no_connection(attempt.error)
        version = attempt.connection.info.server_version
        if version < OLDEST_SERVER * 10_000:
            attempt.connection.close()
            raise StoreMismatch(
                f"{self.shown_url} is PostgreSQL {version // 10_000}: a fleet needs PostgreSQL {OLDEST_SERVER} or later"
            )
        self._connection = attempt.connection
        return self._connection

    def _no_connection(self, error: Exception | None) -> StoreUnavailable | StoreMismatch:
        if not isinstance(error, psycopg.Error):
            return StoreUnavailable(f"{self.shown_url} cannot be reached ({type(error).__name__})")
        said = self._said(error)
        for sign, advice in _CONNECTION_ADVICE.items():
            if sign in said:
                return StoreMismatch(f"{self.shown_url}: {said}; {advice}")
        return StoreUnavailable(f"{self.shown_url} cannot be reached: {said}")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


_SET_PASSWORD: Final = f"set the password in {VARIABLE} or in the file that PGPASSFILE names"
#: Errors of PostgreSQL for which a retry does not help.
_CONNECTION_ADVICE: Final = {
    "password authentication failed": _SET_PASSWORD,
    "no password supplied": _SET_PASSWORD,
    "no pg_hba.conf entry": "allow this host and this user in the pg_hba.conf of the database",
    "authentication failed": "check the user, and the pg_hba.conf of the database",
    '" does not exist': "create it: docs/FLEET.md says how",
    "invalid URI query parameter": "check the parameters after ? in the URL",
    "invalid URI": "check the URL",
    "SSL was required": "check sslmode in the URL, and the TLS settings of the database",
    "certificate verify failed": "check sslrootcert in the URL",
}


class _Attempt:
    """One attempt to connect, in a separate thread, so that each caller can stop waiting when it wants to."""

    def __init__(self, url: str, user_name: str) -> None:
        self.connection: psycopg.Connection | None = None
        self.error: Exception | None = None
        self.is_used = False
        self._url, self._user_name = url, user_name
        self.thread = threading.Thread(target=self._connect, name="gpu-pool-fleet-connect", daemon=True)
        self.thread.start()

    def _connect(self) -> None:
        # Of several servers, the one that can be written to.
        several = "," in urlsplit(self._url).netloc and "target_session_attrs" not in self._url
        try:
            address = psycopg.conninfo.make_conninfo(
                self._url,
                application_name=self._user_name,
                target_session_attrs="read-write" if several else None,
                **_KEEPALIVES,
            )
            self.connection = psycopg.connect(address, autocommit=True, prepare_threshold=None)
        except Exception as error:  # the waiting thread raises it
            self.error = error


def _fenced_write(changes: Sequence[Put | Delete]) -> tuple[bytes, dict[str, object]]:
    """One statement, so that a frozen dispatcher cannot hold a lock between two; the last change of a key counts."""
    by_table: dict[str, dict[str, Put | Delete]] = {}
    for change in changes:
        by_table.setdefault(change.table, {})[change.key] = change
    if not by_table.keys() <= set(TABLES):
        raise ValueError(f"no such table: {by_table.keys() - set(TABLES)}")
    where = f"{_OURS} AND revision = %(revision)s"
    parts = [f"fence AS (UPDATE {NAMESPACE}.fleet SET revision = revision + 1 WHERE {where} RETURNING 1)"]
    values: dict[str, object] = {}
    for table, its in by_table.items():
        puts = {key: change.document for key, change in its.items() if not isinstance(change, Delete)}
        if puts:
            values[f"{table}_keys"], values[f"{table}_documents"] = _columns(puts)
            parts.append(
                f"put_{table} AS (INSERT INTO {NAMESPACE}.{table} (key, document) "
                f"SELECT * FROM unnest(%({table}_keys)s::text[], %({table}_documents)s::json[]) "
                "WHERE EXISTS (TABLE fence) ON CONFLICT (key) DO UPDATE SET document = excluded.document)"
            )
        if deleted := [key for key in its if key not in puts]:
            values[f"{table}_deleted"] = deleted
            parts.append(
                f"delete_{table} AS (DELETE FROM {NAMESPACE}.{table} "
                f"WHERE key = ANY(%({table}_deleted)s::text[]) AND EXISTS (TABLE fence))"
            )
    return f"WITH {', '.join(parts)} SELECT count(*) FROM fence".encode(), values


def _columns(documents: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    return list(documents), [json.dumps(each, separators=(",", ":")) for each in documents.values()]


def _secrets_in(url: str) -> tuple[str, ...]:
    """Longest first: passwords as they are written, and as they are meant."""
    parts = urlsplit(url)
    written = parts.netloc.rpartition("@")[0].partition(":")[2]
    found = {written, unquote(written)}
    found |= {value for name, value in parse_qsl(parts.query) if "password" in name.lower()}
    return tuple(sorted(found - {""}, key=len, reverse=True))
