"""The server as a real process: every documented route and field, the filter, workers, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess
from tests.waiting import eventually

GPU_ROUTES = ("/gpu/stats", "/gpu/count", "/gpu/summary")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> FakeNvidiaSMI:
    """Two GPUs in use and one whose sensors fail."""
    fake = FakeNvidiaSMI(tmp_path_factory.mktemp("host"))
    fake.set_gpus(
        healthy_gpu(0, memory_used="6144", utilization_gpu="15"),
        healthy_gpu(1, memory_used="12288", utilization_gpu="20"),
        healthy_gpu(
            2,
            memory_used="[N/A]",
            utilization_gpu="[Not Supported]",
            temperature_gpu="[N/A]",
            power_draw="[Unknown Error]",
            power_limit="[N/A]",
        ),
    )
    return fake


@pytest.fixture(scope="module")
def server(host: FakeNvidiaSMI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        folder, GPU_BACKEND="nvidia-smi", REFRESH_INTERVAL="0.2", MAX_HISTORY="5", **host.env
    ) as started:
        yield started


def is_local_and_naive(text: str) -> bool:
    taken = datetime.fromisoformat(text)
    return taken.tzinfo is None and abs((datetime.now() - taken).total_seconds()) < 60


# --- the documented routes ---


def test_home(server: ServerProcess) -> None:
    home = server.get("/").json
    assert (home["message"], home["version"]) == ("GPU Statistics Server", "1.0.0")
    documented = {
        "/": "This help message",
        "/gpu/stats": "Get detailed GPU statistics",
        "/gpu/count": "Get number of installed GPUs",
        "/gpu/summary": "Get summary of GPU usage",
        "/health": "Health check endpoint",
        "/config": "Get server configuration",
        "/docs": "Swagger API documentation",
        "/redoc": "ReDoc API documentation",
    }
    assert home["endpoints"].items() >= documented.items()
    assert home["features"] == ["history", "metrics", "events", "dashboard", "inner_leases", "leases"]
    for path in home["endpoints"].keys() - {"/events", "/explain"}:
        assert server.get(path).status == 200, path
    assert server.get("/explain").status == 405, "it is asked by POST"


def test_config(server: ServerProcess) -> None:
    assert server.get("/config").json == {
        "server": {
            "host": "127.0.0.1",
            "port": server.port,
            "reload": False,
            "log_level": "info",
            "access_log": True,
            "workers": 1,
        },
        "api": {
            "title": "GPU Statistics Server",
            "version": "1.0.0",
            "docs_url": "/docs",
            "redoc_url": "/redoc",
            "enable_cors": True,
            "api_prefix": "",
        },
        "monitoring": {"refresh_interval": 0.2, "max_history": 5, "gpu_backend": "nvidia-smi"},
        "gpu_filtering": {
            "cuda_visible_devices": None,
            "visible_gpu_ids": [0, 1, 2],
            "filtering_active": False,
            "total_system_gpus": 3,
            "visible_gpu_count": 3,
        },
        "leases": {
            "open_to": ["loopback"],
            "idle_after": 1800.0,
            "most_waiting": 1000,
            "policy": None,
            "policy_problem": None,
            "most_leases_of_a_caller": 2000,
            "most_leases": 10_000,
        },
    }


def test_stats(server: ServerProcess) -> None:
    stats = server.get("/gpu/stats").json
    assert (stats["gpu_count"], stats["backend"], stats["driver_version"]) == (3, "nvidia-smi", "570.10.20")
    assert is_local_and_naive(stats["timestamp"])
    assert 0 <= stats["sample_age_seconds"] < 15
    assert stats["gpus"][0] == {
        "gpu_id": 0,
        "name": "NVIDIA Test 24GB",
        "memory": {"total_mb": 24576, "used_mb": 6144, "free_mb": 23800, "usage_percent": 25.0},
        "utilization_percent": 15,
        "temperature_c": 35,
        "power": {"draw_w": 60.25, "limit_w": 350.0},
        "uuid": "GPU-00000000-1111-2222-3333-444444444444",
        "pci_bus_id": "00000000:01:00.0",
        "fault": None,
        "reports_utilization": True,
        "ecc_uncorrected_errors": None,
        "recovery_action": None,
        "processes": [],
        "graphics_processes": None,
        "unified_memory": False,
        "mig_enabled": False,
        "mig_devices": [],
        "leases": [],
        "obstacles": [],
        "idle_obstacles": ["6.0 GiB in use by no visible process; 1.2 GiB are allowed"],
    }


def test_what_cannot_be_read_is_null_and_never_zero(server: ServerProcess) -> None:
    row = server.get("/gpu/stats").json["gpus"][2]
    assert row["memory"] == {"total_mb": 24576, "used_mb": None, "free_mb": 23800, "usage_percent": None}
    assert (row["utilization_percent"], row["temperature_c"]) == (None, None)
    assert row["power"] == {"draw_w": None, "limit_w": None}


def test_count(server: ServerProcess) -> None:
    count = server.get("/gpu/count").json
    assert count.keys() == {"gpu_count", "timestamp", "sample_age_seconds"}
    assert count["gpu_count"] == 3


def test_summary_sums_and_averages_what_is_known(server: ServerProcess) -> None:
    summary = server.get("/gpu/summary").json
    rows = summary.pop("gpus_summary")
    assert is_local_and_naive(summary.pop("timestamp"))
    assert summary.pop("sample_age_seconds") < 15
    assert summary == {
        "gpu_count": 3,
        "total_memory_mb": 3 * 24576,
        "total_used_memory_mb": 6144 + 12288,
        "total_memory_usage_percent": 37.5,
        "average_utilization_percent": 17.5,
    }
    assert rows[1] == {
        "gpu_id": 1,
        "name": "NVIDIA Test 24GB",
        "memory_usage_percent": 50.0,
        "utilization_percent": 20,
        "uuid": "GPU-00000001-1111-2222-3333-444444444444",
        "memory_total_mb": 24576,
        "memory_used_mb": 12288,
        "fault": None,
        "reports_utilization": True,
        "process_count": 0,
        "leased": False,
        "unified_memory": False,
    }
    assert (rows[2]["memory_usage_percent"], rows[2]["utilization_percent"]) == (None, None)


def test_health(server: ServerProcess) -> None:
    health = server.get("/health").json
    assert is_local_and_naive(health.pop("timestamp"))
    assert health.pop("sample_age_seconds") < 15
    assert health == {
        "status": "healthy",
        "nvidia_smi_available": True,
        "error": None,
        "error_code": None,
        "gpu_count": 3,
        "backend": "nvidia-smi",
        "driver_version": "570.10.20",
    }


def test_history_is_bounded_oldest_first_and_can_be_narrowed(server: ServerProcess) -> None:
    eventually(lambda: len(server.get("/gpu/history").json["gpus"][0]["readings"]) == 5)
    history = server.get("/gpu/history").json
    assert history["max_history"] == 5
    assert [gpu["gpu_id"] for gpu in history["gpus"]] == [0, 1, 2]
    times = [reading["timestamp"] for reading in history["gpus"][0]["readings"]]
    assert times == sorted(set(times))
    reading = history["gpus"][1]["readings"][-1]
    del reading["timestamp"]
    assert reading == {
        "memory_used_mb": 12288,
        "memory_usage_percent": 50.0,
        "utilization_percent": 20,
        "temperature_c": 35,
        "power_draw_w": 60.25,
        "fault": None,
    }
    narrow = server.get("/gpu/history?gpu_id=2&limit=2").json["gpus"]
    assert [(gpu["gpu_id"], len(gpu["readings"])) for gpu in narrow] == [(2, 2)]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/gpu/history?limit=0", 422),
        ("/gpu/history?limit=x", 422),
        ("/gpu/history?limit=99999999999999999999", 422),
        ("/gpu/history?gpu_id=-1", 422),
        ("/gpu/history?gpu_id=1e3", 422),
        ("/gpu/history?gpu_id=17", 404),
        ("/gpu", 404),
        ("/gpu/stats/0", 404),
        ("/%00", 404),
        ("/docs/assets/../../settings.py", 404),
        ("/docs/assets/%2e%2e/%2e%2e/settings.py", 404),
    ],
)
def test_rubbish_gets_a_reason(server: ServerProcess, path: str, status: int) -> None:
    reply = server.get(path)
    assert reply.status == status
    assert reply.json["detail"]


def test_only_reading_is_offered(server: ServerProcess) -> None:
    for path in GPU_ROUTES:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert server.get(path, method=method).status == 405
        reply = server.get(path, method="HEAD")
        assert (reply.status, reply.body) == (200, b"")


def test_metrics_are_in_base_units_and_leave_out_what_is_unknown(server: ServerProcess) -> None:
    lines = server.get("/metrics").body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{gpu="1",uuid="GPU-00000001-1111-2222-3333-444444444444"}'
    assert float(values[f"gpu_pool_gpu_memory_used_bytes{labels}"]) == 12288 * 2**20
    assert float(values[f"gpu_pool_gpu_memory_total_bytes{labels}"]) == 24576 * 2**20
    assert float(values[f"gpu_pool_gpu_utilization_ratio{labels}"]) == 0.2
    assert float(values[f"gpu_pool_gpu_temperature_celsius{labels}"]) == 35
    assert float(values[f"gpu_pool_gpu_power_watts{labels}"]) == 60.25
    assert float(values[f"gpu_pool_gpu_healthy{labels}"]) == 1
    assert 0 <= float(values["gpu_pool_sample_age_seconds"]) < 15
    assert float(values["gpu_pool_samples_total"]) >= 1
    assert float(values["gpu_pool_sample_failures_total"]) == 0
    unknown = [name for name in values if 'gpu="2"' in name]
    assert {re.sub(r"\{.*", "", name) for name in unknown} == {
        "gpu_pool_gpu_info",
        "gpu_pool_gpu_memory_total_bytes",
        "gpu_pool_gpu_memory_free_bytes",
        "gpu_pool_gpu_processes",
        "gpu_pool_gpu_healthy",
        "gpu_pool_gpu_leases",
        "gpu_pool_gpu_promised_bytes",
        "gpu_pool_gpu_lease_used_bytes",
    }
    assert "openmetrics-text" in server.get("/metrics", Accept="application/openmetrics-text").headers["content-type"]


def test_any_page_may_read_and_none_may_send_credentials(server: ServerProcess) -> None:
    for path in (*GPU_ROUTES, "/health", "/config"):
        headers = server.get(path, Origin="http://elsewhere.example").headers
        assert headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in headers
    preflight = server.get(
        "/gpu/stats", method="OPTIONS", Origin="http://x.example", **{"Access-Control-Request-Method": "DELETE"}
    )
    assert preflight.status == 400
    assert "DELETE" not in preflight.headers["access-control-allow-methods"]


def test_the_start_is_logged(server: ServerProcess) -> None:
    assert "backend nvidia-smi, driver 570.10.20, GPUs found: 3; shown: 3 (3 x NVIDIA Test 24GB)" in server.log
    assert f"GPU statistics on http://127.0.0.1:{server.port}/" in server.log


# --- settings ---


def test_prefix_title_docs_and_cors_as_configured(tmp_path: Path) -> None:
    settings = {
        "API_PREFIX": "/api/v1",
        "TITLE": "Mine <&>",
        "VERSION": "9.9",
        "DOCS_URL": "/swagger",
        "REDOC_URL": "/in/redoc",
        "ENABLE_CORS": "false",
        "GPU_BACKEND": "simulated:2",
        "LOG_FORMAT": "json",
        "ACCESS_LOG": "false",
    }
    with ServerProcess(tmp_path, **settings) as server:
        home = server.get("/").json
        assert (home["message"], home["version"]) == ("Mine <&>", "9.9")
        assert {"/api/v1/gpu/stats", "/swagger", "/in/redoc"} <= home["endpoints"].keys()
        reply = server.get("/gpu/summary", Origin="http://elsewhere.example")
        assert reply.json["gpu_count"] == 2
        assert "access-control-allow-origin" not in reply.headers
        server.prefix = ""
        assert server.get("/gpu/summary").status == 404
        for page in ("/swagger", "/in/redoc"):
            text = server.get(page).body.decode()
            assert "Mine &lt;&amp;&gt;" in text
            assert server.get("/api/v1/openapi.json").json["info"]["title"] == "Mine <&>"
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
        assert "uvicorn.access" not in {line["logger"] for line in lines}


def test_a_dotenv_file_in_the_working_directory_counts(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TITLE=From the file\nGPU_BACKEND=simulated:3\nCUDA_VISIBLE_DEVICES=0,2\n")
    with ServerProcess(tmp_path) as server:
        assert server.get("/").json["message"] == "From the file"
        assert server.get("/config").json["gpu_filtering"]["visible_gpu_ids"] == [0, 2]


def test_bad_settings_are_named_and_the_server_starts(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", REFRESH_INTERVAL="often", MAX_HISTORY="-3") as server:
        monitoring = server.get("/config").json["monitoring"]
        assert (monitoring["refresh_interval"], monitoring["max_history"]) == (1.0, 100)
        assert "REFRESH_INTERVAL must be a number from 0.05 to 3600, not 'often'" in server.log
        assert "MAX_HISTORY must be a whole number from 1 to 10000, not '-3'" in server.log


def test_nothing_secret_is_ever_shown(tmp_path: Path) -> None:
    secrets = {
        "GPU_POOL_API_KEYS": "hunter2-key,hunter2-key-that-is-long-enough",
        "GPU_POOL_ADMIN_KEYS": "hunter2-admin",
        "AWS_SECRET_ACCESS_KEY": "hunter2-aws",
        "DATABASE_URL": "postgres://u:hunter2@db",
    }
    (tmp_path / ".env").write_text("FROM_FILE=hunter2-file\n")
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:2", LOG_LEVEL="debug", **secrets) as server:
        paths = [
            "/",
            "/config",
            *GPU_ROUTES,
            "/gpu/history",
            "/health",
            "/metrics",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/x",
        ]
        for path in paths:
            reply = server.get(path)
            assert b"hunter2" not in reply.body
            assert "hunter2" not in str(reply.headers)
        assert "hunter2" not in server.log


# --- the filter ---


@pytest.mark.parametrize(
    ("value", "shown", "active"),
    [("0,2", [0, 2], True), ("1", [1], True), ("", [], True), ("-1", [], True), ("7,9", [0, 1, 2, 3], False)],
)
def test_the_filter_is_the_same_in_every_route(tmp_path: Path, value: str, shown: list[int], active: bool) -> None:
    with ServerProcess(
        tmp_path, GPU_BACKEND="simulated:4", CUDA_VISIBLE_DEVICES=value, REFRESH_INTERVAL="0.1", LOG_LEVEL="debug"
    ) as server:
        time.sleep(0.5)
        assert [gpu["gpu_id"] for gpu in server.get("/gpu/stats").json["gpus"]] == shown
        summary = server.get("/gpu/summary").json
        assert [gpu["gpu_id"] for gpu in summary["gpus_summary"]] == shown
        assert summary["total_memory_mb"] == 24576 * len(shown)
        assert {server.get(path).json["gpu_count"] for path in GPU_ROUTES} == {len(shown)}
        assert [gpu["gpu_id"] for gpu in server.get("/gpu/history").json["gpus"]] == shown
        metrics = server.get("/metrics").body.decode()
        assert re.findall(r'gpu_pool_gpu_healthy\{gpu="(\d)"', metrics) == [str(index) for index in shown]
        assert server.get("/config").json["gpu_filtering"] == {
            "cuda_visible_devices": value,
            "visible_gpu_ids": shown,
            "filtering_active": active,
            "total_system_gpus": 4,
            "visible_gpu_count": len(shown),
        }
        assert server.log.count("GPU 9 in CUDA_VISIBLE_DEVICES not found on system") == ("9" in value)
        assert server.log.count(f"CUDA_VISIBLE_DEVICES={value!r} reads as") == 1


# --- ways of starting ---


def test_started_by_uvicorn(tmp_path: Path) -> None:
    arguments = ["-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--host", "127.0.0.1", "--port", "{port}"]
    with ServerProcess(tmp_path, arguments=arguments, GPU_BACKEND="simulated:2") as server:
        assert server.get("/gpu/count").json["gpu_count"] == 2
        assert "backend simulated" in server.log


def test_started_from_python(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.write_text(
        "import os\nimport uvicorn\nfrom gpu_worker_pool.gpu_server import app\n"
        "uvicorn.run(app, host='127.0.0.1', port=int(os.environ['PORT']))\n"
    )
    with ServerProcess(tmp_path, arguments=[str(program)], GPU_BACKEND="simulated:2") as server:
        assert server.get("/gpu/count").json["gpu_count"] == 2


def test_started_as_documented_it_reloads_and_stops_whole(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:2", RELOAD="true") as server:
        assert server.get("/config").json["server"]["reload"] is True
        status, seconds = server.terminate()
        assert seconds < 5
        assert status in (0, -signal.SIGTERM)
        with pytest.raises(OSError, match="refused"):
            server.get("/health")


def test_four_workers_give_the_same_answers(tmp_path: Path) -> None:
    """Asked through many connections, so that every worker is asked; history and metrics included."""
    settings = {"GPU_BACKEND": "simulated:3,seed=1", "WORKERS": "4", "REFRESH_INTERVAL": "1", "ACCESS_LOG": "false"}
    with ServerProcess(tmp_path, **settings) as server:
        eventually(lambda: server.log.count("Application startup complete") == 4)
        time.sleep(3)

        def look() -> bool:
            def without_age(path: str) -> str:
                text = server.get(path).body.decode()
                text = re.sub(r"(?m)^process_.*\n", "", text)  # of the worker that answers
                return re.sub(r'"sample_age_seconds":[\d.]+|sample_age_seconds [\d.e-]+|"timestamp":"[^"]*"', "", text)

            for path in ("/gpu/stats", "/gpu/summary", "/gpu/history", "/metrics", "/config", "/health"):
                answers = {without_age(path) for _ in range(24)}
                assert len(answers) == 1, path
            return True

        # A sample may come in between two of the answers.
        eventually(look, 30)
        assert len(server.get("/gpu/history").json["gpus"][0]["readings"]) >= 3
        assert server.log.count("backend simulated") == 4
        _, seconds = server.terminate()
        assert seconds < 5


# --- streams ---


def open_stream(server: ServerProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
    return connection


def read_events(connection: socket.socket, count: int, name: str = "snapshot") -> list[Any]:
    """The data of the first so many of that name."""
    received = b""
    pattern = re.compile(rb"event: %b\ndata: (.*)\n\n" % name.encode())
    while len(found := pattern.findall(received)) < count:
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    return [json.loads(data) for data in found]


def test_a_stream_tells_every_sample_once(server: ServerProcess) -> None:
    with open_stream(server) as connection:
        times = [data["timestamp"] for data in read_events(connection, 5)]
    assert times == sorted(set(times))
    readings = server.get("/gpu/history").json["gpus"][0]["readings"]
    told = {reading["timestamp"] for reading in readings}
    assert set(times[-2:]) <= told


def test_a_stream_begins_with_health_and_the_newest_snapshot(server: ServerProcess) -> None:
    with open_stream(server) as connection:
        assert read_events(connection, 1, "health") == [{"status": "healthy", "error": None, "error_code": None}]
    with open_stream(server) as connection:
        assert read_events(connection, 1)[0].keys() == server.get("/gpu/stats").json.keys()


def test_asking_for_the_head_of_a_stream_ends(server: ServerProcess) -> None:
    reply = server.get("/events", method="HEAD")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_a_compressed_stream_tells_the_same_as_soon_and_ends_as_it_should(tmp_path: Path) -> None:
    """Read by a client that unpacks by itself, and would say that the end is wrong."""
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:8") as server:
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/events") as stream:
            assert stream.headers["content-encoding"] == "gzip"
            assert "accept-encoding" in stream.headers["vary"]
            ages = []
            async for line in stream.content:
                if line.startswith(b"data: ") and b"sample_age_seconds" in line:
                    data = json.loads(line.removeprefix(b"data: "))
                    ages.append(time.time() - datetime.fromisoformat(data["timestamp"]).timestamp())
                    if len(ages) == 4:
                        break
            assert min(ages) < 1, "it is not kept back"
            await asyncio.to_thread(server.terminate)
            await stream.content.read()
        assert "Traceback" not in server.log


def test_the_end_comes_within_five_seconds_with_open_streams(tmp_path: Path) -> None:
    for arguments in ([], ["-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--port", "{port}"]):
        with ServerProcess(tmp_path, arguments=arguments, GPU_BACKEND="simulated:1") as server:
            streams = [open_stream(server) for _ in range(20)]
            for stream in streams:
                read_events(stream, 1)
            _, seconds = server.terminate()
            assert seconds < 5
            for stream in streams:
                rest = b""
                while chunk := stream.recv(65536):
                    rest += chunk
                assert rest.endswith(b"0\r\n\r\n"), "the stream was cut off instead of ended"
                stream.close()
            assert "Traceback" not in server.log


def test_a_stop_says_nothing_of_those_that_do_not_read_or_send(tmp_path: Path) -> None:
    """Each would be a traceback of 40 lines."""
    settings = {"GPU_BACKEND": "simulated:500", "REFRESH_INTERVAL": "0.05", "ACCESS_LOG": "false"}
    with ServerProcess(tmp_path, **settings) as server, contextlib.ExitStack() as stack:
        begun = [b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n"] * 5
        begun += [
            b"POST /explain HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
            b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 16,
        ]
        for request in begun:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request)
        time.sleep(2.5)  # until the buffers of the streams are full, which nothing shows
        status, seconds = server.terminate()
        assert seconds < 5
        assert status == -signal.SIGTERM
        assert "Traceback" not in server.log
        assert "Exception" not in server.log


def test_a_listener_that_leaves_is_forgotten_and_one_that_does_not_read_delays_nobody(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:64", REFRESH_INTERVAL="0.05") as server:
        deaf = open_stream(server)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            open_stream(server).close()
        begun = time.monotonic()
        with open_stream(server) as listener:
            times = [data["timestamp"] for data in read_events(listener, 40)]
        assert times == sorted(set(times))
        assert time.monotonic() - begun < 20
        deaf.close()
        assert server.get("/health").json["status"] == "healthy"
        assert "Traceback" not in server.log
