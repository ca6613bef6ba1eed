"""First come, first served among the requests of one client, at real servers, on a fresh client each time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.leasing import QUICK, is_clean, queue, until
from tests.server_process import ServerProcess

from gpu_worker_pool import GPUAssignment, GPUWorkerPoolClient

GPUS = 4


@contextmanager
def servers_of(folder: Path, count: int, workers: int) -> Iterator[list[ServerProcess]]:
    """`GPUS` simulated GPUs in all, on servers of so many worker processes each."""
    shares = [GPUS] if count == 1 else [2, 1, 1]
    with ExitStack() as stack:
        started = []
        for number, gpus in enumerate(shares):
            server = ServerProcess(
                folder / str(number), GPU_BACKEND=f"simulated:{gpus}", WORKERS=str(workers), RELOAD="false", **QUICK
            )
            stack.callback(server.kill)
            server.start()
            started.append(server)
        yield started


def labels(server: ServerProcess) -> list[str]:
    return [row["label"] for row in queue(server)]


async def queue_of(server: ServerProcess, waiting: list[str]) -> list[str]:
    """The order of these, and no others, in one answer of the server.

    One that was granted elsewhere may still stand there, one may still be on its way, and of several workers of a
    server, one knows it a moment before the next.
    """
    found: list[str] = []

    def are_all_there() -> bool:
        found[:] = labels(server)
        return sorted(found) == waiting

    await until(are_all_there, 30)
    return found


async def check_order(servers: list[ServerProcess], requests: int) -> None:
    # By name: each new connection looks it up, and the first requests of a client race for that.
    urls = [server.url.replace("127.0.0.1", "localhost") for server in servers]
    granted: dict[int, GPUAssignment] = {}

    async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=1, environ={}) as client:

        async def work(number: int) -> None:
            granted[number] = await client.request_gpu(label=f"{number:03}", timeout=60)

        tasks = [asyncio.create_task(work(number)) for number in range(requests)]
        await until(lambda: len(granted) >= min(GPUS, requests), 30)
        assert sorted(granted) == list(range(min(GPUS, requests))), "somebody was overtaken by a newcomer"
        waiting = [f"{number:03}" for number in range(GPUS, requests)]
        for server in servers:
            assert await queue_of(server, waiting) == waiting, "they stand in another order"
        for number in range(GPUS, min(GPUS + 2, requests)):
            await client.release_gpu(granted[number - GPUS])
            await until(lambda number=number: number in granted, 30)
            assert sorted(granted) == list(range(number + 1)), "somebody was overtaken in the queue"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await is_clean(*servers)


async def check_runs(folder: Path, count: int, workers: int, runs: int) -> None:
    draw = random.Random(f"{count}-{workers}")
    with servers_of(folder, count, workers) as servers:
        for _ in range(runs):
            await check_order(servers, draw.randint(2, 16))


CASES = [(1, 1), (1, 4), (3, 1), (3, 4)]


@pytest.mark.parametrize(("count", "workers"), CASES)
async def test_requests_of_one_client_are_granted_in_the_order_they_were_made(
    count: int, workers: int, tmp_path: Path
) -> None:
    await check_runs(tmp_path, count, workers, runs=3)


@pytest.mark.long
@pytest.mark.parametrize(("count", "workers"), CASES)
async def test_requests_of_one_client_are_granted_in_the_order_they_were_made_in_fifty_runs(
    count: int, workers: int, tmp_path: Path
) -> None:
    await check_runs(tmp_path, count, workers, runs=50)
