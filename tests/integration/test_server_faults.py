"""Faults: whatever the driver or a client does, the server answers, with the age of what it knows."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.fakes.nvml import DRIVER_NOT_LOADED, GPU_IS_LOST, FakeMIGDevice, FakeNVML, fake_gpus
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
def smi(tmp_path: Path) -> Iterator[FakeNvidiaSMI]:
    fake = FakeNvidiaSMI(tmp_path)
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    yield fake
    fake.kill_all()


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNVML:
    return FakeNVML(tmp_path, gpus=fake_gpus(2))


def serve(folder: Path, fake: FakeNvidiaSMI | FakeNVML, **env: str) -> ServerProcess:
    backend = "nvml" if isinstance(fake, FakeNVML) else "nvidia-smi"
    return ServerProcess(folder / "server", **{"GPU_BACKEND": backend, "REFRESH_INTERVAL": "0.1"} | fake.env | env)


def status(server: ServerProcess) -> str:
    return str(server.get("/health").json["status"])


# --- 28: nvidia-smi hangs, fails, prints garbage, leaves a grandchild ---


@pytest.mark.fault(28)
def test_a_tool_that_hangs_lets_readings_age_and_is_not_run_twice(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    with serve(tmp_path, smi) as server:
        smi.hang()
        calls = eventually(lambda: (time.sleep(0.3), len(smi.calls))[1])
        eventually(lambda: status(server) == "degraded")
        health = server.get("/health").json
        assert health["error_code"] == "driver_hangs"
        assert re.search(r"the driver has not answered for \d+\.\d s", health["error"])
        begun = time.monotonic()
        stats = server.get("/gpu/stats")
        assert time.monotonic() - begun < 1
        assert (stats.status, stats.json["gpu_count"]) == (200, 2)
        assert stats.json["sample_age_seconds"] > 1
        eventually(lambda: "GPU readings are degraded: the driver has not answered" in server.log)
        assert len(smi.calls) - calls <= 1
        smi.recover()
        smi.kill_all()
        eventually(lambda: status(server) == "healthy")
        assert server.get("/gpu/stats").json["sample_age_seconds"] < 5
        eventually(lambda: "GPU readings are healthy again" in server.log)


def test_a_stop_leaves_no_hanging_tool_behind(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    smi.hang()
    with serve(tmp_path, smi) as server:
        eventually(lambda: smi.pids)
        _, seconds = server.terminate()
        assert seconds < 5
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in smi.pids), 5)


@pytest.mark.timeout(90)
def test_readings_too_old_to_be_told_are_not_told_and_come_back(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    with serve(tmp_path, smi) as server:
        smi.answer(
            "", exit_status=9, stderr="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        )
        eventually(lambda: status(server) == "degraded")
        assert server.get("/gpu/summary").status == 200
        eventually(lambda: server.get("/gpu/summary").status == 503, 20)
        for path in ("/gpu/stats", "/gpu/count", "/gpu/summary"):
            problem = server.get(path)
            assert problem.status == 503
            assert problem.json["error"] == "driver_not_loaded"
            assert "driver" in problem.json["detail"]
        health = server.get("/health")
        assert (health.status, health.json["status"]) == (200, "unhealthy")
        assert health.json["sample_age_seconds"] > 15
        metrics = server.get("/metrics").body.decode()
        assert "gpu_pool_up 0.0" in metrics
        assert "gpu_pool_gpu_memory_used_bytes{" not in metrics
        failures = re.search(r"gpu_pool_sample_failures_total ([\d.]+)", metrics)
        assert failures is not None
        assert float(failures[1]) > 10
        smi.recover()
        eventually(lambda: status(server) == "healthy")
        assert server.get("/gpu/summary").status == 200


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("output", "exit_status", "code"),
    [
        ("", 1, "driver_error"),
        ("\x00\xff what? ,,,,\n" * 50, 0, "driver_error"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "driver_version_mismatch"),
    ],
)
def test_a_tool_that_fails_from_the_start_is_a_503_with_the_cause(
    tmp_path: Path, smi: FakeNvidiaSMI, output: str, exit_status: int, code: str
) -> None:
    smi.answer(output.encode("latin-1"), exit_status=exit_status)
    with serve(tmp_path, smi) as server:
        problem = eventually(lambda: server.get("/gpu/stats"))
        assert (problem.status, problem.json["error"]) == (503, code)
        assert problem.json["detail"]
        assert status(server) == "unhealthy"
        assert "no GPU readings yet" in server.log
        smi.recover()
        eventually(lambda: server.get("/gpu/stats").status == 200)


@pytest.mark.fault(28)
def test_a_grandchild_that_holds_the_output_delays_nothing(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    with serve(tmp_path, smi) as server:
        smi.leave_grandchild(30, own_session=True)
        calls = len(smi.calls)
        eventually(lambda: len(smi.calls) > calls + 4)
        assert status(server) == "healthy"


def test_no_tool_no_library(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="auto", PATH="/nonexistent", LD_LIBRARY_PATH="/nonexistent") as server:
        problem = server.get("/gpu/summary")
        assert (problem.status, problem.json["error"]) == (503, "nvidia_smi_not_found")
        assert "nvidia-smi not found" in problem.json["detail"]
        assert server.get("/health").json["nvidia_smi_available"] is False


def test_a_tool_that_may_not_be_executed_is_reported_as_such(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    smi.program.chmod(0o644)
    with serve(tmp_path, smi) as server:
        problem = server.get("/gpu/summary").json
        assert problem["error"] == "permission_denied"
        assert str(smi.program) in problem["detail"]


def test_a_host_without_gpus_is_no_error(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    smi.set_gpus()
    with serve(tmp_path, smi) as server:
        assert server.get("/gpu/count").json["gpu_count"] == 0
        summary = server.get("/gpu/summary").json
        assert (summary["total_memory_mb"], summary["average_utilization_percent"]) == (0, None)
        assert status(server) == "healthy"


# --- 20: numbers that cannot be ---


def test_impossible_numbers_spoil_their_gpu_only(tmp_path: Path, smi: FakeNvidiaSMI) -> None:
    smi.set_gpus(
        healthy_gpu(0, utilization_gpu="250"),
        healthy_gpu(1, memory_used="99999"),
        healthy_gpu(2, memory_used="-5"),
        healthy_gpu(3, temperature_gpu="NaN", power_draw="inf"),
        healthy_gpu(4),
    )
    with serve(tmp_path, smi) as server:
        rows = server.get("/gpu/summary").json["gpus_summary"]
        assert [row["fault"] is None for row in rows] == [False, False, False, True, True]
        assert (rows[0]["utilization_percent"], rows[1]["memory_usage_percent"], rows[2]["memory_usage_percent"]) == (
            None,
            None,
            None,
        )
        assert rows[4]["memory_usage_percent"] == 2.08
        sick = server.get("/gpu/stats").json["gpus"][3]
        assert (sick["temperature_c"], sick["power"]["draw_w"]) == (None, None)


# --- 29: NVML loses a GPU, the driver, the library ---


@pytest.mark.fault(29)
def test_a_lost_gpu_is_a_row_with_a_reason_and_comes_back(tmp_path: Path, nvml: FakeNVML) -> None:
    with serve(tmp_path, nvml) as server:
        assert [gpu["fault"] for gpu in server.get("/gpu/stats").json["gpus"]] == [None, None]
        nvml.gpus[1].errors = {"handle": GPU_IS_LOST}
        nvml.write()
        eventually(lambda: server.get("/gpu/stats").json["gpus"][1]["fault"])
        well, lost = server.get("/gpu/stats").json["gpus"]
        assert well["fault"] is None
        assert "lost" in lost["fault"]
        assert lost["name"] == "NVIDIA H100 80GB HBM3"
        assert (lost["memory"]["used_mb"], lost["utilization_percent"], lost["temperature_c"]) == (None, None, None)
        assert status(server) == "healthy"
        assert 'gpu_pool_gpu_healthy{gpu="1"' in server.get("/metrics").body.decode()
        nvml.gpus[1].errors = {}
        nvml.write()
        eventually(lambda: server.get("/gpu/stats").json["gpus"][1]["fault"] is None)


@pytest.mark.fault(29)
def test_a_driver_that_goes_and_comes_needs_no_restart(tmp_path: Path, nvml: FakeNVML) -> None:
    with serve(tmp_path, nvml) as server:
        nvml.errors = {"count": DRIVER_NOT_LOADED, "init": DRIVER_NOT_LOADED}
        nvml.write()
        eventually(lambda: status(server) == "degraded")
        assert server.get("/health").json["error_code"] == "driver_not_loaded"
        nvml.errors = {}
        nvml.write()
        eventually(lambda: status(server) == "healthy")


def test_an_nvml_call_that_hangs_costs_one_thread(tmp_path: Path, nvml: FakeNVML) -> None:
    block = tmp_path / "blocked"
    block.touch()
    with serve(tmp_path, nvml) as server:
        assert server.process is not None
        tasks = Path(f"/proc/{server.process.pid}/task")
        threads = len(list(tasks.iterdir()))
        nvml.hangs = {"memory": block}
        nvml.write()
        eventually(lambda: status(server) == "degraded")
        assert server.get("/health").json["error_code"] == "driver_hangs"
        assert server.get("/gpu/stats").status == 200
        assert len(list(tasks.iterdir())) <= threads + 1
        block.unlink()
        eventually(lambda: status(server) == "healthy")
        block.touch()
        eventually(lambda: status(server) == "degraded")
        _, seconds = server.terminate()
        assert seconds < 5


# --- 31: MIG is switched on and off ---


@pytest.mark.fault(31)
def test_mig_devices_appear_and_vanish(tmp_path: Path, nvml: FakeNVML) -> None:
    with serve(tmp_path, nvml) as server:

        def row() -> dict[str, object]:
            found: dict[str, object] = server.get("/gpu/stats").json["gpus"][0]
            return found

        assert (row()["mig_enabled"], row()["mig_devices"]) == (False, [])
        nvml.gpus[0].mig_enabled = True
        nvml.gpus[0].mig_devices = [FakeMIGDevice(uuid="MIG-1", memory_used_mb=100), FakeMIGDevice(uuid="MIG-2")]
        nvml.write()
        eventually(lambda: row()["mig_enabled"])
        devices = row()["mig_devices"]
        assert isinstance(devices, list)
        assert [(device["uuid"], device["name"], device["memory"]["used_mb"]) for device in devices] == [
            ("MIG-1", "3g.40gb", 100),
            ("MIG-2", "3g.40gb", 0),
        ]
        summary = server.get("/gpu/summary").json["gpus_summary"]
        assert len(summary) == 2
        assert (summary[0]["reports_utilization"], summary[0]["utilization_percent"]) == (False, None)
        nvml.gpus[0].mig_enabled, nvml.gpus[0].mig_devices = False, []
        nvml.write()
        eventually(lambda: not row()["mig_enabled"])
        assert row()["mig_devices"] == []


# --- 23: clients that dawdle ---


def connect(server: ServerProcess, first: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(first)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(65536):
            pass
        return True
    return False


def open_sockets(server: ServerProcess) -> int:
    assert server.process is not None
    links = list(Path(f"/proc/{server.process.pid}/fd").iterdir())
    return sum(str(link.readlink()).startswith("socket:") for link in links if link.is_symlink())


HALF_REQUESTS = [
    b"",
    b"GE",
    b"GET /gpu/summary HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    b"POST /gpu/summary HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
    b"GET /gpu/summary HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.fault(23)
def test_connections_that_dawdle_are_closed_and_others_served(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:2", ACCESS_LOG="false") as server:
        begun = time.monotonic()
        waiting = [connect(server, half) for half in HALF_REQUESTS]
        drip = connect(server, b"GET /gpu/summary HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        listener = connect(server, b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        closed_at = None
        while time.monotonic() - begun < 25 and closed_at is None:
            assert server.get("/gpu/summary").status == 200
            try:
                drip.sendall(b"x")
            except OSError:
                closed_at = time.monotonic() - begun
            time.sleep(0.5)
        assert closed_at is not None
        assert 9 < closed_at < 14
        eventually(lambda: all(is_closed(connection) for connection in waiting), 5)
        assert not is_closed(listener), "a stream is no idle connection"
        assert open_sockets(server) < 12
        for connection in (*waiting, drip, listener):
            connection.close()


@pytest.mark.fault(23)
def test_many_idle_connections_leave_room_for_others(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, GPU_BACKEND="simulated:2", ACCESS_LOG="false") as server,
        contextlib.ExitStack() as stack,
    ):
        # Both ends are here: as many as the files this process may open.
        idle = [stack.enter_context(connect(server)) for _ in range(800)]
        begun = time.monotonic()
        assert server.get("/gpu/summary").status == 200
        assert time.monotonic() - begun < 2
        eventually(lambda: all(is_closed(connection) for connection in idle), 20)


def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server, connect(server) as connection:
        begun = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 10_000_000:
                sent += connection.send(b"X-More: " + b"y" * 8000 + b"\r\n")
                time.sleep(0.01)
        assert sent < 1_000_000
        assert time.monotonic() - begun < 5
        assert server.get("/health").status == 200


def test_a_body_that_nobody_wants_is_no_header(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server, connect(server) as connection:
        connection.sendall(b"POST /gpu/stats HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + b"z" * 300_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")


def test_a_stream_behind_another_request_is_not_idle(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server, connect(server) as connection:
        one = b"GET /gpu/count HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(one + one.replace(b"/gpu/count", b"/events"))
        begun = time.monotonic()
        while time.monotonic() - begun < 12:
            assert connection.recv(65536), "closed while it was served"


@pytest.mark.parametrize(
    "rubbish", [b"\x00" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"HELLO WORLD\r\n\r\n"]
)
def test_what_is_no_http_is_refused(tmp_path: Path, rubbish: bytes) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server:
        with connect(server, rubbish) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        assert server.get("/health").status == 200
        assert "Traceback" not in server.log


def test_a_listener_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    """The server's patience is 30 s; a listener that does not read holds at most its buffers until then."""
    settings = {"GPU_BACKEND": "simulated:500", "REFRESH_INTERVAL": "0.05", "ACCESS_LOG": "false"}
    with ServerProcess(tmp_path, **settings) as server:
        time.sleep(0.5)  # the connection that asked for health is closed by then
        before = open_sockets(server)
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: open_sockets(server) > before)
        begun = time.monotonic()
        eventually(lambda: open_sockets(server) == before, 45)
        assert time.monotonic() - begun > 20, "it was given time"
        deaf.close()


# --- probes ---


def test_a_server_is_ready_when_it_can_read_and_write(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", REFRESH_INTERVAL="0.2") as server:
        eventually(lambda: server.get("/readyz").status == 200)
        assert server.get("/readyz").json == {"status": "ready"}
        assert server.get("/livez").json == {"status": "alive"}


def test_a_server_without_readings_is_alive_but_not_ready(tmp_path: Path, nvml: FakeNVML) -> None:
    nvml.errors = {"count": DRIVER_NOT_LOADED, "init": DRIVER_NOT_LOADED}
    nvml.write()
    with serve(tmp_path, nvml) as server:
        eventually(lambda: server.get("/readyz").json.get("error") == "driver_not_loaded")
        assert (server.get("/readyz").status, server.get("/livez").status) == (503, 200)
        assert "driver" in server.get("/readyz").json["detail"]
        nvml.errors = {}
        nvml.write()
        eventually(lambda: server.get("/readyz").status == 200)


def test_a_server_with_a_damaged_ledger_is_alive_but_not_ready(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", GPU_POOL_STATE_DIR=str(state)):
        (ledger,) = state.rglob("*.db")
    for path in state.rglob("*.db*"):
        path.unlink()
    ledger.write_bytes(b"no ledger" * 1000)
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", GPU_POOL_STATE_DIR=str(state)) as server:
        eventually(lambda: server.get("/readyz").json.get("error") == "ledger_unavailable")
        reply = server.get("/readyz")
        assert (reply.status, server.get("/livez").status, server.get("/gpu/count").status) == (503, 200, 200)
        assert ledger.name in reply.json["detail"]
