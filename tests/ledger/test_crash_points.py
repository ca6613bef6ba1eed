"""Fault 10: killed with -9 before and after every write and sync, the ledger is whole; granted means promised."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.core import Granted, PoolSettings, Requested
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.ledger import Ledger
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.testing import gpus, snapshot
from tests.ledger.disks import Unsynced, WatchedDisk
from tests.ledger.dying import BOOT_ID, SURVIVED, grant_gpus
from tests.ledger.places import InSQLite, Told, request

ROOT = Path(__file__).parents[2]


def open_again(place: InSQLite) -> SQLiteLedger:
    return SQLiteLedger(place.path, PoolSettings(), Told(), clock=lambda: 1002.0, boot_id=BOOT_ID, first_fence=0)


async def check_after_the_crash(folder: Path) -> int:
    """How many grants were told of before it."""
    place = InSQLite(folder)
    noted = folder / "promised"
    promised = [
        request_class.split() for request_class in read_if_there(noted).splitlines() if request_class != SURVIVED
    ]
    if not place.path.exists():
        assert promised == []
    ledger = open_again(place)
    try:
        await ledger.look(lambda pool, now: check_invariants(pool))
        assert place.read("PRAGMA integrity_check") == ["ok"]
        rows = {name: (kind, json.loads(data)) for name, kind, data in place.read(ROWS)}
        ended = {words[1] for words in promised if words[0] == "ended"}
        for word, name, *what in promised:
            if word == "granted":
                kind, row = rows[name]
                lease = row if kind == "lease" else row["lease"]
                assert [lease["lease_id"], ",".join(lease["gpu_ids"])] == what
        assert all(rows[name][0] == "outcome" for name in ended)
        await serve_somebody(ledger)
        assert place.read("SELECT count(*) - count(DISTINCT gpu_id) FROM promised") == [0]
    finally:
        await ledger.close()
    return sum(words[0] == "granted" for words in promised)


ROWS = "SELECT request_id, kind, data FROM requests"


async def serve_somebody(ledger: Ledger) -> None:
    await ledger.submit(snapshot(gpus(8), at=1002.0))
    (grant,) = await ledger.submit(Requested(request("the next one")))
    assert isinstance(grant, Granted)
    await ledger.look(lambda pool, now: check_invariants(pool))


@pytest.mark.fault(10)
@pytest.mark.long
@pytest.mark.timeout(180)
def test_killed_at_every_write_of_a_grant(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.ledger.dying", tmp_path], cwd=ROOT, check=True, timeout=150)
    places = sorted(tmp_path.iterdir())
    assert len(places) > 100
    told = set()

    async def check_all() -> None:
        for folder in places:
            told.add(await check_after_the_crash(folder))

    asyncio.run(check_all())
    assert told >= {0, 1, 3, 4, 5}, "there was no crash between two of the grants"
    for when in ("before", "after"):
        survived = [f for f in places if f.name.startswith(when) and SURVIVED in read_if_there(f / "promised")]
        assert len(survived) == 1, "a process should have died, and did not"


def read_if_there(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_nobody_is_told_before_it_is_on_the_disk(tmp_path: Path) -> None:
    unsynced = Unsynced()
    seen: list[set[str]] = []
    disk = WatchedDisk(unsynced)
    try:
        ledger = SQLiteLedger(
            tmp_path / "ledger.db",
            PoolSettings(),
            lambda committed: seen.append(set(unsynced.files)),
            clock=lambda: 1000.0,
            boot_id=BOOT_ID,
        )
        await ledger.submit(snapshot(gpus(2), at=1000.0))
        seen.clear()
        for name in ("one", "two"):
            await ledger.submit(Requested(request(name)))
        await ledger.close()
    finally:
        disk.unregister()
    assert seen == [set(), set()]


async def test_the_history_that_dies_is_a_right_one(tmp_path: Path) -> None:
    await grant_gpus(tmp_path)
    request_classes = (tmp_path / "promised").read_text().splitlines()
    assert [request_class.split()[0:2] for request_class in request_classes if request_class.startswith("granted")] == [
        ["granted", name] for name in ("first", "second", "third", "first", "waits")
    ]
    assert request_classes[-1] == SURVIVED
    assert await check_after_the_crash(tmp_path) == 5
