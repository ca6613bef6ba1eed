"""The client while its servers are killed, paused, restarted or lie: the others go on, and everything comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.server_process import ServerProcess, free_port

from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient, ServiceUnavailableError, WorkerTimeoutError
from gpu_worker_pool.client.monitor import RETURN_SECONDS
from gpu_worker_pool.errors import WrongThreadError


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    started = [
        ServerProcess(tmp_path / str(number), GPU_BACKEND="simulated:4", REFRESH_INTERVAL="0.2", ACCESS_LOG="false")
        for number in range(3)
    ]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


def client_of(servers: list[ServerProcess], **settings: Any) -> GPUWorkerPoolClient:
    named = [f"{name}={server.url}" for name, server in zip("abc", servers, strict=False)]
    settings = {"polling_interval": 0.3, "endpoint_max_retries": 1, "endpoint_timeout": 1.0, **settings}
    return GPUWorkerPoolClient(service_endpoints=named, endpoint_health_check_interval=1, environ={}, **settings)


async def until(look: Callable[[], object], within_seconds: float = 20.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not look():
            await asyncio.sleep(0.02)


def healthy(client: GPUWorkerPoolClient) -> list[str]:
    found: list[str] = client.get_health()["healthy_endpoints"]
    return found


@contextlib.asynccontextmanager
async def load(client: GPUWorkerPoolClient, workers: int = 30) -> AsyncIterator[Counter[str]]:
    """Workers that come and go all the time; what happened to them, and whether two ever had the same GPU."""
    seen: Counter[str] = Counter()
    held: Counter[Any] = Counter()

    async def work() -> None:
        while True:
            try:
                assignment = await client.request_gpu(timeout=60)
            except WorkerTimeoutError:
                seen["timed out"] += 1
                continue
            held[assignment.gpu_id] += 1
            seen["held twice"] += held[assignment.gpu_id] > 1
            seen[str(assignment.gpu_id).split(":")[0]] += 1
            try:
                await asyncio.sleep(0.02)
            finally:
                held[assignment.gpu_id] -= 1
                await client.release_gpu(assignment)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}


@pytest.mark.fault(14)
@pytest.mark.parametrize("coordination", ["local", "leases"])
@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_one_endpoint_fails_and_the_others_go_on(
    servers: list[ServerProcess], how: str, coordination: str
) -> None:
    async with client_of(servers, coordination=coordination, lease_ttl=30) as client:
        kept = await client.request_gpu(only=["b:0"])
        async with load(client) as seen:
            await until(lambda: all(seen[name] > 5 for name in "abc"))
            process = servers[1].process
            assert process is not None
            os.killpg(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            await until(lambda: healthy(client) == ["a", "c"])
            before = seen.copy()
            assert client.get_pool_status().total_gpus == 8
            await until(lambda: seen["a"] > before["a"] + 20 and seen["c"] > before["c"] + 20)
            assert seen["b"] == before["b"]
            status = client.get_error_recovery_status()
            assert status["degradation_manager"]["degraded_endpoints"] == ["b"]
            assert status["circuit_breaker_stats"]["b"]["state"] in ("open", "half_open")
            assert "b:0" in client.get_pool_status().gpu_assignments, "what was assigned there is kept"
            if how == "killed":
                process.wait()
                await asyncio.to_thread(servers[1].start)
            else:
                os.killpg(process.pid, signal.SIGCONT)
            await until(lambda: healthy(client) == ["a", "b", "c"])
            await until(lambda: seen["b"] > before["b"])
            assert client.get_error_recovery_status()["circuit_breaker_stats"]["b"]["state"] == "closed"
        assert seen["held twice"] == 0
        assert seen["timed out"] == 0
        await client.release_gpu(kept)
        await until(lambda: client.get_pool_status().available_gpus == 12)


async def test_an_endpoint_comes_back_gradually(servers: list[ServerProcess]) -> None:
    """Where this process assigns; a server that gives leases says itself what it can give."""
    async with client_of(servers[:2], coordination="local") as client:
        servers[1].kill()
        await until(lambda: healthy(client) == ["a"])
        held = [await client.request_gpu() for _ in range(4)]
        waiting = [asyncio.create_task(client.request_gpu()) for _ in range(4)]
        await asyncio.to_thread(servers[1].start)
        await until(lambda: len(healthy(client)) == 2)
        returned = time.monotonic()
        served_after = []
        for task in asyncio.as_completed(waiting):
            held.append(await task)
            served_after.append(time.monotonic() - returned)
        assert served_after[0] < 2, "one at once"
        assert served_after[1] > 2, "but not all"
        assert served_after[-1] < RETURN_SECONDS + 4


async def test_all_fail_and_requests_wait_until_one_returns(servers: list[ServerProcess]) -> None:
    async with client_of(servers[:2]) as client:
        for server in servers[:2]:
            server.kill()
        await until(lambda: healthy(client) == [])
        assert client.get_health()["status"] == "unhealthy"
        assert client.get_pool_status().total_gpus == 0
        waiting = asyncio.create_task(client.request_gpu())
        retried = asyncio.create_task(client.queue_request_for_retry(lambda: client.request_gpu(timeout=30)))
        await asyncio.sleep(0.2)
        assert client.get_error_recovery_status()["recovery_orchestrator"]["queued_requests"] == 1
        with pytest.raises(WorkerTimeoutError) as caught:
            await client.request_gpu(timeout=0.1)
        assert isinstance(caught.value, ServiceUnavailableError)
        for part in (
            "a (http://127.0.0.1",
            "b (http://127.0.0.1",
            "connection refused",
        ):
            assert part in str(caught.value)
        assert re.search(r"which waited [0-9.]+ s for one GPU", str(caught.value))
        await asyncio.to_thread(servers[1].start)
        assert await client.trigger_endpoint_recovery("b")
        for task in (waiting, retried):
            assert str((await asyncio.wait_for(task, 30)).gpu_id).startswith("b:")


async def test_a_server_that_is_down_at_the_start_is_waited_for(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, GPU_BACKEND="simulated:1")
    settings = {"polling_interval": 0.2, "endpoint_max_retries": 0, "endpoint_health_check_interval": 1}
    async with GPUWorkerPoolClient(service_endpoint=server.url, environ={}, **settings) as client:
        assert client.get_pool_status().total_gpus == 0
        waiting = asyncio.create_task(client.request_gpu())
        try:
            await asyncio.to_thread(server.start)
            assert (await asyncio.wait_for(waiting, 20)).gpu_id == 0
        finally:
            server.kill()


async def test_stopping_with_silent_endpoints_is_quick(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = GPUWorkerPoolClient(service_endpoints=f"http://127.0.0.1:{port}", endpoint_timeout=60, environ={})
    begun = time.monotonic()
    await client.start()
    assert time.monotonic() - begun < 4, "a start does not wait for somebody silent"
    waiting = asyncio.create_task(client.request_gpu())
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    await client.stop()
    assert time.monotonic() - begun < 2
    await asyncio.gather(waiting, return_exceptions=True)
    server.close()
    await server.wait_closed()


# --- servers that lie: faults 19 to 22, as far as the pool sees them ---


class Liar:
    """A small server that answers /gpu/summary with whatever it is told."""

    def __init__(self) -> None:
        self.body: Any = {}
        self.text: str | None = None
        self.status = 200
        self.is_silent = False
        self.asked = 0
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def rows(self, *rows: dict[str, Any], **envelope: Any) -> None:
        self.text = None
        self.body = {"gpu_count": len(rows), "gpus_summary": list(rows), "timestamp": "", **envelope}

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        while self.is_silent:
            await asyncio.sleep(0.05)
        if self.text is not None:
            return web.Response(text=self.text, status=self.status)
        return web.json_response(self.body, status=self.status)


def row(gpu_id: int, **cells: Any) -> dict[str, Any]:
    return {"gpu_id": gpu_id, "name": "A", "memory_usage_percent": 1.0, "utilization_percent": 1.0, **cells}


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    made = Liar()
    application = web.Application()
    application.router.add_get("/gpu/summary", made.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", made.port).start()
    yield made
    await runner.cleanup()


def asking(liar: Liar, **settings: Any) -> GPUWorkerPoolClient:
    settings = {"polling_interval": 0.1, "endpoint_max_retries": 1, **settings}
    return GPUWorkerPoolClient(service_endpoint=liar.url, environ={}, **settings)


@pytest.mark.fault(20)
async def test_a_bad_field_spoils_its_gpu_only(liar: Liar) -> None:
    liar.rows(
        row(0, utilization_percent=250),
        row(1, memory_usage_percent=-5),
        row(2, memory_usage_percent=None),
        row(3, utilization_percent="busy"),
        row(4),
    )
    async with asking(liar) as client:
        assert (await client.request_gpu()).gpu_id == 4
        with pytest.raises(WorkerTimeoutError, match="GPU 0"):
            await client.request_gpu(timeout=0.1)


@pytest.mark.fault(21)
async def test_a_gpu_listed_twice_counts_once(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    liar.rows(row(0), row(0), row(1))
    async with asking(liar) as client:
        assert client.get_pool_status().total_gpus == 2
        await asyncio.sleep(0.5)
    assert len([record for record in caplog.records if "more than once" in record.getMessage()]) == 1


@pytest.mark.fault(19)
async def test_a_bad_reply_keeps_what_was_known(liar: Liar) -> None:
    liar.rows(row(0), row(1))
    async with asking(liar, endpoint_max_retries=50) as client:
        liar.text = "<html>oh no"
        asked = liar.asked
        await until(lambda: liar.asked > asked + 1)
        assert client.get_pool_status().available_gpus == 2
        assert (await client.request_gpu()).gpu_id == 0


async def test_old_readings_grant_nothing(liar: Liar) -> None:
    liar.rows(row(0), sample_age_seconds=14.0)
    async with asking(liar) as client:
        await client.release_gpu(await client.request_gpu(timeout=1))
        liar.rows(row(0), sample_age_seconds=20.0)
        await asyncio.sleep(1.5)
        with pytest.raises(WorkerTimeoutError, match=r"GPU 0: last read .* ago, more than 15 s"):
            await client.request_gpu(timeout=0.5)
        liar.rows(row(0), sample_age_seconds=0.1)
        await client.request_gpu(timeout=45)


@pytest.mark.fault(22)
async def test_no_gpus_means_waiting_and_very_many_are_fine(liar: Liar) -> None:
    liar.rows()
    async with asking(liar) as client:
        with pytest.raises(WorkerTimeoutError, match="no GPUs"):
            await client.request_gpu(timeout=0.2)
        waiting = asyncio.create_task(client.request_gpu())
        liar.rows(*(row(number) for number in range(10_000)))
        await asyncio.wait_for(waiting, 10)
        begun = time.monotonic()
        for _ in range(50):
            await client.request_gpu()
        assert time.monotonic() - begun < 5


async def test_a_promised_gpu_is_not_assigned_in_process(liar: Liar) -> None:
    liar.rows(row(0, leased=True), row(1))
    async with asking(liar) as client:
        assert (await client.request_gpu()).gpu_id == 1
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=0.2)


async def test_a_mig_parent_without_processes_can_be_assigned(liar: Liar) -> None:
    mig = {"utilization_percent": None, "reports_utilization": False}
    liar.rows(row(0, **mig, process_count=3), row(1, **mig), row(2, **mig, process_count=0))
    async with asking(liar) as client:
        assert (await client.request_gpu()).gpu_id == 2
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=0.2)


async def test_a_refusal_says_what_to_look_at(liar: Liar) -> None:
    liar.status = 404
    liar.text = "nothing here"
    async with asking(liar) as client:
        with pytest.raises(ServiceUnavailableError, match="404"):
            await client.request_gpu(timeout=0.2)
        stats = client.get_error_recovery_status()["circuit_breaker_stats"]
        assert [breaker["state"] for breaker in stats.values()] == ["closed"], "a refusal is not counted"


async def test_a_server_that_falls_silent_is_lost_before_its_retries_have_timed_out(
    liar: Liar,
) -> None:
    """The default timeouts alone would call it healthy for two minutes."""
    liar.rows(row(0))
    async with asking(liar, request_timeout=60) as client:
        for monitor in client._monitors._monitors.values():
            monitor._silence_seconds = 0.5
        liar.is_silent = True
        await until(lambda: client.get_health()["status"] == "unhealthy", 5)
        assert client.get_pool_status().total_gpus == 0
        with pytest.raises(ServiceUnavailableError, match="no answer for"):
            await client.request_gpu(timeout=0.1)
        liar.is_silent = False


async def test_one_server_under_two_names_gives_each_gpu_once(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    liar.rows(row(0, uuid="GPU-real0"), row(1, uuid="GPU-real1"))
    names = [f"a={liar.url}", f"b={liar.url.replace('127.0.0.1', 'localhost')}"]
    async with GPUWorkerPoolClient(service_endpoints=names, polling_interval=0.1, environ={}) as client:
        granted = [await client.request_gpu() for _ in range(2)]
        assert len({assignment.gpu_uuids for assignment in granted}) == 2
        with pytest.raises(WorkerTimeoutError, match="it is the same GPU as one of"):
            await client.request_gpu(timeout=0.5)
    assert caplog.text.count("lists the same GPUs as") == 1


@pytest.mark.parametrize("mode", ["one", "many"])
async def test_a_card_that_is_held_is_not_given_out_under_another_number(liar: Liar, mode: str) -> None:
    liar.rows(row(0, uuid="GPU-aaaa"), row(1, uuid="GPU-bbbb", memory_usage_percent=99.0))
    endpoint = {"service_endpoint": liar.url} if mode == "one" else {"service_endpoints": f"a={liar.url}"}
    async with GPUWorkerPoolClient(**endpoint, polling_interval=0.1, environ={}) as client:  # type: ignore[arg-type]
        first = await client.request_gpu()
        assert first.gpu_uuids == ("GPU-aaaa",)
        liar.rows(row(0, uuid="GPU-bbbb", memory_usage_percent=99.0), row(1, uuid="GPU-aaaa"))
        await asyncio.sleep(0.5)
        with pytest.raises(WorkerTimeoutError, match="their numbers have changed"):
            await client.request_gpu(timeout=0.3)
        await client.release_gpu(first)
        await client.request_gpu(timeout=45)


async def test_callbacks_can_do_no_harm(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    liar.rows(row(0))

    def cancelled(_: object) -> None:
        raise asyncio.CancelledError

    async def coroutine(_: object) -> None:
        pass

    client = asking(liar)
    with pytest.raises(TypeError, match="plain function"):
        client.on_stats_update(coroutine)
    end = client.on_stats_update(cancelled)
    async with client:
        asked = liar.asked
        await until(lambda: liar.asked > asked + 3)
        end()
        end()
        assert client.get_health()["status"] == "healthy"
    assert "a callback for new statistics failed" in caplog.text


# --- where it may be called from ---


async def test_from_another_thread_it_is_refused_and_unharmed(liar: Liar) -> None:
    liar.rows(row(0))
    async with GPUWorkerPoolClient(service_endpoints=f"a={liar.url}", polling_interval=0.1, environ={}) as client:
        calls: list[Callable[[], Any]] = [
            client.stop,
            lambda: client.add_endpoint("b=http://127.0.0.1:9"),
            lambda: client.remove_endpoint("a"),
            lambda: client.trigger_endpoint_recovery("a"),
            lambda: client.queue_request_for_retry(client.request_gpu),
        ]
        for call in calls:
            with pytest.raises(WrongThreadError):
                await asyncio.to_thread(lambda call=call: asyncio.run(call()))
        infos = client.get_endpoints_info()
        assert infos is not None
        assert [info["endpoint_id"] for info in infos] == ["a"]
        asked = liar.asked
        await until(lambda: liar.asked > asked + 2)
        await client.release_gpu(await client.request_gpu())


def test_a_client_whose_loop_is_gone_can_be_stopped_and_started_again(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # whoever does not stop it is told about its sockets
        client = GPUWorkerPoolClient(service_endpoints=server.url, environ={})
        asyncio.run(client.start())
        assert client.is_running
        asyncio.run(client.stop())
        assert not client.is_running
        asyncio.run(client.start())

        async def use() -> None:
            async with client:
                assignment = await client.queue_request_for_retry(client.request_gpu)
                assert assignment.gpu_id
                await client.release_gpu(assignment)

        asyncio.run(use())
        asyncio.run(use())
        gc.collect()


async def test_a_block_keeps_its_own_error_when_the_client_is_stopped_meanwhile(liar: Liar) -> None:
    liar.rows(row(0))
    client = asking(liar)
    await client.start()

    async def work() -> None:
        async with GPUContextManager(client):
            await client.stop()
            raise KeyError

    with pytest.raises(KeyError):
        await work()


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), 10**400, True])
async def test_a_timeout_that_is_none_is_refused(liar: Liar, timeout: Any) -> None:
    liar.rows(row(0))
    async with asking(liar) as client:
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            await client.request_gpu(timeout=timeout)


SLOW_NAMES = """
import asyncio, socket, sys, time
real = socket.getaddrinfo
def slow(host, *args, **kwargs):
    if str(host).startswith("slow"):
        time.sleep(120)
        raise socket.gaierror("no such name")
    return real(host, *args, **kwargs)
socket.getaddrinfo = slow
from gpu_worker_pool import GPUWorkerPoolClient
async def main():
    names = [f"http://slow{number}.invalid:9" for number in range(20)] + [f"good=http://localhost:{sys.argv[1]}"]
    async with GPUWorkerPoolClient(service_endpoints=names, environ={}) as client:
        assignment = await client.request_gpu(timeout=40)
        print(assignment.gpu_id)
        await client.release_gpu(assignment)
asyncio.run(main())
"""


@pytest.mark.fault(16)
def test_name_servers_that_hang_delay_neither_other_endpoints_nor_the_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server:
        program = [sys.executable, "-W", "error", "-c", SLOW_NAMES, str(server.port)]
        # Less than one look-up takes, and far more than the rest does on a busy machine.
        done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=50)
        assert (done.stdout, done.stderr, done.returncode) == ("good:0\n", "", 0)
