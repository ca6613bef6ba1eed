"""Makes and migrates the tables of a fleet, and examines its database for `fleet init` and `doctor`."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.record import record
from gpu_worker_pool.fleet.schema import LOCK, NAMESPACE, STEPS, TABLES, VERSION
from gpu_worker_pool.fleet.store import Deposed, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.fleet.postgres import Cursor, PostgresStore
    from gpu_worker_pool.fleet.store import Office

#: Migrations may take longer than what the dispatcher does every second.
_SECONDS: Final = 30.0


@record
class Made:
    """What `make_tables` did."""

    fleet_id: str
    #: None: there were none.
    version_before: int | None
    version: int


@record
class DatabaseFacts:
    """What `gpu-pool doctor` says of the database."""

    server_version: str
    is_read_only: bool
    #: What a candidate needs and this user may not do, in words.
    missing_privileges: tuple[str, ...]
    synchronous_commit: str
    round_trip_seconds: float


def make_tables(
    store: PostgresStore, office: Office | None = None, steps: Mapping[int, tuple[str, ...]] = STEPS
) -> Made:
    """Makes the tables, or upgrades them to this version, in one transaction; several processes may call it at once.

    `office`: of the dispatcher that calls it; another dispatcher that is in office must not be disturbed.
    """
    with store.transaction(seconds=_SECONDS) as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        before = _version(cursor)
        if before is None and office is None:
            _step(cursor, steps, 0)
            _insert_fleet(cursor)
        elif before is not None and before < max(steps):
            if office is not None:
                _check_office(cursor, office)
            _step(cursor, steps, before)
        if before is None or before < max(steps):
            cursor.execute(f"UPDATE {NAMESPACE}.fleet SET schema_version = %s", [max(steps)])
        row = cursor.execute(f"SELECT fleet_id, schema_version, oldest_schema_user FROM {NAMESPACE}.fleet").fetchone()
        if row is None:
            raise StoreMismatch(
                f"{store.shown_url}: {NAMESPACE}.fleet is empty: restore the backup of this database, or remove what "
                f"is left of the fleet (DROP SCHEMA {NAMESPACE} CASCADE) and run gpu-pool fleet init again"
            )
        fleet_id, version, oldest_user = row
        if oldest_user > VERSION:
            raise StoreMismatch(
                f"the tables in {store.shown_url} (version {version}) need a newer gpu-pool than this one: upgrade it"
            )
    return Made(fleet_id, before, version)


def _version(cursor: Cursor) -> int | None:
    row = cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [f"{NAMESPACE}.fleet"]).fetchone()
    if row is None or not row[0]:
        return None
    found = cursor.execute(f"SELECT schema_version FROM {NAMESPACE}.fleet FOR UPDATE").fetchone()
    return None if found is None else int(found[0])


def _step(cursor: Cursor, steps: Mapping[int, tuple[str, ...]], before: int) -> None:
    for version in range(before + 1, max(steps) + 1):
        for statement in steps[version]:
            cursor.execute(statement.encode())


def _insert_fleet(cursor: Cursor) -> None:
    cursor.execute(
        f"INSERT INTO {NAMESPACE}.fleet (fleet_id, schema_version, secret) VALUES (%s, %s, %s)",
        [f"fleet-{secrets.token_hex(4)}", VERSION, secrets.token_hex(32)],
    )


def _check_office(cursor: Cursor, office: Office) -> None:
    row = cursor.execute(f"SELECT epoch FROM {NAMESPACE}.fleet").fetchone()
    if row is None or row[0] != office.epoch:
        raise Deposed(epoch=0 if row is None else row[0])


def examine(store: PostgresStore) -> DatabaseFacts:
    """Works without tables too: then it checks the privileges on the database."""
    begun = time.monotonic()
    with store.transaction(is_read_only=True) as cursor:
        round_trip_seconds = (time.monotonic() - begun) / 2
        row = cursor.execute(
            """SELECT current_setting('server_version'), pg_is_in_recovery()
                OR current_setting('default_transaction_read_only') = 'on', current_setting('synchronous_commit'),
                to_regnamespace(%s) IS NOT NULL""",
            [NAMESPACE],
        ).fetchone()
        assert row is not None
        version, is_read_only, synchronous_commit, has_namespace = row
        missing = _missing(cursor) if has_namespace else _missing_before(cursor)
    return DatabaseFacts(version, is_read_only, missing, synchronous_commit, round_trip_seconds)


def _missing_before(cursor: Cursor) -> tuple[str, ...]:
    row = cursor.execute(
        "SELECT has_database_privilege(current_user, current_database(), 'CREATE'), current_database()"
    ).fetchone()
    assert row is not None
    return () if row[0] else (f"CREATE on the database {row[1]}",)


def _missing(cursor: Cursor) -> tuple[str, ...]:
    missing = []
    row = cursor.execute("SELECT has_schema_privilege(current_user, %s, 'USAGE')", [NAMESPACE]).fetchone()
    if row is None or not row[0]:
        return (f"USAGE on the schema {NAMESPACE}",)
    for table in ("fleet", *TABLES):
        name = f"{NAMESPACE}.{table}"
        if (found := cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [name]).fetchone()) and not found[0]:
            continue
        for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE"):
            allowed = cursor.execute("SELECT has_table_privilege(current_user, %s, %s)", [name, privilege]).fetchone()
            if allowed is None or not allowed[0]:
                missing.append(f"{privilege} on {name}")
    return tuple(missing)
