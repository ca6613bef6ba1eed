"""Measures the client, as ratios within one run, with real HTTP on this machine.

    make bench

`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter

from bench.table import Row, print_table
from gpu_worker_pool.api.http_client import MultiEndpointHTTPClientPool, make_session
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.client.endpoints import Endpoint
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.gpu_monitor import GPUMonitor

TURNS = 7
ENDPOINTS = 200

#: A server in a separate process, so that its time is not counted: the same body on every port.
SERVE = """
import asyncio, sys
body = sys.argv[2].encode()
reply = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body
class Answers(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(reply * data.count(b"\\r\\n\\r\\n"))
async def main():
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Answers, "127.0.0.1", 0) for _ in range(int(sys.argv[1]))]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def summary(gpus: int) -> str:
    rows = [
        {
            "gpu_id": index,
            "name": "Benchmark GPU",
            "memory_usage_percent": 1.0,
            "utilization_percent": 0.0,
            "uuid": f"GPU-51309a7e-0000-4000-8000-{index:012d}",  # of simulated GPUs, the same everywhere
            "memory_total_mb": 24576,
            "memory_used_mb": 246,
            "fault": None,
            "reports_utilization": True,
            "process_count": 0,
        }
        for index in range(gpus)
    ]
    return json.dumps({"gpu_count": gpus, "gpus_summary": rows, "timestamp": "", "sample_age_seconds": 0.01})


@asynccontextmanager
async def servers(count: int, gpus: int = 8) -> AsyncIterator[list[str]]:
    process = subprocess.Popen(  # noqa: ASYNC220  # nothing else runs meanwhile
        [sys.executable, "-c", SERVE, str(count), summary(gpus)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ports = (await asyncio.to_thread(process.stdout.readline)).split()
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def timed(run: Callable[[], Awaitable[object]]) -> float:
    gc.collect()
    begun = perf_counter()
    await run()
    return perf_counter() - begun


async def best_of(ours: Callable[[], Awaitable[object]], other: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    best_ours = best_other = float("inf")
    for _ in range(TURNS):
        best_other = min(best_other, await timed(other))
        best_ours = min(best_ours, await timed(ours))
    return best_ours, best_other


async def cycles(client: GPUWorkerPoolClient, number: int) -> None:
    for _ in range(number):
        await client.release_gpu(await client.request_gpu())


async def measure_uncontended() -> Row:
    number = 20_000
    semaphore = asyncio.Semaphore(8)

    async def theirs() -> None:
        for _ in range(number):
            async with semaphore:
                pass

    async with servers(1) as urls, GPUWorkerPoolClient(service_endpoint=urls[0], environ={}) as client:
        ours, other = await best_of(lambda: cycles(client, number), theirs)
    what = "request + release, uncontended, against async with Semaphore"
    return Row(what, ours / number * 1e6, other / number * 1e6, 0.04, is_speed=True)


async def measure_contended() -> Row:
    workers = 20_000
    semaphore = asyncio.Semaphore(8)

    async def their_worker() -> None:
        async with semaphore:
            await asyncio.sleep(0)

    async with servers(1) as urls, GPUWorkerPoolClient(service_endpoint=urls[0], environ={}) as client:

        async def our_worker() -> None:
            assignment = await client.request_gpu()
            await asyncio.sleep(0)
            await client.release_gpu(assignment)

        async def all_of(worker: Callable[[], Awaitable[None]]) -> None:
            await asyncio.gather(*(worker() for _ in range(workers)))

        ours, other = await best_of(lambda: all_of(our_worker), lambda: all_of(their_worker))
    what = "20,000 workers through 8 GPUs, against async with Semaphore"
    return Row(what, ours / workers * 1e6, other / workers * 1e6, 0.35, is_speed=True)


async def measure_poll(*, as_json: bool) -> Row:
    """One poll of 200 endpoints at once with every field checked, against the same GETs unchecked."""
    async with servers(ENDPOINTS) as urls, make_session() as session:
        pool = MultiEndpointHTTPClientPool(timeout_seconds=30, session=session)
        clients = [pool.client_for(EndpointConfig(f"e{number}", url)) for number, url in enumerate(urls)]
        monitors = [
            GPUMonitor(
                Endpoint(EndpointConfig(f"e{number}", urls[number])),
                client,
                polling_interval=5,
                max_retries=0,
                health_check_interval=30,
                on_stats=lambda *_: None,
                on_lost=lambda *_: None,
            )
            for number, client in enumerate(clients)
        ]

        async def ours() -> None:
            await asyncio.gather(*(monitor._turn() for monitor in monitors))  # noqa: SLF001  # what a poll is

        async def get(url: str) -> None:
            async with session.get(f"{url}/gpu/summary") as response:
                await (response.json() if as_json else response.read())

        async def bare() -> None:
            await asyncio.gather(*(get(url) for url in urls))

        await bare()
        ours_seconds, bare_seconds = await best_of(ours, bare)
    assert all(monitor.endpoint.is_healthy for monitor in monitors)
    what = f"one poll of 200 endpoints against bare aiohttp GETs, {'as JSON' if as_json else 'bytes not looked at'}"
    return Row(what, ours_seconds * 1e6, bare_seconds * 1e6, 1.5, is_speed=False)


async def measure_many_mode() -> Row:
    number = 10_000
    async with (
        servers(1) as urls,
        GPUWorkerPoolClient(service_endpoint=urls[0], environ={}) as single,
        GPUWorkerPoolClient(service_endpoints=urls[0], environ={}) as many,
    ):
        ours, other = await best_of(lambda: cycles(many, number), lambda: cycles(single, number))
    what = "many-endpoint mode with one endpoint against single mode"
    return Row(what, ours / number * 1e6, other / number * 1e6, 1.3, is_speed=False)


async def measure_idle() -> Row:
    async with servers(ENDPOINTS) as urls:
        named = [f"e{number}={url}" for number, url in enumerate(urls)]
        async with GPUWorkerPoolClient(service_endpoints=named, polling_interval=5, environ={}) as client:
            assert client.get_pool_status().total_gpus == 8 * ENDPOINTS
            seconds = 15.0
            begun = time.process_time()
            await asyncio.sleep(seconds)
            used = time.process_time() - begun
            assert len(client.get_health()["healthy_endpoints"]) == ENDPOINTS
    return Row("an idle client with 200 endpoints at 5 s, of a core", used / seconds * 1e6, 1e6, 0.03, is_speed=False)


async def measure_waiters() -> Row:
    """The memory of one waiting request in bytes, with its task and future."""
    number = 10_000
    async with servers(1) as urls, GPUWorkerPoolClient(service_endpoint=urls[0], environ={}) as client:
        held = [await client.request_gpu() for _ in range(8)]
        gc.collect()
        tracemalloc.start()
        waiting = [asyncio.create_task(client.request_gpu()) for _ in range(number)]
        await asyncio.sleep(0.5)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert client.get_pool_status().blocked_workers == number
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for assignment in held:
            await client.release_gpu(assignment)
    return Row("bytes a waiter, of 10,000, against 2 KB", used / number, 2048.0, 1.0, is_speed=False)


def main() -> int:
    measures = (
        measure_uncontended,
        measure_contended,
        lambda: measure_poll(as_json=True),
        lambda: measure_poll(as_json=False),
        measure_many_mode,
        measure_idle,
        measure_waiters,
    )
    is_reached = print_table([asyncio.run(measure()) for measure in measures], "µs")
    return int("--strict" in sys.argv and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
