"""Helpers that open the live page in a browser and read what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

#: For people to look at after the tests; not in the repository.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
_AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")
ADMIN_KEY = "an-administrators-key"
OTHER_KEY = "a-key-of-somebody-else"
KEYS = {"GPU_POOL_ADMIN_KEYS": ADMIN_KEY, "GPU_POOL_API_KEYS": OTHER_KEY}


@dataclass
class Look:
    """One page in one browser window."""

    page: Page
    server: ServerProcess
    #: What went wrong in the page itself; a server that is away is not that.
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def gpu(self, index: int, host: str | None = None) -> Locator:
        section = "" if host is None else f".host[data-host='{host}'] "
        return self.page.locator(f"{section}.gpu[data-gpu='{index}']")

    def wait_for(self, selector: str, text: str | None = None, seconds: float = 10, state: Any = "visible") -> Locator:
        found = self.page.locator(selector)
        if text is not None:
            found = found.filter(has_text=text)
        found.first.wait_for(state=state, timeout=1000 * seconds)
        return found.first

    def wait_for_word(self, index: int, word: str, seconds: float = 10) -> None:
        self.wait_for(f".gpu[data-gpu='{index}'][data-word='{word}']", seconds=seconds)

    def wait_until_live(self, gpus: int) -> None:
        self.wait_for(f".gpu[data-gpu='{gpus - 1}']")
        self.wait_for("#connection[data-kind='fine']", "Live")

    def totals(self) -> dict[str, int]:
        tiles = self.page.locator(".total")
        return {str(tile.get_attribute("data-kind")): int(tile.locator(".number").inner_text()) for tile in tiles.all()}

    def events(self) -> str:
        return self.page.locator("#events").inner_text()

    def use_key(self, key: str = ADMIN_KEY) -> None:
        self.page.click("#key-button")
        self.page.fill("#key-input", key)
        self.page.keyboard.press("Enter")

    def keep(self, name: str, *, full_page: bool = False) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full_page)


@contextmanager
def looking(
    browser: Browser,
    server: ServerProcess,
    *,
    scheme: Any = "light",
    size: tuple[int, int] = (1600, 1000),
    is_phone: bool = False,
) -> Iterator[Look]:
    """Fails afterwards if the page had an error, or asked anybody but its own server."""
    context = browser.new_context(
        color_scheme=scheme,
        viewport={"width": size[0], "height": size[1]},
        has_touch=is_phone,
        device_scale_factor=2 if is_phone else 1,
        reduced_motion="reduce",
    )
    page = context.new_page()
    look = Look(page, server)

    def logged(kind: str, text: str) -> None:
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            look.problems.append(text)

    page.on("console", lambda message: logged(message.type, message.text))
    page.on("pageerror", lambda error: look.problems.append(str(error)))
    page.on("request", lambda request: look.asked.append(request.url))
    try:
        page.goto(f"{server.url}/dashboard")
        yield look
        assert look.problems == []
        elsewhere = [url for url in look.asked if urlsplit(url).scheme != "data" and not url.startswith(server.url)]
        assert elsewhere == [], "the browser talks to one origin only"
    finally:
        context.close()


def take(server: ServerProcess, **requirements: Any) -> dict[str, Any]:
    """A lease; a GPU that a test before had may need a moment until it shows itself free."""
    return _ask(server, 201, {"wait_seconds": 20, **requirements})


def queue_up(server: ServerProcess, **requirements: Any) -> dict[str, Any]:
    """A place in the queue."""
    return _ask(server, 202, requirements)


def _ask(server: ServerProcess, status: int, requirements: dict[str, Any]) -> dict[str, Any]:
    reply = server.ask("POST", "/leases", {"ttl_seconds": 600, **requirements})
    assert reply.status == status, reply.body
    body: dict[str, Any] = reply.json
    return body


def give_back(server: ServerProcess, lease: dict[str, Any]) -> None:
    token = {"X-Lease-Token": lease["token"]}
    assert server.ask("DELETE", f"/leases/{lease['lease_id']}", headers=token).status == 200


def give_up(server: ServerProcess, waiting: dict[str, Any]) -> None:
    server.ask("DELETE", f"/queue/{waiting['request_id']}", headers={"X-Lease-Token": waiting["token"]})


def give_all_back(server: ServerProcess) -> None:
    """Whatever the tests before have left."""
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for waiting in server.get("/queue").json["queue"]:
        server.ask("DELETE", f"/queue/{waiting['request_id']}", headers=admin)
    for lease in server.get("/leases").json["leases"]:
        server.ask("DELETE", f"/leases/{lease['lease_id']}", headers=admin)


def serious(look: Look) -> list[Any]:
    """What axe finds that keeps somebody from using the page."""
    found = look.page.evaluate(f"{_AXE}; axe.run(document, {{resultTypes: ['violations']}})")
    return [
        (problem["id"], [node["html"][:200] for node in problem["nodes"]])
        for problem in found["violations"]
        if problem["impact"] in ("serious", "critical")
    ]


def words(text: str) -> str:
    """In one line."""
    return re.sub(r"\s+", " ", text).strip()


def references(text: str, patterns: Sequence[str]) -> list[str]:
    return [found for pattern in patterns for found in re.findall(pattern, text)]
