"""Measures leases, as ratios within one run, with real processes on this machine and simulated GPUs.

It compares the times that clients see, with both servers on the same disk at the same time.
`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from bench.server import OURS, server
from bench.table import Row, print_table
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Observed, PoolSettings, Reading, Released, Request, Requested
from gpu_worker_pool.core.effects import Granted
from gpu_worker_pool.ledger.sqlite import SQLiteLedger

TURNS = 5
PAIRS_ALONE = 300
CLIENTS = 32
PAIRS_EACH = 30
HAND_OVERS = 400
GRANTS = 150

#: A minimal FastAPI server that makes one bare commit per request.
BARE = """
import os, apsw
from fastapi import FastAPI, Request
db = apsw.Connection(os.environ["BARE_DB"])
db.execute("PRAGMA journal_mode=WAL"); db.execute("PRAGMA synchronous=FULL")
db.execute("CREATE TABLE IF NOT EXISTS t (a TEXT, b TEXT)")
app = FastAPI()
@app.post("/commit", status_code=201)
async def commit(request: Request):
    body = await request.json()
    db.execute("INSERT INTO t VALUES (?, ?)", (body["request_id"], "x" * 300))
    return {"lease_id": body["request_id"], "token": "t" * 40}
@app.get("/nothing")
async def nothing():
    return {"nothing": True}
"""
BARE_SERVER = ["-m", "uvicorn", "bare:app", "--port", "{port}", "--no-access-log", "--log-level", "warning"]
BARE_SERVER += ["--http", "gpu_worker_pool.gpu_server.connections:GuardedProtocol"]


class Connection:
    """One persistent connection that sends a request and waits for the answer, with little overhead."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer)

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}{headers}\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        return int(answer[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


async def lease_pair(connection: Connection, request_id: str) -> None:
    body = json.dumps({"request_id": request_id, "wait_seconds": 30}).encode()
    status, answer = await connection.ask("POST", "/leases", body)
    assert status == 201, answer
    lease = json.loads(answer)
    token = f"X-Lease-Token: {lease['token']}\r\n"
    status, answer = await connection.ask("DELETE", f"/leases/{lease['lease_id']}", headers=token)
    assert status == 200, answer


async def commit_pair(connection: Connection, request_id: str) -> None:
    body = json.dumps({"request_id": request_id}).encode()
    for _ in range(2):
        status, answer = await connection.ask("POST", "/commit", body)
        assert status == 201, answer
        json.loads(answer)


async def microseconds_a_pair(pair, port: int, clients: int, pairs: int, name: str) -> float:  # type: ignore[no-untyped-def]
    connections = [await Connection.open(port) for _ in range(clients)]

    async def work(number: int) -> None:
        for serial in range(pairs):
            await pair(connections[number], f"{name}-{number}-{serial}")

    begun = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(clients)))
    took = time.perf_counter() - begun
    for connection in connections:
        connection.close()
    return took / (clients * pairs) * 1e6


async def measure_pairs(our_port: int, bare_port: int, clients: int, pairs: int) -> tuple[float, float]:
    ours, theirs = [], []
    for turn in range(TURNS):
        ours.append(await microseconds_a_pair(lease_pair, our_port, clients, pairs, f"{clients}-{turn}"))
        theirs.append(await microseconds_a_pair(commit_pair, bare_port, clients, pairs, f"{clients}-{turn}"))
    return min(ours), min(theirs)


#: A waiter in a separate process: prints when it got the grant, by the clock that all processes share.
WAITER = """
import http.client, json, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for line in sys.stdin:
    body = json.dumps({"request_id": line.strip(), "wait_seconds": 30})
    connection.request("POST", "/leases", body, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    print(time.perf_counter(), answer["lease_id"], answer["token"], flush=True)
"""


def measure_hand_over(folder: Path, bare_port: int) -> Row:
    """From the moment a holder sends its release to the moment a waiter in another process has the GPU."""
    with server(OURS, folder, GPU_BACKEND="simulated:1") as (_, port):
        waiters = [
            subprocess.Popen(
                [sys.executable, "-c", WAITER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        took: list[float] = []
        try:
            asyncio.run(_pass_on(port, waiters, took))
        finally:
            for waiter in waiters:
                waiter.kill()
                waiter.wait()
    bare = asyncio.run(_round_trips(bare_port))
    print(f"hand-over: median {median(took) * 1e3:.2f} ms, p99 {p99(took) * 1e3:.2f} ms; "
          f"a bare round trip: median {median(bare) * 1e3:.2f} ms, p99 {p99(bare) * 1e3:.2f} ms")  # fmt: skip
    return Row("release to a waiter's grant in another process, p99", p99(took) * 1e6, p99(bare) * 1e6, 4, False)


async def _pass_on(port: int, waiters: list[subprocess.Popen[str]], took: list[float]) -> None:
    connection = await Connection.open(port)
    holder, waiter = waiters
    _ask(holder, "first")
    _, lease_id, token = _answer(holder)
    for number in range(HAND_OVERS):
        _ask(waiter, f"next-{number}")
        while json.loads((await connection.ask("GET", "/queue"))[1])["queue"] == []:  # noqa: ASYNC110  # it is another process that waits
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)
        sent_at = time.perf_counter()
        await connection.ask("DELETE", f"/leases/{lease_id}", headers=f"X-Lease-Token: {token}\r\n")
        told_at, lease_id, token = _answer(waiter)
        took.append(float(told_at) - sent_at)
        holder, waiter = waiter, holder
    connection.close()


def _ask(waiter: subprocess.Popen[str], request_id: str) -> None:
    assert waiter.stdin is not None
    waiter.stdin.write(f"{request_id}\n")
    waiter.stdin.flush()


def _answer(waiter: subprocess.Popen[str]) -> list[str]:
    assert waiter.stdout is not None
    return waiter.stdout.readline().split()


async def _round_trips(port: int) -> list[float]:
    connection = await Connection.open(port)
    took = []
    for _ in range(2 * HAND_OVERS):
        await asyncio.sleep(0.005)
        begun = time.perf_counter()
        await connection.ask("GET", "/nothing")
        took.append(time.perf_counter() - begun)
    connection.close()
    return took


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def _listen_to_nobody(_: object) -> None:
    pass


async def grants_among(waiting: int, path: Path) -> float:
    """Microseconds from a release to the next grant, both on disk, with a given number of waiters."""
    ledger = SQLiteLedger(path, PoolSettings(), _listen_to_nobody)
    readings = tuple(
        Reading(f"GPU-{index}", index, "any", None, 24_000.0, 0.0, None, 0.0, processes=()) for index in range(8)
    )

    async def ask(number: int) -> list[str]:
        request = Request(f"r{number}", ttl_seconds=3600.0)
        effects = await ledger.submit(Requested(request, poll_deadline=boot_time() + 3600))
        return [effect.lease.lease_id for effect in effects if isinstance(effect, Granted)]

    await ledger.submit(Observed("", readings, boot_time()))
    answers = await asyncio.gather(*(ask(number) for number in range(8 + waiting)))
    held = [lease_id for answer in answers for lease_id in answer]
    took = []
    for number in range(GRANTS):
        begun = time.perf_counter()
        await ledger.submit(Released(held.pop(0)))
        effects = await ledger.submit(Observed("", readings, boot_time()))
        took.append(time.perf_counter() - begun)
        (granted,) = [effect for effect in effects if isinstance(effect, Granted)]
        held.append(granted.lease.lease_id)
        await ask(8 + waiting + number)
    await ledger.close()
    return median(took) * 1e6


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        with server(BARE_SERVER, folder, BARE_DB=str(folder / "bare.db")) as (_, bare_port):
            with server(OURS, folder, GPU_BACKEND="simulated:64") as (_, port):
                alone = asyncio.run(measure_pairs(port, bare_port, 1, PAIRS_ALONE))
                many = asyncio.run(measure_pairs(port, bare_port, CLIENTS, PAIRS_EACH))
            hand_over = measure_hand_over(folder, bare_port)
        few = asyncio.run(grants_among(10, folder / "few.db"))
        crowded = asyncio.run(grants_among(10_000, folder / "crowded.db"))
    print(f"acquire + release: {1e6 / alone[0]:.0f} a second alone, {1e6 / many[0]:.0f} with {CLIENTS} clients")
    rows = [
        Row("acquire + release alone, against two bare durable commits", *alone, 0.5, is_speed=True),
        Row(f"the same with {CLIENTS} clients", *many, 0.5, is_speed=True),
        hand_over,
        Row("a hand-over among 10,000 waiters against 10", crowded, few, 2, is_speed=False),
    ]
    is_reached = print_table(rows, "µs")
    return 0 if is_reached or "--strict" not in sys.argv else 1


if __name__ == "__main__":
    sys.exit(main())
