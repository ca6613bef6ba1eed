"""The three strategies, each over 10,000 requests, on equal and unequal endpoints: what the document promises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.server_process import free_port

from gpu_worker_pool import GPUWorkerPoolClient

REQUESTS = 10_000


@asynccontextmanager
async def endpoints(*gpu_counts: int) -> AsyncIterator[str]:
    """So many small servers, of so many idle GPUs."""
    runners, urls = [], []
    for number, count in enumerate(gpu_counts):
        rows = [
            {"gpu_id": index, "name": "A", "memory_usage_percent": 0.0, "utilization_percent": 0.0}
            for index in range(count)
        ]
        body = {"gpu_count": count, "gpus_summary": rows, "timestamp": ""}

        async def answer(request: web.Request, body: dict[str, object] = body) -> web.Response:
            return web.json_response(body)

        application = web.Application()
        application.router.add_get("/gpu/summary", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        runners.append(runner)
        urls.append(f"s{number}=http://127.0.0.1:{port}")
    try:
        yield ",".join(urls)
    finally:
        for runner in runners:
            await runner.cleanup()


async def distribution(strategy: str, *gpu_counts: int, held: int = 0) -> Counter[str]:
    """Where requests go while so many GPUs are in use all the time."""
    seen: Counter[str] = Counter()
    async with (
        endpoints(*gpu_counts) as urls,
        GPUWorkerPoolClient(service_endpoints=urls, load_balancing_strategy=strategy, environ={}) as client,
    ):
        assert client.get_pool_status().total_gpus == sum(gpu_counts)
        kept = [await client.request_gpu() for _ in range(held)]
        for number in range(REQUESTS):
            assignment = await client.request_gpu()
            seen[str(assignment.gpu_id).split(":")[0]] += 1
            if held:
                kept.append(assignment)
                assignment = kept.pop(0)
            await client.release_gpu(assignment)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        metrics = client.get_detailed_metrics()["load_balancer"]
        assert metrics["total_grants"] == REQUESTS + held
    return seen


@pytest.mark.parametrize("counts", [(4, 4, 4), (8, 2, 1)])
async def test_round_robin_is_even_whatever_the_sizes(counts: tuple[int, ...]) -> None:
    seen = await distribution("round_robin", *counts)
    assert max(seen.values()) - min(seen.values()) <= 1


async def test_round_robin_passes_over_those_that_are_full() -> None:
    seen = await distribution("round_robin", 8, 1, held=5)
    assert seen["s0"] > seen["s1"] > 0


@pytest.mark.parametrize("counts", [(4, 4, 4), (8, 2, 1), (1, 15)])
async def test_weighted_is_in_proportion_to_the_number_of_gpus(counts: tuple[int, ...]) -> None:
    seen = await distribution("weighted", *counts)
    for number, count in enumerate(counts):
        assert seen[f"s{number}"] == pytest.approx(REQUESTS * count / sum(counts), abs=2)


async def test_availability_takes_turns_among_equals() -> None:
    seen = await distribution("availability", 4, 4, 4)
    assert max(seen.values()) - min(seen.values()) <= 1


async def test_availability_prefers_the_larger_share_and_then_the_larger_number() -> None:
    async with (
        endpoints(8, 4, 2) as urls,
        GPUWorkerPoolClient(service_endpoints=urls, load_balancing_strategy="availability", environ={}) as client,
    ):
        order = [str((await client.request_gpu()).gpu_id).split(":")[0] for _ in range(14)]
    free = {"s0": 8, "s1": 4, "s2": 2}
    total = dict(free)
    for name in order:
        best = max(free, key=lambda name: (free[name] / total[name], free[name]))
        assert (free[name] / total[name], free[name]) == (free[best] / total[best], free[best])
        free[name] -= 1


async def test_availability_keeps_the_share_in_use_equal() -> None:
    seen = await distribution("availability", 8, 4, held=6)
    assert seen["s0"] / seen["s1"] == pytest.approx(2, rel=0.5)
