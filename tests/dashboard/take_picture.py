"""Takes the picture of the live page that the README shows: `make picture`. Needs Chromium, and no internet."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "dashboard.png"
#: Who has what in the picture. Load appears a moment after a grant, as it does for real.
REQUESTS: list[dict[str, object]] = [
    {"worker_id": "train-bert", "label": "night run"},
    {"worker_id": "fsdp-llama", "count": 2},
    {"worker_id": "whisper-batch", "memory_mb": 8000, "share": True},
    {"worker_id": "vllm-test", "memory_mb": 6000, "share": True},
    {"worker_id": "train-resnet", "label": "ablation 3"},
]
WAITS: dict[str, object] = {"worker_id": "train-llama", "label": "all of them", "count": 8}


def ask(url: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(f"{url}/leases", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=40) as reply:
        reply.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium here: install Debian's package of that name")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "gpu_worker_pool", "serve", "--simulate", "8", "--port", str(port)]
        server = subprocess.Popen([*command, "--host", "127.0.0.1"], env={"GPU_POOL_STATE_DIR": state, "HOME": state})
        try:
            for _ in range(600):
                time.sleep(0.1)
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=2).close()
                    break
                except OSError:
                    continue
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1600, "height": 900})
                page.goto(f"{url}/dashboard")
                for number, request in enumerate(REQUESTS):
                    ask(url, {**request, "request_id": f"picture-{number}", "ttl_seconds": 3600, "wait_seconds": 10})
                    time.sleep(3)
                ask(url, {**WAITS, "request_id": "waits"})
                time.sleep(25)
                PICTURE.parent.mkdir(exist_ok=True)
                page.screenshot(path=PICTURE)
                browser.close()
        finally:
            server.terminate()
            server.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
