"""Measures the fleet: what a grant costs its dispatcher, at 8 and at 1,000 hosts.

    python -m bench.fleet [--strict]

A grant is: a release is reported, the next request is placed, the host promises it, its client is told, another one
asks. Messages are written and read as JSON, as on a link; nothing is sent, and nothing is stored. `--strict` exits with
1 if a target is missed.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from time import process_time
from typing import Any

from bench.core import TURNS
from bench.scheduling import Row
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.fleet.dispatcher import Dispatcher, Received, Send, Stored, fleet_settings
from gpu_worker_pool.fleet.message_json import decode, encode
from gpu_worker_pool.fleet.messages import Answer, Ask, EndedRow, GPURow, HostLease, Join, Place, Placed, Report

GPUS_OF_A_HOST = 8
WAITING = 10_000


class Fleet:
    """All GPUs are held, and many requests wait."""

    def __init__(self, hosts: int, waiting: int = WAITING) -> None:
        self.now = 1_000_000.0
        self.dispatcher = Dispatcher(
            "h0",
            "http://h0",
            fleet_id="bench",
            epoch=1,
            secret="",
            rows={},
            settings=fleet_settings(),
            now=self.now,
        )
        self.numbers = dict.fromkeys([f"h{host}" for host in range(hosts)], 0)
        self.held: deque[tuple[str, str, HostLease]] = deque()
        self.serial = self.told = 0
        for name in self.numbers:
            self.say(name, Join(name, name, f"http://{name}", "1"))
            rows = tuple(self.gpu(name, index) for index in range(GPUS_OF_A_HOST))
            self.say(name, Report(self.number(name), True, 0.0, rows))
        for _ in range(GPUS_OF_A_HOST * hosts + waiting):
            self.ask()
        self.store()

    def gpu(self, host: str, index: int) -> GPURow:
        uuid = f"GPU-{host}-{index}"
        return GPURow(uuid, index, "H100", uuid, 81_920.0, 100.0, None, 0.0, foreign_processes=0)

    def number(self, host: str) -> int:
        self.numbers[host] += 1
        return self.numbers[host]

    def say(self, host: str, message: Any) -> None:
        found = decode(json.loads(json.dumps(encode(message))))
        for effect in self.dispatcher.apply(Received(host, found), self.now):  # type: ignore[arg-type]
            if isinstance(effect, Send):
                self.hear(effect)

    def hear(self, effect: Send) -> None:
        message = decode(json.loads(json.dumps(encode(effect.message))))
        if isinstance(message, Place):
            self.serial += 1
            lease = HostLease(f"lease-{self.serial}", message.request, message.gpu_ids, "held", 0.0)
            self.held.append((effect.to, message.request.request_id, lease))
            self.say(effect.to, Placed(message.number, message.request.request_id, lease, {"lease_id": lease.lease_id}))
        elif isinstance(message, Answer):
            self.told += message.state == "granted"

    def ask(self) -> None:
        self.serial += 1
        request = Request(
            f"request-{self.serial}", owner="token:0", ttl_seconds=60.0, account=f"user:{self.serial % 7}"
        )
        self.say("h0", Ask(f"poll-{self.serial}", request, 3600.0))

    def store(self) -> None:
        batch, _ = self.dispatcher.take_changes()
        self.dispatcher.apply(Stored(batch), self.now)

    def cycles(self, number: int) -> None:
        for _ in range(number):
            self.now += 1e-3
            host, request_id, lease = self.held.popleft()
            rows = tuple(self.gpu(host, int(gpu_id.rpartition("-")[2])) for gpu_id in lease.gpu_ids)
            ended = (EndedRow(request_id, lease.lease_id, "released"),)
            self.say(host, Report(self.number(host), False, 0.0, rows, (), (), ended))
            self.ask()
        self.store()

    def quiet_second(self) -> None:
        """Every host says that its readings are fresh."""
        self.now += 1.0
        for host in self.numbers:
            self.say(host, Report(self.number(host), False, 0.0))


def _no_leases(fleet: Fleet) -> dict[str, tuple[HostLease, ...]]:
    return dict.fromkeys(fleet.numbers, ())


def takeover(fleet: Fleet) -> None:
    """Another dispatcher loads all rows, and hears all hosts."""
    _, found = fleet.dispatcher.everything()
    rows, leases = json.loads(json.dumps(found)), _no_leases(fleet)
    for host, _, lease in fleet.held:
        leases[host] = (*leases[host], lease)
    fleet.dispatcher = Dispatcher(
        "h0", "http://h0", fleet_id="bench", epoch=2, secret="", rows=rows, settings=fleet_settings(), now=fleet.now
    )
    for host in fleet.numbers:
        fleet.say(host, Join(host, host, f"http://{host}", "1"))
    for host in fleet.numbers:
        gpus = tuple(fleet.gpu(host, index) for index in range(GPUS_OF_A_HOST))
        fleet.say(host, Report(fleet.number(host), True, 0.0, gpus, (), leases[host]))
    assert not fleet.dispatcher.is_hearing


def seconds_of(work: Any, *arguments: Any) -> float:
    begun = process_time()
    work(*arguments)
    return process_time() - begun


def rows(turns: int = TURNS, number: int = 500) -> list[Row]:
    small, large = Fleet(8), Fleet(1000)
    best_small = best_large = quiet = float("inf")
    told = large.told
    for _ in range(turns):
        small.quiet_second()  # readings must not grow old
        quiet = min(quiet, seconds_of(large.quiet_second))
        best_small = min(best_small, seconds_of(small.cycles, number))
        best_large = min(best_large, seconds_of(large.cycles, number))
    assert large.told >= told + turns * number, "not every release led to a grant"
    return [
        Row("processor time of a grant, 1,000 hosts of 8 against 8 of 8", best_large / best_small, 1.5),
        Row("  the same, 1,000 hosts", best_large / number * 1e6, 1000.0, unit=" µs"),
        Row("a report of 1,000 hosts each second, of a core", quiet * 100, 10.0, unit=" %"),
        Row("takeover with 10,000 waiting, 8,000 leases, 1,000 hosts", seconds_of(takeover, large), 3.0, unit=" s"),
    ]


def main() -> int:
    is_reached = True
    for row in rows():
        is_reached &= row.is_reached
        print(f"{row.what:<66} {row.value:8.2f}{row.unit}  {'' if row.is_reached else f'missed: {row.limit:g}'}")
    return 0 if is_reached or "--strict" not in sys.argv else 1


if __name__ == "__main__":
    sys.exit(main())
