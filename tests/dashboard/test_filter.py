"""The filter of the GPUs on the live page: what matches, by hand and by keyboard, across updates and in the address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboard.looking import KEYS, Look, give_all_back, give_back, looking, serious, take
from tests.fakes.http_server import refusing_url
from tests.server_process import ServerProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GPUS = 64
HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("filter")
    with ServerProcess(folder, GPU_BACKEND=f"simulated:{GPUS}", ACCESS_LOG="false", **KEYS) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    take(running, worker_id="alice-train", label="Night run", only=[3, 4], count=2)
    take(running, worker_id="bob-train", label="ablation", only=[40])
    yield running
    give_all_back(running)


@pytest.fixture
def look(browser: Browser, server: ServerProcess) -> Iterator[Look]:
    with looking(browser, server, size=(1200, 900)) as opened:
        opened.wait_until_live(GPUS)
        opened.wait_for_word(40, "Held")
        yield opened


def shown(look: Look) -> list[int]:
    gpus: list[int] = look.page.evaluate(
        "[...document.querySelectorAll('.gpu')].map((card) => Number(card.dataset.gpu))"
    )
    return gpus


def wait_for_shown(look: Look, gpus: list[int]) -> None:
    eventually(lambda: shown(look) == gpus)


def address(look: Look) -> str:
    return str(look.page.evaluate("location.hash"))


def count_shown(look: Look) -> str:
    return look.page.locator("#filter-count").inner_text()


def test_a_text_leaves_the_gpus_it_matches(look: Look) -> None:
    assert count_shown(look) == "64 GPUs"
    assert look.page.locator("#filter-clear").is_hidden()
    for text, gpus in {
        "3": [3],
        "8-11": [8, 9, 10, 11],
        "0,2,62-99": [0, 2, 62, 63],
        "ALICE": [3, 4],
        "train": [3, 4, 40],
        "night RUN": [3, 4],
        "train 4": [4],
        "ablation": [40],
        "simulated": list(range(GPUS)),
        "24": [24],
        "24gb bob": [40],
    }.items():
        look.page.fill("#filter-text", text)
        wait_for_shown(look, gpus)
        eventually(lambda gpus=gpus: count_shown(look) == f"{len(gpus)} of 64 shown")  # type: ignore[misc]
    # The numbers on top are of all GPUs.
    assert look.totals()["held"] == 3


def test_no_match_is_said_and_can_be_cleared(look: Look) -> None:
    look.page.fill("#filter-text", "nothing like this")
    look.wait_for("#filter-none", "No GPU matches.")
    assert count_shown(look) == "0 of 64 shown"
    look.wait_for("[role=status]", "No GPU matches.")
    look.page.click("#filter-clear")
    wait_for_shown(look, list(range(GPUS)))
    assert look.page.locator("#filter-none").is_hidden()
    assert look.page.locator("#filter-clear").is_hidden()
    assert look.page.input_value("#filter-text") == ""
    assert look.page.evaluate("document.activeElement.id") == "filter-text", "the button is gone"
    eventually(lambda: address(look) == "")


def test_the_filter_works_by_keyboard(look: Look) -> None:
    page = look.page
    page.focus("#key-button")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "filter-text":
            break
    page.keyboard.type("train")
    wait_for_shown(look, [3, 4, 40])
    # Enter does not send a form anywhere.
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "all"
    outline = page.evaluate("getComputedStyle(document.activeElement.nextElementSibling).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2, "it can be seen where one is"
    page.keyboard.press("ArrowRight")
    look.wait_for("#filter-none")
    page.keyboard.press("ArrowRight")
    wait_for_shown(look, [3, 4, 40])
    eventually(lambda: address(look) == "#find=train&show=held")
    look.wait_for("[role=status]", "3 of 64 shown")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "filter-clear"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Escape")
    assert page.input_value("#filter-text") == ""
    eventually(lambda: address(look) == "#show=held")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_for_shown(look, list(range(GPUS)))


def test_chips_follow_what_happens(look: Look, server: ServerProcess) -> None:
    look.page.get_by_role("radio", name="Held").check(force=True)
    wait_for_shown(look, [3, 4, 40])
    look.page.fill("#filter-text", "train")
    lease = take(server, worker_id="carol-train", only=[20])
    wait_for_shown(look, [3, 4, 20, 40])
    take(server, worker_id="dora", only=[21])
    look.wait_for(".total[data-kind='held'] .number", "5")
    assert shown(look) == [3, 4, 20, 40]
    give_back(server, lease)
    wait_for_shown(look, [3, 4, 40])
    assert look.page.input_value("#filter-text") == "train"
    look.page.fill("#filter-text", "")
    look.page.get_by_role("radio", name="Free").check(force=True)
    eventually(lambda: count_shown(look) == "60 of 64 shown")
    assert {3, 4, 21, 40}.isdisjoint(shown(look))
    look.page.get_by_role("radio", name="All").check(force=True)
    wait_for_shown(look, list(range(GPUS)))


def test_the_address_remembers_the_filter(look: Look) -> None:
    before = look.page.evaluate("history.length")
    look.page.fill("#filter-text", "bob  ablation")
    eventually(lambda: address(look) == "#find=bob+ablation")
    assert look.page.evaluate("history.length") == before, "not a step back for every letter"
    look.page.reload()
    wait_for_shown(look, [40])
    assert look.page.input_value("#filter-text") == "bob ablation"
    # A link to a part of the page goes there, and changes nothing.
    look.page.evaluate("document.querySelector('.skip').click()")
    eventually(lambda: look.page.evaluate("document.activeElement.id") == "gpus-title")
    eventually(lambda: address(look) == "#find=bob+ablation")
    assert shown(look) == [40]
    look.page.evaluate("location.hash = '#show=held'")
    wait_for_shown(look, [3, 4, 40])
    assert look.page.get_by_role("radio", name="Held").is_checked()
    look.page.evaluate("location.hash = ''")
    wait_for_shown(look, list(range(GPUS)))


def test_a_hostile_address_is_text(look: Look) -> None:
    look.page.evaluate("(text) => { location.hash = new URLSearchParams({ find: text, show: 'nonsense' }) }", HOSTILE)
    look.wait_for("#filter-none")
    assert look.page.input_value("#filter-text") == HOSTILE
    assert look.page.get_by_role("radio", name="All").is_checked()
    look.page.evaluate("location.hash = '#show=__proto__&find=' + 'x'.repeat(100000)")
    eventually(lambda: look.page.input_value("#filter-text") == "x" * 100)
    look.page.evaluate("location.hash = '#find=%E0%A4%A'")
    look.wait_for("#filter-none")
    assert look.page.evaluate("window.hacked") is None
    assert look.page.locator("body img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_filter(browser: Browser, server: ServerProcess, scheme: str) -> None:
    with looking(browser, server, scheme=scheme, size=(1200, 900)) as look:
        look.wait_until_live(GPUS)
        look.page.get_by_role("radio", name="Held").check(force=True)
        wait_for_shown(look, [3, 4, 40])
        assert serious(look) == []
        look.keep(f"filter-{scheme}")
        look.page.fill("#filter-text", "no such GPU")
        look.wait_for("#filter-none")
        assert serious(look) == []
        look.keep(f"filter-none-{scheme}")


def test_few_gpus_need_no_filter_but_an_active_one_is_seen(browser: Browser, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:8") as server, looking(browser, server) as look:
        look.wait_until_live(8)
        assert look.page.locator("#filter").is_hidden()
        look.page.evaluate("location.hash = '#find=3'")
        wait_for_shown(look, [3])
        look.page.click("#filter-clear")
        wait_for_shown(look, list(range(8)))
        look.wait_for("#filter", state="hidden")


def test_a_host_without_a_match_is_hidden_but_not_its_problem(browser: Browser, tmp_path: Path) -> None:
    other = ServerProcess(tmp_path / "other", GPU_BACKEND="simulated:6")
    with other, refusing_url() as down:
        peers = f"gpu-2={other.url}, gpu-3={down}"
        with ServerProcess(tmp_path / "own", GPU_BACKEND="simulated:6", GPU_POOL_PEERS=peers) as own:
            take(other, worker_id="far-away", only=[5])
            with looking(browser, own) as look:
                look.wait_for(".host[data-host='gpu-2'] .gpu[data-gpu='5'][data-word='Held']")
                look.wait_for(".host[data-host='gpu-3'] .health", "Not reachable")
                look.page.fill("#filter-text", "far-away")
                wait_for_shown(look, [5])
                assert look.page.locator(".host:visible").count() == 2
                assert look.page.locator(".host[data-host='gpu-3'] .host-problem").is_visible()
                look.page.fill("#filter-text", "gpu-2 0-1")
                wait_for_shown(look, [0, 1])
                look.page.fill("#filter-text", "5")
                wait_for_shown(look, [5, 5])
                assert look.page.locator(".host:visible").count() == 3


def test_all_that_a_person_may_look_for(look: Look) -> None:
    """Also what simulated GPUs do not have: users, programs, MIG devices, and data that is not what it should be."""
    row: dict[str, Any] = {
        "gpu_id": 7,
        "name": "NVIDIA A100-SXM4-80GB",
        "uuid": "GPU-5f3a9c2e-0000",
        "processes": [{"pid": 1, "name": "/opt/jupyter", "user": "olga"}, {"pid": 2, "name": None, "user": None}],
        "mig_devices": [{"uuid": "MIG-77aa-1111", "name": "3g.40gb"}],
    }
    holder = {"user": "paul", "host": "login-1", "pid": 12, "program": "train.py", "verified": True}
    leases = [{"worker_id": "w-1", "user": "1000", "label": 17, "holder": holder}, {"worker_id": None, "holder": None}]
    script = """async ([row, leases, texts]) => {
        const { GPUFilter } = await import(new URL("dashboard/files/gpu_filter.js", document.baseURI));
        const one = { gpu: { row }, leases, condition: { kind: "held", word: "Partly held" } };
        const seen = [{ host: { name: "gpu-9", isOwn: false }, gpus: [one], error: null }];
        return texts.filter((text) => new GPUFilter(text).choose(seen)[0].shown.length === 1);
    }"""
    found = ["7", "gpu 7", "a100", "100", "paul", "login-1", "train.py", "w-1", "olga", "jupyter", "3g.40gb", "partly",
             "gpu-5f3a", "mig-77aa", "gpu-9", "17", "1-9", "", "   "]  # fmt: skip
    missed = ["77", "0-6", "peter", "5f3a9c2e", "null", "undefined", "paul 66", "a100 peter"]
    assert look.page.evaluate(script, [row, leases, [*found, *missed]]) == found
    spoiled = {**row, "mig_devices": 7}
    failing = script.replace("return texts", "return new GPUFilter('x').choose(seen)[0].error.message; texts")
    assert look.page.evaluate(failing, [spoiled, leases, []]), "it does not affect other hosts"
