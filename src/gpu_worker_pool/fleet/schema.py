"""The tables of a fleet in PostgreSQL, and how each version's are made from those of the version before."""

from __future__ import annotations

from typing import Final

#: The oldest PostgreSQL that is supported.
OLDEST_SERVER: Final = 14
#: The schema version of this program. A newer schema only adds to it, so servers of two versions can share it.
VERSION: Final = 1
#: The PostgreSQL schema of all tables: named in each statement, as a search path would be lost behind PgBouncer.
NAMESPACE: Final = "gpu_pool"
#: Each has rows of a key and a JSON document; what is in them is the dispatcher's.
TABLES: Final = ("requests", "outcomes", "hosts", "accounts")
#: Locked for a transaction, so that two processes do not make or migrate the tables at the same time.
LOCK: Final = 0x6770755F706F6F6C

#: The statements that lead to each version from the previous one. Only append: existing ones have been run.
STEPS: Final[dict[int, tuple[str, ...]]] = {
    1: (
        f"CREATE SCHEMA IF NOT EXISTS {NAMESPACE}",
        f"""CREATE TABLE {NAMESPACE}.fleet (
            only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
            fleet_id text NOT NULL,
            schema_version integer NOT NULL,
            oldest_schema_user integer NOT NULL DEFAULT 1,
            format integer NOT NULL DEFAULT 1,
            epoch bigint NOT NULL DEFAULT 0,
            revision bigint NOT NULL DEFAULT 0,
            dispatcher_name text,
            dispatcher_url text,
            until timestamptz NOT NULL DEFAULT '-infinity',
            secret text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )""",
        *(f"CREATE TABLE {NAMESPACE}.{table} (key text PRIMARY KEY, document json NOT NULL)" for table in TABLES),
        # Rows come and go: without this the few pages of a short queue are read in full until autovacuum comes.
        *(
            f"ALTER TABLE {NAMESPACE}.{table} SET (autovacuum_vacuum_scale_factor = 0.05, fillfactor = 70)"
            for table in ("fleet", *TABLES)
        ),
    ),
}
assert max(STEPS) == VERSION
