"""The live page for all users: on a phone, by keyboard, with a screen reader, in light and in dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.dashboard.looking import ADMIN_KEY, KEYS, Look, give_all_back, looking, queue_up, serious, take, words
from tests.server_process import ServerProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LONG_LABEL = "an experiment with a very long name " * 5


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {"GPU_BACKEND": "simulated:8,seed=7", **KEYS}
    with ServerProcess(tmp_path_factory.mktemp("people"), **settings) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """Of everything a little: held, shared, in use, and somebody who waits."""
    for number in range(2):
        take(running, worker_id=f"worker-{number}", label=LONG_LABEL)
    take(running, worker_id="sharing", memory_mb=4096, share=True)
    queue_up(running, worker_id="w" * 64, label=LONG_LABEL, count=8)
    yield running
    give_all_back(running)


@pytest.fixture
def look(browser: Browser, server: ServerProcess) -> Iterator[Look]:
    with looking(browser, server) as opened:
        opened.wait_for(".waiter .reasons li")
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, server: ServerProcess, scheme: str) -> None:
    with looking(browser, server, scheme=scheme) as look:
        look.wait_for(".waiter .reasons li")
        look.keep(f"desk-{scheme}")
        assert serious(look) == []
        look.page.click("#key-button")
        assert serious(look) == []
        look.keep(f"key-{scheme}")
        look.page.fill("#key-input", ADMIN_KEY)
        look.page.keyboard.press("Enter")
        look.wait_for(".holder button").click()
        assert serious(look) == []
        look.page.keyboard.press("Escape")
        assert serious(look) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off(browser: Browser, server: ServerProcess, scheme: str) -> None:
    with looking(browser, server, scheme=scheme, size=(360, 740), is_phone=True) as look:
        look.use_key()
        look.wait_for(".holder button")
        widths = look.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1], "nothing is wider than the screen"
        cut = look.page.evaluate(
            "[...document.querySelectorAll('button, .state, .total, .position, .time')].filter((one) => "
            "one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
        )
        assert cut == []
        small = look.page.evaluate(
            "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility() && "
            "one.getBoundingClientRect().height < 24).map((one) => one.outerHTML)"
        )
        assert small == [], "a finger needs some room"
        look.keep(f"phone-{scheme}", full_page=True)
        assert serious(look) == []


@pytest.mark.parametrize("width", [320, 360, 700, 1000, 1600])
def test_what_is_written_stays_in_its_box(browser: Browser, server: ServerProcess, width: int) -> None:
    with looking(browser, server, size=(width, 800)) as look:
        look.wait_for(".waiter .summary", "GPUs")
        if width < 992:
            # There the GPUs are below: reasons are unfolded on request.
            look.page.locator(".waiter summary").first.click()
        look.wait_for(".waiter .reasons li")
        over = look.page.evaluate(
            "[...document.querySelectorAll('.total, .total dt, .who-line, .model')].filter((one) => "
            "one.checkVisibility() && one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0)"
            ".map((one) => one.outerHTML)"
        )
        assert over == []
        look.keep(f"width-{width}")


def test_everything_can_be_done_by_keyboard(look: Look, server: ServerProcess) -> None:
    page = look.page

    def focused() -> str:
        return str(page.evaluate("(document.activeElement.id || document.activeElement.getAttribute('aria-label') || "
                                 "document.activeElement.textContent).trim()"))  # fmt: skip

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if name in focused():
                break
        assert name in focused()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert float(outline.removesuffix("px")) >= 2, "it can be seen where one is"

    page.keyboard.press("Tab")
    assert focused() == "Skip to the GPUs"
    page.keyboard.press("Enter")
    assert focused() == "gpus-title"
    page.evaluate("document.activeElement.blur()")
    tab_to("key-button")
    page.keyboard.press("Enter")
    assert focused() == "key-input"
    page.keyboard.type(ADMIN_KEY)
    page.keyboard.press("Enter")
    look.wait_for(".holder button")
    tab_to("Release the lease of worker-0")
    page.keyboard.press("Enter")
    # What changes nothing is where one begins.
    eventually(lambda: focused() == "confirm-no")
    page.keyboard.press("Escape")
    # One is back where one was.
    eventually(lambda: "Release the lease of worker-0" in focused())
    page.keyboard.press("Enter")
    tab_to("confirm-yes")
    page.keyboard.press("Enter")
    look.wait_for(".holder:has-text('worker-0')", state="detached")
    # Its button is gone: one is left near it.
    eventually(lambda: focused() == "gpus-title")
    tab_to("Why ")
    before = page.locator(".waiter details").first.get_attribute("open")
    page.keyboard.press("Enter")
    eventually(lambda: page.locator(".waiter details").first.get_attribute("open") != before)


def test_a_screen_reader_finds_its_way(look: Look) -> None:
    page = look.page
    for role, name in (("region", "At a glance"), ("region", "GPUs"), ("region", "Queue"), ("region", "Events")):
        assert page.get_by_role(role, name=name).count() >= 1, name  # type: ignore[arg-type]
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
    assert page.get_by_role("heading", name="GPU 3", exact=True).count() == 1
    meter = page.get_by_role("meter", name="Memory").first
    assert re.fullmatch(r"[\d.]+ of 24 GiB", meter.get_attribute("aria-valuetext") or "")
    assert page.locator("[role=img]").first.get_attribute("aria-label")
    # Readings come every second: to be told of each would be unbearable.
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]").all()
    assert {element.get_attribute("id") for element in live} == {"said", "key-problem", "confirm-problem"}


def test_a_condition_is_never_only_a_colour(look: Look) -> None:
    words_by_kind = {}
    for card in look.page.locator(".gpu").all():
        kind = card.get_attribute("data-kind")
        words_by_kind.setdefault(kind, set()).add(words(card.locator(".word").inner_text()))
    assert all("" not in found for found in words_by_kind.values())
    shapes = look.page.evaluate("""[...document.querySelectorAll(".total .sign")].map((sign) => {
        const { clipPath, borderRadius, backgroundImage, backgroundColor } = getComputedStyle(sign);
        return [clipPath, borderRadius, backgroundImage, backgroundColor === "rgba(0, 0, 0, 0)"].join();
    })""")
    assert len(set(shapes)) == 5, "each has a shape of its own"
