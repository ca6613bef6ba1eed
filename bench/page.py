"""Measures the live page: bytes to load it, and CPU of a browser that shows 64 busy GPUs at one sample per second.

Needs Chromium and playwright. It draws without a graphics card, which is the worst case.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from playwright.sync_api import sync_playwright

from bench.server import free_port
from bench.table import Row, print_table
from gpu_worker_pool.gpu_server.application import create_app
from gpu_worker_pool.gpu_server.settings import ServerSettings
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading

GPUS = 64
#: Until the history has all that the page requests, and no lease shows seconds any more.
HISTORY_SECONDS = 62
MEASURED_SECONDS = 30
MOST_BYTES = 200_000
MOST_CPU = 0.10


class BusyGPUs:
    """Every value of every GPU changes with every reading, as on busy hosts."""

    def __init__(self) -> None:
        self._random = random.Random(1)  # noqa: S311  # no secret
        self._utilization = [self._random.uniform(30, 90) for _ in range(GPUS)]

    def read(self) -> DriverAnswer:
        return DriverAnswer(tuple(map(self._gpu, range(GPUS))), driver_version="570.86.15", backend="simulated")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _gpu(self, index: int) -> GPUReading:
        draw = self._random.uniform
        self._utilization[index] = min(98.0, max(5.0, self._utilization[index] + draw(-9, 9)))
        used = round(draw(20_000, 60_000))
        return GPUReading(
            index=index,
            name="NVIDIA H100 80GB HBM3",
            uuid=f"GPU-0000000{index:02d}-4a1f-4d0b-9f57-0d6c2f6c1b10",
            pci_bus_id=f"00000000:{index:02X}:00.0",
            memory_total_mb=81_559,
            memory_used_mb=used,
            memory_free_mb=81_559 - used,
            utilization_percent=round(self._utilization[index]),
            temperature_c=round(draw(55, 75)),
            power_draw_w=round(draw(250, 650), 2),
            power_limit_w=700.0,
            processes=(),
        )


@contextmanager
def serving(folder: str) -> Iterator[str]:
    settings = ServerSettings(
        host="127.0.0.1", gpu_pool_state_dir=folder, gpu_backend="simulated:64", log_level="error"
    )
    port = free_port()
    config = uvicorn.Config(create_app(settings, BusyGPUs()), host="127.0.0.1", port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def take_all(url: str) -> None:
    for number in range(GPUS):
        wish = {"worker_id": f"trainer-{number}", "label": f"experiment {number}", "ttl_seconds": 600}
        body = json.dumps(wish | {"memory_threshold": 100, "utilization_threshold": 100}).encode()
        request = urllib.request.Request(f"{url}/leases", body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            assert reply.status == 201


def processes_below(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += processes_below(int(child))
    return found


def cpu_seconds_of_browsers() -> Counter[str]:
    """CPU seconds by kind of process, of all Chromium processes that this one started."""
    spent: Counter[str] = Counter()
    for pid in processes_below(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
        if words and "chromium" in words[0]:
            kind = next((word.partition("=")[2] for word in words if word.startswith("--type=")), "browser")
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[kind] += (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")  # type: ignore[assignment]
    return spent


def bytes_of_first_events(url: str) -> int:
    """What a browser receives of `/events` until every GPU can be shown."""
    address = urlsplit(url)
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    text, head = b"", b""
    with socket.create_connection((address.hostname or "", address.port or 80), timeout=10) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n")
        reply = connection.makefile("rb")
        while (line := reply.readline()) != b"\r\n":
            head += line
        received = len(head) + 2
        assert b"gzip" in head
        while b"event: snapshot" not in text or not text.endswith(b"\n\n"):
            size = int(length := reply.readline(), 16)
            text += unpack.decompress(reply.read(size + 2)[:-2])
            received += len(length) + size + 2
    return received


def measure(url: str, chromium: str) -> tuple[int, Counter[str], float]:
    """Bytes until everything is shown, CPU seconds afterwards, and the duration of that."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        devtools = page.context.new_cdp_session(page)
        urls: dict[str, str] = {}
        # The stream never ends, and of an open one the browser reports its unpacked size only.
        received = Counter({"/events": bytes_of_first_events(url)})

        def finished(event: dict[str, Any]) -> None:
            received[urls.get(event["requestId"], "?").removeprefix(url)] += event["encodedDataLength"]

        devtools.on(
            "Network.requestWillBeSent", lambda event: urls.update({event["requestId"]: event["request"]["url"]})
        )
        devtools.on("Network.loadingFinished", finished)
        devtools.send("Network.enable")
        page.goto(f"{url}/dashboard")
        page.wait_for_selector(f".gpu[data-gpu='{GPUS - 1}']")
        deadline = time.monotonic() + 10
        while not any("history" in path for path in received) and time.monotonic() < deadline:
            page.wait_for_timeout(20)
        loaded = received.total()
        for path, size in received.most_common(4):
            print(f"  {size:>7} bytes {path}")
        devtools.detach()
        page.wait_for_timeout(5000)
        before, begun = cpu_seconds_of_browsers(), time.monotonic()
        page.wait_for_timeout(1000 * MEASURED_SECONDS)
        spent, took = cpu_seconds_of_browsers() - before, time.monotonic() - begun
        browser.close()
    return loaded, spent, took


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("the page is not measured: chromium is not installed")
        return 0
    with tempfile.TemporaryDirectory() as folder, serving(folder) as url:
        take_all(url)
        time.sleep(HISTORY_SECONDS)
        loaded, spent, took = measure(url, chromium)
    print("  CPU by process: " + ", ".join(f"{kind} {seconds / took:.1%}" for kind, seconds in spent.most_common()))
    rows = [
        Row(f"KB to load the page, {GPUS} GPUs, against 200", loaded / 1000, MOST_BYTES / 1000, 1.0, is_speed=False),
        Row(f"CPU seconds of the browser, {GPUS} GPUs, against wall", spent.total(), took, MOST_CPU, is_speed=False),
    ]
    is_reached = print_table(rows, "")
    return 0 if is_reached or "--strict" not in sys.argv else 1


if __name__ == "__main__":
    sys.exit(main())
