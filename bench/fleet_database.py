"""Measures a fleet's dispatcher with a real PostgreSQL: grants a second, in turns with bare commits; and a takeover.

Many simulated hosts are in this process. Every message goes through JSON, as on a link, but over no socket; and the
database commits in a thread of its own, in groups, as in a candidate's office. `--strict` makes it exit with 1 if a
target is missed; `--short` tries it with few hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import psycopg
from tests.postgres_server import PostgresServer, remove_copies

from bench.table import Row, print_table
from gpu_worker_pool.core import Request
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.fleet.database_care import make_tables
from gpu_worker_pool.fleet.dispatcher import Dispatcher, fleet_settings
from gpu_worker_pool.fleet.dispatching import Effect, Received, Send, Stored, TimePassed
from gpu_worker_pool.fleet.message_json import decode, encode
from gpu_worker_pool.fleet.messages import (
    Answer,
    Ask,
    EndedRow,
    GPURow,
    HostLease,
    Join,
    Place,
    Placed,
    Report,
    ReportWanted,
    Welcome,
)
from gpu_worker_pool.fleet.postgres import PostgresStore
from gpu_worker_pool.fleet.store import Office

GPUS = 8
WAITING = 10_000
TURNS = 3
SECONDS = 3.0
BARE_SECONDS = 1.5
OFFICE_SECONDS = 600.0
#: From the death of a dispatcher until another candidate can be elected: its term, and the look that notices.
WAIT_SECONDS = 2.6


@dataclass
class Host:
    """A host that grants whatever is placed, and whose holders are done at once."""

    name: str
    numbered: int = 0
    leases: Iterator[int] = field(default_factory=count)
    held: list[HostLease] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def join(self) -> Join:
        return Join(self.name, f"ledger of {self.name}", f"http://{self.name}:8000", "1")

    def rows(self) -> tuple[GPURow, ...]:
        return tuple(self._row(number) for number in range(GPUS))

    def _row(self, number: int) -> GPURow:
        name = f"GPU-{self.name}-{number}"
        return GPURow(name, number, "Simulated GPU", name, 24576.0, 1.0, 0.0, 0.0, foreign_processes=0)

    def whole(self) -> Report:
        return self.report(is_whole=True, gpus=self.rows(), leases=tuple(self.held))

    def report(self, *, is_whole: bool = False, **changes: Any) -> Report:
        self.numbered += 1
        return Report(self.numbered, is_whole, 0.0, **changes)

    def placed(self, place: Place, *, is_over: bool) -> list[Placed | Report]:
        """`is_over`: the holder releases it at once, and the GPU was read since."""
        request = place.request
        if request.request_id in self.seen:
            return []  # asked again, as the answer to the first is still under way
        self.seen.add(request.request_id)
        lease_id = f"lease-{next(self.leases)}"
        lease = HostLease(lease_id, request, place.gpu_ids, "held", 0.0, 0.0, 60.0)
        body = {"lease_id": lease_id, "request_id": request.request_id, "gpus": [{"uuid": place.gpu_ids[0]}]}
        answer: list[Placed | Report] = [Placed(place.number, request.request_id, lease, body)]
        self.held.append(lease)
        if is_over:
            answer += self.released()
        return answer

    def released(self) -> list[Placed | Report]:
        """One report for each lease that is held."""
        held, self.held = self.held, []
        return [
            self.report(
                gpus=tuple(self._row(int(gpu_id.rpartition("-")[2])) for gpu_id in lease.gpu_ids),
                ended=(EndedRow(lease.request.request_id, lease.lease_id, "released"),),
            )
            for lease in held
        ]


class Fleet:
    """A dispatcher with its database and its hosts; `run` keeps as many requests waiting as there were."""

    def __init__(self, url: str, hosts: int) -> None:
        self.store = PostgresStore(url)
        make_tables(self.store)
        self.hosts = {f"gpu-{number}": Host(f"gpu-{number}") for number in range(hosts)}
        self.is_over = True
        self.granted = 0
        #: The numbers of those who wait, in order.
        self.waiting: dict[int, None] = {}
        #: Of this process, hosts and database driver included, for a grant.
        self.processor_ms: list[float] = []
        self._serial, self._polls = count(), count()
        self._thread = ThreadPoolExecutor(1)
        self._writing: tuple[int, Future[Office]] | None = None
        self._inbox: deque[tuple[str, Any]] = deque()
        self.begin()

    def begin(self) -> None:
        office = self.store.stand("gpu-0", "http://gpu-0:8000", 0, OFFICE_SECONDS)
        assert office is not None
        self.office, rows, state = office, self.store.load(office), self.store.look()
        self.dispatcher = Dispatcher(
            "gpu-0",
            "http://gpu-0:8000",
            fleet_id=state.fleet_id,
            epoch=office.epoch,
            secret=state.secret,
            rows=rows,
            settings=fleet_settings(None),
            now=time.monotonic(),
        )
        for host in self.hosts.values():
            self._inbox.append((host.name, host.join()))

    def arrive(self, sender: str, messages: Sequence[Any]) -> None:
        self._inbox.extend((sender, each) for each in messages)

    def ask(self) -> None:
        number = next(self._serial)
        self.waiting[number] = None
        self.ask_again(number)

    def ask_again(self, number: int) -> None:
        server = f"gpu-{number % len(self.hosts)}"
        request = Request(f"request-{number}", Requirements(count=1), owner="o" * 40, account="a")
        self._inbox.append((server, Ask(f"poll-{number}-{next(self._polls)}", request, 3000.0)))

    def step(self) -> None:
        """What arrived since the last commit was begun is committed next, all of it together."""
        for _ in range(min(len(self._inbox), 200)):
            sender, sent = self._inbox.popleft()
            message: Any = decode(json.loads(json.dumps(encode(sent))))
            self._perform(self.dispatcher.apply(Received(sender, message), time.monotonic()))
        if self.dispatcher.next_due() <= time.monotonic():
            self._perform(self.dispatcher.apply(TimePassed(), time.monotonic()))
        if self._writing is not None and (self._writing[1].done() or not self._inbox):
            batch, future = self._writing
            self.office, self._writing = future.result(), None
            self._perform(self.dispatcher.apply(Stored(batch), time.monotonic()))
        if self._writing is None:
            batch, changes = self.dispatcher.take_changes()
            if changes:
                self._writing = batch, self._thread.submit(self.store.write, self.office, changes)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            host, message = self.hosts[effect.to], decode(json.loads(json.dumps(encode(effect.message))))
            match message:
                case Welcome():
                    host.numbered = 0
                    self.arrive(host.name, [host.whole()])
                case ReportWanted():
                    self.arrive(host.name, [host.whole()])
                case Place():
                    self.arrive(host.name, host.placed(message, is_over=self.is_over))
                case Answer(state="granted", request_id=request_id):
                    self.granted += 1
                    del self.waiting[int(request_id.rpartition("-")[2])]
                    if self.is_over:
                        self.ask()

    def wait(self, seconds: float = 3600.0) -> None:
        """Until everything has arrived and is committed."""
        deadline = time.monotonic() + seconds
        while self._inbox or self._writing is not None:
            self.step()
            assert time.monotonic() < deadline, "it does not come to rest"

    def grants_a_second(self, seconds: float) -> float:
        before, begun_at, worked = self.granted, time.monotonic(), time.process_time()
        while time.monotonic() - begun_at < seconds:
            self.step()
        granted = self.granted - before
        self.processor_ms.append((time.process_time() - worked) * 1000 / max(granted, 1))
        return granted / (time.monotonic() - begun_at)

    def take_over(self) -> float:
        """Until the next grant, from the moment when the term of the one before has ended; one GPU is free."""
        self.is_over = False
        for _ in range(len(self.hosts) * GPUS):
            self.ask()
        self.wait()
        oldest = list(self.waiting)[:100]
        self.store.concede(self.office)
        next(host for host in self.hosts.values() if host.held).held.pop()
        begun_at, before = time.monotonic(), self.granted
        self.begin()
        for number in oldest:  # those who are next ask again
            self.ask_again(number)
        while self.granted == before:
            self.step()
            assert time.monotonic() - begun_at < 300, "nobody is granted"
        return time.monotonic() - begun_at

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()


def bare_commits_a_second(url: str, seconds: float) -> float:
    """One client that inserts a row of the size of a request, durably, over and over."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS bare (key text, document json)")
        document = json.dumps({"request": "x" * 400})
        done, begun_at = 0, time.monotonic()
        while time.monotonic() - begun_at < seconds:
            connection.execute("INSERT INTO bare VALUES (%s, %s)", [f"request-{done}", document])
            done += 1
        return done / (time.monotonic() - begun_at)


def throughput(postgres: PostgresServer, hosts: int) -> list[Row]:
    url = postgres.create_database(f"fleet_{hosts}")
    fleet = Fleet(url, hosts)
    fleet.is_over = False
    for _ in range(hosts * GPUS + WAITING):
        fleet.ask()
    fleet.wait()
    # From now on, a lease ends as soon as it was granted.
    fleet.is_over = True
    for host in fleet.hosts.values():
        fleet.arrive(host.name, host.released())
    ours, bare = [], []
    # All GPUs come free at once; it is measured when that is over.
    while fleet.granted < 2 * hosts * GPUS:
        fleet.step()
    fleet.processor_ms.clear()
    for _ in range(TURNS):
        bare.append(bare_commits_a_second(url, BARE_SECONDS))
        ours.append(fleet.grants_a_second(SECONDS))
    takeover = fleet.take_over() + WAIT_SECONDS
    fleet.close()
    print(
        f"{hosts:,} hosts: {median(fleet.processor_ms):.2f} ms of a processor for a grant, with both ends of its links"
    )
    grants = f"a grant, {hosts:,} hosts x {GPUS} GPUs, {WAITING:,} waiting : a bare commit"
    takeover_of = f"takeover with {hosts * GPUS:,} leases, {WAITING:,} waiting : a second"
    rows = [
        Row(grants, 1000 / median(ours), 1000 / median(bare), 3.0, is_speed=True),
        Row(takeover_of, takeover * 1000, 1000, 5.0, is_speed=False),
    ]
    print(*rows, sep="\n", flush=True)  # the large sizes take long
    return rows


def main() -> None:
    sizes = (8,) if "--short" in sys.argv else (8, 100, 1000)
    try:
        with PostgresServer() as postgres:
            found = [throughput(postgres, hosts) for hosts in sizes]
    finally:
        remove_copies()
    rows = [row for each in found for row in each]
    if len(found) > 1:
        rows.append(Row("a grant, 1,000 hosts : 8 hosts", found[-1][0].ours, found[0][0].ours, 0.8, is_speed=True))
    if not print_table(rows, "ms") and "--strict" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
