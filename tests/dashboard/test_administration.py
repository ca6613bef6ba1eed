"""Administration on the live page: what a key allows, confirmations, and where the key must not appear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.dashboard.looking import ADMIN_KEY, KEYS, OTHER_KEY, Look, give_all_back, looking, queue_up, take
from tests.server_process import ServerProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("admin"), GPU_BACKEND="simulated:3", **KEYS) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    give_all_back(running)


@pytest.fixture
def look(browser: Browser, server: ServerProcess) -> Iterator[Look]:
    take(server, worker_id="alice", label="all of it", count=3)
    queue_up(server, worker_id="bob", label="later")
    with looking(browser, server) as opened:
        opened.wait_for(".waiter", "bob")
        yield opened


def test_without_a_key_it_only_shows(look: Look) -> None:
    assert look.page.locator(".holder button:visible, .waiter > button:visible").count() == 0


def test_a_key_releases_a_lease_after_a_confirmation(look: Look, server: ServerProcess) -> None:
    look.use_key()
    button = look.wait_for(".gpu[data-gpu='1'] .holder button")
    button.click()
    assert "alice" in look.page.locator("#confirm-title").inner_text()
    # Cancelling the dialog changes nothing.
    look.page.click("#confirm-no")
    assert len(server.get("/leases").json["leases"]) == 1
    button.click()
    look.keep("confirm")
    look.page.click("#confirm-yes")
    look.wait_for(".holder:has-text('alice')", state="detached")
    look.wait_for("[role=status]", "GPUs 0, 1 and 2 of alice were released")
    eventually(lambda: all(lease["worker_id"] != "alice" for lease in server.get("/leases").json["leases"]))


def test_what_people_write_rearranges_no_words_around_it(look: Look, server: ServerProcess) -> None:
    label = "\N{HEBREW LETTER SHIN}\N{HEBREW LETTER LAMED} 42"
    queue_up(server, worker_id="carol", label=label)
    look.use_key()
    look.wait_for(".waiter:has-text('carol') > button").click()
    assert look.page.locator("#confirm-title bdi").inner_text() == "carol"
    assert look.page.locator("#confirm-text bdi").inner_text() == label
    look.page.keyboard.press("Escape")
    assert look.page.locator("#events li").first.locator("bdi").all_inner_texts()[:2] == ["carol", label]
    assert look.page.locator(".waiter:has-text('carol') bdi").all_inner_texts()[:2] == ["carol", label]


def test_a_key_removes_one_who_waits(look: Look, server: ServerProcess) -> None:
    look.use_key()
    look.wait_for(".waiter > button").click()
    look.page.click("#confirm-yes")
    look.wait_for(".waiter", state="detached")
    assert server.get("/queue").json["queue"] == []
    look.wait_for("#events li", "bob (later): its request was cancelled")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("not-a-key-of-this-server", "does not know this key"),
        (OTHER_KEY, "not an administrator's"),
        ("with a blank", "without blanks"),
    ],
)
def test_what_is_wrong_with_a_key_is_said(look: Look, key: str, problem: str) -> None:
    look.use_key(key)
    look.wait_for("#key-problem", problem)
    assert look.page.locator("#key-dialog").is_visible()
    look.page.keyboard.press("Escape")
    assert look.page.locator(".holder button:visible").count() == 0


def test_a_key_is_kept_nowhere_and_can_be_forgotten(look: Look) -> None:
    look.use_key()
    look.wait_for(".holder button")
    kept = look.page.evaluate(
        "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, location.href])"
    )
    assert ADMIN_KEY not in kept
    assert ADMIN_KEY not in look.page.content()
    assert look.page.input_value("#key-input") == ""
    assert [url for url in look.asked if ADMIN_KEY in url] == []
    look.page.click("#key-button")
    look.wait_for(".holder button", state="hidden")
    look.use_key()
    look.wait_for(".holder button")
    look.page.reload()
    look.wait_for(".waiter", "bob")
    assert look.page.locator(".holder button:visible").count() == 0


def test_a_lease_that_has_ended_meanwhile(look: Look, server: ServerProcess) -> None:
    """The server's word counts: what cannot be done is said where it was asked for."""
    look.use_key()
    look.wait_for(".waiter > button").click()
    (waiting,) = server.get("/queue").json["queue"]
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert server.ask("DELETE", f"/queue/{waiting['request_id']}", headers=admin).status == 200
    look.page.click("#confirm-yes")
    look.wait_for("#confirm-problem", "GET /queue lists them")
    look.page.keyboard.press("Escape")
