"""While no process can write the ledger nothing expires, and holders are told so; where another one can, rules hold."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import apsw
import pytest

from gpu_worker_pool.core import Renewed, Ticked
from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.ledger import sqlite
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from tests.ledger.disks import Fails, WatchedDisk
from tests.ledger.places import InSQLite, Told, read
from tests.ledger.test_any_ledger import granted
from tests.ledger.test_file_faults import run_script


async def refusal(ledger: SQLiteLedger, lease_id: str, by: str = "me") -> str:
    with pytest.raises(LedgerUnavailableError) as refused:
        await ledger.submit(Renewed(lease_id, by))
    return refused.value.lease


async def stamp_from_elsewhere(place: InSQLite) -> None:
    """By a process whose disk is not full, such as one of root."""
    script = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('UPDATE meta SET now = ?', sys.argv[2:])"
    await asyncio.to_thread(run_script, f"{script}; c.commit()", str(place.path), str(place.clock.now()))


async def test_a_renewal_that_cannot_be_written_says_whether_the_lease_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PAUSE_SECONDS", 0.0)
    place, disk = InSQLite(tmp_path), Fails("write", "sync")
    watched = WatchedDisk(disk)
    try:
        ledger = place.open(Told())
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one", ttl=4.0)
        disk.with_error = apsw.FullError
        assert await refusal(ledger, lease.lease_id) == "unknown", "another process may have written a moment ago"
        place.clock.advance(1.1)
        assert await refusal(ledger, lease.lease_id) == "held"
        assert await refusal(ledger, lease.lease_id, by="you") == "unknown", "that says nothing to a stranger"
        assert await refusal(ledger, "lease-77") == "unknown"
        place.clock.advance(60.0)
        assert await refusal(ledger, lease.lease_id) == "held", "for as long as nobody can write"
        await stamp_from_elsewhere(place)
        assert await refusal(ledger, lease.lease_id) == "unknown", "somebody serves it, and may end the lease"
        place.clock.advance(5.0)
        disk.with_error = None
        await ledger.submit(Ticked())
        await ledger.submit(Renewed(lease.lease_id, "me"))
        assert (await ledger.look(lambda pool, _: pool.leases.by_id[lease.lease_id])).expires_at == (
            place.clock.now() + 4.0
        )
        await ledger.close()
    finally:
        watched.unregister()


async def test_a_ledger_that_was_not_written_since_a_failure_counts_as_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that finds nothing to write does not show that anything can be written."""
    monkeypatch.setattr(sqlite, "PAUSE_SECONDS", 0.0)
    place, disk = InSQLite(tmp_path), Fails("write", "sync")
    watched = WatchedDisk(disk)
    try:
        ledger = place.open(Told())
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one", ttl=4.0)
        disk.with_error = apsw.FullError
        assert await refusal(ledger, lease.lease_id) == "unknown"
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert ledger.problem is not None
            await ledger.look(lambda pool, _: None)
        disk.with_error = None
        await ledger.submit(Ticked())
        assert ledger.problem is None
        await ledger.close()
    finally:
        watched.unregister()
