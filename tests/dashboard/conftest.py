"""A real browser for the live page's tests: Debian's Chromium, driven by playwright. Without it they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# No longer than a module: while it is there, an event loop is, and no other can run beside it.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed, so the page is not seen: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").sync_playwright()
    with playwright as driver:
        # As root it does not run in a sandbox; all that it opens here is our own.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()
