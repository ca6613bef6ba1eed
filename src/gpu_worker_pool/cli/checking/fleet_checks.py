"""The checks of `gpu-pool doctor` for a fleet: its database, its key, and the links between its hosts."""

from __future__ import annotations

import asyncio
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.checking import Finding
from gpu_worker_pool.cli.checking.server_checks import CLOCK_SECONDS, ENDPOINT_SECONDS
from gpu_worker_pool.errors import GPUWorkerPoolError, ServiceRefusedError
from gpu_worker_pool.fleet.database_url import VARIABLE, check_url
from gpu_worker_pool.fleet.keys import read_keys
from gpu_worker_pool.gpu_server.settings import read_environment
from gpu_worker_pool.leases.endpoint_choice import is_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.fleet.database_care import DatabaseFacts
    from gpu_worker_pool.fleet.postgres import PostgresStore

#: A commit takes a round trip or two; the dispatcher makes several in a second.
SLOW_SECONDS: Final = 0.05
#: As many hosts are named; of more, the number is enough.
MOST_NAMED: Final = 5
_KEY_FILE: Final = "GPU_POOL_FLEET_KEY_FILE"
_JOIN: Final = "GPU_POOL_FLEET_JOIN"


def check_fleet(endpoints: Sequence[EndpointConfig]) -> list[Finding]:
    """Nothing where neither this host nor an endpoint belongs to a fleet."""
    environment = read_environment(lambda _: None)
    url, key_file = environment.get(VARIABLE, "").strip(), environment.get(_KEY_FILE, "").strip()
    joined = [each.rstrip("/") for each in re.split(r"[\s,]+", environment.get(_JOIN, "")) if each]
    findings = [*_database(url)] if url else []
    if url or joined or key_file:
        findings += _key_file(key_file)
    names = {each.url: f"{each.endpoint_id}, fleet" for each in endpoints if not is_local(each)}
    names = {each: f"fleet, {each.partition('://')[2]}" for each in joined} | names
    return findings + asyncio.run(_links(names, set(joined)))


# --- the database ---


def _database(given: str) -> Iterator[Finding]:
    try:
        url = check_url(given, VARIABLE)
    except ValueError as error:
        yield Finding("wrong", "fleet database", str(error))
        return
    try:
        from gpu_worker_pool.fleet.database_care import examine
        from gpu_worker_pool.fleet.postgres import PostgresStore
    except GPUWorkerPoolError as error:
        yield Finding("wrong", "fleet database", str(error))
        return
    store = PostgresStore(url, "gpu-pool doctor")
    try:
        facts = examine(store)
        yield from _about(store, facts)
        if not facts.missing_privileges:
            yield from _tables(store)
    except GPUWorkerPoolError as error:
        advice = "" if "gpu-pool fleet init" in str(error) else "docs/FLEET.md says what the database must allow"
        yield Finding("wrong", "fleet database", str(error), advice)
    finally:
        store.close()


def _about(store: PostgresStore, facts: DatabaseFacts) -> Iterator[Finding]:
    if facts.is_read_only:
        yield Finding(
            "wrong",
            "fleet database",
            f"{store.shown_url} can only be read: it is a replica, or set so",
            "name the primary, or all servers of the database with commas",
        )
    else:
        yield Finding("ok", "fleet database", f"{store.shown_url}, PostgreSQL {facts.server_version}")
    if facts.missing_privileges:
        yield Finding(
            "wrong",
            "fleet database, user",
            f"this user lacks {', '.join(facts.missing_privileges)}",
            "GRANT it, as the owner of the database",
        )
    milliseconds = facts.round_trip_seconds * 1000
    if facts.round_trip_seconds > SLOW_SECONDS:
        advice = "each grant that waits is written there: use a database that is near"
        yield Finding("warning", "fleet database, speed", f"{milliseconds:.0f} ms for each question", advice)
    if facts.synchronous_commit == "off":
        yield Finding(
            "warning",
            "fleet database, commits",
            "synchronous_commit is off: a crash of the database may cost the last ones their place in the queue",
            "ALTER DATABASE … SET synchronous_commit = on",
        )


def _tables(store: PostgresStore) -> Iterator[Finding]:
    begun = time.time()
    state = store.look()
    took = time.time() - begun
    who = "no dispatcher" if state.dispatcher is None else f"dispatcher {state.dispatcher[0]}"
    yield Finding("ok", "fleet", f"{state.fleet_id}, tables of version {state.schema_version}, {who}")
    ahead = state.database_time - (begun + took / 2)
    if abs(ahead) > CLOCK_SECONDS + took:
        yield Finding(
            "warning",
            "fleet database, clock",
            f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's clock",
            "synchronise both with NTP; this affects the times in logs, not the fleet",
        )
    else:
        yield Finding("ok", "fleet database, clock", "matches this host's clock")


# --- the key ---


def _key_file(name: str) -> Iterator[Finding]:
    if not name:
        yield Finding("wrong", "fleet key", "no file is named", f"set {_KEY_FILE}; gpu-pool fleet key rotate FILE")
        return
    try:
        keys = read_keys(name)
        mode = Path(name).stat().st_mode
    except (ValueError, OSError) as error:
        yield Finding("wrong", "fleet key", str(error))
        return
    if mode & stat.S_IROTH:
        yield Finding("wrong", "fleet key", f"all users of this host can read {name}", f"chmod o-rwx {name}")
    elif len(keys) > 1:
        advice = f"when all hosts have the newest: gpu-pool fleet key rotate --finish {name}"
        yield Finding("warning", "fleet key", f"{name} holds {len(keys)} keys: the older ones still count", advice)
    else:
        yield Finding("ok", "fleet key", name)


# --- the links ---


async def _links(addresses: dict[str, str], needed: set[str]) -> list[Finding]:
    if not addresses:
        return []
    from gpu_worker_pool.api.transport import make_session

    async with make_session() as session:
        found = await asyncio.gather(
            *(_server(session, *each, is_needed=each[0] in needed) for each in addresses.items())
        )
    return [finding for findings in found for finding in findings]


async def _server(session: Any, url: str, name: str, *, is_needed: bool) -> list[Finding]:
    from gpu_worker_pool.api.client import ON_COMMAND_LINE, APIClient

    client = APIClient(url, lambda: session, timeout_seconds=ENDPOINT_SECONDS, advice=ON_COMMAND_LINE)
    try:
        return [*_hosts(name, await client.fleet())]
    except ServiceRefusedError as error:
        # Other servers belong to no fleet, and need none.
        return [Finding("wrong", name, str(error))] if is_needed or error.status != 404 else []
    except GPUWorkerPoolError as error:
        # Those that do not answer at all are reported as endpoints already.
        return [Finding("wrong", name, str(error), "start it: gpu-pool serve --fleet …")] if is_needed else []


def _hosts(name: str, fleet: dict[str, Any]) -> Iterator[Finding]:
    dispatcher, hosts = fleet["dispatcher"], fleet["hosts"]
    if dispatcher is None:
        yield Finding(
            "wrong",
            name,
            "no server is dispatcher: nothing is granted",
            "on the hosts that know the database: gpu-pool doctor",
        )
    database = fleet["database"] or {}
    if database.get("state") == "away":
        yield Finding("wrong", f"{name}, database", database["problem"] or "the dispatcher cannot reach it")
    away = [each for each in hosts if each["state"] not in ("up", "draining")]
    for each in away[:MOST_NAMED]:
        why = each["reason"] or f"{each['state']}; last seen {each['seen_seconds_ago'] or 0:.0f} s ago"
        advice = f"on {each['host']}: gpu-pool doctor; if it is gone for good: gpu-pool fleet remove {each['host']}"
        yield Finding("warning", f"{name}, host {each['host']}", why, advice)
    if len(away) > MOST_NAMED:
        yield Finding("warning", name, f"{len(away) - MOST_NAMED} more hosts are not up", "gpu-pool fleet status")
    if dispatcher is not None:
        yield Finding("ok", name, f"{len(hosts) - len(away)} of {len(hosts)} hosts up, dispatcher {dispatcher['host']}")
