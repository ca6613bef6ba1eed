"""Shows one pool over several servers: shares, health, and what happens when one fails.

$ GPU_STATS_SERVICE_ENDPOINTS=http://gpu1:8000,http://gpu2:8000 python examples/multi_endpoint_usage.py
$ GPU_STATS_SERVICE_ENDPOINTS=big=http://gpu1:8000,small=http://gpu2:8000 python examples/multi_endpoint_usage.py
"""

# ruff: noqa: T201  # a program for people prints

from __future__ import annotations

import asyncio
import sys

from gpu_worker_pool import (
    GlobalGPUAssignment,
    GPUAssignment,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    ServiceUnavailableError,
    gpu_worker_pool_client,
)

TIMEOUT_SECONDS = 30.0


def show_the_endpoints(client: GPUWorkerPoolClient) -> None:
    status = client.get_pool_status()
    assert isinstance(status, MultiEndpointPoolStatus)
    print(f"{status.healthy_endpoints} of {status.total_endpoints} servers answer")
    for endpoint in status.endpoints:
        took = "no answer yet" if endpoint.response_time_ms is None else f"{endpoint.response_time_ms:.1f} ms"
        print(f"  {endpoint.endpoint_id}: {endpoint.available_gpus} of {endpoint.total_gpus} GPUs available, {took}")


async def compare_strategies() -> None:
    """One request after the other, each released before the next; then the share of each server."""
    for strategy in ("availability", "round_robin", "weighted"):
        async with gpu_worker_pool_client(load_balancing_strategy=strategy) as client:
            for _ in range(12):
                await client.release_gpu(await client.request_gpu(timeout=TIMEOUT_SECONDS))
            metrics = client.get_detailed_metrics()
            grants = {endpoint["endpoint_id"]: endpoint["grants"] for endpoint in metrics["endpoints"]}
            shares = metrics["load_balancer"]["share_of_grants"]
            print(f"{strategy}: {', '.join(f'{name} {grants[name]} ({shares[name]:.0%})' for name in shares)}")


async def use_one_gpu(client: GPUWorkerPoolClient) -> None:
    assignment = await client.request_gpu(timeout=TIMEOUT_SECONDS)
    assert isinstance(assignment, GlobalGPUAssignment)
    # The global id names the host; `env` is for a process on that host, with the host's own index.
    print(f"{assignment.gpu_id} is GPU {assignment.local_gpu_id} of {assignment.endpoint_id}: {assignment.env}")
    await client.release_gpu(assignment)


async def wait_out_a_failure(client: GPUWorkerPoolClient) -> None:
    """For a program that must not fail while all servers reboot."""

    async def ask() -> GPUAssignment:
        return await client.request_gpu(timeout=TIMEOUT_SECONDS)

    assignment = await client.queue_request_for_retry(ask)
    await client.release_gpu(assignment)
    for endpoint_id in client.get_error_recovery_status()["degradation_manager"]["degraded_endpoints"]:
        # If you have just repaired it, there is no need to wait for its breaker.
        print(f"asking {endpoint_id} again: {await client.trigger_endpoint_recovery(endpoint_id)}")
    client.print_error_recovery_summary()


async def main() -> int:
    try:
        async with GPUWorkerPoolClient() as client:
            if not client.is_multi_endpoint_mode():
                print("set GPU_STATS_SERVICE_ENDPOINTS to the URLs of several servers", file=sys.stderr)
                return 2
            if client.get_health()["status"] == "unhealthy":
                # Waits for the first server to answer; raises if none does in time.
                await client.release_gpu(await client.request_gpu(timeout=TIMEOUT_SECONDS))
            show_the_endpoints(client)
            await use_one_gpu(client)
            await wait_out_a_failure(client)
        await compare_strategies()
    except ServiceUnavailableError as error:
        print(f"no GPU server answers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
