"""The server asks its peers: those and no others, only while somebody looks, and whatever they do, within bounds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.api.decoder import MOST_READINGS
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.gpu_server.dashboard.peers import (
    MOST_BYTES,
    MOST_GPUS,
    MOST_LEASES,
    MOST_WAITING,
    TIMEOUT_SECONDS,
    Fleet,
)
from gpu_worker_pool.gpu_server.settings import MOST_PEERS, read_peers
from tests.fakes.http_server import (
    Behaviour,
    Conversation,
    HostileServer,
    answer,
    answer_json,
    drip,
    flood,
    gzip_bomb,
    head,
    raw,
    refusing_url,
    silent,
)
from tests.server_process import ServerProcess, free_port

SAID = {
    "gpus": [{"gpu_id": 0, "name": "A100", "memory": {"total_mb": 81920, "used_mb": 1, "usage_percent": 0.0}}],
    "sample_age_seconds": 0.5,
    "status": "healthy",
    "leases": [],
    "queue": [],
}


@asynccontextmanager
async def fleet_of(*urls: str, own_id: str = "own") -> AsyncIterator[Fleet]:
    fleet = Fleet([EndpointConfig(f"peer-{number}", url) for number, url in enumerate(urls)], own_id)
    try:
        yield fleet
    finally:
        await fleet.close()


async def heard(fleet: Fleet, until: Callable[[dict[str, Any]], object], seconds: float = 10) -> dict[str, Any]:
    """The first peer, once it is as expected; asking as a page does."""
    async with asyncio.timeout(seconds):
        while True:
            peers = json.loads(fleet.shown())["peers"]
            if peers and until(peers[0]):
                found: dict[str, Any] = peers[0]
                return found
            await asyncio.sleep(0.05)


def answers(peer: dict[str, Any]) -> bool:
    return bool(peer["status"] == "answers")


def is_silent(peer: dict[str, Any]) -> bool:
    return bool(peer["status"] == "silent")


# --- who is asked, and when ---


async def test_nobody_is_asked_before_somebody_looks_and_then_not_too_often() -> None:
    with HostileServer(answer_json(SAID)) as peer:
        async with fleet_of(peer.url) as fleet:
            await asyncio.sleep(0.2)
            assert peer.connections == 0
            first = json.loads(fleet.shown())["peers"][0]
            assert (first["status"], first["answered_seconds_ago"]) == ("asking", None)
            await heard(fleet, answers)
            for _ in range(50):
                fleet.shown()
            await asyncio.sleep(0.3)
            asked = sorted(request.split()[1].decode() for request in peer.requests)
            assert asked == ["/dashboard/host", "/gpu/stats", "/health", "/leases", "/queue"]


async def test_it_is_shown_what_a_peer_says() -> None:
    with HostileServer(answer_json(SAID)) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert shown["gpus"][0]["name"] == "A100"
    assert shown["gpus"][0]["memory"] == {
        "total_mb": 81920,
        "used_mb": 1,
        "free_mb": None,
        "usage_percent": 0.0,
    }
    assert (shown["health"]["status"], shown["leases"], shown["queue"], shown["waiting"]) == ("healthy", [], [], 0)
    assert shown["url"] == peer.url


async def test_an_older_server_has_no_leases_to_tell_of() -> None:
    def behave(talk: Conversation) -> None:
        path = talk.request.split()[1]
        known = path in (b"/gpu/stats", b"/health")
        (answer_json(SAID) if known else answer_json({"detail": "Not Found"}, status=404))(talk)

    with HostileServer(behave) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert (shown["leases"], shown["ledger_problem"], shown["queue"]) == (None, None, [])
    assert len(shown["gpus"]) == 1


def with_refused_leases(stats: dict[str, Any]) -> Behaviour:
    """A server whose ledger cannot be read: it says so of its leases and of its queue."""

    def behave(talk: Conversation) -> None:
        is_refused = talk.request.split()[1] in (b"/leases", b"/queue")
        (answer_json({"detail": "the disk is full"}, status=503) if is_refused else answer_json(stats))(talk)

    return behave


async def test_leases_that_cannot_be_told_are_not_none_and_the_reason_is_kept() -> None:
    with HostileServer(with_refused_leases(SAID)) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert (shown["leases"], shown["ledger_problem"]) == (None, "the disk is full")


async def test_a_gpu_whose_leases_are_null_is_not_one_without() -> None:
    told = {**SAID, "gpus": [{"gpu_id": 0, "leases": None}, {"gpu_id": 1, "leases": []}]}
    with HostileServer(answer_json(told)) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert shown["ledger_problem"] == "its ledger cannot be read"


async def test_a_server_that_finds_itself_in_the_list_is_not_shown_twice() -> None:
    with HostileServer(answer_json({**SAID, "host_id": "own"})) as peer:
        async with fleet_of(peer.url, own_id="own") as fleet:
            async with asyncio.timeout(5):
                while json.loads(fleet.shown())["peers"]:
                    await asyncio.sleep(0.05)
            assert len(peer.requests) == 1


async def test_what_was_known_stays_while_a_peer_is_silent() -> None:
    with HostileServer(answer_json(SAID)) as peer:
        async with fleet_of(peer.url) as fleet:
            await heard(fleet, answers)
            peer.behaviour = answer_json({"detail": "being upgraded"}, status=500)
            shown = await heard(fleet, is_silent)
            assert "being upgraded" in shown["problem"]
            assert len(shown["gpus"]) == 1
            assert shown["answered_seconds_ago"] > 1
            peer.behaviour = answer_json(SAID)
            assert (await heard(fleet, answers))["problem"] is None


# --- whatever it does ---


#: Of several bad answers any may be named, so the routes without GPUs get a good one.
NO_LEASES = b'{"status": "healthy", "leases": [], "queue": [], '
HOSTILE: dict[str, tuple[Behaviour, str]] = {
    "a redirect": (answer(b"", status=302, Location="http://169.254.169.254/"), "a redirect"),
    "a flood": (flood(head(200, Content_Type="application/json")), f"more than {MOST_BYTES} bytes"),
    "a long one": (flood(head(200, Content_Length=MOST_BYTES + 1)), f"more than {MOST_BYTES} bytes"),
    "compressed": (answer(gzip_bomb(1 << 24), Content_Encoding="gzip"), "which was not asked for"),
    "no JSON": (answer(b"<html>"), "not JSON"),
    "no object": (answer(b"[1]"), "must be a JSON object"),
    "not a number": (answer(NO_LEASES + b'"gpus": NaN}'), "must have a list gpus"),
    "nested": (answer(b"[" * 100_000), "nested too deeply"),
    "huge integer": (answer(NO_LEASES + b'"gpus": ' + b"9" * 10_000 + b"}"), "must have a list gpus, not inf"),
    "not UTF-8": (answer(b'{"\xff": 1}'), "not UTF-8"),
    "no GPUs": (answer(NO_LEASES + b'"gpus": 7}'), "must have a list gpus, not 7"),
    "refuses": (answer_json({"detail": "go away"}, status=403), "go away"),
    "silent": (silent, f"{TIMEOUT_SECONDS:g} s"),
    "slow": (drip(head(200, Content_Length=5000) + b" " * 5000), f"{TIMEOUT_SECONDS:g} s"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "not HTTP"),
}


@pytest.mark.parametrize(("behaviour", "problem"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_peer_harms_nobody(behaviour: Behaviour, problem: str) -> None:
    with HostileServer(behaviour) as hostile, HostileServer(answer_json(SAID)) as sound:
        async with fleet_of(hostile.url, sound.url) as fleet:
            begun = time.monotonic()
            shown = await heard(fleet, is_silent)
            assert time.monotonic() - begun < TIMEOUT_SECONDS + 2
            assert problem in shown["problem"]
            # Nobody who looked had to wait for it, nor does the other one.
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while json.loads(fleet.shown())["peers"][1]["status"] != "answers":
                    await asyncio.sleep(0.05)
        assert hostile.bytes_sent < 16 * MOST_BYTES, "most of it was never read"


async def test_a_peer_that_is_down_is_named_with_the_reason() -> None:
    with refusing_url() as url:
        async with fleet_of(url) as fleet:
            shown = await heard(fleet, is_silent)
    assert "connection refused" in shown["problem"]
    assert shown.get("gpus") is None


async def test_closing_ends_what_is_under_way() -> None:
    with HostileServer(silent) as peer:
        async with fleet_of(peer.url) as fleet:
            fleet.shown()
            await asyncio.sleep(0.2)
            begun = time.monotonic()
        assert time.monotonic() - begun < 1
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


# --- the last readings ---


async def test_histories_are_asked_for_once_however_many_look() -> None:
    reading = {"timestamp": "2026-05-04T10:30:00", "memory_usage_percent": 5.0, "utilization_percent": 7, "fault": None}
    told = {"gpus": [{"gpu_id": 0, "uuid": None, "readings": [reading] * 500}], "sample_age_seconds": 1.0}
    with HostileServer(answer_json(told)) as peer, refusing_url() as down:
        async with fleet_of(peer.url, down) as fleet:
            first, *others = await asyncio.gather(*(fleet.history() for _ in range(20)))
            assert all(other == first for other in others)
            assert len(peer.requests) == 1
    (gpu,) = json.loads(first)["peers"]["peer-0"]["gpus"]
    assert len(gpu["readings"]) == MOST_READINGS
    assert set(gpu["readings"][0]) == {"timestamp", "memory_usage_percent", "utilization_percent"}


# --- bounds ---


async def test_a_bad_field_spoils_its_gpu_only() -> None:
    body = b'{"gpus": [{"gpu_id": 0, "temperature_c": NaN}, {"gpu_id": 1}], "leases": [], "queue": []}'
    with HostileServer(answer(body)) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert [gpu["fault"] for gpu in shown["gpus"]] == ["bad value: temperature_c is nan", None]


async def test_of_too_many_the_first_are_shown_and_all_are_counted() -> None:
    said = {
        "gpus": [{"gpu_id": number} for number in range(MOST_GPUS + 1)],
        "leases": [{"lease_id": str(number)} for number in range(MOST_LEASES + 1)],
        "queue": [{"request_id": str(number)} for number in range(1000)],
    }
    with HostileServer(answer_json(said)) as peer:
        async with fleet_of(peer.url) as fleet:
            shown = await heard(fleet, answers)
    assert (len(shown["gpus"]), len(shown["leases"])) == (MOST_GPUS, MOST_LEASES)
    assert (len(shown["queue"]), shown["waiting"]) == (MOST_WAITING, 1000)


# --- the list ---


def test_the_list_is_read_as_a_clients_is() -> None:
    problems: list[str] = []
    peers = read_peers("GPU_POOL_PEERS", "a=http://gpu-1:8000, https://gpu-2/p/,, http://[::1]:80", problems.append)
    assert [(peer.endpoint_id, peer.url) for peer in peers] == [
        ("a", "http://gpu-1:8000"),
        ("gpu-2_443", "https://gpu-2/p"),
        ("--1_80", "http://[::1]"),
    ]
    assert problems == []
    assert read_peers("GPU_POOL_PEERS", "", problems.append) == ()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("ftp://gpu-1", "cannot be used"),
        ("file:///etc/passwd", "cannot be used"),
        ("local://", "cannot be one of several"),
        ("http://gpu-1:99999", "port 99999 is not valid"),
        ("good=http://another", "already taken"),
        ("http://gpu-1?key=secret", "***"),
    ],
)
def test_one_that_cannot_be_used_does_not_hide_the_others(bad: str, problem: str) -> None:
    problems: list[str] = []
    peers = read_peers("GPU_POOL_PEERS", f"good=http://gpu-0,{bad},http://gpu-9", problems.append)
    assert [peer.url for peer in peers] == ["http://gpu-0", "http://gpu-9"]
    (said,) = problems
    assert problem in said
    assert "secret" not in said


def test_a_password_is_told_to_nobody() -> None:
    problems: list[str] = []
    assert read_peers("GPU_POOL_PEERS", "http://gpu-0,http://me:pass,word@gpu-1", problems.append) == ()
    assert "word" not in problems[0].replace("password", "")


def test_more_than_fit_on_a_page() -> None:
    problems: list[str] = []
    text = ",".join(f"http://gpu-{number}" for number in range(MOST_PEERS + 1))
    assert len(read_peers("GPU_POOL_PEERS", text, problems.append)) == MOST_PEERS
    assert len(problems) == 1


# --- all of it, with real servers ---


def test_two_servers_that_know_each_other(tmp_path: Path) -> None:
    """Neither asks the other for what that one asks in turn."""
    port = free_port()
    second = ServerProcess(tmp_path / "second", GPU_BACKEND="simulated:2", GPU_POOL_PEERS=f"http://127.0.0.1:{port}")
    own = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": second.url, "PORT": str(port)}
    first = ServerProcess(tmp_path / "first", **own)
    first.port = port
    with second, first:
        deadline = time.monotonic() + 10
        shown: dict[str, Any] = {"status": "asking"}
        while shown["status"] != "answers" and time.monotonic() < deadline:
            (shown,) = first.get("/dashboard/peers").json["peers"]
            time.sleep(0.1)
        assert shown["status"] == "answers"
        assert len(shown["gpus"]) == 2
        assert "/dashboard/peers" not in second.log
        assert first.get("/dashboard/host").json["peers"] == [shown["name"]]
        assert len(first.get("/dashboard/peers/history").json["peers"][shown["name"]]["gpus"]) == 2
        assert first.terminate()[1] < 5
        assert "Unclosed" not in first.log
