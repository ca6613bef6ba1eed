"""The client against real servers: every documented method in both modes, and the promises about who gets what."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.leasing import QUICK, until
from tests.server_process import ServerProcess
from tests.waiting import eventually

from gpu_worker_pool import (
    GlobalGPUAssignment,
    GPUAssignment,
    GPUContextManager,
    GPUStats,
    GPUWorkerPoolClient,
    ImpossibleRequestError,
    MultiEndpointPoolStatus,
    PoolStatus,
    PoolStoppedError,
    WorkerTimeoutError,
    gpu_worker_pool_client,
)
from gpu_worker_pool.client import client as client_module
from gpu_worker_pool.config import EndpointConfig


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Of 8, 4 and 2 GPUs."""
    folder = tmp_path_factory.mktemp("servers")
    started = [ServerProcess(folder / str(count), GPU_BACKEND=f"simulated:{count}", **QUICK) for count in (8, 4, 2)]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture(autouse=True)
def all_idle(servers: list[ServerProcess]) -> None:
    """The GPUs that the last test had still look busy until the next reading."""
    for server in servers:
        eventually(
            lambda server=server: not any(gpu["memory"]["used_mb"] for gpu in server.get("/gpu/stats").json["gpus"])
        )


@pytest.fixture(params=["local", "leases"])
def coordination(request: pytest.FixtureRequest) -> str:
    """What is documented holds whoever decides which GPU is whose: this process, or the servers."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def one(servers: list[ServerProcess], coordination: str) -> GPUWorkerPoolClient:
    return GPUWorkerPoolClient(servers[0].url, polling_interval=1, coordination=coordination, environ={})


@pytest.fixture
def many(servers: list[ServerProcess], coordination: str) -> GPUWorkerPoolClient:
    named = [f"{name}={server.url}" for name, server in zip("abc", servers, strict=True)]
    return GPUWorkerPoolClient(service_endpoints=named, polling_interval=1, coordination=coordination, environ={})


# --- life ---


async def test_life(one: GPUWorkerPoolClient) -> None:
    assert not one.is_running
    for call in (one.get_pool_status, one.get_detailed_metrics, one.get_error_recovery_status, one.get_health):
        with pytest.raises(RuntimeError, match="not started"):
            call()
    with pytest.raises(RuntimeError, match="not started"):
        await one.request_gpu()
    with pytest.raises(RuntimeError, match="not started"):
        one.print_error_recovery_summary()
    assert one.get_endpoints_info() is None
    await one.stop()
    await one.start()
    with pytest.raises(RuntimeError, match="already started"):
        await one.start()
    assignment = await one.request_gpu()
    await one.stop()
    with pytest.raises(RuntimeError, match="not started"):
        await one.release_gpu(assignment)
    await one.start()
    await until(lambda: one.get_pool_status().available_gpus == 8)
    await one.stop()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    client = GPUWorkerPoolClient(service_endpoint="http://127.0.0.1:9", environ={})
    for steps in range(20):
        starting = asyncio.create_task(client.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert not client.is_running
        assert client._http is None
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.fault(8)
async def test_stopping_ends_those_who_wait_with_an_error_that_says_so(one: GPUWorkerPoolClient) -> None:
    await one.start()
    held = [await one.request_gpu() for _ in range(8)]
    waiting = [asyncio.create_task(one.request_gpu()) for _ in range(3)]
    await asyncio.sleep(0.05)
    await one.stop()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, PoolStoppedError)
        assert "stopped" in str(outcome)
    assert len(held) == 8


# --- one endpoint ---


async def test_an_assignment_with_one_endpoint(one: GPUWorkerPoolClient) -> None:
    async with one:
        assert not one.is_multi_endpoint_mode()
        assignment = await one.request_gpu()
        assert type(assignment) is GPUAssignment
        assert isinstance(assignment.gpu_id, int)
        assert isinstance(assignment.assigned_at, datetime)
        visible = {"CUDA_VISIBLE_DEVICES": str(assignment.gpu_id), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if assignment.lease_id is not None:
            visible |= {"NVIDIA_VISIBLE_DEVICES": assignment.gpu_uuids[0], "GPU_POOL_LEASE_ID": assignment.lease_id}
        assert assignment.env == visible
        assert assignment.gpu_uuids[0].startswith("GPU-")
        status = one.get_pool_status()
        assert type(status) is PoolStatus
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (8, 7, 1)
        assert [worker.id for worker in status.gpu_assignments[assignment.gpu_id]] == [assignment.worker_id]
        await one.release_gpu(assignment)
        await one.release_gpu(assignment)
        await until(lambda: one.get_pool_status().available_gpus == 8)
        with pytest.raises(ValueError, match=r"not a|no GPU|holds no"):
            await one.release_gpu(GPUAssignment(0, "somebody", datetime.now()))
        assert one.get_endpoints_info() is None
        for call in (
            one.trigger_endpoint_recovery("x"),
            one.queue_request_for_retry(one.request_gpu),
            one.add_endpoint("x"),
        ):
            with pytest.raises(RuntimeError, match="many endpoints"):
                await call


async def test_the_context_manager_yields_a_number_and_releases(one: GPUWorkerPoolClient) -> None:
    async with one:
        async with GPUContextManager(one) as gpu_id:
            assert isinstance(gpu_id, int)
            assert one.get_pool_status().active_workers == 1
        async with GPUContextManager(one, timeout=45, count=2) as gpu_ids:
            assert len(set(gpu_ids)) == 2
        with pytest.raises(ZeroDivisionError):
            async with GPUContextManager(one):
                raise ZeroDivisionError
        manager = GPUContextManager(one)
        async with manager:
            with pytest.raises(RuntimeError, match="make one for each block"):
                await manager.__aenter__()
        async with manager:
            assert one.get_pool_status().active_workers == 1
        with pytest.raises(ImpossibleRequestError):
            async with GPUContextManager(one, count=99):
                pass
        assert one.get_pool_status().active_workers == 0


async def test_the_factory(servers: list[ServerProcess]) -> None:
    async with gpu_worker_pool_client(service_endpoint=servers[2].url, memory_threshold=75.0, environ={}) as client:
        assert client.get_detailed_metrics()["thresholds"]["memory_threshold_percent"] == 75.0
    assert not client.is_running


async def test_wishes(one: GPUWorkerPoolClient) -> None:
    async with one:
        pair = await one.request_gpu(count=2, only=[5, 6, 7], exclude=[6], label="mine")
        assert sorted(pair.gpu_ids) == [5, 7]
        assert pair.env["CUDA_VISIBLE_DEVICES"] in ("5,7", "7,5")
        sharing = [await one.request_gpu(memory_mb=8000, share=True, only=[0]) for _ in range(3)]
        assert {assignment.gpu_id for assignment in sharing} == {0}
        with pytest.raises(ImpossibleRequestError, match="9"):
            await one.request_gpu(count=9)
        with pytest.raises(ImpossibleRequestError, match="H100"):
            await one.request_gpu(gpu_model="H100")
        with pytest.raises(WorkerTimeoutError, match="GPU 0"):
            await one.request_gpu(timeout=0.1, only=[0])
        assert "memory is promised to" in str(one.explain(only=[0])) or "held by" in str(one.explain(only=[0]))


async def test_nobody_is_held_twice_and_all_are_served(one: GPUWorkerPoolClient) -> None:
    """100 workers on 8 GPUs, each several times."""
    held: Counter[Any] = Counter()
    draw = random.Random(3)

    async def work() -> None:
        for _ in range(5):
            assignment = await one.request_gpu()
            held[assignment.gpu_id] += 1
            assert held[assignment.gpu_id] == 1
            await asyncio.sleep(draw.random() * 0.01)
            held[assignment.gpu_id] -= 1
            await one.release_gpu(assignment)

    async with one:
        await asyncio.gather(*(work() for _ in range(100)))
        # What was released a moment ago is free once it is read again.
        await until(lambda: one.get_pool_status().available_gpus == 8)


async def test_first_come_first_served(servers: list[ServerProcess]) -> None:
    async with GPUWorkerPoolClient(service_endpoint=servers[2].url, environ={}) as client:
        held = [await client.request_gpu() for _ in range(2)]
        order: list[int] = []

        async def wait(number: int) -> None:
            assignment = await client.request_gpu()
            order.append(number)
            await client.release_gpu(assignment)

        waiting = [asyncio.create_task(wait(number)) for number in range(20)]
        await asyncio.sleep(0.05)
        assert client.get_pool_status().blocked_workers == 20
        for assignment in held:
            await client.release_gpu(assignment)
        await asyncio.gather(*waiting)
    assert order == list(range(20))


# --- faults 3 and 4: cancelled or timed out in the moment of the grant ---


async def test_a_request_cancelled_at_any_step_leaks_nothing(servers: list[ServerProcess]) -> None:
    async with GPUWorkerPoolClient(service_endpoint=servers[2].url, environ={}) as client:
        for steps in range(12):
            held = [await client.request_gpu() for _ in range(2)]
            waiting = asyncio.create_task(client.request_gpu())
            await asyncio.sleep(0)
            releasing = asyncio.create_task(client.release_gpu(held[0]))
            for _ in range(steps):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, releasing, return_exceptions=True)
            await client.release_gpu(held[1])
            if not waiting.cancelled():
                await client.release_gpu(waiting.result())
            assert client.get_pool_status().available_gpus == 2


async def test_a_timeout_that_races_the_grant_has_one_outcome(servers: list[ServerProcess]) -> None:
    async with GPUWorkerPoolClient(service_endpoint=servers[2].url, environ={}) as client:
        outcomes: Counter[str] = Counter()
        allowed_seconds = 0.01
        while outcomes.total() < 40 or len(outcomes) < 2:
            held = [await client.request_gpu() for _ in range(2)]
            waiting = asyncio.create_task(client.request_gpu(timeout=allowed_seconds))
            await asyncio.sleep(0.005)
            await client.release_gpu(held[0])
            try:
                await client.release_gpu(await waiting)
                outcomes["granted"] += 1
                allowed_seconds /= 1.2  # so that it comes to be decided in one and the same moment
            except WorkerTimeoutError:
                outcomes["timed out"] += 1
                allowed_seconds *= 1.2
            await client.release_gpu(held[1])
            assert client.get_pool_status().available_gpus == 2


async def test_gpus_are_named_by_uuid_on_request(servers: list[ServerProcess], coordination: str) -> None:
    url, named = servers[0].url, [f"a={servers[0].url}"]
    variable = {"GPU_POOL_GPU_NAMES": "uuid"}
    for client in (
        GPUWorkerPoolClient(url, polling_interval=1, coordination=coordination, gpu_names="uuid", environ={}),
        GPUWorkerPoolClient(service_endpoints=named, polling_interval=1, coordination=coordination, environ=variable),
    ):
        async with client:
            both = await client.request_gpu(count=2)
            assert both.env["CUDA_VISIBLE_DEVICES"] == ",".join(both.gpu_uuids)
            assert all(uuid.startswith("GPU-") for uuid in both.gpu_uuids)
            assert pickle.loads(pickle.dumps(both)).env == both.env  # noqa: S301  # our own
            await client.release_gpu(both)
    with pytest.raises(ValueError, match="gpu_names must be one of index, uuid, not 'name'"):
        GPUWorkerPoolClient(url, gpu_names="name", environ={})


# --- many endpoints ---


async def test_an_assignment_with_many_endpoints(many: GPUWorkerPoolClient) -> None:
    async with many:
        assert many.is_multi_endpoint_mode()
        status = many.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert (status.total_gpus, status.available_gpus) == (14, 14)
        assert (status.total_endpoints, status.healthy_endpoints) == (3, 3)
        assert [details["endpoint_id"] for details in status.endpoint_details] == ["a", "b", "c"]
        assert [endpoint.total_gpus for endpoint in status.endpoints] == [8, 4, 2]
        assignment = await many.request_gpu()
        assert isinstance(assignment, GlobalGPUAssignment)
        assert assignment.gpu_id == assignment.global_gpu_id == f"{assignment.endpoint_id}:{assignment.local_gpu_id}"
        assert int(str(assignment.gpu_id).split(":")[1]) == assignment.local_gpu_id
        assert assignment.env["CUDA_VISIBLE_DEVICES"] == str(assignment.local_gpu_id)
        assert many.get_pool_status().gpu_assignments.keys() == {assignment.gpu_id}
        await many.release_gpu(assignment)
        async with GPUContextManager(many) as gpu_id:
            assert re.fullmatch(r"[abc]:\d", gpu_id)
        async with GPUContextManager(many, count=3) as gpu_ids:
            assert len({name.split(":")[0] for name in gpu_ids}) == 1, "several GPUs are of one host"


async def test_what_is_told_of_endpoints(many: GPUWorkerPoolClient, servers: list[ServerProcess]) -> None:
    async with many:
        infos = many.get_endpoints_info()
        assert infos is not None
        for info, server, total in zip(infos, servers, (8, 4, 2), strict=True):
            assert info.keys() >= {
                "endpoint_id",
                "url",
                "is_healthy",
                "total_gpus",
                "available_gpus",
                "response_time_ms",
                "last_seen",
            }
            assert (info["url"], info["is_healthy"], info["total_gpus"]) == (server.url, True, total)
            assert info["response_time_ms"] > 0


async def test_detailed_metrics_in_both_modes(one: GPUWorkerPoolClient, many: GPUWorkerPoolClient) -> None:
    documented = {
        "timestamp",
        "is_running",
        "total_gpus",
        "available_gpus",
        "active_workers",
        "blocked_workers",
        "gpu_metrics",
        "assignment_metrics",
        "queue_metrics",
        "thresholds",
    }
    async with one, many:
        held = [await one.request_gpu() for _ in range(8)]
        waiting = asyncio.create_task(one.request_gpu(label="late"))
        await asyncio.sleep(0.05)
        metrics = one.get_detailed_metrics()
        assert metrics.keys() == documented
        assert (metrics["total_gpus"], metrics["active_workers"], metrics["blocked_workers"]) == (8, 8, 1)
        gpu = metrics["gpu_metrics"][0]
        assert gpu.keys() >= {
            "gpu_id",
            "name",
            "memory_usage_percent",
            "utilization_percent",
            "is_available",
            "assigned_workers",
        }
        assert (gpu["gpu_id"], gpu["is_available"], len(gpu["assigned_workers"])) == (0, False, 1)
        assert metrics["assignment_metrics"]["total_assignments"] == 8
        assert metrics["queue_metrics"]["queue_size"] == 1
        assert metrics["queue_metrics"]["waiting"][0]["label"] == "late"
        assert metrics["thresholds"] == {"memory_threshold_percent": 80.0, "utilization_threshold_percent": 90.0}
        for assignment in held:
            await one.release_gpu(assignment)
        await one.release_gpu(await waiting)

        granted = [await many.request_gpu() for _ in range(7)]
        metrics = many.get_detailed_metrics()
        assert metrics.keys() == documented | {"endpoints", "load_balancer"}
        assert sum(endpoint["grants"] for endpoint in metrics["endpoints"]) == 7
        assert all(endpoint["success_rate"] == 1.0 for endpoint in metrics["endpoints"])
        assert all(endpoint["response_time_ms"] > 0 for endpoint in metrics["endpoints"])
        shares = metrics["load_balancer"]["share_of_grants"]
        assert sum(shares.values()) == pytest.approx(1)
        assert metrics["load_balancer"]["strategy"] == "availability"
        counted = Counter(str(assignment.gpu_id).split(":")[0] for assignment in granted)
        assert {name: share * 7 for name, share in shares.items()} == pytest.approx(
            {name: counted[name] for name in "abc"}
        )


async def test_whatever_is_reported_can_be_dumped(one: GPUWorkerPoolClient, many: GPUWorkerPoolClient) -> None:
    async with one, many:
        await many.release_gpu(await many.request_gpu())
        for client in (one, many):
            for report in (
                client.get_detailed_metrics(),
                client.get_endpoints_info(),
                client.get_error_recovery_status(),
                client.get_health(),
            ):
                assert json.loads(json.dumps(report, allow_nan=False)) == report


async def test_recovery_status_in_both_modes(
    one: GPUWorkerPoolClient, many: GPUWorkerPoolClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async with one, many:
        for client, count in ((one, 1), (many, 3)):
            status = client.get_error_recovery_status()
            assert status.keys() == {
                "degradation_manager",
                "recovery_orchestrator",
                "circuit_breaker_stats",
                "endpoint_health_summary",
            }
            assert len(status["degradation_manager"]["healthy_endpoints"]) == count
            assert status["degradation_manager"]["degraded_endpoints"] == []
            assert {stats["state"] for stats in status["circuit_breaker_stats"].values()} == {"closed"}
            assert status["endpoint_health_summary"]["health_percentage"] == 100.0
            client.print_error_recovery_summary()
            printed = capsys.readouterr().out
            assert printed.startswith("=== Error Recovery Status ===\n")
            assert f"({count}/{count} endpoints healthy)" in printed
            assert client.get_health()["status"] == "healthy"
        assert await many.trigger_endpoint_recovery("a") is True
        assert await many.trigger_endpoint_recovery("nobody") is False


async def test_a_request_queued_for_retry_runs_when_it_can(many: GPUWorkerPoolClient) -> None:
    async with many:
        assignment = await many.queue_request_for_retry(many.request_gpu)
        await many.release_gpu(assignment)

        async def fails() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await many.queue_request_for_retry(fails)
        assert many.get_error_recovery_status()["recovery_orchestrator"]["queued_requests"] == 0


async def test_endpoints_come_and_go(many: GPUWorkerPoolClient, servers: list[ServerProcess]) -> None:
    async with many:
        assignment = await many.request_gpu(only=["a:3"])
        await many.remove_endpoint("a")
        assert many.get_pool_status().total_gpus == 6
        await many.release_gpu(assignment)
        with pytest.raises(ValueError, match="there is no endpoint 'a'; there are b, c"):
            await many.remove_endpoint("a")
        with pytest.raises(ValueError, match="already"):
            await many.add_endpoint(servers[1].url)
        assert await many.add_endpoint(f"new={servers[0].url}") == "new"
        assignment = await many.request_gpu(only=["new:7"], timeout=45)
        assert assignment.gpu_id == "new:7"
        await many.release_gpu(assignment)


async def test_removing_and_adding_at_once(many: GPUWorkerPoolClient, servers: list[ServerProcess]) -> None:
    async with many:
        removing = [asyncio.create_task(many.remove_endpoint("a")) for _ in range(2)]
        outcomes = await asyncio.gather(*removing, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "ValueError"]
        with pytest.raises(ValueError, match=r"local://|http"):
            await many.add_endpoint("x=local://")
        assert many.get_health()["status"] == "healthy"
        for name in ("b", "c"):
            await many.remove_endpoint(name)
        assert many.get_pool_status().total_gpus == 0
        with pytest.raises(WorkerTimeoutError):
            await many.request_gpu(timeout=0.1)


async def test_what_is_impossible_is_judged_by_all_endpoints_and_by_no_other(
    servers: list[ServerProcess],
) -> None:
    """An endpoint that has not answered yet may have what is asked for; one that was removed has not."""
    silent = "http://127.0.0.1:9"
    async with GPUWorkerPoolClient(
        service_endpoints=[f"a={servers[2].url}", f"b={silent}"], endpoint_max_retries=0, environ={}
    ) as client:
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu(timeout=0.2, gpu_model="H100")
        waiting = asyncio.create_task(client.request_gpu(gpu_model="H100"))
        await asyncio.sleep(0.05)
        await client.remove_endpoint("b")
        with pytest.raises(ImpossibleRequestError):
            await waiting
        with pytest.raises(ImpossibleRequestError):
            await client.request_gpu(count=3)
        await client.add_endpoint(f"c={servers[1].url}")
        assignment = await client.request_gpu(count=3, timeout=45)
        assert len(assignment.gpu_ids) == 3
        assert {str(gpu_id).split(":")[0] for gpu_id in assignment.gpu_ids} == {"c"}
        await client.remove_endpoint("c")
        assert {gpu["gpu_id"].split(":")[0] for gpu in client.get_detailed_metrics()["gpu_metrics"]} == {"a"}
        await client.release_gpu(assignment)


async def test_an_earlier_life_says_nothing_about_this_one(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, GPU_BACKEND="simulated:1")
    client = GPUWorkerPoolClient(service_endpoint=server.url, endpoint_max_retries=0, environ={})
    with server:
        async with client:
            assert client.get_health()["status"] == "healthy"
    async with client:
        assert client.get_health()["status"] == "unhealthy"
        assert client.get_pool_status().total_gpus == 0
    with server:
        async with client:
            assert client.get_pool_status().total_gpus == 1, "a breaker that was open does not keep it from asking"


@pytest.mark.parametrize("way", ["request", "retry"])
async def test_an_assignment_passed_on_by_a_task_is_not_taken_for_forgotten(
    many: GPUWorkerPoolClient, way: str
) -> None:
    """The task ends with the answer; that says nothing about who uses the GPU, knowing its number alone."""
    async with many:
        asking = many.request_gpu() if way == "request" else many.queue_request_for_retry(many.request_gpu)
        gpu_id = (await asyncio.create_task(asking)).gpu_id
        await asyncio.sleep(2.5)
        assert gpu_id in many.get_pool_status().gpu_assignments


async def test_callbacks_hear_of_every_endpoint(many: GPUWorkerPoolClient) -> None:
    heard: list[GPUStats] = []
    end = many.on_stats_update(heard.append)
    async with many:
        assert {stats.gpu_count for stats in heard} == {2, 4, 8}
        end()
        count = len(heard)
        await asyncio.sleep(1.3)
    assert len(heard) == count


# --- readings ---


async def test_a_release_with_waiters_asks_for_a_fresh_reading_at_once(tmp_path: Path) -> None:
    """The GPU is full in the last reading, which would stand for an hour: only asking again shows it free."""
    fake = FakeNvidiaSMI(tmp_path)
    fake.set_gpus(healthy_gpu(0))
    settings = {"GPU_BACKEND": "nvidia-smi", "REFRESH_INTERVAL": "0.1", "ACCESS_LOG": "false"} | fake.env
    with ServerProcess(tmp_path / "server", **settings) as server:
        async with GPUWorkerPoolClient(service_endpoint=server.url, polling_interval=3600, environ={}) as client:
            assignment = await client.request_gpu()
            fake.set_gpus(healthy_gpu(0, memory_used="24000", utilization_gpu="99"))
            await asyncio.sleep(0.5)
            client._wake("")
            await asyncio.sleep(0.5)
            assert client.get_detailed_metrics()["gpu_metrics"][0]["utilization_percent"] == 99
            waiting = asyncio.create_task(client.request_gpu(timeout=45))
            await asyncio.sleep(0.05)
            fake.set_gpus(healthy_gpu(0))
            await client.release_gpu(assignment)
            await client.release_gpu(await waiting)


async def test_nothing_configured_finds_the_server_at_its_own_default_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:3") as server:
        # The ports of this machine may be taken: another one stands for the server's 8000.
        monkeypatch.setattr(client_module, "SERVER_DEFAULT", EndpointConfig("localhost_8000", server.url))
        async with GPUWorkerPoolClient(environ={}) as client:
            assert client.get_pool_status().total_gpus == 3
            assert f"using {server.url}" in caplog.text
            assert client.get_error_recovery_status()["degradation_manager"]["status"] == "none"


# --- logs ---


async def test_events_are_logged_for_those_who_want_them(
    one: GPUWorkerPoolClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpu_worker_pool")
    async with one:
        held = [await one.request_gpu() for _ in range(8)]
        waiting = asyncio.create_task(one.request_gpu())
        while not any(record.__dict__.get("event") == "blocked" for record in caplog.records):
            await asyncio.sleep(0.01)
        await one.release_gpu(held[0])
        await one.release_gpu(await waiting)
        for assignment in held[1:]:
            await one.release_gpu(assignment)
    events = [record.__dict__["event"] for record in caplog.records if "event" in record.__dict__]
    assert Counter(events) == {"assigned": 9, "released": 9, "blocked": 1, "unblocked": 1}
    blocked = next(record for record in caplog.records if record.__dict__.get("event") == "blocked")
    assert blocked.__dict__["worker_id"]
    assert "free" in blocked.getMessage()
    unblocked = next(record for record in caplog.records if record.__dict__.get("event") == "unblocked")
    assert unblocked.__dict__["waited_seconds"] > 0
