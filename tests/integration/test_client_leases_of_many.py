"""A client of several servers that give leases, and of some that do not: one pool, one outcome a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.lease_server import LeaseServer
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.leasing import QUICK, client_of, is_clean, queue, some_servers, until
from tests.server_process import ServerProcess

from gpu_worker_pool import (
    ImpossibleRequestError,
    WorkerTimeoutError,
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Of 2, 2 and 4 GPUs."""
    with some_servers(tmp_path_factory.mktemp("servers"), 2, 2, 4) as started:
        yield started


# --- several servers ---


async def test_a_request_waits_at_all_servers_and_takes_the_first_gpu(servers: list[ServerProcess]) -> None:
    async with client_of(*servers) as client:
        held = [await client.request_gpu() for _ in range(8)]
        assert Counter(str(one.gpu_id).split(":")[0] for one in held) == {"a": 2, "b": 2, "c": 4}
        waiting = asyncio.create_task(client.request_gpu())
        await until(lambda: all(len(queue(server)) == 1 for server in servers))
        assert client.get_pool_status().blocked_workers == 1
        assert len({queue(server)[0]["request_id"] for server in servers}) == 3
        freed = next(one for one in held if str(one.gpu_id).startswith("b:"))
        held.remove(freed)
        await client.release_gpu(freed)
        async with asyncio.timeout(5):
            taken = await waiting
        assert str(taken.gpu_id).startswith("b:")
        await until(lambda: not any(queue(server) for server in servers))
        for one in [*held, taken]:
            await client.release_gpu(one)
    await is_clean(*servers)


async def test_of_two_grants_in_one_moment_one_is_given_back(servers: list[ServerProcess]) -> None:
    first, second = servers[:2]
    async with client_of(first, second) as holder, client_of(first, second) as client:
        for _ in range(5):
            held = [await holder.request_gpu(count=2, only=[f"{name}:0", f"{name}:1"], timeout=45) for name in "ab"]
            waiting = asyncio.create_task(client.request_gpu(timeout=20))
            await until(lambda: queue(first) and queue(second))
            await asyncio.gather(*(holder.release_gpu(one) for one in held))
            await client.release_gpu(await waiting)
            await is_clean(first, second)


async def test_a_server_that_dies_while_a_request_waits_there(tmp_path: Path, servers: list[ServerProcess]) -> None:
    dying = ServerProcess(tmp_path, GPU_BACKEND="simulated:2", **QUICK)
    with dying:
        async with client_of(servers[0], dying, endpoint_health_check_interval=0.5) as client:
            held = [await client.request_gpu(count=2, timeout=45) for _ in range(2)]
            waiting = [asyncio.create_task(client.request_gpu(timeout=60)) for _ in range(2)]
            await until(lambda: len(queue(dying)) == 2 and len(queue(servers[0])) == 2)
            dying.kill()
            await until(lambda: client.get_health()["degraded_endpoints"] == ["b"])
            alive = next(one for one in held if str(one.gpu_id).startswith("a:"))
            await client.release_gpu(alive)
            async with asyncio.timeout(10):
                taken = [await task for task in waiting]
            assert {str(one.gpu_id).split(":")[0] for one in taken} == {"a"}
            waiting = [asyncio.create_task(client.request_gpu(timeout=60))]
            await until(lambda: queue(servers[0]))
            await asyncio.to_thread(dying.start)
            await until(lambda: client.get_health()["status"] == "healthy")
            await until(lambda: len(queue(dying)) == 1)
            (other,) = [one for one in held if one is not alive]
            await client.release_gpu(other)
            async with asyncio.timeout(15):
                taken.append(await waiting[0])
            assert str(taken[-1].gpu_id).startswith("b:")
            for one in taken:
                await client.release_gpu(one)
            await is_clean(servers[0], dying)


async def test_what_one_server_cannot_give_is_had_from_another(servers: list[ServerProcess]) -> None:
    async with client_of(*servers) as client:
        four = await client.request_gpu(count=4)
        assert {str(gpu_id).split(":")[0] for gpu_id in four.gpu_ids} == {"c"}
        with pytest.raises(ImpossibleRequestError) as caught:
            await client.request_gpu(count=5)
        assert {reason.split(":")[0] for reason in caught.value.reasons} == {"a", "b", "c"}
        named = await client.request_gpu(only=["b:1"])
        assert named.gpu_id == "b:1"
        others = await client.request_gpu(count=2, exclude=["b:0"], timeout=45)
        assert {str(gpu_id).split(":")[0] for gpu_id in others.gpu_ids} == {"a"}
        for one in (four, named, others):
            await client.release_gpu(one)
    await is_clean(*servers)


@pytest.mark.parametrize(("strategy", "shares"), [("round_robin", [4, 4, 4]), ("weighted", [3, 3, 6])])
async def test_the_strategy_chooses_who_is_asked_first(
    servers: list[ServerProcess], strategy: str, shares: list[int]
) -> None:
    granted: Counter[str] = Counter()
    async with client_of(*servers, load_balancing_strategy=strategy) as client:
        for _ in range(12):
            await until(lambda: client.get_pool_status().available_gpus == 8)
            assignment = await client.request_gpu(timeout=45)
            granted[str(assignment.gpu_id).split(":")[0]] += 1
            await client.release_gpu(assignment)
        metrics = client.get_detailed_metrics()
        assert metrics["load_balancer"]["total_grants"] == 12
    assert [granted[name] for name in "abc"] == pytest.approx(shares, abs=1)


async def test_servers_with_leases_and_without_are_one_pool(servers: list[ServerProcess]) -> None:
    with LeaseServer(gpus=2, features=["metrics"]) as closed:
        async with client_of(servers[0], closed.url) as client:
            status = client.get_pool_status()
            assert (status.total_gpus, status.available_gpus) == (4, 4)
            held = [await client.request_gpu() for _ in range(4)]
            kinds = Counter((str(one.gpu_id).split(":")[0], one.lease_id is not None) for one in held)
            assert kinds == {("a", True): 2, ("b", False): 2}
            assert client.get_pool_status().active_workers == 4
            assert len(client.get_pool_status().gpu_assignments) == 4
            assert len(client.explain().gpus) == 4
            for here in (True, False):
                waiting = asyncio.create_task(client.request_gpu())
                await until(lambda: client.get_pool_status().blocked_workers == 1)
                await until(lambda: len(queue(servers[0])) == 1)
                assert client.get_pool_status().blocked_workers == 1
                assert client.get_detailed_metrics()["queue_metrics"]["queue_size"] == 1
                freed = next(one for one in held if (one.lease_id is None) is here)
                held.remove(freed)
                await client.release_gpu(freed)
                async with asyncio.timeout(5):
                    held.append(await waiting)
                assert (held[-1].lease_id is None) is here
            with pytest.raises(WorkerTimeoutError, match=r"b:\d: held by"):
                await client.request_gpu(timeout=0.3)
            with pytest.raises(ImpossibleRequestError):
                await client.request_gpu(count=3)
            for one in held:
                await client.release_gpu(one)
            assert [info["total_gpus"] for info in client.get_endpoints_info() or []] == [2, 2]
    await is_clean(servers[0])


async def test_endpoints_that_come_and_go(servers: list[ServerProcess]) -> None:
    async with client_of(servers[0], servers[1]) as client:
        await client.remove_endpoint("b")
        kept = await client.request_gpu(count=2)
        waiting = asyncio.create_task(client.request_gpu())
        await until(lambda: queue(servers[0]))
        added = await client.add_endpoint(f"late={servers[2].url}")
        assert added == "late"
        async with asyncio.timeout(10):
            late = await waiting
        assert str(late.gpu_id).startswith("late:")
        await client.remove_endpoint("late")
        assert client.get_pool_status().total_gpus == 2
        await asyncio.sleep(0.5)
        assert not late.lost, "what is held there stays so"
        await client.release_gpu(late)
        await client.release_gpu(kept)
    await is_clean(*servers)


async def test_one_server_under_two_names_is_asked_once(tmp_path: Path) -> None:
    """Of simulated GPUs nobody can tell; of others the UUIDs."""
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(healthy_gpu(0), healthy_gpu(1))
    environment: dict[str, Any] = {"GPU_BACKEND": "nvidia-smi", **QUICK} | smi.env
    with ServerProcess(tmp_path / "server", **environment) as server:
        async with client_of(server.url, server.url.replace("127.0.0.1", "localhost")) as client:
            held = [await client.request_gpu(timeout=45) for _ in range(2)]
            assert len({str(one.gpu_id).split(":")[0] for one in held}) == 1
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.5)
