"""`client.run_in_gpu_process`, and executors whose leases a server grants."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool import BrokenGPUWorkerError, GPUProcessPoolExecutor, GPUWorkerPoolClient, ServiceUnavailableError
from gpu_worker_pool.errors import NotStartedError
from tests.leasing import leases
from tests.server_process import ServerProcess
from tests.waiting import eventually
from tests.workers import tasks
from tests.workers.conftest import Host


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        folder,
        GPU_BACKEND="simulated:2",
        REFRESH_INTERVAL="0.2",
        ACCESS_LOG="false",
        GPU_POOL_SOCKET=str(folder / "server.sock"),
    ) as running:
        yield running


@pytest.fixture
def server(running_server: ServerProcess) -> ServerProcess:
    """Once what an earlier test killed there has left quarantine."""
    eventually(lambda: leases(running_server) == [])
    return running_server


# --- the client ---


async def test_an_async_client_runs_functions_in_processes_with_a_gpu(host: Host) -> None:
    async with GPUWorkerPoolClient("local://") as client:
        found = await asyncio.gather(*(client.run_in_gpu_process(tasks.sleep_and_name, 0.3) for _ in range(3)))
        assert len({pid for pid, _ in found}) == len({gpu for _, gpu in found}) > 1
        _, gpus = await client.run_in_gpu_process(tasks.whoami, count=2, max_workers=1)
        assert len(gpus.split(",")) == 2
        with pytest.raises(ValueError, match="no"):
            await client.run_in_gpu_process(tasks.fail, "no")
        with pytest.raises(BrokenGPUWorkerError):
            await client.run_in_gpu_process(tasks.die)
        with pytest.raises(ValueError, match="count must be a whole number"):
            await client.run_in_gpu_process(tasks.whoami, count=0)
    await asyncio.to_thread(eventually, host.is_given_back)
    with pytest.raises(NotStartedError):
        await client.run_in_gpu_process(tasks.whoami)


async def test_a_call_after_one_that_no_gpu_could_serve_tries_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with GPUWorkerPoolClient("local://") as client:
        with monkeypatch.context() as without:
            without.setenv("GPU_BACKEND", "simulated:0")
            with pytest.raises(ServiceUnavailableError, match="this host has no GPU"):
                await client.run_in_gpu_process(tasks.square, 3)
        assert await client.run_in_gpu_process(tasks.square, 3) == 9


async def test_a_client_that_is_stopped_cancels_calls_that_wait(host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with GPUWorkerPoolClient("local://") as client:
        running = asyncio.create_task(client.run_in_gpu_process(tasks.wait_for, str(go), max_workers=1))
        await asyncio.to_thread(eventually, lambda: len(list(tmp_path.iterdir())) == 1)
        waiting = asyncio.create_task(client.run_in_gpu_process(tasks.square, 3, max_workers=1))
        await asyncio.sleep(0)
        go.touch()
        stopping = asyncio.create_task(client.stop())
        assert await running
        await stopping
        assert await asyncio.wait([waiting])
        assert waiting.cancelled() or waiting.result() == 9


async def test_its_own_settings_count_and_not_those_of_the_process(host: Host, server: ServerProcess) -> None:
    async with GPUWorkerPoolClient(server.url, environ={}) as client:
        environment = await client.run_in_gpu_process(tasks.initial_environment)
        assert environment["GPU_POOL_LEASE_ENDPOINT"] == server.url
        assert [lease["lease_id"] for lease in leases(server)] == [environment["GPU_POOL_LEASE_ID"]]
    await asyncio.to_thread(eventually, lambda: leases(server) == [])
    assert await asyncio.to_thread(host.is_clean)


# --- a server ---


@pytest.fixture(params=["over TCP", "over its socket"])
def of_the_server(
    request: pytest.FixtureRequest, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> ServerProcess:
    """The environment says how it is reached."""
    for name in ("GPU_BACKEND", "GPU_POOL_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "over TCP":
        monkeypatch.setenv("GPU_SERVICE_ENDPOINT", server.url)
    else:
        monkeypatch.setenv("GPU_POOL_SOCKET", server.environment["GPU_POOL_SOCKET"])
    return server


def test_a_server_knows_the_worker_as_the_holder(
    of_the_server: ServerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    with GPUProcessPoolExecutor(1, memory_mb=12288, share=True, lease_ttl=10.0) as pool:
        pid, _ = pool.submit(tasks.whoami).result()
        (lease,) = leases(of_the_server)
        assert lease["holder"]["pid"] == pid
        assert pool.submit(tasks.initial_environment).result()["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
        dying = pool.submit(tasks.die)
        with pytest.raises(BrokenGPUWorkerError, match="SIGKILL"):
            dying.result()
        assert pool.submit(tasks.square, 3).result() == 9
    eventually(lambda: leases(of_the_server) == [])
    assert capfd.readouterr().err == "", "nothing is printed to the terminal of the program"


def test_when_the_lease_process_is_killed_its_workers_end_before_their_leases(
    of_the_server: ServerProcess,
) -> None:
    from gpu_worker_pool.hardware.proc import process_stat

    with GPUProcessPoolExecutor(1, lease_ttl=2.0) as pool:
        pid, _ = pool.submit(tasks.whoami).result()
        sleeping = pool.submit(tasks.sleep, 60.0)
        eventually(sleeping.running)
        worker = process_stat(pid)
        assert worker is not None
        os.kill(worker.parent, signal.SIGKILL)
        with pytest.raises(BrokenGPUWorkerError, match="the process that held its lease has ended"):
            sleeping.result()
        assert pool.submit(tasks.square, 3).result() == 9, "another lease process has taken its place"
    eventually(lambda: leases(of_the_server) == [])


def test_another_host_is_refused_with_what_to_do(host: Host) -> None:
    with GPUProcessPoolExecutor(service_endpoints="http://192.0.2.7:8000") as pool:
        future = pool.submit(tasks.square, 1)
        with pytest.raises(ValueError, match="is another host, and a worker process runs where its GPU is"):
            future.result()


def test_other_hosts_are_left_out_where_this_one_is_named_too(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with GPUProcessPoolExecutor(1, service_endpoints=["http://192.0.2.7:8000", server.url]) as pool:
        assert pool.submit(tasks.initial_environment).result()["GPU_POOL_LEASE_ENDPOINT"] == server.url
    assert "http://192.0.2.7:8000 is another host: not asked for GPUs of worker processes" in caplog.text
    eventually(lambda: leases(server) == [])


def test_a_server_that_never_answers_is_a_timeout_with_the_reason(host: Host) -> None:
    from tests.server_process import free_port

    with GPUProcessPoolExecutor(service_endpoints=f"http://127.0.0.1:{free_port()}", gpu_timeout=0.1) as pool:
        future = pool.submit(tasks.square, 1)
        with pytest.raises((TimeoutError, ServiceUnavailableError), match=r"no GPU became free .*127\.0\.0\.1"):
            future.result()
