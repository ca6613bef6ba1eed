"""`gpu-pool fleet status`, `drain` and `remove`, and `doctor`, against three real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import Programs
from tests.fleet.hosts import ADMIN_KEY, KEY_LINE, FleetServers, make_fleet_tables, release, wait_for_lease
from tests.postgres_server import PostgresServer
from tests.waiting import eventually

#: Several servers or programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def fleet(tmp_path: Path, database: str) -> Iterator[FleetServers]:
    make_fleet_tables(database)
    with FleetServers(tmp_path / "fleet", database, gpus=2) as started:
        yield started


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with Programs(tmp_path, GPU_POOL_ADMIN_KEY=ADMIN_KEY) as started:
        yield started


def hosts(programs: Programs, url: str) -> dict[str, dict[str, Any]]:
    done = programs.call("fleet", "status", "--json", "-e", url)
    assert done.returncode == 0, done.stderr
    return {row["host"]: row for row in json.loads(done.stdout)["hosts"]}


def test_a_fleet_is_shown_and_its_hosts_are_drained_and_removed(fleet: FleetServers, programs: Programs) -> None:
    url = fleet.servers[2].url
    shown = programs.call("fleet", "status", "-e", url).stdout
    assert f"dispatcher: {fleet.dispatcher().name}" in shown
    assert "database: up" in shown
    assert all(server.name in shown for server in fleet.servers)

    # The host that would be filled first gets nothing new, and keeps what it has.
    server, lease = wait_for_lease(fleet.servers, "first")
    drained = lease["host"]
    assert programs.call("fleet", "drain", drained, "-e", url).stdout == f"{drained} gets no new leases\n"
    assert hosts(programs, url)[drained]["state"] == "draining"
    for number in range(4):
        assert wait_for_lease(fleet.servers, f"other-{number}")[1]["host"] != drained
    assert server.ask("POST", f"/leases/{lease['lease_id']}/renew", headers=token("first")).status == 200
    assert release(server, lease, "first").status == 200
    assert programs.call("fleet", "drain", "--undo", drained, "-e", url).returncode == 0
    assert wait_for_lease(fleet.servers, "last")[1]["host"] == drained

    # A host that is gone is shown as such until it is removed.
    gone = fleet.servers[2]
    gone.kill()
    url = fleet.servers[0].url
    eventually(lambda: fleet.servers[0].fleet()["hosts"][2]["state"] == "unreachable")
    found = json.loads(programs.call("doctor", "--json", "-e", url).stdout)["checks"]
    assert any("gpu-pool fleet remove gpu-3" in row["advice"] for row in found)
    assert programs.call("fleet", "remove", "gpu-3", "-e", url).returncode == 0
    assert "gpu-3" not in hosts(programs, url)
    unknown = programs.call("fleet", "drain", "gpu-9", "-e", url)
    assert unknown.returncode != 0
    assert "gpu-9" in unknown.stderr


def test_no_secret_is_shown_also_while_the_database_is_away(tmp_path: Path, own_postgres: PostgresServer) -> None:
    """Neither the password of the database nor the fleet's key: in replies, logs, and the list of processes."""
    url = own_postgres.create_database("fleet")
    make_fleet_tables(url)
    with_password = url.replace("postgres@", "postgres:hunter2@")
    with FleetServers(tmp_path, with_password, names=["gpu-1"], candidates=1, LOG_LEVEL="debug") as fleet:
        (server,) = fleet.servers
        own_postgres.kill()
        eventually(lambda: "refused" in server.fleet()["database"].get("problem", ""))
        bodies = [server.get(path).body.decode() for path in ("/", "/config", "/fleet", "/metrics", "/health")]
        assert server.process is not None
        command = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        for text in (*bodies, command, server.log):
            assert "hunter2" not in text
            assert KEY_LINE.strip() not in text


def token(request_id: str) -> dict[str, str]:
    return {"X-Lease-Token": f"token-of-{request_id}-1234"}
