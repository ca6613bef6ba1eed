"""The ledger of a host that is in a fleet: all processes that use it follow the fleet's order, however they came."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from gpu_worker_pool.core import FleetOrder, FleetOrdered, Granted, Requested, Ticked, TurnCame
from gpu_worker_pool.core.fleet_order import follows_fleet
from gpu_worker_pool.ledger import Ledger
from gpu_worker_pool.ledger.bell import processes_concerned
from tests.ledger.places import InSQLite, Told, read, request

ORDER = FleetOrder(1015.0, {"a": 3}, ("0",), "big", "ada's train.py", "a note", "4242")


async def leases_in(ledger: Ledger) -> set[str]:
    return await ledger.look(lambda pool, _: {lease.request.request_id for lease in pool.leases})


@pytest.mark.fault(46)
async def test_no_process_grants_what_the_fleet_has_not_granted(tmp_path: Path) -> None:
    place = InSQLite(tmp_path)
    server = place.open(Told())
    await server.submit(read(place, 2))
    await server.submit(FleetOrdered(ORDER))
    program = place.open(Told())  # which was not there when the server said so
    await program.submit(read(place, 2))
    await program.submit(Requested(request("a")))
    await program.submit(Ticked())
    assert await leases_in(program) == set()
    assert await program.look(lambda pool, _: pool.fleet_order) == ORDER
    effects = await server.submit(TurnCame("a", ("1",)))
    assert [effect.lease.gpu_ids for effect in effects if isinstance(effect, Granted)] == [("1",)]
    # The server is gone.
    await server.close()
    await program.submit(Requested(request("b")))
    assert await leases_in(program) == {"a"}
    place.clock.advance(14.0)
    await program.submit(read(place, 2))
    assert await leases_in(program) == {"a"}
    place.clock.advance(1.0)
    await program.submit(Ticked())
    assert await leases_in(program) == {"a", "b"}
    await program.close()


async def test_who_begins_to_wait_wakes_the_server(tmp_path: Path) -> None:
    place = InSQLite(tmp_path)
    ledger = place.open(Told())
    await ledger.submit(Requested(request("a")))
    waiters = await ledger.look(lambda pool, _: pool.queue.in_order())
    assert await ledger.look(lambda pool, _: processes_concerned(pool, waiters)) == set()
    await ledger.submit(FleetOrdered(ORDER))
    assert await ledger.look(lambda pool, _: processes_concerned(pool, waiters)) == {"4242"}
    await ledger.close()


async def test_after_a_reboot_nothing_of_it_is_left(tmp_path: Path) -> None:
    place = InSQLite(tmp_path)
    before = place.open(Told())
    await before.submit(FleetOrdered(FleetOrder(1e9)))
    await before.close()
    place.boot_id = "second-boot"
    after = place.open(Told())
    await after.submit(read(place, 1))
    assert not await after.look(follows_fleet)
    assert await after.submit(Requested(request("a")))
    assert await leases_in(after) == {"a"}
    await after.close()


async def test_a_ledger_of_the_version_before_gets_the_table(tmp_path: Path) -> None:
    place = InSQLite(tmp_path)
    await place.open(Told()).close()
    with apsw.Connection(str(place.path)) as connection:
        connection.execute("DROP TABLE fleet_order")
    ledger = place.open(Told())
    await ledger.submit(FleetOrdered(ORDER))
    await ledger.close()
    assert place.read("SELECT until FROM fleet_order") == [1015.0]
