"""A ledger that an older version wrote is opened and goes on, and what this version writes, the older one can read.

`data/older_ledger.sql` was written by 576e67f, before fields of waiters, leases and requests were renamed. Of four GPUs
0 and 1 are held ("holds", "shares"), 2 is in quarantine ("dies"), and 3 and 1 are reserved for "many", which wants two;
"later" waits behind it, "released" and "gone" have ended.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Ended,
    Granted,
    HolderGone,
    Lease,
    LeaseState,
    Observed,
    PollAbandoned,
    ProcessReading,
    QuarantineEnded,
    ReadingWanted,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Waiter,
    check_invariants,
)
from gpu_worker_pool.errors import LeaseEndedError, NotYourLeaseError
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.ledger.tables import SCHEMA
from gpu_worker_pool.testing import gpus, snapshot
from tests.ledger.places import InSQLite, Told

OLDER = Path(__file__).parent / "data" / "older_ledger.sql"


@pytest.fixture
def place(tmp_path: Path) -> InSQLite:
    place = InSQLite(tmp_path)
    with closing(apsw.Connection(str(place.path))) as connection:
        connection.execute(OLDER.read_text(encoding="utf-8"))
    place.clock.advance(66.0)  # one second after the last transaction
    return place


def observed(place: InSQLite) -> Observed:
    """The holder that is gone still has a process on GPU 2."""
    shown = list(gpus(4))
    shown[2] = replace(shown[2], memory_used_mb=30_000.0, processes=(ProcessReading(4242),))
    return snapshot(shown, at=place.clock.now())


def again(name: str, **requirements: Any) -> Request:
    return Request(name, Requirements(**requirements), f"worker-{name}", "me", "training", 60.0, "user:1000")


async def test_everything_in_it_is_known(place: InSQLite) -> None:
    ledger = place.open(Told())
    leases = {lease.request.request_id: lease for lease in await ledger.look(lambda pool, _: list(pool.leases))}
    assert {name: (lease.state, lease.gpu_ids) for name, lease in leases.items()} == {
        "holds": (LeaseState.HELD, ("0",)),
        "shares": (LeaseState.HELD, ("1",)),
        "dies": (LeaseState.QUARANTINED, ("2",)),
    }
    assert leases["holds"].poll_id == ""
    assert leases["holds"].expires_at == 1125.0
    assert leases["shares"].request.requirements == Requirements(memory_mb=10_000.0, share=True)
    assert leases["dies"].request.requirements.gpu_model == "H100"
    many, later = await ledger.look(lambda pool, _: pool.queue.in_order())
    assert (many.request.requirements.count, many.reserved, many.reserved_at) == (2, ("3", "1"), 1065.0)
    assert (many.poll_id, many.poll_deadline, many.may_reserve) == ("poll-many", 1080.0, True)
    assert (later.request.requirements, later.reserved, later.may_reserve) == (ANY_GPU, (), False)
    assert await ledger.look(lambda pool, _: pool.reserved_for) == many
    assert await ledger.look(lambda pool, _: (pool.fence, pool.ticket)) == (4, 7)
    assert await ledger.look(lambda pool, _: check_invariants(pool)) is None
    await ledger.close()


async def test_it_goes_on(place: InSQLite) -> None:
    ledger = place.open(told := Told())
    await ledger.submit(observed(place))
    assert told.effects == [ReadingWanted("")]  # GPU 3 is free, but reserved for "many"

    (renewed,) = await ledger.submit(Renewed("lease-1", "me"))
    assert isinstance(renewed, Granted)
    assert renewed.lease.expires_at == 1126.0
    with pytest.raises(NotYourLeaseError):
        await ledger.submit(Renewed("lease-1", "somebody"))
    with pytest.raises(LeaseEndedError, match="its holder is gone"):
        await ledger.submit(Renewed("lease-3", "me"))

    # Those who ended are remembered, and an equal request is recognised.
    assert await ledger.submit(Requested(again("gone", only=("0",)))) == (Ended("gone", RequestState.CANCELLED),)
    assert await ledger.submit(Requested(again("released"))) == (Ended("released", RequestState.GRANTED),)
    await ledger.submit(Requested(again("many", count=2), poll_deadline=1100.0, poll_id="poll-2"))

    await ledger.submit(Released("lease-2", "me"))
    place.clock.advance(1.0)
    await ledger.submit(observed(place))
    granted = told.changes["many"]
    assert isinstance(granted, Lease)
    assert set(granted.gpu_ids) == {"3", "1"}
    assert (granted.lease_id, granted.fence, granted.poll_id) == ("lease-5", 5, "poll-2")

    await ledger.submit(QuarantineEnded("lease-3"))
    place.clock.advance(1.0)
    await ledger.submit(snapshot(gpus(4), at=place.clock.now()))
    served = told.changes["later"]
    assert isinstance(served, Lease)
    assert served.gpu_ids == ("2",)
    assert place.read("SELECT gpu_id, lease_id FROM promised ORDER BY gpu_id") == [
        ("0", "lease-1"), ("1", "lease-5"), ("2", "lease-6"), ("3", "lease-5"),
    ]  # fmt: skip
    await ledger.close()


async def test_what_is_written_has_the_names_that_the_older_version_knows(place: InSQLite, tmp_path: Path) -> None:
    older = written(place)
    new = InSQLite(tmp_path / "new")
    new.folder.mkdir()
    new.clock.advance(66.0)
    ledger = new.open(Told())
    await write_all_kinds(ledger, new)
    await ledger.close()
    assert written(new) == older


def written(place: InSQLite) -> dict[str, Any]:
    """The tables with their columns, and for each kind of row the names of everything in it."""
    found = place.read("SELECT kind, data FROM requests ORDER BY rowid")
    rows = {kind: names(json.loads(data)) for kind, data in found}
    leases = [json.loads(data) for kind, data in found if kind in ("lease", "outcome")]
    quarantines = [names(row["quarantine"]) for row in leases if row.get("quarantine")]
    ended = [names(row["lease"]) for row in leases if row.get("lease")]
    tables = place.read("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name")
    return {"rows": rows, "quarantine": quarantines[0], "ended lease": ended[0], "tables": tables}


def names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: names(item) if isinstance(item, dict | list) and name not in ("lease", "quarantine") else None
            for name, item in value.items()
        }
    return names(value[0]) if value and isinstance(value[0], dict) else None


async def write_all_kinds(ledger: SQLiteLedger, place: InSQLite) -> None:
    """The same kinds of rows, each last written like those of the older ledger: for a request with requirements."""
    await ledger.submit(snapshot(gpus(3), at=place.clock.now()))
    for name in ("holds", "dies", "released"):
        await ledger.submit(Requested(again(name, gpu_model="H100"), poll_deadline=1070.0, poll_id=name))
    await ledger.submit(Released("lease-3", "me"))
    await ledger.submit(PollAbandoned("holds", "holds"))
    await ledger.submit(HolderGone("lease-2"))
    await ledger.submit(Requested(again("gone", count=2)))
    await ledger.submit(Cancelled("gone", "me"))
    await ledger.submit(Requested(again("waits", count=2), poll_deadline=1090.0))
    assert isinstance(await ledger.look(lambda pool, _: pool.requests["waits"]), Waiter)


def test_the_schema_is_the_older_one() -> None:
    """Tables are made by whichever version comes first."""
    with closing(apsw.Connection(":memory:")) as new, closing(apsw.Connection(":memory:")) as older:
        new.execute(SCHEMA)
        older.execute(OLDER.read_text(encoding="utf-8"))
        query = "SELECT type, name, tbl_name FROM sqlite_schema ORDER BY name"
        assert new.execute(query).fetchall() == older.execute(query).fetchall()
        columns = "SELECT m.name, c.name, c.type, c.pk FROM sqlite_schema m, pragma_table_info(m.name) c ORDER BY 1, 2"
        assert new.execute(columns).fetchall() == older.execute(columns).fetchall()
