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
    Origin,
    Outcome,
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
)
from gpu_worker_pool.core.invariants import check_invariants
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
    tables = place.read(
        "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'later_%'"
        " AND name NOT IN ('unrecorded', 'totals', 'policy', 'fleet_order') ORDER BY name"
    )
    return {"rows": rows, "quarantine": quarantines[0], "ended lease": ended[0], "tables": tables}


def names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: names(item) if isinstance(item, dict | list) and name not in ("lease", "quarantine") else None
            for name, item in value.items()
        }
    return names(value[0]) if value and isinstance(value[0], dict) else None


async def test_what_came_later_is_stored_apart(place: InSQLite) -> None:
    """Older versions refuse a row with a field that they do not know."""
    request = replace(again("new", count=4), origin=Origin("ada", "gpu-1", 4242, "train.py", is_verified=True))
    ledger = place.open(Told())
    await ledger.submit(observed(place))
    await ledger.submit(Requested(request, poll_deadline=1090.0))
    (data,) = place.read("SELECT data FROM requests WHERE request_id = 'new'")
    assert "origin" not in json.loads(data)["request"]
    await ledger.close()

    ledger = place.open(Told())
    waiter = await ledger.look(lambda pool, _: pool.requests["new"])
    assert (waiter.request, waiter.request.origin) == (request, request.origin)
    await ledger.submit(Cancelled("new", "me"))
    await ledger.close()

    ledger = place.open(Told())
    # Now it is only in the file.
    assert Ended("new", RequestState.CANCELLED) in await ledger.submit(Requested(request))
    ended = await ledger.look(lambda pool, _: pool.requests["new"])
    assert ended.request.origin == request.origin
    await ledger.close()


async def test_what_came_later_stays_with_a_lease_that_has_ended(tmp_path: Path) -> None:
    """Its row has the request twice."""
    place = InSQLite(tmp_path)
    request = replace(again("new"), origin=Origin("ada", "gpu-1", 4242, "train.py", is_verified=True))
    ledger = place.open(Told())
    await ledger.submit(snapshot(gpus(1), at=place.clock.now()))
    (granted,) = [
        effect
        for effect in await ledger.submit(Requested(request, poll_deadline=1090.0))
        if isinstance(effect, Granted)
    ]
    await ledger.submit(Released(granted.lease.lease_id, "me"))
    (data,) = place.read("SELECT data FROM requests WHERE request_id = 'new' AND kind = 'outcome'")
    assert "ada" not in data
    await ledger.close()

    ledger = place.open(Told())
    await ledger.submit(Requested(request))
    ended = await ledger.look(lambda pool, _: pool.requests["new"])
    assert isinstance(ended, Outcome)
    assert ended.lease is not None
    assert (ended.request.origin, ended.lease.request.origin) == (request.origin, request.origin)
    await ledger.close()


async def test_what_came_later_is_removed_with_its_request(place: InSQLite) -> None:
    """Also by an older version: the database itself does it."""
    ledger = place.open(Told())
    await ledger.submit(observed(place))
    await ledger.submit(Requested(replace(again("new", count=4), origin=Origin("ada")), poll_deadline=1090.0))
    assert place.read("SELECT request_id FROM later_fields") == ["new"]
    await ledger.close()
    with closing(apsw.Connection(str(place.path))) as connection:
        connection.execute("DELETE FROM requests WHERE request_id = 'new'")
    assert place.read("SELECT request_id FROM later_fields") == []


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


def as_older_versions_see_it(place: InSQLite, folder: Path) -> InSQLite:
    """A copy of the ledger without what came later. For requests outside any lease the rules are still the same."""
    folder.mkdir()
    older = InSQLite(folder)
    with closing(apsw.Connection(str(place.path))) as connection:
        connection.execute("VACUUM INTO ?", (str(older.path),))
    with closing(apsw.Connection(str(older.path))) as connection:
        connection.execute("DELETE FROM later_fields")
    older.clock.advance(place.clock.now() - older.clock.now())
    return older


async def test_an_older_version_grants_nothing_inside_a_lease_and_nothing_twice(
    place: InSQLite, tmp_path: Path
) -> None:
    """To it the leases inside are further leases on the same GPU, and nobody who waits inside can be served."""
    ledger = place.open(Told())
    await ledger.submit(QuarantineEnded("lease-3"))
    for name in ("many", "later"):
        await ledger.submit(Cancelled(name, "me"))
    place.clock.advance(1.0)
    idle = snapshot(gpus(4), at=place.clock.now())
    await ledger.submit(idle)
    await ledger.submit(Requested(again("outer", count=2, only=("2", "3"))))
    await ledger.submit(Requested(replace(again("inner"), within="lease-5")))
    await ledger.submit(Requested(replace(again("both", count=2), within="lease-5"), poll_deadline=1100.0))
    assert place.read("SELECT gpu_id, lease_id FROM promised WHERE lease_id > 'lease-4' ORDER BY gpu_id") == [
        ("2", "lease-5"), ("3", "lease-5"), ("lease-5/2", "lease-6"),
    ]  # fmt: skip
    await ledger.close()

    older = as_older_versions_see_it(place, tmp_path / "older")
    ledger = older.open(told := Told())
    await ledger.submit(idle)
    await ledger.submit(Requested(again("next", count=2)))
    await ledger.submit(Released("lease-5", "me"))
    older.clock.advance(61.0)  # long enough to reserve something for those who wait
    await ledger.submit(snapshot(gpus(4), at=older.clock.now()))
    assert [effect for effect in told.effects if isinstance(effect, Granted)] == []
    leases = {lease.request.request_id: lease.gpu_ids for lease in await ledger.look(lambda pool, _: list(pool.leases))}
    assert leases["inner"] == ("2",)  # the lease around it has ended; its GPU is still in use
    both = await ledger.look(lambda pool, _: pool.requests["both"])
    assert (both.request.requirements.only, both.reserved) == (("inside lease-5",), ())
    await ledger.close()


async def test_what_an_older_version_left_of_a_lease_inside_stands_for_itself(place: InSQLite) -> None:
    ledger = place.open(Told())
    for name in ("many", "later"):
        await ledger.submit(Cancelled(name, "me"))
    await ledger.submit(snapshot(gpus(4), at=place.clock.now()))
    await ledger.submit(Requested(replace(again("inner"), within="lease-1")))
    await ledger.submit(Requested(replace(again("waits"), within="lease-1"), poll_deadline=1100.0))
    await ledger.close()
    with closing(apsw.Connection(str(place.path))) as connection:  # as an older version releases "holds"
        (row,) = connection.execute("SELECT data FROM requests WHERE request_id = 'holds'").fetchone()
        lease = json.loads(row)
        ended = {"request": lease["request"], "state": "granted", "at": 1066.0, "reasons": []}
        ended |= {"lease": lease, "lease_state": "released"}
        connection.execute(
            "UPDATE requests SET kind = 'outcome', ended_at = 1066.0, data = ?, revision = revision + 100"
            " WHERE request_id = 'holds'",
            (json.dumps(ended),),
        )
        connection.execute("DELETE FROM promised WHERE lease_id = 'lease-1'")
        connection.execute(
            "UPDATE meta SET revision = revision + 100,"
            " tally = json_set(tally, '$.released', coalesce(tally ->> '$.released', 0) + 1)"
        )

    ledger = place.open(told := Told())
    place.clock.advance(1.0)
    await ledger.submit(snapshot(gpus(4), at=place.clock.now()))
    assert await ledger.look(lambda pool, _: check_invariants(pool)) is None
    why = "lease-1, inside which this runs, has ended"
    assert Ended("waits", RequestState.REJECTED, (why,)) in told.effects
    await ledger.submit(Requested(again("next", only=("0",)), poll_deadline=1100.0))
    assert isinstance(await ledger.look(lambda pool, _: pool.requests["next"]), Waiter)  # "inner" still has GPU 0
    inner = await ledger.look(lambda pool, _: pool.requests["inner"])
    assert isinstance(inner, Lease)
    await ledger.submit(Released(inner.lease_id, "me"))
    place.clock.advance(1.0)
    await ledger.submit(snapshot(gpus(4), at=place.clock.now()))
    assert isinstance(await ledger.look(lambda pool, _: pool.requests["next"]), Lease)
    await ledger.close()
