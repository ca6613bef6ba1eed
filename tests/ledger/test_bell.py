"""Commits wake the processes that they concern, so that a GPU changes hands at once also without a server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core import ReadingWanted, Released, Requested
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.ledger import Committed
from gpu_worker_pool.ledger.bell import Bell
from tests.ledger.places import InSQLite, read, request

#: Without rings this program finds a commit of others a quarter of an hour later.
DEAF = """
import asyncio, sys
from gpu_worker_pool.broker import local
from gpu_worker_pool.hardware import sampler
from gpu_worker_pool.ledger import sqlite
sqlite.FOLLOW_SECONDS = sampler.FOLLOW_SECONDS = local.INTERVAL_SECONDS = 900.0
from tests.integration.broker_process import Program
asyncio.run(Program(*sys.argv[1:]).run())
"""


@pytest.fixture
def place(tmp_path: Path) -> InSQLite:
    return InSQLite(tmp_path)


class Talking:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.hear()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        self.say(line)
        return self.hear()


@contextmanager
def programs(folder: Path, *, count: int) -> Iterator[list[Talking]]:
    command = [sys.executable, "-c", DEAF, str(folder), "simulated:1"]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield [Talking(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_release_wakes_the_program_that_is_next(tmp_path: Path) -> None:
    with programs(tmp_path, count=2) as (first, second):
        for turn in range(3):
            lease = first.ask(f"acquire a{turn} 5")["lease"]
            assert second.ask(f"acquire b{turn} 0")["position"] == 1
            second.say(f"acquire b{turn} 60")
            assert second.ask("renew lease-0")["error"] == "UnknownLeaseError"  # after the poll before it was stored
            assert first.ask(f"release {lease}")["released"] == lease
            granted = second.hear()
            assert granted["name"] == f"b{turn}"
            assert second.ask(f"release {granted['lease']}")["released"] == granted["lease"]


async def test_many_rings_are_one_and_nobody_waits_for_who_does_not_listen(tmp_path: Path) -> None:
    file, loop, me = tmp_path / "ledger.db", asyncio.get_running_loop(), name_of_this_process()
    file.touch()
    rung: list[str] = []
    here = Bell(file, me, loop, lambda: rung.append("here"))
    same_name = Bell(file, me, loop, lambda: rung.append("same name"))
    other = Bell(file, "other", loop, lambda: rung.append("other"))
    for _ in range(1000):
        same_name.ring([me, "nobody"])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rung == ["here"]
    here.ring(["other"])
    other.ring([me])
    same_name.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(rung) == ["here", "here", "other"]
    for bell in (here, other):
        bell.close()
        bell.ring([me])


async def test_a_reading_that_began_while_the_release_was_being_stored_will_do(place: InSQLite) -> None:
    """It need only begin after the lease has ended."""
    told: list[Committed] = []
    ledger = place.open(told.append)
    await ledger.submit(read(place, 1))
    await ledger.submit(Requested(request("first")))
    await ledger.submit(Requested(request("second"), poll_deadline=2000.0))
    told.clear()
    place.clock.advance(1.0)
    released_at = place.clock.now()
    await ledger.submit(Released("lease-1"))
    (committed,) = told
    assert ([type(effect) for effect in committed.effects], committed.decided_at) == ([ReadingWanted], released_at)
    await ledger.close()
