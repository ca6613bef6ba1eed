"""The public API as a type checker sees it. mypy --strict reads this file; nobody runs it."""

from __future__ import annotations

from datetime import datetime
from typing import assert_type

from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient, with_gpu
from gpu_worker_pool.config import EnvironmentConfigurationManager, MultiEndpointConfigurationManager
from gpu_worker_pool.core import Effect, Explanation, Pool, PoolSettings, Reading, Requirements, Ticked
from gpu_worker_pool.errors import GPUWorkerPoolError, ImpossibleRequestError
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, PoolStatus, WorkerInfo
from gpu_worker_pool.testing import FakeClock, gpu
from gpu_worker_pool.worker_pool_manager import StaleAssignmentError, WorkerPoolManager, WorkerTimeoutError


async def a_worker_as_documented() -> None:
    manager = WorkerPoolManager(EnvironmentConfigurationManager(), worker_timeout=None, clock=FakeClock())
    async with manager as same:
        assert_type(same, WorkerPoolManager)
        try:
            assignment = await manager.request_gpu(timeout=1.5)
        except WorkerTimeoutError as error:
            assert_type(error.retryable, bool)
            return
        except ImpossibleRequestError as error:
            assert_type(error.reasons, tuple[str, ...])
            return
        assert_type(assignment, GPUAssignment)
        assert_type(assignment.gpu_id, int | str)
        assert_type(assignment.local_gpu_ids, tuple[int, ...])
        assert_type(assignment.env, dict[str, str])
        assert_type(assignment.assigned_at, datetime)
        assert_type(await assignment.wait_lost(), None)
        if isinstance(assignment, GlobalGPUAssignment):
            assert_type(assignment.gpu_id, str)
            assert_type(assignment.endpoint_id, str)
        try:
            await manager.release_gpu(assignment)
        except StaleAssignmentError as error:
            same_error: ValueError = error
            raise GPUWorkerPoolError(str(same_error)) from error


async def every_wish(manager: WorkerPoolManager) -> None:
    await manager.request_gpu(
        5,
        count=2,
        memory_mb=8000,
        share=True,
        min_free_memory_mb=1000.5,
        gpu_model="A100",
        only=[0, "GPU-1234"],
        exclude=(3,),
        priority=1,
        policy="idle",
        label="training",
    )
    await manager.request_gpu(policy="whatever")  # type: ignore[arg-type]
    await manager.request_gpu(count="two")  # type: ignore[arg-type]
    await manager.request_gpu(None, 2)  # type: ignore[call-arg]


def readings_by_hand(manager: WorkerPoolManager) -> None:
    reading = Reading("0", 0, "NVIDIA H100", memory_usage_percent=1.0, utilization_percent=None)
    assert_type(reading.utilization_percent, float | None)
    manager.observe([reading, gpu(1)], age_seconds=0.5)
    status = manager.get_pool_status()
    assert_type(status, PoolStatus)
    assert_type(status.gpu_assignments, dict[int | str, list[WorkerInfo]])
    assert_type(manager.explain(count=2), Explanation)
    reading.index = 3  # type: ignore[misc]


def the_core() -> None:
    pool = Pool(PoolSettings(strategy="weighted"))
    assert_type(pool.apply(Ticked(), now=1.0), tuple[Effect, ...])
    PoolSettings(strategy="random")  # type: ignore[arg-type]
    requirements = Requirements(count=2)
    requirements.count = 3  # type: ignore[misc]


def configuration() -> None:
    config = MultiEndpointConfigurationManager({"GPU_POLLING_INTERVAL": "2.5"})
    assert_type(config.get_polling_interval(), float)
    assert_type(config.get_service_endpoint(), str)
    assert_type([endpoint.url for endpoint in config.get_service_endpoints()], list[str])


async def blocks(client: GPUWorkerPoolClient, count: int) -> None:
    async with GPUContextManager(client, 5, gpu_model="A100") as gpu_id:
        assert_type(gpu_id, int | str)
    async with GPUContextManager(client, count=count) as gpus:
        assert_type(gpus, int | str | tuple[int | str, ...])


async def decorated(client: GPUWorkerPoolClient) -> None:
    @with_gpu(client, timeout=5)
    async def train(gpu: GPUAssignment, epochs: int) -> float:
        return float(epochs) + len(gpu.gpu_ids)

    assert_type(await train(3), float)
    await train("three")  # type: ignore[arg-type]
