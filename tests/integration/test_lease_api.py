"""The lease API of a real server: the life of a lease, the queue, public views, and errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import Reply, ServerProcess
from tests.waiting import eventually

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Request
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.lease import HeldLease

_NUMBERS = itertools.count()
ADMIN = {"Authorization": "Bearer the-administrators-key"}
OWN_TOKEN = {"X-Lease-Token": "a-token-of-my-own-making"}
#: Separators of lines, and marks that change the direction of the text around them.
_MARKS = ("2028", "2029", "2066", "200f", "061c", "202e")
SIMULATED_UUID = re.compile(r"GPU-51309a7e-0000-4000-8000-\d{12}")
SETTINGS = {"GPU_BACKEND": "simulated:4", "REFRESH_INTERVAL": "0.2", "ACCESS_LOG": "false"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("leases")
    with ServerProcess(folder, **SETTINGS, GPU_POOL_ADMIN_KEYS="the-administrators-key") as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture
def server(started: ServerProcess) -> Iterator[ServerProcess]:
    """With no lease and nobody waiting, before and after."""
    yield started
    clear(started)


def clear(server: ServerProcess) -> None:
    for row in server.get("/queue").json["queue"]:
        server.ask("DELETE", f"/queue/{row['request_id']}", headers=ADMIN)
    for row in server.get("/leases").json["leases"]:
        server.ask("DELETE", f"/leases/{row['lease_id']}", headers=ADMIN)
    eventually(lambda: not server.get("/leases").json["leases"])
    # Of the leases that were: simulated load is gone with the next reading.
    eventually(lambda: all(gpu["process_count"] == 0 for gpu in server.get("/gpu/summary").json["gpus_summary"]))


def acquire(server: ServerProcess, headers: dict[str, str] | None = None, **body: Any) -> Reply:
    return server.ask("POST", "/leases", body, headers=headers)


def new(name: str) -> str:
    """An id that no other test has used: they are remembered for a day."""
    return f"{name}-{next(_NUMBERS)}"


def granted(server: ServerProcess, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    # A GPU whose last lease has just ended is given away again once it was read.
    reply = acquire(server, headers, **{"wait_seconds": 5, **body})
    assert reply.status == 201, reply
    lease: dict[str, Any] = reply.json
    return lease


def renew(server: ServerProcess, lease: dict[str, Any], **headers: str) -> Reply:
    sent = {"X-Lease-Token": lease["token"]} | {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("POST", f"/leases/{lease['lease_id']}/renew", headers=sent)


def release(server: ServerProcess, lease: dict[str, Any], **headers: str) -> Reply:
    sent = {"X-Lease-Token": lease["token"]} | {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("DELETE", f"/leases/{lease['lease_id']}", headers=sent)


def refused(reply: Reply) -> tuple[int, str]:
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["detail"]
    return reply.status, reply.json["error"]


@contextlib.contextmanager
def in_background(call: Callable[[], Reply]) -> Iterator[concurrent.futures.Future[Reply]]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


# --- the life of a lease ---


def test_a_lease_says_all_that_its_holder_needs(server: ServerProcess) -> None:
    wall, own = datetime.now(UTC), new("own")
    reply = acquire(server, request_id=own, worker_id="trainer", ttl_seconds=30, label="nightly run")
    assert reply.status == 201
    lease = reply.json
    assert reply.headers["Location"] == f"/leases/{lease['lease_id']}"
    assert server.get(reply.headers["Location"]).json["request_id"] == own
    (gpu,) = lease["gpus"]
    assert (gpu["gpu_id"], gpu["name"]) == (0, "Simulated GPU 24GB")
    assert SIMULATED_UUID.fullmatch(gpu["uuid"])
    assert 29 < lease.pop("expires_in_seconds") <= 30
    moments = [datetime.fromisoformat(lease.pop(name)) for name in ("granted_at", "expires_at")]
    assert abs((moments[0] - wall).total_seconds()) < 5
    assert (moments[1] - moments[0]).total_seconds() == pytest.approx(30, abs=0.1)
    lease_id = lease["lease_id"]
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", lease_id)
    assert re.fullmatch(r"[!-~]{16,200}", lease.pop("token"))
    assert lease.pop("fence") > 0
    assert 0 <= lease.pop("waited_seconds") < 30
    assert lease == {
        "lease_id": lease_id,
        "request_id": own,
        "worker_id": "trainer",
        "gpus": [gpu],
        "ends_in_seconds": None,
        "yield_asked": False,
        "yield_reason": None,
        "leave_in_seconds": None,
        "expected_seconds": None,
        "max_seconds": None,
        "ttl_seconds": 30,
        "state": "held",
        "label": "nightly run",
        "memory_mb": None,
        "share": False,
        "within": None,
        "env": {
            "CUDA_VISIBLE_DEVICES": str(gpu["gpu_id"]),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "NVIDIA_VISIBLE_DEVICES": gpu["uuid"],
            "GPU_POOL_LEASE_ID": lease_id,
        },
    }


def test_renewed_and_released(server: ServerProcess) -> None:
    lease = granted(server, ttl_seconds=20)
    time.sleep(0.3)
    reply = renew(server, lease)
    assert reply.status == 200
    assert reply.json["expires_in_seconds"] > 19.8
    assert reply.json.keys() == lease.keys() - {"token", "waited_seconds"}
    reply = release(server, lease)
    assert (reply.status, reply.json) == (200, {"lease_id": lease["lease_id"], "released": True})
    assert refused(renew(server, lease)) == (409, "lease_ended")
    assert refused(server.get(f"/leases/{lease['lease_id']}")) == (404, "unknown_lease")


def test_nobody_gets_what_another_has_and_fences_grow(server: ServerProcess) -> None:
    leases = [granted(server) for _ in range(4)]
    assert sorted(lease["gpus"][0]["gpu_id"] for lease in leases) == [0, 1, 2, 3]
    fences = [lease["fence"] for lease in leases]
    assert fences == sorted(set(fences))
    reply = acquire(server)
    assert reply.status == 202
    assert reply.headers["Retry-After"] == "1"
    assert reply.json["position"] == 1


def test_several_gpus_shared_gpus_and_requirements(server: ServerProcess) -> None:
    both = granted(server, count=2, exclude=[0])
    assert len({gpu["uuid"] for gpu in both["gpus"]} - {None}) == 2
    assert 0 not in [gpu["gpu_id"] for gpu in both["gpus"]]
    shared = [granted(server, memory_mb=8000, share=True, only=[0]) for _ in range(3)]
    assert {lease["gpus"][0]["gpu_id"] for lease in shared} == {0}
    assert acquire(server, memory_mb=8000, share=True, only=[0]).status == 202, "no more than there is"


def test_gpus_are_named_by_number_by_uuid_on_request_and_by_uuid_to_containers(server: ServerProcess) -> None:
    lease = granted(server, request_id=(name := new("names")), count=2)
    numbers = ",".join(str(gpu["gpu_id"]) for gpu in lease["gpus"])
    uuids = ",".join(gpu["uuid"] for gpu in lease["gpus"])
    assert lease["env"] == {
        "CUDA_VISIBLE_DEVICES": numbers,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "GPU_POOL_LEASE_ID": lease["lease_id"],
    }
    # It is about the answer, not about the request, which is still the same one.
    assert granted(server, request_id=name, count=2, gpu_names="uuid")["env"]["CUDA_VISIBLE_DEVICES"] == uuids
    assert renew(server, lease).json["env"] == lease["env"]
    path, sent = f"/leases/{lease['lease_id']}/renew", {"X-Lease-Token": lease["token"]}
    by_uuid = server.ask("POST", f"{path}?gpu_names=uuid", headers=sent)
    assert by_uuid.json["env"] == {**lease["env"], "CUDA_VISIBLE_DEVICES": uuids}
    for bad in (server.ask("POST", f"{path}?gpu_names=name", headers=sent), acquire(server, gpu_names="name")):
        assert refused(bad) == (422, "invalid")
        assert "gpu_names" in bad.json["detail"]
        assert "uuid" in bad.json["detail"]


def test_a_lease_that_is_not_renewed_is_lost_and_its_gpu_given_on(server: ServerProcess) -> None:
    lease = granted(server, ttl_seconds=2)
    row = eventually(lambda: quarantined(server, lease["lease_id"]), 10)
    assert row["quarantine"]["seconds"] >= 0
    assert row["quarantine"]["reason"]
    assert refused(renew(server, lease)) == (409, "lease_ended")
    assert refused(release(server, lease)) == (409, "lease_ended")
    eventually(lambda: not server.get("/leases").json["leases"], 15)
    assert refused(release(server, lease)) == (409, "lease_ended")


def quarantined(server: ServerProcess, lease_id: str) -> Any:
    row = server.get(f"/leases/{lease_id}").json
    return row if row.get("state") == "quarantined" else None


# --- the queue ---


def test_asking_again_keeps_the_place_and_a_release_hands_on_at_once(server: ServerProcess) -> None:
    holder = granted(server, count=4, ttl_seconds=60)
    first, second = new("first"), new("second")
    begun = time.monotonic()
    reply = acquire(server, request_id=first, worker_id="a", wait_seconds=0.5)
    assert 0.4 < time.monotonic() - begun < 3
    assert reply.status == 202
    assert reply.json.keys() == {"request_id", "position", "waiting_seconds", "reasons", "token"}
    assert (reply.json["request_id"], reply.json["position"]) == (first, 1)
    assert reply.json["waiting_seconds"] >= 0.4
    assert "held by" in " ".join(reply.json["reasons"])
    assert acquire(server, request_id=second).json["position"] == 2
    assert acquire(server, request_id=first, worker_id="a").json["position"] == 1

    def ask_on() -> Reply:
        return acquire(server, request_id=first, worker_id="a", wait_seconds=20)

    with in_background(ask_on) as waiting:
        time.sleep(0.5)
        assert release(server, holder).status == 200
        answer = waiting.result(30)
        assert answer.status == 201, "woken, and not told after its wait that it waits on"
    assert answer.json["token"] == reply.json["token"], "the same for every repetition"
    assert acquire(server, request_id=second).status == 201


async def test_a_lease_that_was_waited_for_longer_than_its_ttl_is_not_dead_on_arrival(server: ServerProcess) -> None:
    blockers = [granted(server) for _ in range(4)]
    body = {"request_id": new("patient"), "ttl_seconds": 2, "wait_seconds": 20}
    begun = boot_time()
    by_hand = asyncio.create_task(asyncio.to_thread(server.ask, "POST", "/leases", body))
    async with aiohttp.ClientSession() as session:
        service = HTTPLeaseService("here", APIClient(server.url, lambda: session, timeout_seconds=5))
        request = Request(new("patient"), ANY_GPU, "worker", OWN_TOKEN["X-Lease-Token"], ttl_seconds=2.0)
        ours = asyncio.create_task(service.acquire(request, wait_seconds=20, may_reserve=True))
        await asyncio.to_thread(eventually, lambda: len(server.get("/queue").json["queue"]) == 2)
        await asyncio.sleep(max(begun + 2.2 - boot_time(), 0))
        for lease in blockers[:2]:
            await asyncio.to_thread(release, server, lease)
        held = await ours
        assert isinstance(held, HeldLease)
        assert not held.is_overdue
        row = server.get(f"/leases/{held.lease_id}").json
        assert held.held_until <= boot_time() + row["expires_in_seconds"], "never longer than its server has it"
    lease = (await by_hand).json
    assert lease["waited_seconds"] > 2
    assert 1 < lease["expires_in_seconds"] <= 2


def test_priority_goes_first(server: ServerProcess) -> None:
    granted(server, count=4)
    early, urgent = new("early"), new("urgent")
    acquire(server, request_id=early)
    acquire(server, request_id=urgent, priority=5, label="now!", count=2)
    queue = server.get("/queue").json["queue"]
    assert [row["request_id"] for row in queue] == [urgent, early]
    assert queue[0].keys() == {
        "request_id",
        "worker_id",
        "position",
        "waiting_seconds",
        "reasons",
        "label",
        "priority",
        "count",
        "expected_seconds",
        "max_seconds",
        "account",
        "holder",
        "within",
    }
    assert (queue[0]["position"], queue[0]["label"], queue[0]["priority"], queue[0]["count"]) == (1, "now!", 5, 2)


def test_the_explanation(server: ServerProcess) -> None:
    granted(server, count=3, worker_id="trainer")
    waits = new("waits")
    acquire(server, request_id=waits, count=2)
    found = server.get(f"/queue/{waits}").json
    assert found.keys() == {"request_id", "position", "waiting_seconds", "summary", "impossible", "gpus"}
    assert (found["position"], found["impossible"]) == (1, [])
    assert [gpu["gpu_id"] for gpu in found["gpus"]] == [0, 1, 2, 3]
    assert all(SIMULATED_UUID.fullmatch(gpu["uuid"]) for gpu in found["gpus"])
    obstacles = [obstacle for gpu in found["gpus"] for obstacle in gpu["obstacles"]]
    assert obstacles[0].keys() == {"kind", "text", "actual", "limit"}
    assert "held" in {obstacle["kind"] for obstacle in obstacles}
    assert "held by trainer" in obstacles[0]["text"]
    assert sum(not gpu["obstacles"] for gpu in found["gpus"]) == 1
    assert refused(server.get("/queue/nobody")) == (404, "unknown_request")


def test_taking_a_request_back(server: ServerProcess) -> None:
    granted(server, count=4)
    plain, own = new("plain"), new("own")
    acquire(server, request_id=plain)
    acquire(server, OWN_TOKEN, request_id=own)
    assert refused(server.ask("DELETE", f"/queue/{own}")) == (403, "token_needed")
    assert refused(server.ask("DELETE", f"/queue/{own}", headers={"X-Lease-Token": "x" * 20})) == (403, "not_yours")
    reply = server.ask("DELETE", f"/queue/{own}", headers=OWN_TOKEN)
    assert (reply.status, reply.json) == (200, {"request_id": own, "cancelled": True})
    assert server.ask("DELETE", f"/queue/{plain}").status == 200
    assert server.get("/queue").json == {"queue": []}
    assert refused(server.ask("DELETE", f"/queue/{plain}")) == (404, "unknown_request")
    assert refused(server.ask("DELETE", "/queue/nobody")) == (404, "unknown_request")
    ended = acquire(server, request_id=plain)
    assert (refused(ended), ended.json["state"]) == ((409, "request_ended"), "cancelled")


def test_what_can_never_be_granted_fails_at_once(server: ServerProcess) -> None:
    for requirements in ({"count": 5}, {"memory_mb": 1e6}, {"gpu_model": "H100"}, {"only": ["GPU-nobody-has"]}):
        begun = time.monotonic()
        reply = acquire(server, wait_seconds=20, **requirements)
        assert refused(reply) == (409, "impossible"), requirements
        assert reply.json["reasons"]
        assert time.monotonic() - begun < 5


def test_one_id_is_one_request(server: ServerProcess) -> None:
    mine = new("mine")
    lease = granted(server, request_id=mine, worker_id="w")
    assert refused(acquire(server, request_id=mine, worker_id="w", count=2)) == (409, "request_mismatch")
    assert refused(acquire(server, request_id=mine, worker_id="other")) == (409, "request_mismatch")
    assert acquire(server, request_id=mine, worker_id="w", wait_seconds=1, may_keep=False).status == 201
    assert release(server, lease).status == 200
    reply = acquire(server, request_id=mine, worker_id="w")
    assert (refused(reply), reply.json["state"]) == ((409, "request_ended"), "granted")


def test_too_many_of_one_caller(tmp_path: Path) -> None:
    keys = {"GPU_POOL_API_KEYS": "somebodys-own-key-1,somebodys-own-key-2", "GPU_POOL_MOST_WAITING": "2"}
    with ServerProcess(tmp_path, **{**SETTINGS, "GPU_BACKEND": "simulated:1"}, **keys) as server:
        granted(server)
        assert [acquire(server, request_id=f"r{number}").status for number in range(2)] == [202, 202]
        reply = acquire(server, request_id="r2")
        assert refused(reply) == (429, "too_many_waiting")
        assert acquire(server, request_id="r1").status == 202, "it waits already"
        for key in ("somebodys-own-key-1", "somebodys-own-key-2"):
            assert acquire(server, {"Authorization": f"Bearer {key}"}).status == 202, "each for itself"


# --- what goes wrong: faults 5, 6, 7, 12, 24, 35 ---


def test_leases_are_limited_for_each_caller_and_in_all(tmp_path: Path) -> None:
    limits = {"GPU_POOL_MOST_LEASES_OF_A_CALLER": "3", "GPU_POOL_MOST_LEASES": "5"}
    share, whole = {"memory_mb": 1, "share": True}, {"request_id": new("whole")}
    key = {"Authorization": "Bearer somebodys-own-key-1"}
    with ServerProcess(tmp_path, **SETTINGS, **limits, GPU_POOL_API_KEYS="somebodys-own-key-1") as server:
        leases = [granted(server, **share) for _ in range(2)]
        assert acquire(server, count=4, **whole).status == 202
        reply = acquire(server, **share)
        assert refused(reply) == (429, "too_many_leases")
        assert "GPU_POOL_MOST_LEASES_OF_A_CALLER" in reply.json["detail"]
        assert reply.headers["Retry-After"]
        assert acquire(server, count=4, **whole).status == 202, "it waits already"
        assert renew(server, leases[0]).status == 200
        assert [acquire(server, key, **share).status for _ in range(2)] == [201, 201], "each for itself"
        reply = acquire(server, key, **share)
        assert refused(reply) == (429, "too_many_leases")
        assert "GPU_POOL_MOST_LEASES," not in reply.json["detail"]
        assert "GPU_POOL_MOST_LEASES" in reply.json["detail"]
        release(server, leases[0])
        assert acquire(server, **share).status == 201
        server.kill()
        server.start()
        assert refused(acquire(server, **share)) == (429, "too_many_leases"), "also after a restart"


@pytest.mark.fault(5)
def test_a_lost_reply_is_asked_for_again(server: ServerProcess) -> None:
    again = new("again")
    lease = granted(server, request_id=again, label="x")
    other = acquire(server, request_id=again, label="x").json
    volatile = {"expires_at", "expires_in_seconds", "waited_seconds"}
    assert {name: value for name, value in other.items() if name not in volatile} == {
        name: value for name, value in lease.items() if name not in volatile
    }
    assert len(server.get("/leases").json["leases"]) == 1


@pytest.mark.fault(6)
def test_releasing_twice_is_harmless(server: ServerProcess) -> None:
    lease = granted(server)
    first, second = release(server, lease), release(server, lease)
    assert (first.status, second.status) == (200, 200)
    next_one = granted(server, only=[gpu["uuid"] for gpu in lease["gpus"]])
    assert release(server, lease).status == 200
    assert server.get(f"/leases/{next_one['lease_id']}").json["state"] == "held"


@pytest.mark.fault(7)
def test_a_stranger_changes_nothing(server: ServerProcess) -> None:
    lease = granted(server, ttl_seconds=100)
    path = f"/leases/{lease['lease_id']}"
    before = server.get(path).json["expires_at"]
    for method, target in (("POST", f"{path}/renew"), ("DELETE", path)):
        assert refused(server.ask(method, target)) == (403, "token_needed")
        for token in ("wrong-wrong-wrong-wrong", "x", "", "\xe9" * 16, lease["token"][:-1], lease["token"] + "0"):
            headers = {"X-Lease-Token": token}
            assert refused(server.ask(method, target, headers=headers)) == (403, "not_yours"), token
    assert server.get(path).json["expires_at"] == before
    assert refused(server.ask("POST", "/leases/nobody/renew", headers=OWN_TOKEN)) == (404, "unknown_lease")
    assert refused(server.ask("DELETE", "/leases/nobody", headers=OWN_TOKEN)) == (404, "unknown_lease")
    old = lease["token"]
    release(server, lease)
    assert refused(renew(server, {**lease, "token": "wrong-wrong-wrong-wrong"})) == (403, "not_yours")
    successor = granted(server, only=[gpu["uuid"] for gpu in lease["gpus"]])
    assert refused(renew(server, {**successor, "token": old})) == (403, "not_yours")
    assert refused(release(server, {**successor, "token": old})) == (403, "not_yours")


def test_with_a_token_of_its_own_nobody_else_can_repeat_a_request(server: ServerProcess) -> None:
    mine = new("mine")
    lease = granted(server, OWN_TOKEN, request_id=mine)
    assert lease["token"] == OWN_TOKEN["X-Lease-Token"]
    assert refused(acquire(server, request_id=mine)) == (409, "request_mismatch")
    assert refused(acquire(server, {"X-Lease-Token": "y" * 16}, request_id=mine)) == (409, "request_mismatch")
    assert acquire(server, OWN_TOKEN, request_id=mine).status == 201
    assert renew(server, lease).status == 200


def test_an_administrator_may_end_anything(server: ServerProcess) -> None:
    lease = granted(server, OWN_TOKEN, count=4)
    waits = new("waits")
    acquire(server, OWN_TOKEN, request_id=waits)
    assert server.ask("DELETE", f"/queue/{waits}", headers=ADMIN).status == 200
    assert server.ask("DELETE", f"/leases/{lease['lease_id']}", headers=ADMIN).status == 200
    assert refused(server.ask("POST", f"/leases/{lease['lease_id']}/renew", headers=ADMIN)) == (403, "token_needed")
    expiring = granted(server, ttl_seconds=2)
    eventually(lambda: quarantined(server, expiring["lease_id"]), 10)
    assert server.ask("DELETE", f"/leases/{expiring['lease_id']}", headers=ADMIN).status == 200
    assert server.get("/leases").json == {"leases": []}


RUBBISH: list[tuple[bytes, dict[str, str], tuple[int, str]]] = [
    (b"", {}, (422, "invalid")),
    (b"{", {}, (422, "invalid")),
    (b"[]", {}, (422, "invalid")),
    (b'{"label": "\xff"}', {}, (422, "invalid")),
    (b"[" * 16_000, {}, (422, "invalid")),
    (b'{"count": -1}', {}, (422, "invalid")),
    (b'{"count": 1e400}', {}, (422, "invalid")),
    (b'{"count": ' + b"9" * 5000 + b"}", {}, (422, "invalid")),
    (b'{"memory_mb": NaN}', {}, (422, "invalid")),
    (b'{"memory_mb": 1e-300, "share": true}', {}, (422, "invalid")),
    (b'{"memory_mb": 0.999, "share": true}', {}, (422, "invalid")),
    (b'{"ttl_seconds": 1e9}', {}, (422, "invalid")),
    (b'{"request_id": "../../etc"}', {}, (422, "invalid")),
    (b'{"request_id": "a\\u0000b"}', {}, (422, "invalid")),
    (b'{"share": true}', {}, (422, "invalid")),
    (b'{"colour": "red"}', {}, (422, "invalid")),
    *[
        (f'{{"{field}": "train{mark}gnp.exe"}}'.encode(), {}, (422, "invalid"))
        for field in ("label", "gpu_model")
        for mark in ("\\n", "\\u0085", "\u202e", *(f"\\u{code}" for code in _MARKS))
    ],
    (b'{"label": "' + b"x" * 17_000 + b'"}', {}, (413, "too_large")),
    (b"{}", {"Content-Type": "text/plain"}, (415, "not_json")),
    (b"a=1", {"Content-Type": "application/x-www-form-urlencoded"}, (415, "not_json")),
    (b"{}", {"X-Lease-Token": "short"}, (422, "invalid")),
    (b"{}", {"X-Lease-Token": "x" * 201}, (422, "invalid")),
    (b"{}", {"X-Lease-Token": "blank in the middle"}, (422, "invalid")),
]


@pytest.mark.fault(24)
@pytest.mark.parametrize(("body", "headers", "expected"), RUBBISH)
def test_rubbish_gets_a_reason(
    server: ServerProcess, body: bytes, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    reply = server.ask("POST", "/leases", body, headers=headers)
    assert refused(reply) == expected
    if expected[0] == 422:
        assert reply.json["reasons"]
    assert server.get("/leases").json == {"leases": []}


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    "identifier",
    [
        "%00",
        "a%0A",
        "a%0D",
        "a%E2%80%A8",
        "%E2%80%AEa",
        "..%2f..",
        "%ff",
        "a%20b",
        "x" * 65,
        "x" * 5000,
        "%F0%9F%98%80",
        "*",
        "-1",
    ],
)
def test_ids_that_are_none(server: ServerProcess, identifier: str) -> None:
    for method, path in (
        ("GET", f"/leases/{identifier}"),
        ("DELETE", f"/leases/{identifier}"),
        ("POST", f"/leases/{identifier}/renew"),
        ("GET", f"/queue/{identifier}"),
        ("DELETE", f"/queue/{identifier}"),
    ):
        reply = server.ask(method, path, headers=OWN_TOKEN)
        assert reply.status == 404, (method, path)
        assert reply.json["detail"]


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=15)


def raw_request(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /leases HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"", body])


@pytest.mark.fault(24)
def test_a_body_without_end_is_not_read_to_its_end(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(raw_request(b"", b"Transfer-Encoding: chunked"))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 50_000_000:
                sent += connection.send(b"ffff\r\n" + b" " * 0xFFFF + b"\r\n")
        reply = connection.recv(65536)
        assert sent < 50_000_000
    assert reply.startswith(b"HTTP/1.1 413") or reply == b""
    with connect(server) as connection:
        connection.sendall(raw_request(b"{", b"Content-Length: 100000000"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413"), "at once, as it says how much will come"
    with connect(server) as connection:
        chunks = b"".join(b"1000\r\n" + b" " * 0x1000 + b"\r\n" for _ in range(17)) + b"0\r\n\r\n"
        connection.sendall(raw_request(chunks, b"Transfer-Encoding: chunked"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    with connect(server) as connection:
        body = b"".join(b"%x\r\n%b\r\n" % (1, b"{}"[i : i + 1]) for i in range(2)) + b"0\r\n\r\n"
        connection.sendall(raw_request(body, b"Transfer-Encoding: chunked"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 201"), "in pieces is as good as whole"


def test_a_body_that_never_comes_is_not_waited_for(server: ServerProcess) -> None:
    with connect(server) as connection:
        begun = time.monotonic()
        connection.sendall(raw_request(b"{", b"Content-Length: 10"))
        assert connection.recv(65536) == b""
        assert 5 < time.monotonic() - begun < 14
    assert server.get("/leases").json == {"leases": []}


def test_an_error_leaves_the_connection_usable(server: ServerProcess) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        for body, status in (("{", 422), ("{}", 201), ('{"count": 0}', 422)):
            connection.request("POST", "/leases", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == status
            reply.read()


def offered_to(server: ServerProcess, request_id: str) -> Any:
    """Its lease, once it is only offered; it is held for a moment if it was granted before its asker was seen to go."""
    rows = server.get("/leases").json["leases"]
    return next((row for row in rows if (row["request_id"], row["state"]) == (request_id, "offered")), None)


def test_a_caller_that_disconnects_keeps_its_position_and_is_only_offered_a_gpu(server: ServerProcess) -> None:
    holder = granted(server, count=4)
    gone = new("gone")
    body = json.dumps({"request_id": gone, "wait_seconds": 25}).encode()
    with connect(server) as connection:
        connection.sendall(raw_request(body, b"Content-Length: %d" % len(body)))
        eventually(lambda: server.get("/queue").json["queue"])
    assert [row["request_id"] for row in server.get("/queue").json["queue"]] == [gone], "its place"
    release(server, holder)
    row = eventually(lambda: offered_to(server, gone))
    assert row["expires_in_seconds"] <= 10
    lease = acquire(server, request_id=gone).json
    assert (lease["lease_id"], lease["state"]) == (row["lease_id"], "held")
    assert lease["expires_in_seconds"] > 50


def test_a_grant_that_nobody_is_there_to_hear_of_is_only_offered(server: ServerProcess) -> None:
    for _ in range(4):
        body = json.dumps({"request_id": new("gone"), "ttl_seconds": 3600}).encode()
        with connect(server) as connection:
            # Corked, the request leaves together with the end of the connection: no answer can come in between.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            connection.sendall(raw_request(body, b"Content-Length: %d" % len(body)))
    eventually(lambda: len(server.get("/leases").json["leases"]) == 4)
    eventually(lambda: {row["state"] for row in server.get("/leases").json["leases"]} == {"offered"}, 3)


def test_a_holder_that_asks_again_and_hangs_up_holds_on(server: ServerProcess) -> None:
    """It knows its lease already: that the answer to a later poll is not delivered changes nothing."""
    lease = granted(server, request_id=new("holder"))
    body = json.dumps({"request_id": lease["request_id"], "wait_seconds": 5}).encode()
    for _ in range(5):
        with connect(server) as connection:
            connection.sendall(raw_request(body, b"Content-Length: %d" % len(body)))
    time.sleep(1)
    (row,) = server.get("/leases").json["leases"]
    assert (row["lease_id"], row["state"]) == (lease["lease_id"], "held")
    assert renew(server, lease).status == 200


def test_a_stranger_who_is_refused_does_not_listen_in_anothers_place(server: ServerProcess) -> None:
    holder = granted(server, count=4)
    victim = new("victim")
    body = json.dumps({"request_id": victim, "wait_seconds": 25, "ttl_seconds": 3600}).encode()
    with connect(server) as connection:
        connection.sendall(raw_request(body, b"Content-Length: %d" % len(body)))
        eventually(lambda: server.get("/queue").json["queue"])
        assert refused(acquire(server, request_id=victim, count=2)) == (409, "request_mismatch")
    release(server, holder)
    assert eventually(lambda: offered_to(server, victim))


def test_what_is_held_is_not_cancelled_without_its_token(server: ServerProcess) -> None:
    lease = granted(server, request_id=new("held"))
    path = f"/queue/{lease['request_id']}"
    assert refused(server.ask("DELETE", path)) == (403, "token_needed")
    assert renew(server, lease).status == 200
    assert server.ask("DELETE", path, headers={"X-Lease-Token": lease["token"]}).status == 200
    assert server.get("/leases").json == {"leases": []}


def test_coming_back_before_the_broken_connection_was_noticed(server: ServerProcess) -> None:
    """Two connections wait for one request; the first one goes as the answer comes. The second is told, and holds."""
    holder = granted(server, count=4)
    twice = new("twice")
    body = json.dumps({"request_id": twice, "wait_seconds": 20}).encode()
    with connect(server) as first, connect(server) as second:
        for connection in (first, second):
            connection.sendall(raw_request(body, b"Content-Length: %d" % len(body)))
            time.sleep(0.4)
        first.close()
        release(server, holder)
        answer = second.recv(65536)
    assert answer.startswith(b"HTTP/1.1 201")
    time.sleep(1)
    (row,) = server.get("/leases").json["leases"]
    assert (row["request_id"], row["state"]) == (twice, "held")


@pytest.mark.fault(12)
def test_a_stop_answers_those_who_wait_and_ends_in_time(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, **{**SETTINGS, "GPU_BACKEND": "simulated:1"}) as server:
        lease = granted(server, ttl_seconds=60)
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            waiting = [pool.submit(acquire, server, request_id=f"w{number}", wait_seconds=30) for number in range(20)]
            eventually(lambda: len(server.get("/queue").json["queue"]) == 20)
            order = [row["request_id"] for row in server.get("/queue").json["queue"]]
            status, seconds = server.terminate()
            replies = [future.result(10) for future in waiting]
        assert seconds < 5
        assert status in (0, -15)
        assert {refused(reply) for reply in replies} == {(503, "stopping")}
        assert {reply.headers["retry-after"] for reply in replies} == {"1"}
        assert "Traceback" not in server.log
        server.start()
        assert [row["request_id"] for row in server.get("/queue").json["queue"]] == order, "places are kept"
        assert renew(server, lease).status == 200


# --- what others are shown ---


def test_no_token_is_ever_shown(server: ServerProcess) -> None:
    with listening(server) as events:
        tokens = [granted(server, count=3)["token"], granted(server, OWN_TOKEN)["token"]]
        waits = new("waits")
        tokens.append(acquire(server, request_id=waits).json["token"])
        paths = [
            "/",
            "/leases",
            "/leases/lease-1",
            "/queue",
            f"/queue/{waits}",
            "/gpu/stats",
            "/gpu/summary",
            "/metrics",
        ]
        shown = b"".join(server.get(path).body for path in [*paths, "/config", "/openapi.json"])
        shown += b"".join(server.get(f"/leases/{row['lease_id']}").body for row in server.get("/leases").json["leases"])
        eventually(lambda: any(name == "queue" for name, _ in events))
    text = shown.decode() + json.dumps(events) + server.log
    for token in tokens:
        assert token not in text


def test_leases_are_listed_newest_last_with_what_their_holders_make_of_them(server: ServerProcess) -> None:
    first, second = granted(server, worker_id="a", memory_mb=8192), granted(server, worker_id="b", label="x")
    eventually(lambda: all(row["memory_used_mb"] for row in listed(server)))
    rows = listed(server)
    assert [row["lease_id"] for row in rows] == [first["lease_id"], second["lease_id"]]
    assert rows[0].keys() == (first.keys() - {"token", "env", "waited_seconds"}) | {
        "quarantine",
        "memory_used_mb",
        "idle_seconds",
        "is_idle",
        "user",
        "account",
        "holder",
        "held_seconds",
    }
    assert rows[0]["memory_used_mb"] == 8192
    assert (rows[0]["quarantine"], rows[0]["user"], rows[0]["is_idle"]) == (None, None, False)
    assert 0 < rows[0]["held_seconds"] < 30
    assert server.get(f"/leases/{first['lease_id']}").json.keys() == rows[0].keys()


def listed(server: ServerProcess) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.get("/leases").json["leases"]
    return rows


def test_the_gpu_routes_say_who_holds_what(server: ServerProcess) -> None:
    lease = granted(server, only=[2], worker_id="me", label="mine")
    rows = server.get("/gpu/summary").json["gpus_summary"]
    assert [row["leased"] for row in rows] == [False, False, True, False], "at once, not with the next sample"
    stats = server.get("/gpu/stats").json["gpus"]
    row = {"state": "held", "user": None, "holder": None, "within": None}
    assert [each["leases"] for each in stats] == [
        [],
        [],
        [{**row, "lease_id": lease["lease_id"], "worker_id": "me", "label": "mine"}],
        [],
    ]
    # Load appears, as a real program's would (D20), and is gone with the lease.
    eventually(lambda: server.get("/gpu/summary").json["gpus_summary"][2]["utilization_percent"] == 95)
    release(server, lease)
    assert not any(row["leased"] for row in server.get("/gpu/summary").json["gpus_summary"])
    eventually(lambda: server.get("/gpu/summary").json["gpus_summary"][2]["utilization_percent"] == 0)


def metrics(server: ServerProcess) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_metrics(server: ServerProcess) -> None:
    before = metrics(server)
    assert before["gpu_pool_ledger_up"] == 1
    lease = granted(server, only=[1], memory_mb=8192, share=True)
    granted(server, only=[0])
    waits = new("waits")
    acquire(server, request_id=waits, count=4)
    labels = '{gpu="1",uuid="GPU-51309a7e-0000-4000-8000-000000000001"}'
    eventually(lambda: metrics(server)[f"gpu_pool_gpu_lease_used_bytes{labels}"] == 8192 * 2**20)
    now = metrics(server)
    assert now['gpu_pool_leases{state="held"}'] == 2
    assert now["gpu_pool_waiting"] == 1
    assert now["gpu_pool_grants_total"] == before["gpu_pool_grants_total"] + 2
    assert now[f"gpu_pool_gpu_leases{labels}"] == 1
    assert now[f"gpu_pool_gpu_promised_bytes{labels}"] == 8192 * 2**20
    assert now[f"gpu_pool_gpu_lease_idle_seconds{labels}"] < 10
    zero = labels.replace('"1"', '"0"').replace("0001", "0000")
    assert now[f"gpu_pool_gpu_promised_bytes{zero}"] == 24576 * 2**20
    release(server, lease)
    server.ask("DELETE", f"/queue/{waits}")
    now = metrics(server)
    for name in ('gpu_pool_leases_ended_total{state="released"}', 'gpu_pool_requests_ended_total{state="cancelled"}'):
        assert now[name] == before[name] + 1
    assert lease["lease_id"] not in server.get("/metrics").body.decode(), "there is no end to lease ids"


@contextlib.contextmanager
def listening(server: ServerProcess) -> Iterator[list[tuple[str, Any]]]:
    """What `/events` tells from now on, as it comes in."""
    events: list[tuple[str, Any]] = []
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", f"{server.prefix}/events")
    reply = connection.getresponse()

    def read() -> None:
        name = ""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while line := reply.readline():
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    events.append((name, json.loads(line[6:])))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(read)
        eventually(lambda: any(name == "leases" for name, _ in events))
        try:
            yield events
        finally:
            assert connection.sock is not None or reply.fp is not None
            reply.fp.raw._sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def test_events(server: ServerProcess) -> None:
    one, two, three = new("one"), new("two"), new("three")
    kept = granted(server, only=[3], label="was there")
    with listening(server) as events:
        (present,) = [data for name, data in events if name == "leases"]
        assert [row["lease_id"] for row in present["leases"]] == [kept["lease_id"]]
        assert (present["waiting"], present["queue"]) == (0, [])
        lease = granted(server, count=3, request_id=one)
        acquire(server, request_id=two, count=4)
        renew(server, lease)
        release(server, lease)
        acquire(server, request_id=three, only=[3])
        server.ask("DELETE", f"/queue/{three}")
        with in_background(lambda: acquire(server, request_id=two, count=4, wait_seconds=15)) as waiting:
            time.sleep(0.3)
            release(server, kept)
            assert waiting.result(15).status == 201
        eventually(lambda: ("lease", "granted", two) in brief(events))
    assert brief(events) == [
        ("lease", "granted", one),
        ("queue", "waiting", two),
        ("lease", "released", one),
        ("queue", "waiting", three),
        ("queue", "cancelled", three),
        ("lease", "released", kept["request_id"]),
        ("queue", "granted", two),
        ("lease", "granted", two),
    ]
    data = next(data for name, data in events if name == "lease")
    assert data.keys() == {"change", "reasons", "lease"}
    assert data["lease"].keys() == server.get("/leases").json["leases"][0].keys()
    data = next(data for name, data in events if name == "queue")
    assert data == {
        "change": "waiting",
        "state": "waiting",
        "waiting": 1,
        "request": {
            "request_id": two,
            "worker_id": "",
            "label": None,
            "priority": 0,
            "count": 4,
            "expected_seconds": None,
            "max_seconds": None,
            "account": "programs on this host without a key",
            "holder": None,
            "within": None,
        },
    }


def brief(events: list[tuple[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (name, data["change"], data["lease"]["request_id"])
        if name == "lease"
        else (name, data["state"], data["request"]["request_id"])
        for name, data in events
        if name in ("lease", "queue")
    ]


def test_a_lost_lease_is_told(tmp_path: Path) -> None:
    settings = {**SETTINGS, "GPU_BACKEND": "simulated:1"}
    with ServerProcess(tmp_path, **settings) as server, listening(server) as events:
        granted(server, request_id="short", ttl_seconds=2)
        wanted = [("lease", change, "short") for change in ("granted", "quarantined", "reclaimed")]
        eventually(lambda: brief(events) == wanted, 20)
        data = [data for name, data in events if name == "lease"]
        assert data[1]["reasons"] == [data[1]["lease"]["quarantine"]["reason"]]
        assert data[2]["reasons"]


def test_a_holder_that_computes_nothing_is_told_of(tmp_path: Path) -> None:
    fake = FakeNvidiaSMI(tmp_path)
    fake.set_gpus(healthy_gpu(0, utilization_gpu="0"), healthy_gpu(1, utilization_gpu="0"))
    settings = {**SETTINGS, "GPU_BACKEND": "nvidia-smi", "GPU_POOL_IDLE_AFTER": "2"}
    with ServerProcess(tmp_path, **settings, **fake.env) as server, listening(server) as events:
        idle, busy = (granted(server, request_id=name, only=[gpu]) for gpu, name in enumerate(("idle", "busy")))
        fake.set_gpus(healthy_gpu(0, utilization_gpu="0"), healthy_gpu(1, utilization_gpu="80"))
        eventually(lambda: ("lease", "idle", "idle") in brief(events), 20)
        time.sleep(1.5)
        told = [request_id for _, change, request_id in brief(events) if change == "idle"]
        assert told == ["idle"], "once, and of nobody else"
        rows = {row["lease_id"]: row for row in listed(server)}
        assert [rows[lease["lease_id"]]["is_idle"] for lease in (idle, busy)] == [True, False]
        assert rows[idle["lease_id"]]["idle_seconds"] >= 2
        assert rows[busy["lease_id"]]["idle_seconds"] < 2
        seconds = [value for name, value in metrics(server).items() if name.startswith("gpu_pool_gpu_lease_idle")]
        assert seconds[0] >= 2 > seconds[1]


# --- the ledger and the settings ---


@pytest.mark.fault(26)
def test_a_damaged_ledger_leaves_the_statistics_alone_and_is_never_replaced(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, **SETTINGS) as server:
        (ledger,) = (tmp_path / "state").glob("ledger-*.db")
    for file in (tmp_path / "state").glob("ledger-*"):
        file.unlink()
    ledger.write_bytes(b"this is no database at all" * 200)
    with ServerProcess(tmp_path, **SETTINGS) as server:
        assert server.get("/gpu/summary").json["gpu_count"] == 4
        assert server.get("/health").json["status"] == "healthy"
        assert "leases" in server.get("/").json["features"], "never downgraded"
        for reply in (acquire(server), server.get("/leases"), server.get("/queue"), server.get("/queue/x")):
            assert refused(reply) == (503, "ledger_unavailable")
            assert str(ledger) in reply.json["detail"]
            assert reply.headers["retry-after"] == "1"
        for method, path in (("POST", "/leases/x/renew"), ("DELETE", "/leases/x"), ("DELETE", "/queue/x")):
            assert refused(server.ask(method, path, headers=OWN_TOKEN)) == (503, "ledger_unavailable")
        assert metrics(server)["gpu_pool_ledger_up"] == 0
        assert [row["leased"] for row in server.get("/gpu/summary").json["gpus_summary"]] == [False] * 4
        assert ledger.read_bytes().startswith(b"this is no database")
        ledger.unlink()
        # One request, repeated: new ones would queue behind those made before the first sample.
        eventually(lambda: acquire(server, request_id="again").status == 201, 15)
        assert "Traceback" not in server.log


def test_without_a_place_for_a_ledger_no_leases_are_offered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ServerProcess(tmp_path, **SETTINGS, GPU_POOL_STATE_DIR=str(tmp_path / "file" / "state")) as server:
        assert "leases" not in server.get("/").json["features"], "so that clients work as they did before"
        assert server.get("/gpu/summary").json["gpu_count"] == 4
        assert refused(acquire(server)) == (503, "ledger_unavailable")


def test_what_the_server_does_not_show_it_does_not_promise(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with (
        ServerProcess(tmp_path / "some", **SETTINGS, GPU_POOL_STATE_DIR=state, CUDA_VISIBLE_DEVICES="1,3") as some,
        ServerProcess(tmp_path / "all", **SETTINGS, GPU_POOL_STATE_DIR=state) as everything,
        ServerProcess(tmp_path / "none", **SETTINGS, GPU_POOL_STATE_DIR=state, CUDA_VISIBLE_DEVICES="") as nothing,
    ):
        assert granted(some, only=[1, 2])["gpus"][0]["gpu_id"] == 1
        assert granted(some)["gpus"][0]["gpu_id"] == 3
        assert acquire(some, request_id="waits").status == 202
        assert acquire(some, request_id="waits").status == 202
        for reply in (acquire(some, only=[2]), acquire(some, count=3), acquire(nothing)):
            assert refused(reply) == (409, "impossible")
        assert {granted(everything)["gpus"][0]["gpu_id"] for _ in range(2)} == {0, 2}


def test_a_request_stays_the_same_when_a_gpu_that_is_shown_goes_missing(tmp_path: Path) -> None:
    fake = FakeNvidiaSMI(tmp_path)
    fake.set_gpus(*(healthy_gpu(index, utilization_gpu="0") for index in range(3)))
    settings = {**SETTINGS, "GPU_BACKEND": "nvidia-smi", "CUDA_VISIBLE_DEVICES": "0,1"}
    with ServerProcess(tmp_path, **settings, **fake.env) as server:
        granted(server, count=2)
        assert acquire(server, request_id="waits").status == 202
        fake.set_gpus(healthy_gpu(0, utilization_gpu="0"), healthy_gpu(2, utilization_gpu="0"))
        eventually(lambda: server.get("/gpu/count").json["gpu_count"] == 1)
        assert acquire(server, request_id="waits").status == 202
        assert refused(acquire(server, request_id="waits", priority=1)) == (409, "request_mismatch")


@pytest.mark.fault(13)
def test_four_workers_are_one_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, **SETTINGS, WORKERS="4") as server:
        eventually(lambda: server.log.count("Application startup complete") == 4)
        leases = [granted(server) for _ in range(4)]
        assert sorted(lease["gpus"][0]["gpu_id"] for lease in leases) == [0, 1, 2, 3]
        for lease in leases * 3:
            assert renew(server, lease).status == 200
            assert server.get(f"/leases/{lease['lease_id']}").status == 200
        with in_background(lambda: acquire(server, request_id="waits", wait_seconds=20)) as waiting:
            eventually(lambda: server.get("/queue").json["queue"])
            assert release(server, leases[0]).status == 200
            assert waiting.result(10).status == 201
        # Each worker knows all leases, whichever granted them.
        eventually(lambda: all(len(server.get("/leases").json["leases"]) == 4 for _ in range(12)))
        assert "Traceback" not in server.log


def test_under_a_prefix_and_inside_another_application(tmp_path: Path) -> None:
    program = tmp_path / "outer.py"
    program.write_text(
        "import contextlib, os, uvicorn\nfrom fastapi import FastAPI\n"
        "from gpu_worker_pool.gpu_server import create_app\n"
        "inner = create_app()\n"
        "@contextlib.asynccontextmanager\nasync def lifespan(app):\n"
        "    async with inner.router.lifespan_context(inner):\n        yield\n"
        "outer = FastAPI(lifespan=lifespan)\nouter.mount('/pool', inner)\n"
        "uvicorn.run(outer, host='127.0.0.1', port=int(os.environ['PORT']))\n"
    )
    with ServerProcess(tmp_path / "prefix", **SETTINGS, API_PREFIX="/api/v1") as server:
        lease = granted(server)
        assert renew(server, lease).status == 200
        assert release(server, lease).status == 200
        server.prefix = ""
        assert acquire(server).status == 404
    mounted = ServerProcess(tmp_path / "mounted", arguments=[str(program)], wait=False, **SETTINGS)
    mounted.prefix = "/pool"
    with mounted as server:
        eventually(lambda: server.get("/health").status == 200, 30)
        lease = granted(server)
        assert renew(server, lease).status == 200
        assert server.get("/leases").json["leases"][0]["lease_id"] == lease["lease_id"]
        assert release(server, lease).status == 200
        assert refused(server.ask("DELETE", "/queue/x")) == (404, "unknown_request")


def test_head_and_other_methods(server: ServerProcess) -> None:
    lease = granted(server, count=4)
    waits = new("waits")
    acquire(server, request_id=waits)
    for path in ("/leases", f"/leases/{lease['lease_id']}", "/queue", f"/queue/{waits}"):
        reply = server.get(path, method="HEAD")
        assert (reply.status, reply.body) == (200, b"")
        assert server.get(path, method="PUT").status == 405
    assert server.ask("POST", "/queue", {}).status == 405
    assert server.ask("DELETE", "/leases").status == 405


def test_nothing_is_said_to_be_free_while_the_ledger_is_locked_from_the_beginning(tmp_path: Path) -> None:
    settings = {**SETTINGS, "GPU_BACKEND": "simulated:1"}
    with ServerProcess(tmp_path, **settings) as server:
        lease = granted(server, ttl_seconds=600)
    (path,) = (tmp_path / "state").glob("ledger-*.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as elsewhere:
        elsewhere.execute("BEGIN EXCLUSIVE")
        with ServerProcess(tmp_path, **settings) as server:
            (row,) = eventually(lambda: server.get("/leases", timeout=15).json["leases"])
            assert row["lease_id"] == lease["lease_id"]
            assert server.get(f"/leases/{lease['lease_id']}", timeout=15).json["state"] == "held"
            (gpu,) = server.get("/gpu/stats").json["gpus"]
            assert gpu["leases"] is None, "not known, which is not the same as nobody's"
            elsewhere.execute("ROLLBACK")
            eventually(lambda: server.get("/gpu/stats").json["gpus"][0]["leases"])


def test_requirements_are_explained_before_they_are_requested(server: ServerProcess) -> None:
    # A GPU that an earlier test released is given again after one more reading.
    free = eventually(
        lambda: (reply := server.ask("POST", "/explain", {"count": 2})).json["summary"].endswith("now") and reply
    )
    assert (free.status, free.json["summary"], free.json["request_id"]) == (200, "2 GPUs: could be granted now", "")
    granted(server, count=4)
    waiting = new("waits")
    acquire(server, request_id=waiting)
    explained, of_waiter = server.ask("POST", "/explain", {}).json, server.get(f"/queue/{waiting}").json
    assert (explained["position"], of_waiter["position"]) == (2, 1)
    assert [gpu["obstacles"][0]["kind"] for gpu in explained["gpus"]] == ["held"] * 4
    assert explained.keys() == of_waiter.keys()
    assert len(server.get("/queue").json["queue"]) == 1, "nothing was asked for"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"request_id": "mine"}, "request_id: there is no such field"),
        ({"wait_seconds": 1}, "wait_seconds: there is no such field"),
        ({"count": 0}, "count: Input should be greater than or equal to 1"),
        ({"share": True}, "share=True needs memory_mb"),
    ],
)
def test_invalid_requirements_are_not_explained(server: ServerProcess, body: dict[str, Any], reason: str) -> None:
    reply = server.ask("POST", "/explain", body)
    assert refused(reply) == (422, "invalid")
    assert reason in reply.json["reasons"][0]


# --- inside a lease ---


def part_of(lease: dict[str, Any]) -> dict[str, str]:
    return {"lease_id": lease["lease_id"], "token": lease["token"]}


def test_requests_inside_a_lease_divide_it(server: ServerProcess) -> None:
    outer = granted(server, count=2)
    first, second = (granted(server, within=part_of(outer)) for _ in range(2))
    assert sorted(each["gpus"][0]["gpu_id"] for each in (first, second)) == [gpu["gpu_id"] for gpu in outer["gpus"]]
    assert (outer["within"], first["within"]) == (None, outer["lease_id"])
    request_id = new("third")
    waits = acquire(server, request_id=request_id, within=part_of(outer))
    assert (waits.status, waits.json["position"]) == (202, 1)
    (row,) = server.get("/queue").json["queue"]
    assert (row["request_id"], row["within"]) == (request_id, outer["lease_id"])
    listed = server.get("/leases").body + server.get("/queue").body + server.get("/gpu/stats").body
    assert outer["token"].encode() not in listed
    assert first["token"].encode() not in listed
    assert outer["token"] not in server.log
    innermost = granted(server, within=part_of(first))
    assert (innermost["gpus"], innermost["within"]) == (first["gpus"], first["lease_id"])
    now = metrics(server)
    index, uuid = outer["gpus"][0]["gpu_id"], outer["gpus"][0]["uuid"]
    assert now[f'gpu_pool_gpu_leases{{gpu="{index}",uuid="{uuid}"}}'] == 1  # it stands for those inside it

    release(server, second)
    assert acquire(server, request_id=request_id, within=part_of(outer), wait_seconds=5).status == 201
    assert release(server, outer).status == 200
    assert release(server, outer).status == 200
    states = {row["lease_id"]: row["state"] for row in server.get("/leases").json["leases"]}
    assert states[outer["lease_id"]] == "quarantined"
    assert states[first["lease_id"]] == "held"
    assert renew(server, first).status == 200


def test_a_part_of_a_lease_needs_its_token(server: ServerProcess) -> None:
    outer, other = granted(server), granted(server)
    stolen = {"lease_id": outer["lease_id"], "token": other["token"]}
    assert refused(acquire(server, within=stolen)) == (403, "not_yours")
    assert refused(acquire(server, within={"lease_id": outer["lease_id"]})) == (403, "token_needed")
    for bad in (
        {**stolen, "token": "short"},
        {**stolen, "more": 1},
        outer["lease_id"],
    ):
        reply = acquire(server, within=bad)
        assert refused(reply) == (422, "invalid")
        assert other["token"].encode() not in reply.body


def test_what_a_lease_can_never_give_and_what_has_ended(server: ServerProcess) -> None:
    outer = granted(server)
    more = acquire(server, within=part_of(outer), count=2)
    assert refused(more) == (409, "impossible")
    why = f"{outer['lease_id']}, inside which this runs, has one GPU; 2 were requested"
    assert more.json["reasons"] == [why]
    release(server, outer)
    ended = acquire(server, within=part_of(outer))
    assert refused(ended) == (409, "impossible")
    assert ended.json["reasons"] == [f"{outer['lease_id']}, inside which this runs, has ended"]
    unknown = acquire(server, within={"lease_id": "lease-999999", "token": "x" * 20})
    assert refused(unknown) == (409, "impossible")
