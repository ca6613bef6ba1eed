"""Measures three real servers on a real PostgreSQL: from a release to the next grant, in turns with one server alone.

Waiters are in another process, and 200 leases are released per second. Before that the dispatcher is killed, and the
time until the next grant is taken. `--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from tests.fleet.hosts import FleetServers, make_fleet_tables, release, wait_for_lease
from tests.postgres_server import PostgresServer, remove_copies
from tests.server_process import ServerProcess

from bench.leases import Connection, p99
from bench.table import Row, print_table

GPUS = 8
TURNS = 3
RELEASES = 600
RELEASES_A_SECOND = 200
#: At once, at each of the servers.
WAITING = 20
TAKEOVERS = 3

#: Keeps requests waiting at all servers: prints when each was granted, by the clock that all processes share, and what.
WAITERS = """
import asyncio, itertools, json, os, sys, time
from bench.leases import Connection
serial = itertools.count()
async def wait(port):
    connection = await Connection.open(port)
    while True:
        body = {"request_id": f"w{os.getpid()}-{next(serial)}", "wait_seconds": 30, "ttl_seconds": 300}
        status, answer = await connection.ask("POST", "/leases", json.dumps(body).encode())
        at, lease = time.perf_counter(), json.loads(answer)
        assert status in (201, 202), answer
        if status == 201:
            gpu = lease["gpus"][0]
            key = f"{lease.get('host', '')}/{gpu['uuid']}"
            print(at, key, lease["lease_id"], lease["token"], lease.get("endpoint_url", ""), flush=True)
async def main():
    await asyncio.gather(*(wait(int(port)) for port in sys.argv[2:] for _ in range(int(sys.argv[1]))))
asyncio.run(main())
"""


class Load:
    """Servers whose GPUs are all held, while others wait."""

    def __init__(self, ports: Sequence[int], gpus: int) -> None:
        self.ports = ports
        self.held: deque[tuple[str, str, str, int]] = deque()
        self.released_at: dict[str, float] = {}
        self.took: list[float] = []
        command = [sys.executable, "-c", WAITERS, str(WAITING), *map(str, ports)]
        self._waiters = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + 60
        while len(self.held) < gpus:
            assert time.monotonic() < deadline, f"only {len(self.held)} of {gpus} GPUs are held"
            time.sleep(0.05)

    def _read(self) -> None:
        assert self._waiters.stdout is not None
        for line in self._waiters.stdout:
            at, gpu, lease_id, token, url = line.rstrip("\n").split(" ")
            if (released_at := self.released_at.pop(gpu, None)) is not None:
                self.took.append(float(at) - released_at)
            self.held.append((gpu, lease_id, token, urlsplit(url).port or self.ports[0]))

    def turn(self) -> list[float]:
        """Seconds from each release to the next grant of that GPU."""
        self.took.clear()
        asyncio.run(self._release())
        deadline = time.monotonic() + 30
        while self.released_at and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.released_at, "not every release led to a grant"
        return list(self.took)

    async def _release(self) -> None:
        free: dict[int, deque[Connection]] = {port: deque() for port in self.ports}
        tasks = set()
        begun_at = time.perf_counter()

        async def release(lease_id: str, token: str, port: int) -> None:
            connection = free[port].popleft() if free[port] else await Connection.open(port)
            status, answer = await connection.ask(
                "DELETE", f"/leases/{lease_id}", headers=f"X-Lease-Token: {token}\r\n"
            )
            assert status == 200, answer
            free[port].append(connection)

        for number in range(RELEASES):
            await asyncio.sleep(max(0.0, begun_at + number / RELEASES_A_SECOND - time.perf_counter()))
            while not self.held:  # noqa: ASYNC110  # a thread adds to them
                await asyncio.sleep(0.001)
            gpu, lease_id, token, port = self.held.popleft()
            self.released_at[gpu] = time.perf_counter()
            tasks.add(asyncio.create_task(release(lease_id, token, port)))
        await asyncio.gather(*tasks)
        took = time.perf_counter() - begun_at
        self.rate = RELEASES / took

    def close(self) -> None:
        self._waiters.kill()
        self._waiters.wait()


def hand_over(folder: Path, fleet: FleetServers) -> Row:
    with ServerProcess(folder / "alone", GPU_BACKEND=f"simulated:{GPUS}", ACCESS_LOG="false") as server:
        alone = Load([server.port], GPUS)
        ours = Load([each.port for each in fleet.servers], GPUS * len(fleet.servers))
        try:
            of_one: list[list[float]] = []
            of_fleet: list[list[float]] = []
            for _ in range(TURNS):
                of_one.append(alone.turn())
                of_fleet.append(ours.turn())
                print(
                    f"{alone.rate:.0f} releases a second at one host: median {median(of_one[-1]) * 1e3:.1f} ms, p99 "
                    f"{p99(of_one[-1]) * 1e3:.1f} ms; {ours.rate:.0f} in the fleet: "
                    f"{median(of_fleet[-1]) * 1e3:.1f} ms, {p99(of_fleet[-1]) * 1e3:.1f} ms"
                )
        finally:
            alone.close()
            ours.close()
    what = f"release to the next grant, three hosts, {RELEASES_A_SECOND} a second, p99 : one host"
    return Row(what, median(map(p99, of_fleet)) * 1e3, median(map(p99, of_one)) * 1e3, 2.0, is_speed=False)


def takeover(fleet: FleetServers) -> Row:
    """From `kill -9` of the dispatcher to the next grant: one is due at once, as a lease is released right then."""
    took = []
    for turn in range(TAKEOVERS):
        fleet.all_free()
        dispatcher = fleet.dispatcher()
        others = [each for each in fleet.servers if each is not dispatcher]
        held = [wait_for_lease(others, f"held-{turn}-{each}") for each in range(GPUS * len(fleet.servers))]
        server, lease = next(each for each in held if each[1]["host"] != dispatcher.name)
        number = held.index((server, lease))
        granted_at: list[float] = []

        def wait(turn: int = turn, others: Sequence = others, granted_at: list[float] = granted_at) -> None:  # type: ignore[type-arg]
            wait_for_lease(others, f"next-{turn}")
            granted_at.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not fleet.servers[-1].fleet().get("queue"):
            time.sleep(0.02)
        killed_at = time.monotonic()
        dispatcher.kill()
        release(next(each for each in others if each.name == lease["host"]), lease, f"held-{turn}-{number}")
        waiter.join()
        took.append(granted_at[0] - killed_at)
        dispatcher.start()
        fleet.wait_until_whole()
        for _, lease in [*held, wait_for_lease(others, f"next-{turn}")]:
            assert release(others[0], lease, lease["request_id"]).status == 200
    print(f"from kill -9 of the dispatcher to the next grant: {', '.join(f'{each:.1f} s' for each in took)}")
    return Row("kill -9 of the dispatcher to the next grant : a second", median(took) * 1000, 1000, 5.0, is_speed=False)


def main() -> None:
    try:
        with PostgresServer() as postgres, tempfile.TemporaryDirectory(prefix="gpu-pool-bench-") as name:
            url = postgres.create_database("fleet")
            make_fleet_tables(url)
            with FleetServers(Path(name) / "fleet", url, gpus=GPUS, LOG_LEVEL="warning") as fleet:
                rows = [takeover(fleet)]
                rows.append(hand_over(Path(name), fleet))
    finally:
        remove_copies()
    if not print_table(rows, "ms") and "--strict" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
