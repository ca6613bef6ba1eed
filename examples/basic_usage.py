"""Shows one pool, from the first request to the last release.

    $ GPU_SERVICE_ENDPOINT=http://gpu-server:8000 python examples/basic_usage.py

Without a GPU, start a server that simulates some: `GPU_BACKEND=simulated:4 python -m gpu_worker_pool.gpu_server`.
"""

# ruff: noqa: T201  # a program for people prints

from __future__ import annotations

import asyncio
import os
import sys

from gpu_worker_pool import (
    GPUContextManager,
    GPUWorkerPoolClient,
    ImpossibleRequestError,
    ServiceUnavailableError,
    WorkerTimeoutError,
)

#: Long enough for a server that has just been started; your programs will wait longer.
TIMEOUT_SECONDS = 30.0


async def show_the_pool(client: GPUWorkerPoolClient) -> None:
    status = client.get_pool_status()
    print(f"{status.available_gpus} of {status.total_gpus} GPUs are available")
    for gpu in client.get_detailed_metrics()["gpu_metrics"]:
        print(
            f"  GPU {gpu['gpu_id']}, {gpu['name']}: memory {gpu['memory_usage_percent']} %, "
            f"utilization {gpu['utilization_percent']} %"
        )


async def use_one_gpu(client: GPUWorkerPoolClient) -> None:
    """The usual way: request, work, and release whatever happens."""
    assignment = await client.request_gpu(timeout=TIMEOUT_SECONDS, label="basic example")
    try:
        # A child process sees only this GPU, with the same index as in nvidia-smi.
        program = "import os; print('  a child sees CUDA_VISIBLE_DEVICES =', os.environ['CUDA_VISIBLE_DEVICES'])"
        print(f"{assignment.worker_id} has GPU {assignment.gpu_id}")
        sys.stdout.flush()
        environment = {**os.environ, **assignment.env}
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environment)
        await child.wait()
    finally:
        await client.release_gpu(assignment)


async def share_among_workers(client: GPUWorkerPoolClient) -> None:
    """More workers than GPUs: first come, first served, and no GPU has two workers."""
    holders: dict[object, int] = {}

    async def work(number: int) -> None:
        async with GPUContextManager(client, timeout=TIMEOUT_SECONDS) as gpu_id:
            assert gpu_id not in holders, f"GPU {gpu_id} was given to {holders[gpu_id]} and {number}"
            holders[gpu_id] = number
            await asyncio.sleep(0.1)
            del holders[gpu_id]

    workers = 2 * client.get_pool_status().total_gpus + 1
    await asyncio.gather(*(work(number) for number in range(workers)))
    print(f"{workers} workers were served, no two of them by one GPU at a time")


async def ask_for_something_special(client: GPUWorkerPoolClient) -> None:
    try:
        async with GPUContextManager(client, timeout=1.0, min_free_memory_mb=8192, policy="idle") as gpu_id:
            print(f"GPU {gpu_id} has 8 GiB free and runs nothing")
    except WorkerTimeoutError as error:
        print(f"no such GPU within a second: {error}")
    try:
        await client.request_gpu(count=1000)
    except ImpossibleRequestError as error:
        print(f"refused at once: {error}")


async def main() -> int:
    try:
        async with GPUWorkerPoolClient() as client:
            if not client.get_pool_status().total_gpus:
                # A server may still be starting: a request waits until it answers.
                assignment = await client.request_gpu(timeout=TIMEOUT_SECONDS)
                await client.release_gpu(assignment)
            await show_the_pool(client)
            await use_one_gpu(client)
            await share_among_workers(client)
            await ask_for_something_special(client)
    except ServiceUnavailableError as error:
        print(f"no GPU server answers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
