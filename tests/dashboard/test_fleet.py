"""Several hosts on one page, in a real browser: each with its health, and one that is down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dashboard.looking import KEYS, looking, queue_up, take, words
from tests.fakes.http_server import Conversation, HostileServer, answer_json, refusing_url
from tests.server_process import ServerProcess, free_port
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

HOSTILE = '<img src=x onerror="window.hacked=1">'
#: A dash, as long as a letter is wide.
UNKNOWN = "\N{EN DASH}"


def test_hosts_with_their_health_and_one_that_is_down(browser: Browser, tmp_path: Path) -> None:
    other = ServerProcess(tmp_path / "other", GPU_BACKEND="simulated:2", API_PREFIX="/gpus", **KEYS)
    with other, refusing_url() as down:
        port = free_port()
        # The same list for all: the server finds itself in it.
        peers = f"gpu-2={other.url}, gpu-3={down}, myself=http://127.0.0.1:{port}"
        own = ServerProcess(tmp_path / "own", GPU_BACKEND="simulated:2", GPU_POOL_PEERS=peers, PORT=str(port), **KEYS)
        own.port = port
        take(other, worker_id="far-away", label="on the other host", count=2)
        with own, looking(browser, own) as look:
            look.wait_for(".host[data-host='gpu-2'] .gpu[data-gpu='1'][data-word='Held']")
            look.wait_for(".host[data-host='gpu-2'] .holder", "far-away on the other host")
            look.wait_for(".host[data-host='gpu-2'] .health", "Healthy, 2 GPUs")
            look.wait_for(".host[data-host='gpu-3'] .health", "Not reachable")
            assert "connection refused" in look.page.locator(".host[data-host='gpu-3'] .host-problem").inner_text()
            look.wait_for(".host[data-host='myself']", state="detached")
            assert look.page.locator(".host").count() == 3
            # One that was never reached has no GPU to be counted, and is in trouble itself.
            eventually(lambda: [look.totals()[kind] for kind in ("held", "free", "trouble")] == [2, 2, 1])
            queue_up(other, worker_id="next")
            waiter = look.wait_for(".waiter", "next on gpu-2")
            look.wait_for(".waiter .reasons li", "GPU 1 held by far-away")
            look.wait_for("#events li", "Unreachable")
            look.keep("fleet")
            # Only what is on this host can be changed here.
            look.use_key()
            take(own, worker_id="near")
            look.wait_for(".host .holder:has-text('near') button")
            assert look.page.locator(".host[data-host='gpu-2'] button:visible").count() == 0
            assert waiter.locator("button:visible").count() == 0
            other.kill()
            look.wait_for(".host[data-host='gpu-2'] .health", "Not reachable")
            look.wait_for(".host[data-host='gpu-2'] .holder", "far-away")
            look.keep("fleet-silent")


def test_a_peer_cannot_put_markup_on_the_page(browser: Browser, tmp_path: Path) -> None:
    gpu = {"gpu_id": 0, "name": HOSTILE, "uuid": HOSTILE, "fault": HOSTILE, "memory": None, "processes": None}
    said = {
        "gpus": [gpu, {"gpu_id": 1, "name": ["not", "a", "name"], "memory": "all of it", "power": 7}, "nonsense"],
        "sample_age_seconds": 0.1,
        "status": "degraded",
        "error": HOSTILE,
        "leases": [{"lease_id": HOSTILE, "worker_id": HOSTILE, "label": HOSTILE, "gpus": [{"gpu_id": 1}], "state": {}}],
        "queue": [{"request_id": HOSTILE, "worker_id": HOSTILE, "reasons": [HOSTILE, HOSTILE], "waiting_seconds": "x"}],
        "host_id": HOSTILE,
    }
    with HostileServer(answer_json(said)) as hostile:
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": f"evil={hostile.url}"}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            look.wait_for(".host[data-host='evil'] .gpu[data-gpu='0'][data-word='Fault']", HOSTILE)
            look.wait_for(".host[data-host='evil'] .gpu[data-gpu='1']", "unknown")
            look.wait_for(".host[data-host='evil'] .host-problem", HOSTILE)
            look.wait_for(".waiter .summary", HOSTILE)
            assert look.page.locator("body img").count() == 0
            assert look.page.evaluate("window.hacked") is None
            assert HOSTILE in words(look.page.locator(".host[data-host='evil']").inner_text())


def calm_peer(**more: Any) -> dict[str, Any]:
    """What a peer with one idle GPU says, to whatever it is asked."""
    memory = {"total_mb": 24576, "used_mb": 0, "usage_percent": 0.0}
    gpu = {"gpu_id": 0, "name": "A10", "uuid": "GPU-0", "memory": memory, "utilization_percent": 0, "processes": []}
    rows = [{**gpu, "leases": [], "obstacles": []}]
    said = {"gpus": rows, "sample_age_seconds": 0.1, "status": "healthy", "leases": [], "queue": []}
    return {**said, "host_id": "calm", **more}


def test_no_gpu_of_a_peer_is_called_free_while_its_ledger_cannot_be_read(browser: Browser, tmp_path: Path) -> None:
    def behave(talk: Conversation) -> None:
        is_refused = talk.request.split()[1] in (b"/leases", b"/queue")
        (answer_json({"detail": "the disk is full"}, 503) if is_refused else answer_json(calm_peer()))(talk)

    with HostileServer(behave) as peer:
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": f"other={peer.url}"}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            look.wait_for(".host[data-host='other'] .gpu[data-word='Unknown']", "its leases are unknown")
            look.wait_for(".host[data-host='other'] .host-problem", "The leases are unknown: the disk is full")
            peer.behaviour = answer_json(calm_peer())
            look.wait_for(".host[data-host='other'] .gpu[data-word='Free']")


def test_absurd_durations_are_dashes(browser: Browser, tmp_path: Path) -> None:
    lease = {"lease_id": "l", "worker_id": "methuselah", "gpus": [{"gpu_id": 0, "uuid": "GPU-0"}], "state": "held"}
    waiting = {"request_id": "r", "worker_id": "patient", "position": 1, "waiting_seconds": -9e15}
    said = calm_peer(leases=[{**lease, "held_seconds": 1e300}], queue=[waiting])
    with HostileServer(answer_json(said)) as peer:
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": f"other={peer.url}"}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            look.wait_for(".host[data-host='other'] .holder", f"methuselah for {UNKNOWN}")
            look.wait_for(".waiter .time", UNKNOWN)


def test_a_host_that_cannot_be_drawn_keeps_nothing_else_from_being_drawn(browser: Browser, tmp_path: Path) -> None:
    """Whatever the reason: here what the server passed on is changed on its way."""

    def spoil(route: Route) -> None:
        told = route.fetch().json()
        for row in told["peers"][0].get("gpus", []):
            row["name"] = 7
        route.fulfill(body=json.dumps(told), content_type="application/json")

    waiting = {"request_id": "r", "worker_id": "patient", "position": 1, "waiting_seconds": 3}
    with (
        HostileServer(answer_json(calm_peer())) as odd,
        HostileServer(answer_json(calm_peer(queue=[waiting]))) as sound,
    ):
        peers = f"odd={odd.url}, sound={sound.url}"
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": peers}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            look.page.route("**/dashboard/peers", spoil)
            look.wait_for(".host[data-host='odd'] .host-problem", "This host sent data that cannot be shown")
            look.wait_for(".host[data-host='sound'] .gpu[data-word='Free']")
            look.wait_for(".waiter", "patient")
            look.page.unroute_all(behavior="wait")


def test_devices_of_a_split_gpu_are_named_and_counted(browser: Browser, tmp_path: Path) -> None:
    def device(number: int) -> dict[str, Any]:
        return {"uuid": f"MIG-{number}1b36874-2f5c", "name": "3g.40gb", "memory": {"total_mb": 40 * 1024}}

    gpu = {"gpu_id": 0, "name": "A100", "uuid": "GPU-0", "memory": {"total_mb": 80 * 1024}, "leases": []}
    lease = {"lease_id": "l", "worker_id": "ana", "state": "held", "gpus": [{"gpu_id": 0, "uuid": "MIG-11b36874-2f5c"}]}
    said = calm_peer(gpus=[{**gpu, "mig_devices": [device(1), device(2)]}], leases=[lease])
    with HostileServer(answer_json(said)) as peer:
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": f"other={peer.url}"}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            card = look.wait_for(".host[data-host='other'] .gpu[data-word='Partly held']")
            text = words(card.inner_text())
            assert "1 of 2 MIG devices not held" in text
            assert "ana on 3g.40gb (MIG-11b36874)" in text
            assert "40 GiB promised" in text
            assert card.locator(".memory .promise").evaluate("(mark) => mark.style.width") == "50%"


def test_nobody_waits_for_the_history_of_a_slow_peer(browser: Browser, tmp_path: Path) -> None:
    with HostileServer(answer_json(calm_peer())) as peer:
        settings = {"GPU_BACKEND": "simulated:1", "GPU_POOL_PEERS": f"other={peer.url}"}
        with ServerProcess(tmp_path, **settings) as own, looking(browser, own) as look:
            given_up: list[str] = []
            look.page.on("requestfailed", lambda request: given_up.append(request.url))
            look.page.route("**/dashboard/peers/history", lambda _: None)
            with look.page.expect_request("**/dashboard/peers/history"):
                look.page.reload()
            given_up.clear()
            for _ in range(2):
                look.page.wait_for_event("request", lambda request: request.url.endswith("/dashboard/peers"))
            assert [url for url in given_up if url.endswith("/history")] == [], "it is still waited for, elsewhere"
