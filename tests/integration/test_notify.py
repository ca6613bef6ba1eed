"""A server that systemd started says when it accepts connections, and not before."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.server_process import ServerProcess
from tests.waiting import eventually

from gpu_worker_pool.cli.setup import Options, Places
from gpu_worker_pool.cli.setup.service import unit_text


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
        if workers == 1:
            assert manager.recv(100) == b"STOPPING=1"


def test_it_shows_that_its_event_loop_is_alive_and_no_longer_when_it_hangs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000", "GPU_BACKEND": "simulated:1"}
        with ServerProcess(tmp_path, **variables) as server:
            assert [manager.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            eventually(lambda: Path(f"/proc/{server.process.pid}/stat").read_text().split()[2] == "T")
            with contextlib.suppress(BlockingIOError):
                manager.setblocking(False)
                while manager.recv(100):  # what was under way
                    pass
            manager.settimeout(1.0)
            with pytest.raises(TimeoutError):
                manager.recv(100)
            server.process.send_signal(signal.SIGCONT)
            manager.settimeout(30)
            assert manager.recv(100) == b"WATCHDOG=1"


_ACTIVATE = """
import os, socket, sys
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    os.dup2(listener.fileno(), 3)
    os.set_inheritable(3, True)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    port = str(listener.getsockname()[1])
    os.execv(sys.executable, [sys.executable, *(word.replace("{port}", port) for word in sys.argv[1:])])
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_listens_on_the_socket_that_systemd_passes_on(tmp_path: Path, workers: str) -> None:
    words = ["-m", "gpu_worker_pool", "serve", "--simulate", "1", "--port", "{port}", "--workers", workers]
    with subprocess.Popen(
        [sys.executable, "-c", _ACTIVATE, *words, "--state-dir", str(tmp_path / "state")],
        env=os.environ | {"NOTIFY_SOCKET": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            # Before it has started: nobody is refused.
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=40) as reply:
                assert reply.status == 200
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="without systemd")
@pytest.mark.parametrize("is_server_only", [False, True])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, *, is_server_only: bool) -> None:
    options = Options(directory=tmp_path / "state", is_server_only=is_server_only)
    (unit := tmp_path / "gpu-pool.service").write_text(unit_text(options, Places(), "root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"SYSTEMD_LOG_LEVEL": "warning"},
    )
    about_it = [line for line in done.stderr.splitlines() if "gpu-pool" in line]
    assert about_it == []
