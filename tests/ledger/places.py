"""Places where a ledger can be kept, for tests that every ledger must pass: the next kind is one more class here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from gpu_worker_pool.core import Effect, Lease, Observed, Outcome, PoolSettings, Request, Requirements, Waiter
from gpu_worker_pool.ledger import Committed, Ledger, OnCommit
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.testing import FakeClock, gpu, gpus, snapshot
from tests.fakes.memory_ledger import MemoryLedger

TTL = 60.0


class Place:
    """Opened again, it has what was in it, if it is one that lasts. All who open it here have one clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock(1000.0)
        self.boot_id = "first-boot"

    def open(self, on_commit: OnCommit, settings: PoolSettings | None = None) -> Ledger:
        raise NotImplementedError


class InMemory(Place):
    def open(self, on_commit: OnCommit, settings: PoolSettings | None = None) -> Ledger:
        return MemoryLedger(settings or PoolSettings(), on_commit, self.clock)


class InSQLite(Place):
    @property
    def path(self) -> Path:
        return self.folder / "ledger.db"

    def open(self, on_commit: OnCommit, settings: PoolSettings | None = None) -> SQLiteLedger:
        return SQLiteLedger(
            self.path, settings or PoolSettings(), on_commit, clock=self.clock.now, boot_id=self.boot_id, first_fence=0
        )

    def read(self, sql: str, *values: Any) -> list[Any]:
        """What the file says, as somebody else would find it; of one column the values alone."""
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            found = connection.execute(sql, values).fetchall()
        finally:
            connection.close()
        return [row[0] if len(row) == 1 else row for row in found]


class Told:
    """What a ledger told, in order."""

    def __init__(self, and_then: Callable[[Committed], object] | None = None) -> None:
        self.all: list[Committed] = []
        self._and_then = and_then

    def __call__(self, committed: Committed) -> None:
        self.all.append(committed)
        if self._and_then is not None:
            self._and_then(committed)

    @property
    def effects(self) -> list[Effect]:
        return [effect for committed in self.all for effect in committed.effects]

    @property
    def changes(self) -> dict[str, Waiter | Lease | Outcome]:
        """Each request as it was last told."""
        known: dict[str, Waiter | Lease | Outcome] = {}
        for committed in self.all:
            known |= committed.changes
        return known


def request(
    name: str, *, owner: str = "me", ttl: float | None = TTL, account: str = "", **requirements: Any
) -> Request:
    return Request(name, Requirements(**requirements), owner=owner, ttl_seconds=ttl, account=account)


def read(place: Place, number: int = 2, **reading: Any) -> Observed:
    """So many idle GPUs, read now."""
    return snapshot(gpus(number, **reading), at=place.clock.now())


__all__ = ["TTL", "InMemory", "InSQLite", "Place", "Told", "gpu", "read", "request"]
