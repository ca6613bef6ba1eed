"""What a fleet of real servers does when its parts fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tcp_proxy import TCPProxy
from tests.fleet.hosts import FleetServer, FleetServers, make_fleet_tables, wait_for_lease
from tests.fleet.servers import KEY, Fleet, fleet_of
from tests.postgres_server import PostgresServer
from tests.server_process import Reply, ServerProcess
from tests.waiting import eventually

#: Several servers or programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)


class Poll(threading.Thread):
    """A client that waits at a server, and asks again as long as it is told to wait."""

    def __init__(self, fleet: Fleet, by: str, request_id: str) -> None:
        super().__init__(daemon=True)
        self._fleet, self._by, self._id = fleet, by, request_id
        self.reply: Reply | None = None
        self.start()

    def run(self) -> None:
        while self.reply is None or self.reply.status in (202, 503):
            self.reply = self._fleet.request(self._by, self._id, wait_seconds=10)

    def granted(self) -> dict[str, Any]:
        self.join(60)
        assert self.reply is not None
        assert self.reply.status == 201, self.reply.body
        lease: dict[str, Any] = self.reply.json
        return lease


def fill(fleet: Fleet, number: int) -> list[dict[str, Any]]:
    leases = []
    for each in range(number):
        reply = fleet.request("gpu-3", f"fill-{each}", ttl_seconds=300, wait_seconds=5)
        assert reply.status == 201, reply.body
        leases.append(reply.json)
    return leases


def states(fleet: Fleet, by: str = "gpu-3") -> dict[str, str]:
    return {row["host"]: row["state"] for row in fleet.seen_by(by)["hosts"]}


@pytest.mark.fault(45, 48)
def test_the_dispatcher_is_killed(database: str, tmp_path: Path) -> None:
    """Those who wait keep their order, holders notice nothing, and what its host held is shown as unreachable."""
    with fleet_of(tmp_path, database, gpus=1) as fleet:
        leases = fill(fleet, 3)
        polls = []
        for number in range(2):
            polls.append(Poll(fleet, "gpu-3", f"waiting-{number}"))
            eventually(lambda number=number: len(fleet["gpu-3"].get("/queue").json["queue"]) == number + 1)
        before = fleet.seen_by("gpu-3")
        dead = before["dispatcher"]["host"]
        fleet[dead].kill()
        alive = [lease for lease in leases if lease["host"] != dead]
        for lease in alive:
            # At its own host, with a dispatcher or without.
            token = {"X-Lease-Token": lease["token"]}
            assert fleet[lease["host"]].ask("POST", f"/leases/{lease['lease_id']}/renew", headers=token).status == 200
        after = eventually(lambda: _elected(fleet, before["epoch"]))
        assert after["dispatcher"]["host"] != dead
        assert eventually(lambda: states(fleet)[dead] == "unreachable")
        lost = next(lease for lease in leases if lease["host"] == dead)
        renewed = fleet["gpu-3"].ask(
            "POST", f"/leases/{lost['lease_id']}/renew", headers={"X-Lease-Token": lost["token"]}
        )
        assert (renewed.status, renewed.json["error"]) == (503, "fleet_unavailable")
        # The same request gets the same lease, whoever is dispatcher.
        again = fleet.request("gpu-3", alive[0]["request_id"], ttl_seconds=300, wait_seconds=5)
        assert (again.status, again.json["lease_id"]) == (201, alive[0]["lease_id"])
        assert fleet.release("gpu-3", alive[0]).status == 200
        assert polls[0].granted()["host"] == alive[0]["host"]
        assert fleet.release("gpu-3", alive[1]).status == 200
        assert polls[1].granted()["host"] == alive[1]["host"]
        # It comes back, and so does its lease.
        fleet[dead].start()
        fleet.until_up(by="gpu-3")
        assert eventually(
            lambda: (
                fleet["gpu-3"]
                .ask("POST", f"/leases/{lost['lease_id']}/renew", headers={"X-Lease-Token": lost["token"]})
                .status
                == 200
            )
        )


def _elected(fleet: Fleet, epoch: int) -> dict[str, Any]:
    found = fleet.seen_by("gpu-3")
    assert found["dispatcher"] is not None
    assert found["epoch"] > epoch
    return found


@pytest.mark.fault(41)
def test_the_database_is_away(own_postgres: PostgresServer, tmp_path: Path) -> None:
    with fleet_of(tmp_path, own_postgres.create_database("away"), gpus=1) as fleet:
        leases = fill(fleet, 3)
        waiting = Poll(fleet, "gpu-2", "waiting")
        eventually(lambda: fleet["gpu-3"].get("/queue").json["queue"])
        own_postgres.kill()
        assert eventually(lambda: fleet.seen_by("gpu-3")["database"]["state"] == "away")
        # Those who wait are served, and a newcomer gets a GPU at once, or is told.
        refused = fleet.request("gpu-3", "newcomer", wait_seconds=5)
        assert (refused.status, "database" in refused.json["detail"]) == (503, True)
        assert fleet.release("gpu-1", leases[0]).status == 200
        assert waiting.granted()["host"] == leases[0]["host"]
        assert fleet.release("gpu-1", leases[1]).status == 200
        got = eventually(lambda: _granted(fleet.request("gpu-3", "at-once")))
        assert got["host"] == leases[1]["host"]
        own_postgres.start()
        assert eventually(lambda: fleet.seen_by("gpu-3")["database"]["state"] == "up")
        assert eventually(lambda: fleet.request("gpu-3", "newcomer-2").status == 202)
        assert fleet.seen_by("gpu-3")["epoch"] == 1


def _granted(reply: Reply) -> dict[str, Any]:
    assert reply.status == 201, reply.body
    lease: dict[str, Any] = reply.json
    return lease


@pytest.mark.fault(49)
def test_a_name_or_a_key_that_does_not_fit(database: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, database, hosts=1, candidates=1, gpus=1) as fleet:
        url = fleet["gpu-1"].url
        (tmp_path / "wrong").write_text("another key of 16 letters")
        own = {"GPU_BACKEND": "simulated:1", "GPU_POOL_FLEET_JOIN": url}
        twin = ServerProcess(
            tmp_path / "twin", GPU_POOL_HOST_NAME="gpu-1", GPU_POOL_FLEET_KEY_FILE=str(tmp_path / "key"), **own
        )
        stranger = ServerProcess(
            tmp_path / "stranger", GPU_POOL_HOST_NAME="gpu-2", GPU_POOL_FLEET_KEY_FILE=str(tmp_path / "wrong"), **own
        )
        with twin, stranger:
            assert eventually(lambda: "another host is called gpu-1" in twin.log or "has another ledger" in twin.log)
            assert eventually(lambda: "the fleet's key is another one here" in stranger.log)
            assert states(fleet, "gpu-1") == {"gpu-1": "up"}
            refused = stranger.ask("POST", "/leases", {}, timeout=30)
            assert (refused.status, refused.json["error"]) == (503, "fleet_unavailable")
            assert "the fleet's key is another one here" in refused.json["detail"]
            assert KEY not in stranger.log + twin.log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--join", "http://gpu-1:8000"], "a fleet needs a key"),
        (["--join", "http://gpu-1:8000", "--fleet-key-file", "/nothing"], "cannot be read"),
        (["--join", "ftp://gpu-1", "--fleet-key-file", "{key}"], "GPU_POOL_FLEET_JOIN"),
        (["--join", "http://gpu-1:8000", "--fleet-key-file", "{key}", "--workers", "2"], "one process"),
        (["--fleet", "postgresql://pool:secret@db/gpupool", "--fleet-key-file", "{key}"], "password"),
        (["--fleet", "mysql://db/gpupool", "--fleet-key-file", "{key}"], "postgresql://"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(KEY)
    given = [text.replace("{key}", str(tmp_path / "key")) for text in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker_pool", "serve", "--simulate", "1", "--port", "0", *given],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GPU_POOL_STATE_DIR": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert "secret" not in done.stderr


def test_a_server_without_a_fleet_loads_nothing_of_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from gpu_worker_pool.gpu_server import app\n"
        "async def run():\n"
        "    async with app.router.lifespan_context(app):\n"
        "        pass\n"
        "asyncio.run(run())\n"
        "ours = ('psycopg', 'gpu_worker_pool.fleet', 'gpu_worker_pool.gpu_server.fleet')\n"
        "print([name for name in sys.modules if name.startswith(ours)])\n"
    )
    environ = {**os.environ, "GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.fault(47)
def test_a_client_that_cannot_reach_the_host_of_its_lease_renews_it_through_another(
    database: str, tmp_path: Path
) -> None:
    """Also while that host has lost its links to the fleet: the lease lives on until they are back."""
    make_fleet_tables(database)
    fleet = FleetServers(tmp_path, database, gpus=1, names=["gpu-1", "gpu-2"], candidates=1)
    candidate, host = fleet.servers
    with TCPProxy(candidate.port) as proxy:
        candidate.environment["GPU_POOL_URL"] = host.environment["GPU_POOL_FLEET_JOIN"] = proxy.url
        with fleet:
            token = {"X-Lease-Token": "a-token-of-the-client"}
            body = {"request_id": "far", "only": ["gpu-2"], "ttl_seconds": 3, "wait_seconds": 5}
            lease = candidate.ask("POST", "/leases", body, headers=token).json
            path = f"/leases/{lease['lease_id']}"
            assert candidate.ask("POST", f"{path}/renew", headers=token).status == 200
            proxy.mode = "refuse"
            proxy.cut()
            eventually(lambda: candidate.fleet()["hosts"][1]["state"] == "unreachable")
            assert candidate.ask("POST", f"{path}/renew", headers=token).json["error"] == "fleet_unavailable"

            def outlives_its_ttl() -> bool:
                row = host.get(path).json
                assert row["state"] == "held", row
                return bool(row["held_seconds"] > 5.0)

            assert eventually(outlives_its_ttl)
            proxy.mode = "forward"
            eventually(lambda: candidate.ask("POST", f"{path}/renew", headers=token).status == 200)
            assert candidate.ask("DELETE", path, headers=token).json["released"] is True


@pytest.mark.fault(46)
def test_a_host_that_has_no_link_for_15_s_serves_its_programs_itself(database: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, database, hosts=2, candidates=1, gpus=1) as fleet:
        local = {"GPU_POOL_STATE_DIR": str(fleet["gpu-2"].folder / "state"), "GPU_BACKEND": "simulated:1"}
        program = [sys.executable, "-m", "gpu_worker_pool", "run", "-e", "local://", "--", "true"]
        subprocess.run(program, env=os.environ | local, check=True, timeout=60)  # its turn comes at once
        killed_at = time.monotonic()
        fleet["gpu-2"].kill()
        # Its GPU is free, and somebody of the fleet may be next.
        subprocess.run(program, env=os.environ | local, check=True, timeout=60)
        waited = time.monotonic() - killed_at
        assert waited > 10, waited
        fleet["gpu-2"].start()
        fleet.until_up()
        subprocess.run(program, env=os.environ | local, check=True, timeout=60)


@pytest.mark.fault(42)
def test_a_dispatcher_that_is_cut_off_from_the_database_places_until_another_is_elected(
    database: str, tmp_path: Path
) -> None:
    make_fleet_tables(database)
    port = int(database.rpartition(":")[2].partition("/")[0])
    fleet = FleetServers(tmp_path, database, gpus=1)
    with TCPProxy(port) as proxy:
        # Whoever is elected first has the database behind the proxy.
        for candidate in fleet.candidates:
            candidate.environment["GPU_POOL_FLEET_DATABASE"] = database.replace(f":{port}", f":{proxy.port}")
        with fleet:
            before = fleet.dispatcher()
            epoch = before.fleet()["epoch"]
            other = next(each for each in fleet.candidates if each is not before)
            other.kill()
            other.environment["GPU_POOL_FLEET_DATABASE"] = database
            proxy.mode = "hang"
            begun_at = time.monotonic()
            eventually(lambda: before.fleet()["database"]["state"] == "away", 10)
            _, lease = wait_for_lease([fleet.servers[2]], "meanwhile", wait_seconds=0)
            assert lease["host"] in (before.name, "gpu-3")
            # The other one has the database.
            other.start()
            found = eventually(lambda: _elected_at(fleet.servers[2], epoch))
            assert found["dispatcher"]["host"] == other.name
            eventually(lambda: before.fleet()["dispatcher"]["host"] == other.name)
            _, again = wait_for_lease([before], "meanwhile")
            assert again["lease_id"] == lease["lease_id"]
            assert time.monotonic() - begun_at < 60


def _elected_at(server: FleetServer, epoch: int) -> dict[str, Any]:
    found = server.fleet()
    assert found["dispatcher"] is not None
    assert found["epoch"] > epoch
    return found
