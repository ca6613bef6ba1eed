"""Three real servers as one fleet: one queue and one order, whichever server is asked."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPoolClient
from tests.fleet.servers import KEY, Fleet, fleet_of
from tests.postgres_server import PostgresServer
from tests.server_process import Reply
from tests.waiting import eventually

#: Several servers or programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)

ADMIN_KEY = "an-administrator-of-this-fleet"
PASSWORD = "a-password-of-nobody"  # noqa: S105  # trust needs none


@pytest.fixture(scope="module")
def fleet(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    database = shared_postgres.create_database("fleet_of_servers").replace("@", f":{PASSWORD}@", 1)
    with fleet_of(tmp_path_factory.mktemp("fleet"), database, gpus=2, GPU_POOL_ADMIN_KEYS=ADMIN_KEY) as found:
        yield found


@pytest.fixture(autouse=True)
def _free_again(fleet: Fleet) -> Iterator[None]:
    """Each test begins with six free GPUs, and nobody waiting."""
    yield

    def is_free() -> bool:
        for row in fleet["gpu-1"].get("/queue").json["queue"]:
            admin(fleet, "DELETE", f"/queue/{row['request_id']}")
        for row in fleet["gpu-1"].get("/leases").json["leases"]:
            admin(fleet, "DELETE", f"/leases/{row['lease_id']}")
        seen = fleet.seen_by("gpu-1")
        return not seen["queue"] and [row["free"] for row in seen["hosts"]] == [2, 2, 2]

    eventually(is_free)


def admin(fleet: Fleet, method: str, path: str) -> Reply:
    return fleet["gpu-1"].ask(method, path, headers={"Authorization": f"Bearer {ADMIN_KEY}"})


def granted(reply: Reply) -> dict[str, Any]:
    assert reply.status == 201, reply.body
    lease: dict[str, Any] = reply.json
    return lease


def fill(fleet: Fleet) -> list[dict[str, Any]]:
    names = ["gpu-1", "gpu-2", "gpu-3"] * 2
    return [granted(fleet.request(name, secrets.token_hex(8), wait_seconds=5)) for name in names]


def test_a_lease_is_good_at_every_server(fleet: Fleet) -> None:
    lease = granted(fleet.request("gpu-3", "anywhere", wait_seconds=5))
    host, token = lease["host"], {"X-Lease-Token": lease["token"]}
    assert lease["lease_id"].startswith(f"{host}:lease-")
    assert lease["endpoint_url"] == fleet[host].url
    assert lease["env"]["GPU_POOL_HOST"] == host
    for name in fleet.servers:
        renewed = fleet[name].ask("POST", f"/leases/{lease['lease_id']}/renew", headers=token)
        assert (renewed.status, renewed.json["lease_id"]) == (200, lease["lease_id"])
        rows = eventually(lambda name=name: fleet[name].get("/leases").json["leases"])
        assert [(row["lease_id"], row["host"]) for row in rows] == [(lease["lease_id"], host)]
        stranger = fleet[name].ask("DELETE", f"/leases/{lease['lease_id']}", headers={"X-Lease-Token": "x" * 20})
        assert (stranger.status, stranger.json["error"]) == (403, "not_yours")
        assert fleet[name].ask("DELETE", f"/leases/{lease['lease_id']}").json["error"] == "token_needed"
    other = next(name for name in fleet.servers if name != host)
    assert fleet.release(other, lease).json["released"] is True
    again = fleet[other].ask("POST", f"/leases/{lease['lease_id']}/renew", headers=token)
    assert (again.status, again.json["error"]) == (409, "lease_ended")


def test_a_request_repeated_at_another_server_gets_the_same_lease(fleet: Fleet) -> None:
    first = granted(fleet.request("gpu-1", "twice", wait_seconds=5))
    second = granted(fleet.request("gpu-2", "twice", wait_seconds=5))
    assert [first["lease_id"], first["token"]] == [second["lease_id"], second["token"]]


def test_first_come_first_served_over_all_hosts(fleet: Fleet) -> None:
    leases = fill(fleet)
    served: list[str] = []
    replies: dict[str, Reply] = {}

    def wait(by: str, request_id: str) -> None:
        replies[request_id] = fleet.request(by, request_id, wait_seconds=30)
        served.append(request_id)

    threads = []
    for number, name in enumerate(["gpu-3", "gpu-1", "gpu-2"]):
        threads.append(threading.Thread(target=wait, args=(name, f"wait-{number}")))
        threads[-1].start()
        eventually(lambda number=number: len(fleet["gpu-2"].get("/queue").json["queue"]) == number + 1)
    rows = fleet["gpu-2"].get("/queue").json["queue"]
    assert [(row["request_id"], row["position"]) for row in rows] == [("wait-0", 1), ("wait-1", 2), ("wait-2", 3)]
    assert fleet.seen_by("gpu-3")["queue"][0]["request_id"] == "wait-0"
    explained = fleet["gpu-3"].get("/queue/wait-2").json
    assert explained["position"] == 3
    assert {gpu["host"] for gpu in explained["gpus"]} == set(fleet.servers)
    for number, lease in enumerate(leases[:3]):
        assert fleet.release("gpu-1", lease).status == 200
        eventually(lambda number=number: len(served) == number + 1)
    for thread in threads:
        thread.join()
    assert served == ["wait-0", "wait-1", "wait-2"]
    assert [reply.status for reply in replies.values()] == [201] * 3


def test_several_gpus_are_on_one_host_or_none(fleet: Fleet) -> None:
    pair = granted(fleet.request("gpu-1", "pair", count=2, wait_seconds=5))
    assert len(pair["gpus"]) == 2
    refused = fleet.request("gpu-1", "too many", count=3)
    assert refused.status == 422  # an id holds no blank
    refused = fleet.request("gpu-1", "too-many", count=3)
    assert (refused.status, refused.json["error"]) == (409, "impossible")


def test_a_host_can_be_named_or_excluded(fleet: Fleet) -> None:
    here = granted(fleet.request("gpu-3", "here", on_this_host=True, only=[1], wait_seconds=5))
    assert (here["host"], here["env"]["CUDA_VISIBLE_DEVICES"]) == ("gpu-3", "1")
    assert granted(fleet.request("gpu-1", "only", only=["gpu-3"], wait_seconds=5))["host"] == "gpu-3"
    assert granted(fleet.request("gpu-1", "not", exclude=["gpu-1", "gpu-3"], wait_seconds=5))["host"] == "gpu-2"
    waiting = fleet.request("gpu-3", "here-too", on_this_host=True)
    assert (waiting.status, waiting.json["position"]) == (202, 1)


@pytest.mark.fault(53)
def test_gpus_that_a_program_of_a_host_holds_are_granted_around(fleet: Fleet) -> None:
    program = program_on(fleet, "gpu-1", "-n", "2")
    try:
        assert eventually(lambda: [row["host"] for row in fleet["gpu-3"].get("/leases").json["leases"]] == ["gpu-1"])
        hosts = [granted(fleet.request("gpu-1", f"around-{number}", wait_seconds=5))["host"] for number in range(4)]
        assert sorted(hosts) == ["gpu-2", "gpu-2", "gpu-3", "gpu-3"]
        waiting = fleet.request("gpu-1", "around-4")
        assert (waiting.status, waiting.json["position"]) == (202, 1)
    finally:
        program.communicate()
    # The place was kept.
    assert granted(fleet.request("gpu-2", "around-4", wait_seconds=20))["host"] == "gpu-1"


def program_on(fleet: Fleet, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """One that uses `local://` there, and ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_worker_pool", "run", "-e", "local://", *arguments, "--", "cat"],
        stdin=subprocess.PIPE,
        env=os.environ | local_env(fleet, name),
    )


def local_env(fleet: Fleet, name: str) -> dict[str, str]:
    return {"GPU_POOL_STATE_DIR": str(fleet[name].folder / "state"), "GPU_BACKEND": "simulated:2"}


def local_queue(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    """As programs of this host see it."""
    shown = json.loads(shown_by("queue", "--json", "-e", "local://", **local_env(fleet, name)))
    rows: list[dict[str, Any]] = shown["queue"]
    return rows


def test_a_program_of_a_host_waits_for_its_turn_in_the_fleet(fleet: Fleet) -> None:
    leases = [granted(fleet.request("gpu-2", f"held-{number}", only=["gpu-1"], wait_seconds=5)) for number in (0, 1)]
    replies: dict[str, Reply] = {}

    def wait(request_id: str, priority: int) -> None:
        # Their accounts differ, and the one that uses more would come later.
        body = {"only": ["gpu-1"], "priority": priority, "wait_seconds": 30}
        replies[request_id] = fleet.request("gpu-3", request_id, **body)

    def queue() -> list[str]:
        return [row["request_id"] for row in fleet["gpu-2"].get("/queue").json["queue"]]

    late = threading.Thread(target=wait, args=("late", 0))
    late.start()
    eventually(lambda: queue() == ["late"])
    program = program_on(fleet, "gpu-1", "--priority", "1")
    early = threading.Thread(target=wait, args=("early", 2))
    try:
        eventually(lambda: len(queue()) == 2)
        local = queue()[0]
        early.start()
        eventually(lambda: queue() == ["early", local, "late"])
        # On its host it is told its place in the whole queue, too.
        shown = eventually(lambda: [row for row in local_queue(fleet, "gpu-1") if row["position"] == 2])
        assert [row["request_id"] for row in shown] == [local]
        assert "in the order of this host's fleet" in shown[0]["reasons"][0]

        fleet.release("gpu-1", leases[0])
        eventually(lambda: "early" in replies)
        assert queue() == [local, "late"]
        fleet.release("gpu-1", leases[1])
        eventually(lambda: queue() == ["late"])
        rows = fleet["gpu-3"].get("/leases").json["leases"]
        assert [row["host"] for row in rows if row["request_id"] == local] == ["gpu-1"]
        fleet.release("gpu-1", granted(replies["early"]))
        late.join()
        assert granted(replies["late"])["host"] == "gpu-1"
    finally:
        program.communicate()
        for thread in (early, late):
            thread.join()
    assert program.returncode == 0


def test_a_program_that_ends_while_it_waits_leaves_the_queue_of_the_fleet(fleet: Fleet) -> None:
    leases = fill(fleet)
    program = program_on(fleet, "gpu-2", "-n", "2")
    eventually(lambda: len(fleet["gpu-3"].get("/queue").json["queue"]) == 1)
    program.kill()
    program.communicate()
    eventually(lambda: fleet["gpu-3"].get("/queue").json["queue"] == [])
    for lease in leases:
        fleet.release("gpu-1", lease)


def test_a_free_gpu_goes_to_a_program_of_its_host_at_once_also_inside_a_lease(fleet: Fleet) -> None:
    inner = [sys.executable, "-m", "gpu_worker_pool", "run", "--no-wait", "-e", "local://", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker_pool", "run", "--no-wait", "-n", "2", "-e", "local://", "--", *inner],
        env=os.environ | local_env(fleet, "gpu-2"),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


def test_who_waits_can_leave(fleet: Fleet) -> None:
    fill(fleet)
    assert fleet.request("gpu-1", "leaving", token="t" * 20).status == 202
    assert fleet["gpu-2"].ask("DELETE", "/queue/leaving").status == 403
    gone = fleet["gpu-2"].ask("DELETE", "/queue/leaving", headers={"X-Lease-Token": "t" * 20})
    assert gone.json == {"request_id": "leaving", "cancelled": True}
    assert fleet["gpu-2"].ask("DELETE", "/queue/nothing").json["error"] == "unknown_request"
    assert fleet.request("gpu-3", "leaving", token="t" * 20).json["error"] == "request_ended"


def test_the_fleet_is_shown_alike_by_every_server(fleet: Fleet) -> None:
    seen = [fleet.seen_by(name) for name in fleet.servers]
    assert {(found["fleet_id"], found["epoch"], found["dispatcher"]["host"]) for found in seen} == {
        (seen[0]["fleet_id"], seen[0]["epoch"], seen[0]["dispatcher"]["host"])
    }
    for found in seen:
        assert [(row["host"], row["url"], row["state"], row["gpus"]) for row in found["hosts"]] == [
            (name, server.url, "up", 2) for name, server in fleet.servers.items()
        ]
        assert found["database"]["state"] == "up"
    assert fleet["gpu-1"].get("/").json["features"][-1] == f"fleet:{seen[0]['fleet_id']}"


def test_nothing_shown_or_logged_holds_a_secret(fleet: Fleet) -> None:
    lease = granted(fleet.request("gpu-3", "secret", wait_seconds=5))
    for name, server in fleet.servers.items():
        shown = [server.get(path).body.decode() for path in ("/config", "/fleet", "/leases", "/queue", "/metrics", "/")]
        for secret in (PASSWORD, KEY, lease["token"]):
            assert not any(secret in text for text in (*shown, server.log)), (name, secret)


def test_only_administrators_drain_hosts(fleet: Fleet) -> None:
    refused = fleet["gpu-2"].ask("POST", "/fleet/hosts/gpu-2/drain")
    assert (refused.status, refused.json["error"]) == (403, "not_admin")
    assert admin(fleet, "POST", "/fleet/hosts/nothing/drain").status == 404
    assert admin(fleet, "POST", "/fleet/hosts/gpu-2/drain").json == {"host": "gpu-2", "state": "draining"}
    try:
        states = {row["host"]: row["state"] for row in eventually(lambda: fleet.seen_by("gpu-3"))["hosts"]}
        assert eventually(lambda: fleet.seen_by("gpu-3")["hosts"][1]["state"] == "draining"), states
        hosts = [granted(fleet.request("gpu-2", f"drained-{number}", wait_seconds=5))["host"] for number in range(4)]
        assert sorted(hosts) == ["gpu-1", "gpu-1", "gpu-3", "gpu-3"]
        assert fleet.request("gpu-2", "drained-4").status == 202
    finally:
        assert admin(fleet, "POST", "/fleet/hosts/gpu-2/undrain").json == {"host": "gpu-2", "state": "up"}


def test_a_client_of_one_server_gets_gpus_of_all_hosts(fleet: Fleet) -> None:
    async def run() -> None:
        async with GPUWorkerPoolClient(service_endpoint=fleet["gpu-3"].url, environ={}) as client:
            assignments = [await client.request_gpu(timeout=20) for _ in range(6)]
            assert sorted(each.gpu_id for each in assignments) == [
                f"{name}:{index}" for name in fleet.servers for index in (0, 1)
            ]
            assert {each.endpoint_id for each in assignments} == set(fleet.servers)
            assert all(each.lease_id.startswith(f"{each.endpoint_id}:") for each in assignments)
            for assignment in assignments:
                await client.release_gpu(assignment)

    asyncio.run(run())
    eventually(lambda: fleet["gpu-1"].get("/leases").json["leases"] == [])


def test_several_addresses_are_one_fleet_and_not_a_race(fleet: Fleet) -> None:
    async def run() -> None:
        urls = ",".join(server.url for server in fleet.servers.values())
        async with GPUWorkerPoolClient(service_endpoints=urls, environ={}) as client:
            requests = [asyncio.create_task(client.request_gpu(timeout=30)) for _ in range(7)]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            queue = await asyncio.to_thread(
                eventually, lambda: fleet["gpu-1"].get("/queue").json["queue"], within_seconds=20
            )
            assert len(queue) == 1  # with three endpoints, the seventh would wait at each of them
            done = [task for task in requests if task.done()]
            assert len(done) == 6
            await client.release_gpu(done[0].result())
            for task in requests:
                await task

    asyncio.run(run())
    eventually(lambda: fleet["gpu-1"].get("/queue").json == {"queue": []})


def shown_by(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker_pool", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_show_the_whole_fleet(fleet: Fleet) -> None:
    """`GPU_POOL_ENDPOINT` names some of its servers; the next one is asked if one is silent."""
    lease = granted(fleet.request("gpu-2", "shown", label="of the fleet", wait_seconds=5))
    env = {"GPU_POOL_ENDPOINT": f"http://127.0.0.1:1,{fleet['gpu-2'].url},{fleet['gpu-3'].url}"}
    status = shown_by("status", **env)
    for name, server in fleet.servers.items():
        assert status.count(f"{server.url}: 2 x") == 1, (name, status)
    assert status.count("of the fleet") == 1
    leases = shown_by("leases", **env)
    assert leases.count(lease["lease_id"]) == 1
    explained = shown_by("explain", "-n", "2", **env)
    held, free = f"{lease['host']}: 1 of 2 GPUs could serve it", ": 2 of 2 GPUs could serve it"
    assert (explained.count(held), explained.count(free)) == (1, 2), explained
    body = json.loads(shown_by("status", "--json", **env))
    assert [(each["endpoint"], each["error"]) for each in body["endpoints"][-3:]] == [
        (name, None) for name in fleet.servers
    ]
