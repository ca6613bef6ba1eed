"""What `gpu-pool fleet` does: makes the tables, shows the hosts, drains and removes them, changes the key."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.exits import CommandError, Status, status_of
from gpu_worker_pool.cli.output import print_json, print_line
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.http_host import open_http_host
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.fleet.database_url import EXAMPLE, VARIABLE, check_argument, check_url
from gpu_worker_pool.fleet.keys import MOST_KEYS, read_keys
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints, is_local
from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gpu_worker_pool.cli.views.http_host import HTTPHost

_ADDRESS = "name a server of the fleet: -e http://gpu-1:8000, or GPU_SERVICE_ENDPOINT"


# --- the database ---


def init_database(given: str | None) -> None:
    set_url = Environment().text(VARIABLE)
    if not (given or set_url):
        raise CommandError(f"name the database: gpu-pool fleet init {EXAMPLE}, or set {VARIABLE}", Status.USAGE)
    try:
        url = check_argument(given, "URL") if given else check_url(set_url, VARIABLE)
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None
    from gpu_worker_pool.fleet.database_care import make_tables
    from gpu_worker_pool.fleet.postgres import PostgresStore

    store = PostgresStore(url, "gpu-pool fleet init")
    try:
        made = make_tables(store)
    finally:
        store.close()
    if made.version_before is None:
        print_line(f"made {made.fleet_id} in {store.shown_url}")
    elif made.version_before < made.version:
        print_line(
            f"{made.fleet_id} in {store.shown_url}: tables of version {made.version_before} are now {made.version}"
        )
    else:
        print_line(f"{made.fleet_id} is in {store.shown_url} already; nothing was changed")
    print_line("next, on two or three hosts: gpu-pool serve --fleet URL --fleet-key-file FILE")


# --- the hosts ---


def show_fleet(endpoints: Sequence[str], *, as_json: bool) -> None:
    found = asyncio.run(_ask(endpoints, lambda host: host.fleet()))
    if as_json:
        print_json(found)
        return
    dispatcher, database = found["dispatcher"], found["database"] or {}
    who = "none; no GPU is granted until one is elected" if dispatcher is None else dispatcher["host"]
    print_line(f"fleet {found['fleet_id'] or 'unknown'}, epoch {_shown(found['epoch'])}; dispatcher: {who}")
    why = f" ({database['problem']})" if database.get("problem") else ""
    print_line(f"database: {database.get('state') or 'unknown'}{why}; waiting: {_shown(found['waiting'])}")
    rows = [
        (
            row["host"],
            " ".join(filter(None, (row["state"] or "unknown", row["reason"]))),
            f"{_shown(row['free'])}/{_shown(row['gpus'])}",
            "unknown" if row["seen_seconds_ago"] is None else f"{spoken_seconds(row['seen_seconds_ago'])} ago",
            row["version"] or "unknown",
            row["url"] or "",
        )
        for row in found["hosts"]
    ]
    print_table(("host", "state", "free", "seen", "version", "url"), rows, nothing="no host has joined")


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)


def administer(endpoints: Sequence[str], host: str, action: str) -> None:
    state = asyncio.run(_ask(endpoints, lambda server: server.administer_host(host, action)))
    done = {
        "drain": f"{host} gets no new leases",
        "undrain": f"{host} gets leases again",
        "remove": f"{host} no longer belongs to the fleet; it may join again",
    }[action]
    print_line(f"{done} ({state})" if state and state not in ("draining", "up", "removed") else done)


async def _ask(given: Sequence[str], ask: Callable[[HTTPHost], Awaitable[Any]]) -> Any:
    """The first server that answers: they are of one fleet."""
    try:
        servers = [each for each in chosen_endpoints(given) if not is_local(each)]
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None
    if not servers:
        raise CommandError(_ADDRESS, Status.USAGE)
    errors: list[GPUWorkerPoolError] = []
    for server in servers:
        async with open_http_host(server) as host:
            try:
                return await ask(host)
            except GPUWorkerPoolError as error:
                errors.append(error)
                if not error.retryable:
                    break
    raise CommandError("; ".join(dict.fromkeys(map(str, errors))), status_of(errors[-1]))


# --- the key ---


def rotate_key(file: Path, *, is_finish: bool) -> None:
    try:
        keys = read_keys(str(file)) if file.exists() or is_finish else ()
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None
    if is_finish:
        _replace(file, keys[:1])
        print_line(f"{file} holds one key now; copy it to all hosts of the fleet")
        return
    _replace(file, (secrets.token_urlsafe(32).encode(), *keys[: MOST_KEYS - 1]))
    if not keys:
        print_line(f"made {file} with a new key; copy it to all hosts of the fleet")
        return
    print_line(f"{file} has a new key, and still the one before; copy it to all hosts of the fleet")
    print_line(f"when all have it: gpu-pool fleet key rotate --finish {file}, and copy it again")


def _replace(file: Path, keys: Sequence[bytes]) -> None:
    """Atomic, because servers read it at any time. Its owner and mode stay; only its owner can read a new one."""
    try:
        found = file.stat() if file.exists() else None
        number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(number, "wb") as new:
                new.write(b"\n".join(keys) + b"\n")
                if found is not None:
                    with suppress(PermissionError):
                        os.fchown(number, found.st_uid, found.st_gid)
                    os.fchmod(number, found.st_mode & 0o777)
                new.flush()
                os.fsync(number)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from None
