"""A server that systemd started says when it accepts connections, and not before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_abstract", [False, True], ids=["a path", "an abstract name"])
def test_it_is_ready_when_it_listens(tmp_path: Path, workers: int, *, is_abstract: bool) -> None:
    address = f"@gpu-pool-test-{os.getpid()}-{workers}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, socket.socket() as free:
        manager.bind(address.replace("@", "\0"))
        manager.settimeout(50)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = ["serve", "--simulate", "1", "--host", "127.0.0.1", "--port", str(port), "--workers", str(workers)]
        server = subprocess.Popen(
            [sys.executable, "-m", "gpu_worker_pool", *words, "--state-dir", str(tmp_path / "state")],
            env=os.environ | {"NOTIFY_SOCKET": address},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert manager.recv(100) == b"READY=1"
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
