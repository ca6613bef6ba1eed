"""The live page on a phone, a laptop and a large screen, with few and with many GPUs: nothing is cut or overlaps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.dashboard.looking import KEYS, Look, give_up, looking, queue_up, take
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTHS = [390, 1200, 1600]
LONG_LABEL = "an experiment with a very long name that never seems to end, seed 3"
LONG_NAME = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
ANY = {"memory_threshold": 100, "utilization_threshold": 100}


class Busy(NamedTuple):
    server: ServerProcess
    gpus: int


@pytest.fixture(scope="module", params=[8, 64])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """Of everything a little: large cards, a fault, an outsider, shares, several GPUs, a quarantine, long names."""
    count = request.param
    folder = tmp_path_factory.mktemp(f"layout-{count}")
    smi = FakeNvidiaSMI(folder)
    gpus = [healthy_gpu(index) for index in range(count)]
    gpus[0] |= {"name": LONG_NAME, "memory.total": "196608", "memory.used": "190000", "power.draw": "612.00"}
    gpus[1] |= {"gpu_recovery_action": "Drain and Reset"}
    gpus[2] |= {"name": LONG_NAME, "memory.total": "196608", "memory.used": "9000", "power.limit": "1200.00"}
    smi.set_gpus(*gpus)
    with ServerProcess(folder, GPU_BACKEND="nvidia-smi", ACCESS_LOG="false", **KEYS, **smi.env) as server:
        take(server, worker_id="worker-7f3a9c-of-a-rather-long-name-000001", label=LONG_LABEL, only=[2], **ANY)
        take(server, worker_id="fsdp-llama", label="two of them", count=2, only=[3, 4])
        for name in ("whisper-batch", "vllm-test"):
            take(server, worker_id=name, label=LONG_LABEL, memory_mb=8000, share=True, only=[5])
        take(server, worker_id="gone", label="no longer renewed", ttl_seconds=2, only=[6])
        # What it has left behind: a process that is younger than the lease keeps the GPU in quarantine.
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as left:
            try:
                smi.set_processes(
                    (gpus[0]["uuid"], 1, "/opt/notebooks/bin/jupyter-kernel-of-somebody", 185_000),
                    (gpus[6]["uuid"], left.pid, "/usr/bin/sleep", 4000),
                )
                for index in range(8, count // 2):
                    take(server, worker_id=f"trainer-{index}", label=LONG_LABEL[: index * 3].strip(), only=[index])
                yield Busy(server, count)
            finally:
                left.kill()


@pytest.fixture
def busy(running: Busy) -> Iterator[Busy]:
    asked = [
        queue_up(running.server, worker_id="w" * 64, label=LONG_LABEL, count=running.gpus, **ANY),
        queue_up(running.server, worker_id="alice", label=LONG_LABEL, count=3, only=[2, 3, 4], **ANY),
        *(queue_up(running.server, worker_id=f"waiter-{number}", only=[3]) for number in range(6)),
    ]
    yield running
    for waiting in asked:
        give_up(running.server, waiting)


@pytest.fixture(params=WIDTHS)
def look(request: pytest.FixtureRequest, browser: Browser, busy: Busy) -> Iterator[Look]:
    width = request.param
    with looking(browser, busy.server, size=(width, 1000), is_phone=width < 500) as opened:
        opened.wait_for(f".gpu[data-gpu='{busy.gpus - 1}']", state="attached")
        opened.wait_for_word(0, "In use")
        opened.wait_for_word(1, "Fault")
        opened.wait_for_word(6, "Quarantined", seconds=20)
        opened.wait_for(".waiter:nth-child(3)")
        yield opened
        opened.keep(f"layout-{busy.gpus}-{width}")


#: By the number of GPUs and the width of the window.
COLUMNS = {(8, 390): 1, (8, 1200): 3, (8, 1600): 4, (64, 390): 2, (64, 1200): 6, (64, 1600): 8}
EDGES = """() => [...document.querySelectorAll(".gpu")].map((one) => one.getBoundingClientRect())
    .map((box) => [box.left, box.right])"""


def columns_of_gpus(look: Look) -> int:
    return len({round(left) for left, _ in look.page.evaluate(EDGES)})


def box(look: Look, selector: str) -> dict[str, float]:
    found: dict[str, float] = look.page.locator(selector).evaluate("(one) => one.getBoundingClientRect().toJSON()")
    return found


#: What does not fit into its box, and is not a name that ends with an ellipsis and has the whole text in its title.
TOO_WIDE = """() => [...document.querySelectorAll(".gpu, .gpu *, .total, .total *, .chip, .filter > *")]
    .filter((one) => one.checkVisibility() && one.clientWidth > 0 && !one.closest(".chart"))
    .filter((one) => one.scrollWidth > one.clientWidth + 1)
    .filter((one) => !(one.matches(".model, .who-line") && getComputedStyle(one).textOverflow === "ellipsis"
        && one.title.replaceAll(" · ", " ").endsWith(one.textContent.trim())))
    .map((one) => `${one.className}: ${one.textContent} (${one.scrollWidth} in ${one.clientWidth})`)"""

#: Pairs of texts of one card that lie on one another.
OVERLAPPING = """() => [...document.querySelectorAll(".gpu, .total")].flatMap((tile) => {
    const walker = document.createTreeWalker(tile, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (!node.textContent.trim() || !node.parentElement.checkVisibility()) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        let block = node.parentElement;
        while (getComputedStyle(block).display === "inline") block = block.parentElement;
        const clip = block.getBoundingClientRect();
        for (const { left, right, top, bottom } of range.getClientRects()) {
            // The lines of one text are closer together than its letters are high.
            const middle = (Math.max(top, clip.top) + Math.min(bottom, clip.bottom)) / 2;
            const seen = { node, left, right: Math.min(right, clip.right), top: middle - 3, bottom: middle + 3 };
            if (middle < clip.bottom) texts.push(seen);
        }
    }
    return texts.flatMap((one, i) => texts.slice(i + 1).filter((other) => other.node !== one.node
        && Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1
        && Math.min(one.bottom, other.bottom) > Math.max(one.top, other.top))
        .map((other) => `${one.node.textContent} | ${other.node.textContent}`));
})"""

#: Words that are broken though a line has room for them. A hyphen, a slash and a colon may end a line.
BROKEN_WORDS = r"""() => [...document.querySelectorAll(".gpu, .total, .panel")].flatMap((tile) => {
    const walker = document.createTreeWalker(tile, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (!node.parentElement.checkVisibility()) continue;
        let block = node.parentElement;
        while (getComputedStyle(block).display === "inline") block = block.parentElement;
        const line = block.clientWidth;
        for (const { index, 0: word } of node.textContent.matchAll(/[^\s\u00a0\-/:;,·]+/g)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const parts = [...range.getClientRects()];
            const width = parts.reduce((sum, part) => sum + part.width, 0);
            if (new Set(parts.map((part) => Math.round(part.top))).size > 1 && width <= line) found.push(word);
        }
    }
    return found;
})"""


#: What reaches beyond the window; the rest of a name that ends with an ellipsis is not seen.
OUTSIDE = """() => [...document.querySelectorAll("main *, header *")]
    .filter((one) => one.checkVisibility() && !one.closest(".unseen"))
    .filter((one) => !one.parentElement.closest(".model, .who-line"))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"""

#: Boxes that are too low for what is in them.
CUT_LISTS = """() => [...document.querySelectorAll(".panel, .panel *")]
    .filter((one) => one.checkVisibility() && !one.matches(".who-line"))
    .filter((one) => getComputedStyle(one).overflowY !== "visible" && one.scrollHeight > one.clientHeight + 1)
    .map((one) => one.outerHTML)"""


def test_everything_has_its_place_and_fits(look: Look, busy: Busy) -> None:
    assert look.page.evaluate(TOO_WIDE) == []
    assert look.page.evaluate(OVERLAPPING) == []
    assert look.page.evaluate(BROKEN_WORDS) == []
    assert look.page.evaluate(OUTSIDE) == []
    window = look.page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert window[1] <= window[0], "the page does not scroll sideways"

    totals, queue, gpus, events = (box(look, selector) for selector in ("#totals", ".waiting", ".gpus", ".happened"))
    assert totals["bottom"] <= min(queue["top"], gpus["top"], events["top"])
    if window[0] == 390:
        assert queue["bottom"] <= gpus["top"], "on a phone, the queue comes before the GPUs"
        assert gpus["bottom"] <= events["top"]
    elif busy.gpus == 8:
        assert gpus["right"] <= queue["left"] == events["left"], "few GPUs have the queue beside them"
        assert queue["bottom"] <= events["top"]
    else:
        assert queue["right"] <= events["left"]
        assert max(queue["bottom"], events["bottom"]) <= gpus["top"], "many have the whole width"

    if window[0] == 390 or busy.gpus > 8:
        edges = look.page.evaluate(EDGES)
        assert max(right for _, right in edges) - min(left for left, _ in edges) > window[0] - 50, "no column is empty"
    assert columns_of_gpus(look) == COLUMNS[busy.gpus, window[0]]


def test_lists_are_whole_and_long_ones_are_folded(look: Look, busy: Busy) -> None:
    """A long list shows its first items, and all on request; no list is a window that cuts a line."""
    first = 6 if busy.gpus == 8 and look.page.evaluate("innerWidth") > 1000 else 3
    waiters = look.page.locator(".waiter")
    eventually(lambda: waiters.count() == first)
    assert look.page.locator("#queue-count").inner_text() == "8", "the number counts all"
    more = look.page.locator("#queue + button.fold")
    assert more.inner_text() == "Show all 8"
    more.click()
    eventually(lambda: waiters.count() == 8)
    more.click()
    eventually(lambda: waiters.count() == first)

    waiter = waiters.first
    if not waiter.locator(".reasons").is_visible():
        waiter.locator("summary").click()
    reasons = waiter.locator(".reasons li")
    eventually(lambda: reasons.count() == 8)
    if busy.gpus > 8:
        more = waiter.locator("button.fold")
        assert (more.inner_text(), more.get_attribute("aria-expanded")) == ("Show all 64", "false")
        more.focus()
        look.page.keyboard.press("Enter")
        eventually(lambda: reasons.count() == 64)
        assert (more.inner_text(), more.get_attribute("aria-expanded")) == ("Show the first 8", "true")
        assert look.page.evaluate("document.activeElement.className") == "fold"
    assert "held by fsdp-llama" in waiter.inner_text()
    assert look.page.evaluate(CUT_LISTS) == []
    assert look.page.evaluate(BROKEN_WORDS) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_an_empty_queue_changes_no_columns(browser: Browser, running: Busy, width: int) -> None:
    with looking(browser, running.server, size=(width, 1000)) as look:
        look.wait_for(f".gpu[data-gpu='{running.gpus - 1}']", state="attached")
        look.wait_for("#queue-empty", "No requests are waiting.")
        assert columns_of_gpus(look) == COLUMNS[running.gpus, width]
        assert look.page.evaluate(OUTSIDE) == []
        look.keep(f"layout-{running.gpus}-{width}-no-queue")
