"""`make demo-fleet`: three servers and jobs in one queue, on a real PostgreSQL; their dispatcher is killed."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fleet.hosts import FleetServers, make_fleet_tables, release, wait_for_lease
from tests.postgres_server import PostgresServer, UnavailableError, remove_copies

JOBS = 24
GPUS = 2
#: Every sixth job wants a whole host.
LARGE_EVERY = 6
ARRIVAL_SECONDS = 0.25
JOB_SECONDS = 1.5

_begun_at = time.monotonic()
_lock = threading.Lock()


def say(text: str) -> None:
    with _lock:
        sys.stdout.write(f"{time.monotonic() - _begun_at:5.1f} s  {text}\n")
        sys.stdout.flush()


def main() -> int:
    try:
        database = PostgresServer()
    except UnavailableError as error:
        say(f"no PostgreSQL can be started here: {error}")
        return 1
    try:
        with database, tempfile.TemporaryDirectory(prefix="gpu-pool-demo-") as folder:
            url = database.create_database("gpupool")
            make_fleet_tables(url)
            say(f"PostgreSQL {database.version} is up, and has the tables: gpu-pool fleet init {url}")
            with FleetServers(Path(folder), url, gpus=GPUS) as fleet:
                return show(fleet)
    finally:
        remove_copies()


def show(fleet: FleetServers) -> int:
    dispatcher = fleet.dispatcher()
    say(f"three servers with {GPUS} simulated GPUs each are one fleet; the dispatcher is {dispatcher.name}")
    served: list[str] = []

    def job(number: int) -> None:
        name, count = f"job-{number:02}", GPUS if number % LARGE_EVERY == 0 else 1
        asked_at = time.monotonic()
        try:
            server, lease = wait_for_lease(fleet.servers, name, count=count, ttl_seconds=6, first=number)
            waited = time.monotonic() - asked_at
            gpus = ", ".join(str(gpu["gpu_id"]) for gpu in lease["gpus"])
            say(f"{name}, asked at {server.name}: waited {waited:4.1f} s, has GPU {gpus} of {lease['host']}")
            time.sleep(JOB_SECONDS)
            give_back(fleet, lease, name)
            served.append(name)
        except AssertionError as error:
            say(f"{name}: {error}")

    jobs = [threading.Thread(target=job, args=(number,), daemon=True) for number in range(1, JOBS + 1)]
    for number, thread in enumerate(jobs, 1):
        thread.start()
        time.sleep(ARRIVAL_SECONDS)
        if number == JOBS // 2:
            dispatcher.kill()
            killed_at = time.monotonic()
            say(f"kill -9: {dispatcher.name}, the dispatcher, is gone, and its {GPUS} GPUs with it")
            threading.Thread(target=announce, args=(fleet, dispatcher.name, killed_at), daemon=True).start()
        if number == JOBS * 3 // 4:
            dispatcher.start()
            say(f"{dispatcher.name} is started again")
    for thread in jobs:
        thread.join(60)
    say(f"{len(served)} of {JOBS} jobs were served")
    if len(served) == JOBS:
        fleet.all_free(20)
        say("every GPU is free again, and nobody waits")
    return 0 if len(served) == JOBS else 1


def give_back(fleet: FleetServers, lease: dict[str, Any], name: str) -> None:
    """At any server that answers; a lease of a host that is gone ends by itself."""
    for server in fleet.servers:
        with suppress(OSError):
            if server.is_running and release(server, lease, name).status < 500:
                return


def announce(fleet: FleetServers, gone: str, since: float) -> None:
    while (found := fleet.dispatcher()).name == gone:
        time.sleep(0.05)
    say(f"{found.name} is the dispatcher now, {time.monotonic() - since:.1f} s after that")


if __name__ == "__main__":
    sys.exit(main())
