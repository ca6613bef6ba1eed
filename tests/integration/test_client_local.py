"""`local://`: leases of this host's GPUs without any server, for as many programs as like."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.leasing import QUICK, is_clean, leases, queue, until
from tests.server_process import ServerProcess

from gpu_worker_pool import (
    GPUContextManager,
    GPUWorkerPoolClient,
    ImpossibleRequestError,
    PoolStoppedError,
    StaleAssignmentError,
    WorkerTimeoutError,
    sync,
)
from gpu_worker_pool.client.local_readings import LocalReadings
from gpu_worker_pool.errors import (
    LeaseEndedError,
    LedgerUnusableError,
    ServiceRefusedError,
    ServiceRetryableError,
)
from gpu_worker_pool.leases.lease_thread import LeaseThread
from gpu_worker_pool.leases.local import LocalLeaseService, LocalSettings

MakeClient = Callable[..., GPUWorkerPoolClient]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Two GPUs, and a place to meet."""
    return {"GPU_BACKEND": "simulated:2", "GPU_POOL_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def client(environ: dict[str, str]) -> MakeClient:
    def make(more: dict[str, str] | None = None, **settings: Any) -> GPUWorkerPoolClient:
        return GPUWorkerPoolClient("local://", polling_interval=0.3, environ=environ | (more or {}), **settings)

    return make


async def test_two_programs_get_different_gpus_and_a_third_waits_and_is_told_why(client: MakeClient) -> None:
    async with client() as first, client() as second, client() as third:
        one, other = await asyncio.gather(first.request_gpu(), second.request_gpu())
        assert {one.gpu_id, other.gpu_id} == {0, 1}
        assert one.lease_id != other.lease_id
        with pytest.raises(WorkerTimeoutError, match=r"local: number 1 in line") as caught:
            await third.request_gpu(timeout=0.5)
        for assignment in (one, other):
            assert f"GPU {assignment.gpu_id}: held by this very process (pid {os.getpid()}) for" in str(caught.value)
        assert "could serve it" not in str(caught.value)
        waiting = asyncio.create_task(third.request_gpu())
        await asyncio.sleep(0.5)
        assert "leased by its server to another client" in str(third.explain())
        begun = time.monotonic()
        await first.release_gpu(one)
        passed_on = await waiting
        assert time.monotonic() - begun < 1.5
        assert passed_on.gpu_id == one.gpu_id
        await second.release_gpu(other)
        await third.release_gpu(passed_on)


async def test_an_assignment_is_like_any_other(client: MakeClient) -> None:
    async with client() as one:
        assert not one.is_multi_endpoint_mode()
        assert one.get_health()["healthy_endpoints"] == ["local"]
        async with GPUContextManager(one, count=2) as gpu_ids:
            assert set(gpu_ids) == {0, 1}
            status = one.get_pool_status()
            assert (status.total_gpus, status.available_gpus, status.active_workers) == (2, 0, 1)
        with pytest.raises(ImpossibleRequestError, match="2 of 2"):
            await one.request_gpu(count=3)
        seen: list[int] = []
        end = one.on_stats_update(lambda stats: seen.append(stats.gpu_count))
        await until(lambda: seen)
        end()
        assert seen[0] == 2
        metrics = one.get_detailed_metrics()
        assert [gpu["name"] for gpu in metrics["gpu_metrics"]] == ["Simulated GPU 24GB"] * 2
    assert "gpu-pool leases" not in {thread.name for thread in threading.enumerate()}


async def test_it_is_renewed_also_while_the_event_loop_is_blocked(client: MakeClient) -> None:
    async with client(lease_ttl=2) as one:
        assignment = await one.request_gpu()
        time.sleep(5)  # noqa: ASYNC251  # which is the point
        assert not assignment.lost
        await one.release_gpu(assignment)


async def test_many_workers_of_several_programs_and_nobody_is_held_twice(client: MakeClient) -> None:
    held: Counter[Any] = Counter()

    async def work(one: GPUWorkerPoolClient) -> None:
        for _ in range(3):
            async with GPUContextManager(one, timeout=50) as gpu_id:
                held[gpu_id] += 1
                assert held[gpu_id] == 1
                await asyncio.sleep(0.002)
                held[gpu_id] -= 1

    async with client() as first, client() as second:
        await asyncio.gather(*(work(one) for one in (first, second) for _ in range(8)))


async def test_a_server_of_the_same_host_and_programs_without_it_have_one_ledger(
    client: MakeClient, environ: dict[str, str], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "server", **environ, **QUICK) as server:
        async with client() as local, GPUWorkerPoolClient(server.url, polling_interval=0.3, environ={}) as remote:
            one, other = await local.request_gpu(), await remote.request_gpu()
            assert {one.gpu_id, other.gpu_id} == {0, 1}
            assert {lease["lease_id"] for lease in leases(server)} == {one.lease_id, other.lease_id}
            waiting = [asyncio.create_task(each.request_gpu()) for each in (local, remote)]
            await until(lambda: len(queue(server)) == 2)
            await local.release_gpu(one)
            await remote.release_gpu(other)
            for each, task in zip((local, remote), waiting, strict=True):
                await each.release_gpu(await task)
        await is_clean(server)


async def test_stopping_ends_those_who_wait_and_gives_back(client: MakeClient) -> None:
    one = client()
    await one.start()
    await one.request_gpu(count=2)
    waiting = asyncio.create_task(one.request_gpu())
    await asyncio.sleep(0.3)
    await one.stop()
    with pytest.raises(PoolStoppedError):
        await waiting
    async with client() as other:
        await other.release_gpu(await other.request_gpu(count=2, timeout=45))
        assert other.get_pool_status().blocked_workers == 0


def test_threads_have_it_too(environ: dict[str, str]) -> None:
    with sync.GPUWorkerPoolClient("local://", environ=environ) as one:
        with sync.GPUContextManager(one) as gpu_id:
            assert gpu_id in (0, 1)
        assignment = one.request_gpu()
        one.release_gpu(assignment)
        one.release_gpu(assignment)


# --- inside a lease ---


async def test_inside_a_lease_it_is_that_lease(client: MakeClient) -> None:
    async with client(lease_ttl=2) as outer:
        lease = await outer.request_gpu()
        async with client(lease.env, lease_ttl=2) as inner:
            assert inner.get_pool_status().total_gpus == 1
            assignment = await inner.request_gpu(timeout=2)
            assert (assignment.lease_id, assignment.gpu_id) == (lease.lease_id, lease.gpu_id)
            with pytest.raises(WorkerTimeoutError, match="other workers of this program have the GPUs"):
                await inner.request_gpu(timeout=0.3)
            waiting = asyncio.create_task(inner.request_gpu())
            await asyncio.sleep(0.1)
            await inner.release_gpu(assignment)
            async with asyncio.timeout(3):
                again = await waiting
            assert again.gpu_id == lease.gpu_id
            with pytest.raises(ImpossibleRequestError, match=f"runs inside {lease.lease_id}"):
                await inner.request_gpu(count=2)
            await asyncio.sleep(2.5)
            assert not again.lost, "it is renewed by whoever holds it"
        assert not lease.lost, "neither releasing nor stopping ends it"
        await outer.release_gpu(lease)


async def test_the_gpus_of_a_larger_lease_are_handed_out_one_by_one(client: MakeClient) -> None:
    async with client() as outer:
        lease = await outer.request_gpu(count=2)
        async with client(lease.env) as inner:
            one, other = await inner.request_gpu(), await inner.request_gpu()
            assert {one.gpu_id, other.gpu_id} == {0, 1}
            await inner.release_gpu(one)
            named = await inner.request_gpu(only=[one.gpu_id], timeout=2)
            assert named.gpu_id == one.gpu_id
            for each in (other, named):
                await inner.release_gpu(each)
            both = await inner.request_gpu(count=2, timeout=2)
            assert set(both.gpu_ids) == {0, 1}
        await outer.release_gpu(lease)


async def test_a_lease_that_ends_is_lost_for_those_inside_too(client: MakeClient) -> None:
    async with client() as outer:
        lease = await outer.request_gpu()
        async with client(lease.env, lease_ttl=2) as inner:
            assignment = await inner.request_gpu()
            await outer.release_gpu(lease)
            async with asyncio.timeout(5):
                await assignment.wait_lost()
            with pytest.raises(StaleAssignmentError, match="inside which this program runs, has ended"):
                await inner.release_gpu(assignment)


async def test_inside_a_lease_that_has_ended_nothing_is_handed_out(client: MakeClient) -> None:
    async with client() as outer, client() as stranger:
        lease = await outer.request_gpu()
        async with client(lease.env) as inner:
            await inner.release_gpu(await inner.request_gpu(timeout=45))
            await outer.release_gpu(lease)
            await stranger.release_gpu(await stranger.request_gpu(only=[lease.gpu_id], timeout=45))
            with pytest.raises(LeaseEndedError, match="inside which this program runs, has ended"):
                await inner.request_gpu(timeout=45)


async def test_a_lease_of_this_hosts_server_is_one_to_run_inside_too(
    client: MakeClient, environ: dict[str, str], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "server", **environ, **QUICK) as server:
        async with GPUWorkerPoolClient(server.url, polling_interval=0.3, environ={}) as outer:
            lease = await outer.request_gpu()
            async with client(lease.env) as inner:
                assignment = await inner.request_gpu(timeout=45)
                assert (assignment.lease_id, assignment.gpu_id) == (lease.lease_id, lease.gpu_id)
                await inner.release_gpu(assignment)
            other = next(gpu for gpu in (0, 1) if gpu != lease.gpu_id)
            async with client({**lease.env, "CUDA_VISIBLE_DEVICES": str(other)}) as unrelated:
                assignment = await unrelated.request_gpu(timeout=45)
                assert (assignment.lease_id != lease.lease_id, assignment.gpu_id) == (True, other)
                await unrelated.release_gpu(assignment)
            await outer.release_gpu(lease)


async def test_the_name_of_a_lease_that_is_over_means_nothing(
    client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with client({"GPU_POOL_LEASE_ID": "lease-999"}) as one:
        assignment = await one.request_gpu(timeout=45)
        assert assignment.lease_id != "lease-999"
        assert "lease-999, which is not one of your active leases" in caplog.text
        await one.release_gpu(assignment)


# --- CUDA_VISIBLE_DEVICES ---


@pytest.mark.parametrize("visible", ["1", " 1 ", "GPU-51309a7e-0000-4000-8000-000000000001", "1,7"])
async def test_only_visible_gpus_are_asked_for(client: MakeClient, visible: str) -> None:
    async with client({"CUDA_VISIBLE_DEVICES": visible}) as one, client() as other:
        assert one.get_pool_status().total_gpus == 1
        assignment = await one.request_gpu(timeout=45)
        assert assignment.gpu_id == 1
        with pytest.raises(WorkerTimeoutError):
            await one.request_gpu(timeout=0.3)
        with pytest.raises(ImpossibleRequestError):
            await one.request_gpu(only=[0])
        assert other.get_pool_status().total_gpus == 2, "for others they are there"
        assert (await other.request_gpu(timeout=45)).gpu_id == 0


async def test_all_gpus_hidden(client: MakeClient) -> None:
    async with client({"CUDA_VISIBLE_DEVICES": "-1"}) as one:
        with pytest.raises(ImpossibleRequestError, match="hides every GPU: unset it"):
            await one.request_gpu()


async def test_nothing_that_is_named_is_there(client: MakeClient) -> None:
    async with client({"CUDA_VISIBLE_DEVICES": "7"}) as one:
        assert one.get_pool_status().total_gpus == 2
        await one.release_gpu(await one.request_gpu(timeout=45))


# --- what is wrong ---


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this host has a driver")
async def test_no_driver_is_told_at_once(environ: dict[str, str]) -> None:
    async with GPUWorkerPoolClient("local://", environ=environ | {"GPU_BACKEND": "nvidia-smi"}) as client:
        assert client.get_health()["status"] == "unhealthy"
        begun = time.monotonic()
        with pytest.raises(ServiceRefusedError, match="install the NVIDIA driver"):
            await client.request_gpu()
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize("inside", [{}, {"GPU_POOL_LEASE_ID": "lease-1"}])
async def test_a_folder_that_cannot_be_used_is_told(
    environ: dict[str, str], inside: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environ["GPU_POOL_STATE_DIR"] = str(tmp_path / "file" / "below")
    async with GPUWorkerPoolClient("local://", environ=environ | inside) as client:
        with pytest.raises(LedgerUnusableError, match=r"below.*set GPU_POOL_STATE_DIR"):
            await client.request_gpu()  # at once, and not only when a time is over
    assert not [record for record in caplog.records if record.exc_info], "it is no bug"


async def test_readings_that_a_stop_cuts_short_are_no_bug(environ: dict[str, str]) -> None:
    thread = LeaseThread(lambda _: None)
    thread.start()
    service = LocalLeaseService("local", LocalSettings.from_environment(environ))
    await asyncio.wrap_future(thread.request_stop())
    thread.join()
    with pytest.raises(ServiceRetryableError, match="stopped"):
        await LocalReadings(service, thread).fetch()


def test_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(ValueError, match=r"local:// cannot be one of several"):
        GPUWorkerPoolClient(service_endpoints=["local://", "http://gpu2:8000"], environ={})
    with pytest.raises(ValueError, match=r'which coordination="local" turns off'):
        GPUWorkerPoolClient("local://", coordination="local", environ={})


def test_a_variable_that_combines_it_is_told_and_the_rest_used(caplog: pytest.LogCaptureFixture) -> None:
    client = GPUWorkerPoolClient(environ={"GPU_SERVICE_ENDPOINTS": "local://,http://gpu2:8000"})
    assert [endpoint.url for endpoint in client._config.endpoints] == ["http://gpu2:8000"]
    assert "local:// cannot be one of several" in caplog.text


async def test_a_bad_backend_is_told(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with GPUWorkerPoolClient("local://", environ=environ | {"GPU_BACKEND": "abacus"}):
        assert "GPU_BACKEND must be auto, nvml, nvidia-smi, amd or simulated:N, not 'abacus'" in caplog.text
