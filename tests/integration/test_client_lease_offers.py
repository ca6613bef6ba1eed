"""Which servers give leases to a client, and with which key; and which must never be used without."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import HostileServer, answer_json, gpu_row, summary
from tests.fakes.lease_server import LeaseServer, refusing
from tests.leasing import QUICK, client_of, is_clean, leases, some_servers, until
from tests.server_process import ServerProcess, free_port

from gpu_worker_pool import (
    GPUWorkerPoolClient,
    WorkerTimeoutError,
)
from gpu_worker_pool.errors import (
    ServiceRefusedError,
    ServiceUnavailableTimeoutError,
)

KEY = "a-key-for-somebody-else"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with some_servers(tmp_path_factory.mktemp("servers"), 2) as started:
        yield started


@pytest.fixture
async def server(servers: list[ServerProcess]) -> AsyncIterator[ServerProcess]:
    """Of 2 GPUs; it must be left as it was found."""
    yield servers[0]
    await is_clean(*servers)


# --- who gives leases, and who must not be used without ---


async def test_local_coordination_takes_no_lease_and_keeps_off_those_there_are(server: ServerProcess) -> None:
    async with client_of(server) as leasing, client_of(server, coordination="local") as local:
        lease = await leasing.request_gpu()
        await until(lambda: local.get_pool_status().available_gpus == 1)
        assignment = await local.request_gpu()
        assert assignment.lease_id is None
        assert assignment.gpu_id != lease.gpu_id
        assert len(leases(server)) == 1
        with pytest.raises(WorkerTimeoutError, match="leased by its server to another client"):
            await local.request_gpu(timeout=0.2)
        await leasing.release_gpu(lease)
        assert {thread.name for thread in threading.enumerate()} >= {"gpu-pool leases"}


OLD = answer_json(summary(gpu_row(0), gpu_row(1)))


async def test_a_forgotten_assignment_is_taken_back_also_while_it_is_open_who_gives_leases(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with HostileServer(OLD) as old:
        async with client_of(old.url, f"http://127.0.0.1:{free_port()}") as client:
            assert client._coordinator.assigner is not client._manager, "the other one may give leases when it returns"

            async def forget() -> None:
                await client.request_gpu()

            await asyncio.create_task(forget())
            await until(lambda: "without release_gpu(); it is taken back when the task" in caplog.text)
            await until(lambda: client.get_pool_status().active_workers == 0)


async def test_an_older_server_works_as_documented(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with HostileServer(OLD) as old:
        async with client_of(old.url) as client:
            assert client._coordinator.assigner is client._manager, "nothing is between a request and the pool"
            first, second = await client.request_gpu(), await client.request_gpu()
            assert (first.lease_id, first.lost) == (None, False)
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.05)
            await client.release_gpu(first)
            await client.release_gpu(second)
        assert "gpu-pool leases" not in {thread.name for thread in threading.enumerate()}
        assert [record.levelname for record in caplog.records if "gives no leases" in record.message] == ["INFO"]
        async with client_of(old.url, coordination="leases") as client:
            for _ in range(2):
                with pytest.raises(ServiceRefusedError, match=r"gives no leases .*older server"):
                    await client.request_gpu()
            assert client.get_pool_status().available_gpus == 0
            assert "its server gives no leases" in str(client.explain())


async def test_a_server_that_closes_its_leases_to_us_is_used_without_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LeaseServer(features=["metrics"]) as closed:
        async with client_of(closed.url, polling_interval=0.1) as client:
            assert (await client.request_gpu()).lease_id is None
            await asyncio.sleep(0.5)
        assert [record.levelname for record in caplog.records if "gives no leases" in record.message] == ["WARNING"]
        assert closed.asked("GET / ") == 1


@pytest.mark.parametrize(
    ("status", "error"), [(401, "key_wrong"), (403, "leases_closed"), (404, ""), (405, ""), (421, "wrong_host")]
)
async def test_a_server_that_gave_leases_is_never_used_without(status: int, error: str) -> None:
    with LeaseServer(POST_leases=refusing(status, error)) as server:
        async with client_of(server.url) as client:
            with pytest.raises(ServiceRefusedError, match="because") as caught:
                await client.request_gpu()
            assert caught.value.status == status
            assert client.get_pool_status().active_workers == 0


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_ledger_that_cannot_be_used_is_waited_for_and_not_done_without(status: int) -> None:
    with LeaseServer(POST_leases=refusing(status, "ledger_unavailable", "the disk is full")) as server:
        async with client_of(server.url) as client:
            with pytest.raises(ServiceUnavailableTimeoutError, match="the disk is full"):
                await client.request_gpu(timeout=1.0)
            assert client.get_health()["status"] == "healthy"
        assert 1 <= server.asked("POST /leases") <= 4


async def test_a_server_whose_offer_cannot_be_read_yet_is_not_used_yet() -> None:
    with LeaseServer() as server:
        home = server.routes["GET / "]
        server.routes["GET / "] = refusing(503, "starting")
        async with client_of(server.url, endpoint_max_retries=0, endpoint_health_check_interval=0.3) as client:
            assert client.get_health()["status"] == "unhealthy"
            with pytest.raises(ServiceUnavailableTimeoutError, match="503"):
                await client.request_gpu(timeout=0.2)
            server.routes["GET / "] = home
            await until(lambda: client.get_health()["status"] == "healthy")


async def test_a_server_that_is_down_at_the_start(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, GPU_BACKEND="simulated:1", **QUICK)
    async with client_of(server, endpoint_max_retries=0, endpoint_health_check_interval=0.3) as client:
        waiting = [asyncio.create_task(client.request_gpu()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert client.get_pool_status().blocked_workers == 3
        with pytest.raises(ServiceUnavailableTimeoutError, match="connection refused"):
            await client.request_gpu(timeout=0.1)
        try:
            await asyncio.to_thread(server.start)
            for task in waiting:
                async with asyncio.timeout(15):
                    assignment = await task
                assert assignment.lease_id is not None
                await client.release_gpu(assignment)
            assert client.get_pool_status().blocked_workers == 0
        finally:
            server.kill()


async def test_an_older_server_that_is_down_at_the_start() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with client_of(url, endpoint_max_retries=0, endpoint_health_check_interval=0.3) as client:
        waiting = asyncio.create_task(client.request_gpu(label="early"))
        await asyncio.sleep(0.1)
        assert client.get_detailed_metrics()["queue_metrics"]["waiting"][0]["label"] == "early"
        with HostileServer(OLD, at_port=port):
            assignment = await waiting
            assert assignment.lease_id is None
            await client.release_gpu(assignment)
            await client.release_gpu(assignment)


# --- keys ---


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that takes nobody for one of its own host."""
    settings = {"GPU_POOL_OPEN_ON_LOOPBACK": "false", "GPU_POOL_API_KEYS": KEY, **QUICK}
    with ServerProcess(tmp_path_factory.mktemp("locked"), GPU_BACKEND="simulated:1", **settings) as started:
        yield started


async def test_without_a_key_it_says_what_is_missing(locked: ServerProcess) -> None:
    async with client_of(locked) as client:
        with pytest.raises(ServiceRefusedError, match=r"401: a key is needed.*; give api_key= or set GPU_POOL_API_KEY"):
            await client.request_gpu()


async def test_a_wrong_key_is_refused_and_shown_nowhere(
    locked: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "this-is-the-wrong-key"
    async with client_of(locked, api_key=wrong) as client:
        with pytest.raises(ServiceRefusedError, match="401") as caught:
            await client.request_gpu()
        shown = [str(caught.value), repr(caught.value), repr(client), repr(vars(client)), repr(client._config)]
        assert not [text for text in [*shown, caplog.text] if wrong in text]


@pytest.mark.parametrize("how", ["argument", "variable"])
async def test_the_right_key_opens(locked: ServerProcess, how: str) -> None:
    given: dict[str, Any] = {"api_key": KEY} if how == "argument" else {"environ": {"GPU_POOL_API_KEY": KEY}}
    async with client_of(locked, lease_ttl=2, **given) as client:
        assignment = await client.request_gpu()
        await asyncio.sleep(2.5)
        assert not assignment.lost, "it is renewed with the key, too"
        await client.release_gpu(assignment)
    assert KEY not in locked.log


async def test_a_key_is_not_sent_to_a_server_of_this_host_that_wants_none(server: ServerProcess) -> None:
    async with client_of(server, api_key="for-another-server") as client:
        await client.release_gpu(await client.request_gpu(timeout=45))


async def test_a_key_is_not_sent_over_plain_http_to_another_host() -> None:
    with LeaseServer(POST_leases=refusing(401, "key_needed")) as server:
        elsewhere = f"http://not-this-host.invalid:{server.port}"
        with pytest.raises(ValueError, match="allow_insecure_key=True"):
            GPUWorkerPoolClient(elsewhere, coordination="leases", api_key=KEY, environ={})
        from tests.fakes.lease_service import new_request

        from gpu_worker_pool.api.client import APIClient
        from gpu_worker_pool.leases.http import HTTPLeaseService

        def session() -> Any:
            raise AssertionError("nothing must be sent")

        service = HTTPLeaseService("lab", APIClient(elsewhere, session, timeout_seconds=1, api_key=KEY))
        with pytest.raises(
            ServiceRefusedError, match=r"use https://, or, in a network you trust, pass allow_insecure_key=True"
        ):
            await service.acquire(new_request(), wait_seconds=0, may_reserve=True)
        assert KEY not in repr(service)
        api = APIClient(elsewhere, session, timeout_seconds=1, api_key=KEY, allow_insecure_key=True)
        allowed = HTTPLeaseService("lab", api)
        with pytest.raises(AssertionError):
            await allowed.acquire(new_request(), wait_seconds=0, may_reserve=True)


def test_what_cannot_be_a_key_or_a_callback_is_refused_and_not_shown() -> None:
    for key in ("with blanks in it", "käy", "", "two\nlines"):
        with pytest.raises(ValueError, match="api_key must be a key") as caught:
            GPUWorkerPoolClient("http://a:1", api_key=key, environ={})
        assert not key or key not in str(caught.value)
    with pytest.raises(ValueError, match="api_key must be a key"):
        GPUWorkerPoolClient("http://a:1", api_key=7, environ={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="called, not awaited"):
        GPUWorkerPoolClient("http://a:1", on_lease_lost=asyncio.sleep, environ={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_lease_lost must be a function"):
        GPUWorkerPoolClient("http://a:1", on_lease_lost=3, environ={})  # type: ignore[arg-type]
