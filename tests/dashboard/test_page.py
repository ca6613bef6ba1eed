"""The live page in a real browser: what people see of GPUs, leases and the queue, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.dashboard.looking import KEYS, Look, give_all_back, give_back, give_up, looking, queue_up, take, words
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("page")
    with ServerProcess(folder, GPU_BACKEND="simulated:8", ACCESS_LOG="false", **KEYS) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    give_all_back(running)


@pytest.fixture
def look(browser: Browser, server: ServerProcess) -> Iterator[Look]:
    with looking(browser, server) as opened:
        opened.wait_until_live(8)
        yield opened


# --- at a glance ---


def test_each_gpu_is_shown_with_what_it_does(look: Look) -> None:
    assert look.page.locator(".gpu").count() == 8
    card = look.gpu(3)
    text = words(card.inner_text())
    for part in ("GPU 3", "Simulated GPU 24GB", "Free", "Memory", "0 / 24 GiB", "Compute", "0 %", "34 °C", "21/320 W"):
        assert part in text, part
    eventually(lambda: card.locator("canvas").count() == 1)
    assert look.totals() == {"free": 8, "held": 0, "outside": 0, "trouble": 0, "waiting": 0}
    assert look.page.title().startswith("8/8 free")


def test_a_lease_appears_within_a_second_and_vanishes(look: Look, server: ServerProcess) -> None:
    lease = take(server, worker_id="alice", label="night run")
    begun = time.monotonic()
    index = lease["gpus"][0]["gpu_id"]
    holder = look.wait_for(f".gpu[data-gpu='{index}'] .holder", seconds=1)
    assert time.monotonic() - begun < 1
    assert words(holder.inner_text()).startswith("alice night run for ")
    look.wait_for_word(index, "Held", seconds=1)
    # It has loaded its model: what it uses of what it was promised is told, too.
    look.wait_for(f".gpu[data-gpu='{index}'] .holder", "uses 18 of 24 GiB promised", seconds=8)
    look.keep("held")
    give_back(server, lease)
    begun = time.monotonic()
    look.wait_for(f".gpu[data-gpu='{index}'] .holder", seconds=1, state="detached")
    assert time.monotonic() - begun < 1
    look.wait_for_word(index, "Free")
    assert "Granted GPU" in look.events()
    assert "Released GPU" in look.events()
    assert sum(url.endswith("/events") for url in look.asked) == 1, "one stream a page"


def test_those_who_share_a_gpu_are_all_named(look: Look, server: ServerProcess) -> None:
    requirements = {"memory_mb": 8192, "share": True, "only": [5]}
    for name in ("ben", "eva"):
        take(server, worker_id=name, **requirements)
    look.wait_for_word(5, "Shared")
    look.wait_for(".gpu[data-gpu='5'] .holder", "eva")
    text = words(look.gpu(5).inner_text())
    assert "ben for" in text
    assert "eva for" in text
    assert text.count("8 GiB promised") == 2
    look.wait_for(".gpu[data-gpu='5']", "Together they use 16 of 16 GiB promised", seconds=8)


def test_several_gpus_of_one_lease(look: Look, server: ServerProcess) -> None:
    lease = take(server, worker_id="dora", count=2)
    for held in lease["gpus"]:
        look.wait_for_word(held["gpu_id"], "Held")
        look.wait_for(f".gpu[data-gpu='{held['gpu_id']}']", "48 GiB promised on 2 GPUs", seconds=8)
    assert look.totals()["held"] == 2


# --- the queue ---


def test_the_queue_explains_itself_gpu_by_gpu(look: Look, server: ServerProcess) -> None:
    all_of_them = take(server, worker_id="first", count=8)
    waiting = queue_up(server, worker_id="second", label="has to wait", count=3)
    waiter = look.wait_for(".waiter", "second")
    look.wait_for(".waiter .reasons li", "GPU 7 held by first")
    text = words(waiter.inner_text())
    assert text.startswith("1 second has to wait")
    assert "3 GPUs: next in line; 0 of 3 free; of 8 GPUs: 8 held" in text
    assert look.page.locator(".waiter .reasons li").count() == 8
    assert look.totals()["waiting"] == 1
    assert "Waiting second (has to wait) for 3 GPUs" in look.events()
    assert "Granted GPUs 0, 1, 2, 3, 4, 5, 6 and 7 to first" in look.events()
    look.keep("queue")
    give_up(server, waiting)
    look.wait_for("#queue-empty", "No requests are waiting.")
    assert look.page.locator(".waiter").count() == 0
    give_back(server, all_of_them)


def test_many_who_wait_can_be_opened_one_by_one(look: Look, server: ServerProcess) -> None:
    take(server, worker_id="first", count=8)
    for number in range(3):
        queue_up(server, worker_id=f"waiter-{number}")
    look.wait_for(".waiter:nth-child(3)")
    look.page.locator(".waiter:nth-child(2) summary").click()
    look.wait_for(".waiter:nth-child(2) .reasons li", "GPU 0 held by first")


def test_who_holds_and_who_waits_are_named_as_they_say(look: Look, server: ServerProcess) -> None:
    ada = {"user": "ada", "host": "lap-7", "pid": 4242, "program": "train.py"}
    take(server, worker_id="worker-30e16e-1", count=8, holder=ada)
    queue_up(server, worker_id="worker-31aa00-1", holder={"program": "other.py"})
    name = "ada train.py (pid 4242, unverified)"
    look.wait_for(".gpu[data-gpu='3'] .holder", name)
    assert look.page.locator(".gpu[data-gpu='3'] .holder .who-line").get_attribute("title") == f"{name} · on lap-7"
    look.wait_for(".waiter", "other.py (unverified)")
    look.wait_for(".waiter .reasons li", "GPU 7 held by ada's train.py (pid 4242 on lap-7, unverified)")
    assert f"to {name}" in look.events()
    assert "worker-3" not in look.page.locator("main").inner_text()


# --- nothing that anybody says becomes markup ---


def test_a_hostile_label_is_text(look: Look, server: ServerProcess) -> None:
    take(server, label=HOSTILE, worker_id="eve", count=8)
    queue_up(server, label=HOSTILE, worker_id="eve")
    look.use_key()
    for selector in (".holder", ".waiter", "#events li"):
        look.wait_for(selector, HOSTILE)
    look.wait_for(".gpu[data-gpu='0'] .holder button").click()
    look.wait_for("#confirm-text", HOSTILE)
    look.keep("hostile-label")
    look.page.keyboard.press("Escape")
    assert look.page.locator("body img").count() == 0
    assert look.page.evaluate("window.hacked") is None


def test_hostile_names_of_gpus_and_processes_are_text(browser: Browser, tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    gpu = healthy_gpu(0, name="<b>GPU</b>", memory_used="23000")
    smi.set_gpus(gpu)
    smi.set_processes((gpu["uuid"], 1, "<script>hacked=1</script>", 9000))
    with ServerProcess(tmp_path, GPU_BACKEND="nvidia-smi", **smi.env) as server, looking(browser, server) as look:
        look.wait_for_word(0, "In use")
        assert "<b>GPU</b>" in look.gpu(0).inner_text()
        assert "without a lease: " in look.gpu(0).inner_text()
        assert look.page.locator(".gpu b, .gpu script").count() == 0


# --- what is wrong is said, and why ---


def test_a_lost_gpu_and_a_driver_that_hangs(browser: Browser, tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(healthy_gpu(0), healthy_gpu(1), healthy_gpu(2))
    settings = {"GPU_BACKEND": "nvidia-smi", "REFRESH_INTERVAL": "0.2", **smi.env}
    with ServerProcess(tmp_path, **settings) as server, looking(browser, server) as look:
        look.wait_for_word(1, "Free")
        smi.set_gpus(healthy_gpu(0), dict.fromkeys(healthy_gpu(1), "[GPU is lost]") | {"index": "1"})
        look.wait_for_word(1, "Fault")
        look.wait_for_word(2, "Missing")
        assert "lost" in words(look.gpu(1).inner_text())
        assert "missing from the readings" in words(look.gpu(2).inner_text())
        assert "Fault GPU 1" in look.events()
        look.wait_for_word(0, "Free")
        smi.hang(60)
        look.wait_for_word(0, "Stale", seconds=15)
        look.wait_for("#events li", "Degraded")
        notice = look.wait_for("#notice").inner_text()
        assert "The last readings are" in notice
        assert "the driver has not answered" in notice
        look.keep("trouble")
        # How long it lasts is asked for besides; that it is over is told, even if that answer knew it first.
        with look.page.expect_response("**/health"):
            look.page.route("**/health", lambda route: route.fulfill(json={"status": "healthy", "error": None}))
        smi.recover()
        smi.kill_all()
        look.wait_for("#events li", "Healthy the readings are reliable again", seconds=30)


def test_a_quarantine_says_why(browser: Browser, tmp_path: Path) -> None:
    settings = {"GPU_BACKEND": "simulated:2,linger=100", **KEYS}
    with ServerProcess(tmp_path, **settings) as server, looking(browser, server) as look:
        look.wait_until_live(2)
        lease = take(server, worker_id="gone", ttl_seconds=2)
        index = lease["gpus"][0]["gpu_id"]
        look.wait_for_word(index, "Quarantined", seconds=12)
        assert "not renewed in time" in words(look.gpu(index).inner_text())
        assert "Expired gone has lost GPU" in words(look.events())
        # An administrator may end it.
        look.use_key()
        look.wait_for(".holder button", "End the quarantine").click()
        look.wait_for("#confirm-title", "End the quarantine")
        look.page.click("#confirm-yes")
        look.wait_for(".holder", state="detached")


def test_an_idle_holder_is_called_so(browser: Browser, tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(healthy_gpu(0, utilization_gpu="0"))
    settings = {"GPU_BACKEND": "nvidia-smi", "GPU_POOL_IDLE_AFTER": "1", **smi.env}
    with ServerProcess(tmp_path, **settings) as server, looking(browser, server) as look:
        look.wait_until_live(1)
        take(server, worker_id="asleep")
        look.wait_for(".holder .tag", "idle for", seconds=8)
        look.wait_for("#events li", "Idle asleep has left GPU 0 idle for", seconds=3)


def test_no_gpu_is_called_free_while_the_ledger_cannot_be_read(browser: Browser, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1"):
        (ledger,) = (tmp_path / "state").glob("ledger-*.db")
    for file in (tmp_path / "state").glob("ledger-*"):
        file.unlink()
    ledger.write_bytes(b"this is no database at all" * 200)
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server, looking(browser, server) as look:
        look.wait_for_word(0, "Unknown")
        look.wait_for("#notice", "The leases are unknown")
        # And why not, in the server's words.
        eventually(lambda: ledger.name in look.page.locator("#notice").inner_text())


def test_outsiders_are_named(browser: Browser, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:8,seed=7") as server, looking(browser, server) as look:
        look.wait_for(".gpu[data-kind='outside']", "without a lease: outsider", seconds=20)
        assert look.totals()["outside"] > 0
        look.keep("outsiders")


# --- connected or not ---


def test_disconnected_and_connected_again(browser: Browser, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:4") as server, looking(browser, server) as look:
        look.wait_until_live(4)
        assert look.page.locator("#notice").is_hidden()
        server.kill()
        notice = look.wait_for("#notice", seconds=3)
        assert "Disconnected since" in notice.inner_text()
        assert look.page.locator("#connection").inner_text() == "Disconnected"
        assert "Disconnected" in look.page.locator("[role=status]").inner_text()
        ages = [eventually(lambda: words(notice.inner_text()).partition("What you see is ")[2])]
        eventually(lambda: words(notice.inner_text()).partition("What you see is ")[2] != ages[0])
        # What it says of a GPU cannot be relied on any more.
        look.wait_for_word(0, "Stale", seconds=12)
        look.keep("disconnected")
        seen = 'Object.defineProperty(document, "visibilityState", {value: "visible"}); '
        look.page.evaluate(f'{seen}document.dispatchEvent(new Event("visibilitychange"))')
        server.start()
        look.wait_for("#notice", state="hidden", seconds=15)
        look.wait_until_live(4)
        look.wait_for_word(0, "Free")
        assert "Connected to the server again" in words(look.events())
        assert "Paused" not in look.events(), "it did all it could"


def test_under_a_prefix(browser: Browser, tmp_path: Path) -> None:
    settings = {"GPU_BACKEND": "simulated:1", "API_PREFIX": "/host/7", "DOCS_URL": "/manual"}
    with ServerProcess(tmp_path, **settings) as server, looking(browser, server) as look:
        look.wait_until_live(1)
        origin = server.url.removesuffix("/host/7")
        eventually(lambda: look.page.locator("#api-link").evaluate("(link) => link.href") == f"{origin}/manual")
        assert look.page.request.get(f"{origin}/manual").status == 200
        lease = take(server, worker_id="alice")
        look.wait_for_word(0, "Held", seconds=2)
        give_back(server, lease)


# --- a page that nobody sees ---

SEE_NOTHING = """
    Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
    window.requestAnimationFrame = () => 0;
    document.dispatchEvent(new Event("visibilitychange"));
"""
SEE_AGAIN = """
    delete document.visibilityState;
    document.dispatchEvent(new Event("visibilitychange"));
"""


def test_the_title_of_a_hidden_tab_stays_true(look: Look, server: ServerProcess) -> None:
    look.page.evaluate(SEE_NOTHING)
    take(server, count=3)
    eventually(lambda: look.page.title().startswith("5/8 free"))


def test_a_page_that_rests_has_no_number_in_its_title(look: Look) -> None:
    look.page.clock.install()
    look.page.evaluate(SEE_NOTHING)
    look.page.clock.fast_forward(61_000)
    eventually(lambda: "free" not in look.page.title())
    look.page.evaluate(SEE_AGAIN)
    look.wait_for("#events li", "Paused while this page was hidden")


def test_a_gap_in_a_chart_is_filled_by_the_history(look: Look) -> None:
    seen = look.page.evaluate("""async () => {
        const { Host } = await import(new URL("dashboard/files/pool_state.js", document.baseURI));
        const host = new Host("one", { isOwn: true });
        for (const age of [60, 59, 58, 2, 1, 0]) {
            const row = { gpu_id: 0, uuid: "GPU-0", utilization_percent: 50, memory: { usage_percent: 5 } };
            host.takeStats({ gpus: [row], sample_age_seconds: age });
        }
        const readings = [...Array(71).keys()].map((second) => ({
            timestamp: new Date(Date.UTC(2026, 0, 1, 0, 0, second)).toISOString(),
            utilization_percent: 50, memory_usage_percent: 5,
        }));
        const chart = () => host.gpus.get("GPU-0").chart.utilization;
        const before = chart().filter((each) => each === null).length;
        host.takeHistory({ gpus: [{ gpu_id: 0, uuid: "GPU-0", readings }], sample_age_seconds: 0 });
        return [before, chart().filter((each) => each === null).length, chart().length];
    }""")
    assert seen == [1, 0, 71]


def test_a_browser_with_too_many_pages_open_is_told_so(look: Look, server: ServerProcess) -> None:
    """The stream has the last connection, so what is asked for besides never leaves the browser."""
    look.page.route("**/queue", lambda _: None)
    take(server, count=8)
    queue_up(server, worker_id="patient")
    look.wait_for("#queue-empty", "1 request waits; loading the list…")
    look.wait_for("#notice", "too many pages of this server are open in this browser", seconds=30)
    look.page.unroute_all()
    look.wait_for(".waiter", "patient", seconds=20)
    look.wait_for("#notice", state="hidden")
