"""The blocking client and `with_gpu` as a type checker sees them. mypy --strict reads this file; nobody runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

from gpu_worker_pool import sync
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.core import Explanation
from gpu_worker_pool.decorators import with_gpu
from gpu_worker_pool.models import GPUAssignment, GPUStats, PoolStatus


def a_thread() -> None:
    with sync.GPUWorkerPoolClient("http://gpu-server-1:8000", worker_timeout=5, endpoint_max_retries=1) as client:
        assert_type(client, sync.GPUWorkerPoolClient)
        assignment = client.request_gpu(timeout=1.5, count=2, only=[0, "GPU-1234"], policy="idle", label="training")
        assert_type(assignment, GPUAssignment)
        assert_type(assignment.env, dict[str, str])
        assert_type(assignment.lost, bool)
        assert_type(assignment.lost_reason, str | None)
        assert_type(assignment.lease_id, str | None)
        client.release_gpu(assignment)
        client.release_gpu(0)  # type: ignore[arg-type]
        client.request_gpu(policy="whatever")  # type: ignore[arg-type]
        client.request_gpu(cuont=2)  # type: ignore[call-arg]
        client.request_gpu(None, 2)  # type: ignore[call-arg]
        block = sync.GPUContextManager(client, 5, count=2)
        with block:
            assert_type(block.assignment, GPUAssignment | None)
    with sync.gpu_worker_pool_client(memory_threshold=75.0) as started:
        assert_type(started, sync.GPUWorkerPoolClient)
    sync.GPUWorkerPoolClient(worker_timeout="soon")  # type: ignore[arg-type]

    def lost(assignment: GPUAssignment) -> None:
        assert_type(assignment.lost, bool)

    sync.GPUWorkerPoolClient("local://", coordination="leases", lease_ttl=30, api_key="a-secret", on_lease_lost=lost)
    sync.GPUWorkerPoolClient(gpu_names="uuid")
    sync.GPUWorkerPoolClient(on_lease_lost=len)  # type: ignore[arg-type]


def looking(client: sync.GPUWorkerPoolClient) -> None:
    assert_type(client.is_running, bool)
    assert_type(client.is_multi_endpoint_mode(), bool)
    assert_type(client.get_pool_status(), PoolStatus)
    assert_type(client.get_endpoints_info(), list[dict[str, Any]] | None)
    assert_type(client.get_detailed_metrics(), dict[str, Any])
    assert_type(client.get_health(), dict[str, Any])
    assert_type(client.get_error_recovery_status(), dict[str, Any])
    assert_type(client.explain(count=2), Explanation)
    assert_type(client.add_endpoint("lab=http://gpu-server-2:8000"), str)
    assert_type(client.trigger_endpoint_recovery("lab"), bool)
    assert_type(client.queue_request_for_retry(lambda: client.request_gpu(5)), GPUAssignment)

    def arrived(stats: GPUStats) -> None:
        assert_type(stats.gpu_count, int)

    end: Callable[[], None] = client.on_stats_update(arrived)
    end()


def functions(client: sync.GPUWorkerPoolClient) -> None:
    @with_gpu(client, timeout=60, min_free_memory_mb=8000)
    def train(gpu: GPUAssignment, epochs: int, *, rate: float = 0.1) -> float:
        return epochs * rate * len(gpu.gpu_ids)

    assert_type(train(10), float)
    assert_type(train(epochs=10, rate=0.2), float)
    train("ten")  # type: ignore[arg-type]
    train(10, speed=3)  # type: ignore[call-arg]

    @with_gpu(client)
    def anywhere(epochs: int, *, gpu: GPUAssignment) -> str:
        return f"{gpu.gpu_id} {epochs}"

    assert_type(anywhere(10), str)


async def async_functions(client: GPUWorkerPoolClient) -> None:
    @with_gpu(client)
    async def train(gpu: GPUAssignment, epochs: int) -> float:
        return float(epochs) * len(gpu.gpu_ids)

    assert_type(await train(10), float)
    await train("ten")  # type: ignore[arg-type]

    @with_gpu(client)
    async def anywhere(epochs: int, *, gpu: GPUAssignment) -> str:
        return f"{gpu.gpu_id} {epochs}"

    assert_type(await anywhere(10), str)

    @with_gpu(client)  # type: ignore[arg-type]
    def plain(gpu: GPUAssignment) -> None: ...

    with_gpu(plain)  # type: ignore[call-overload]
