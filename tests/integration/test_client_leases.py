"""The client and servers that give leases: real servers, whose own routes say who holds what."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.fakes.tcp_proxy import TCPProxy
from tests.leasing import ADMIN, QUICK, client_of, is_clean, leases, queue, some_servers, take_away, until
from tests.server_process import ServerProcess
from tests.waiting import eventually

from gpu_worker_pool import (
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    ImpossibleRequestError,
    PoolStoppedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
    sync,
)
from gpu_worker_pool.decorators import with_gpu
from gpu_worker_pool.errors import (
    InvalidAssignmentError,
    RequestCancelledError,
    ServiceUnavailableTimeoutError,
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with some_servers(tmp_path_factory.mktemp("servers"), 2) as started:
        yield started


@pytest.fixture
async def server(servers: list[ServerProcess]) -> AsyncIterator[ServerProcess]:
    """Of 2 GPUs; it must be left as it was found."""
    yield servers[0]
    await is_clean(*servers)


# --- one server ---


async def test_a_request_takes_a_lease_and_a_release_ends_it(server: ServerProcess) -> None:
    async with client_of(server, lease_ttl=30) as client:
        assignment = await client.request_gpu(label="mine")
        (lease,) = leases(server)
        assert (lease["lease_id"], lease["fence"]) == (assignment.lease_id, assignment.fence)
        assert (lease["worker_id"], lease["label"], lease["ttl_seconds"]) == (assignment.worker_id, "mine", 30)
        assert [gpu["uuid"] for gpu in lease["gpus"]] == list(assignment.gpu_uuids)
        assert assignment.env["GPU_POOL_LEASE_ID"] == assignment.lease_id
        assert assignment.expires_at is not None
        assert 20 < (assignment.expires_at - assignment.assigned_at).total_seconds() <= 30
        assert not assignment.lost
        await client.release_gpu(assignment)
        assert leases(server) == []
        assert not assignment.lost


async def test_programs_that_ask_at_once_get_different_gpus_and_a_third_waits(server: ServerProcess) -> None:
    async with client_of(server) as first, client_of(server) as second, client_of(server) as third:
        one, other = await asyncio.gather(first.request_gpu(), second.request_gpu())
        assert {one.gpu_id, other.gpu_id} == {0, 1}
        waiting = asyncio.create_task(third.request_gpu())
        await until(lambda: queue(server))
        status = third.get_pool_status()
        assert (status.active_workers, status.blocked_workers) == (0, 1)
        await until(lambda: third.get_pool_status().available_gpus == 0)
        assert "leased by its server to another client" in str(third.explain())
        with pytest.raises(WorkerTimeoutError, match=r"number 2 in line") as caught:
            await third.request_gpu(timeout=0.3)
        assert not isinstance(caught.value, ServiceUnavailableError)
        begun = time.monotonic()
        await first.release_gpu(one)
        passed_on = await waiting
        assert time.monotonic() - begun < 2
        assert passed_on.gpu_id == one.gpu_id
        assert (passed_on.fence or 0) > (one.fence or 0)
        await second.release_gpu(other)
        await third.release_gpu(passed_on)


async def test_what_is_told_of_leases_in_metrics_and_status(server: ServerProcess) -> None:
    async with client_of(server) as client:
        held = await client.request_gpu(count=2, label="both")
        waiting = asyncio.create_task(client.request_gpu(label="late", min_free_memory_mb=10))
        await until(lambda: queue(server))
        status = client.get_pool_status()
        assert (status.total_gpus, status.available_gpus, status.active_workers, status.blocked_workers) == (2, 0, 1, 1)
        assert {gpu: [worker.id for worker in workers] for gpu, workers in status.gpu_assignments.items()} == {
            0: [held.worker_id],
            1: [held.worker_id],
        }
        metrics = client.get_detailed_metrics()
        assert [gpu["assigned_workers"] for gpu in metrics["gpu_metrics"]] == [[held.worker_id]] * 2
        assert metrics["assignment_metrics"]["assignments"][0]["label"] == "both"
        assert metrics["assignment_metrics"]["granted_total"] == 1
        assert metrics["queue_metrics"]["waiting"][0]["label"] == "late"
        assert f"held by this very process (pid {os.getpid()})" in str(client.explain())
        await client.release_gpu(held)
        await client.release_gpu(await waiting)


async def test_thresholds_go_with_the_request(tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(healthy_gpu(0, memory_total="10000", memory_used="5000", memory_free="5000"))
    environment: dict[str, Any] = {"GPU_BACKEND": "nvidia-smi", **QUICK} | smi.env
    with ServerProcess(tmp_path / "server", **environment) as server:
        async with client_of(server, memory_threshold=40) as picky:
            with pytest.raises(WorkerTimeoutError, match=r"memory 50.0 % used, not below 40 %"):
                await picky.request_gpu(timeout=0.5)
        async with client_of(server) as client:
            await client.release_gpu(await client.request_gpu(timeout=45))


@pytest.mark.parametrize("wish", [{"priority": 5000}, {"label": "x" * 300}, {"count": 3}, {"gpu_model": "H100"}])
async def test_what_the_server_can_never_give_fails_at_once(server: ServerProcess, wish: dict[str, Any]) -> None:
    async with client_of(server) as client:
        begun = time.monotonic()
        with pytest.raises(ImpossibleRequestError) as caught:
            await client.request_gpu(**wish)
        assert time.monotonic() - begun < 2
        assert caught.value.reasons


async def test_many_workers_and_nobody_is_held_twice(server: ServerProcess) -> None:
    held: Counter[Any] = Counter()
    fences: dict[Any, list[int]] = {0: [], 1: []}

    async def work(client: GPUWorkerPoolClient) -> None:
        for _ in range(3):
            block = GPUContextManager(client, timeout=60)
            async with block as gpu_id:
                assert block.assignment is not None
                assert block.assignment.fence is not None
                fences[gpu_id].append(block.assignment.fence)
                held[gpu_id] += 1
                assert held[gpu_id] == 1
                await asyncio.sleep(0.005)
                held[gpu_id] -= 1

    async with client_of(server) as one, client_of(server) as other:
        await asyncio.gather(*(work(client) for client in (one, other) for _ in range(15)))
    every = [*fences[0], *fences[1]]
    assert len(every) == len(set(every)) == 2 * 15 * 3
    assert all(of_one == sorted(of_one) for of_one in fences.values()), "they grow with every grant"


async def test_those_of_one_client_are_served_in_the_order_in_which_they_came(server: ServerProcess) -> None:
    async with client_of(server) as client:
        held = [await client.request_gpu() for _ in range(2)]
        order: list[int] = []

        async def wait(number: int) -> None:
            assignment = await client.request_gpu()
            order.append(number)
            await client.release_gpu(assignment)

        waiting = [asyncio.create_task(wait(number)) for number in range(15)]
        await until(lambda: len(queue(server)) == 15)
        await client.release_gpu(held[0])
        await asyncio.gather(*waiting)
        await client.release_gpu(held[1])
    assert order == sorted(order)


# --- fault 32: it lives for as long as its holder does ---


@pytest.mark.fault(32)
async def test_it_is_renewed_also_while_the_event_loop_is_blocked(server: ServerProcess) -> None:
    async with client_of(server, lease_ttl=2) as client:
        assignment = await client.request_gpu()
        time.sleep(6)  # noqa: ASYNC251  # which is the point
        assert not assignment.lost
        assert [lease["state"] for lease in leases(server)] == ["held"]
        await client.release_gpu(assignment)


async def test_a_request_that_waits_keeps_its_place_while_the_loop_is_blocked(server: ServerProcess) -> None:
    async with client_of(server, lease_ttl=2) as holder, client_of(server, lease_ttl=2) as client:
        held = [await holder.request_gpu() for _ in range(2)]
        waiting = asyncio.create_task(client.request_gpu())
        await until(lambda: queue(server))
        (before,) = queue(server)
        time.sleep(4)  # noqa: ASYNC251
        (after,) = queue(server)
        assert after["request_id"] == before["request_id"]
        await holder.release_gpu(held[0])
        await client.release_gpu(await waiting)
        await holder.release_gpu(held[1])


# --- losing it ---


async def test_a_worker_is_told_that_its_lease_is_lost(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[GPUAssignment, threading.Thread]] = []
    callback = lambda lost: told.append((lost, threading.current_thread()))  # noqa: E731
    async with client_of(server, lease_ttl=2, on_lease_lost=callback) as client:
        assignment = await client.request_gpu()
        waiting = asyncio.create_task(assignment.wait_lost())
        assert assignment.lease_id is not None
        take_away(server, assignment.lease_id)
        async with asyncio.timeout(5):
            await waiting
        assert assignment.lost
        assert assignment.lost_reason is not None
        assert assignment.lease_id in assignment.lost_reason
        await until(lambda: told)
        assert told[0][0] is assignment
        assert told[0][1] is not threading.main_thread()
        assert client.get_pool_status().active_workers == 0
        for released in (assignment, copy.copy(assignment)):
            with pytest.raises(StaleAssignmentError, match="lost GPU"):
                await client.release_gpu(released)
        assert f"{assignment.worker_id} lost GPU" in caplog.text


def test_the_callback_of_a_quick_loop_gets_the_assignment_of_its_worker(servers: list[ServerProcess]) -> None:
    """The lease thread tells the client's loop, which drops the holder, and then calls back."""

    class QuickLoop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
            handle = super().call_soon_threadsafe(callback, *args, context=context)
            if getattr(callback, "__name__", "") == "_lost":
                has_run = threading.Event()
                super().call_soon_threadsafe(has_run.set)
                has_run.wait(10)
            return handle

    told: list[GPUAssignment] = []

    async def lose() -> None:
        async with client_of(servers[0], on_lease_lost=told.append, lease_ttl=2) as client:
            lost = await client.request_gpu()
            assert lost.lease_id is not None
            take_away(servers[0], lost.lease_id)
            await until(lambda: told)
            assert told[0] is lost
        await is_clean(*servers)

    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(lose())


async def test_a_callback_that_takes_its_time_delays_neither_renewals_nor_the_stop(server: ServerProcess) -> None:
    is_called, may_return, told = threading.Event(), threading.Event(), []

    def callback(lost: GPUAssignment) -> None:
        is_called.set()
        may_return.wait()
        told.append(lost)

    async with client_of(server, lease_ttl=2, on_lease_lost=callback) as client:
        lost, kept = [await client.request_gpu() for _ in range(2)]
        assert lost.lease_id is not None
        take_away(server, lost.lease_id)
        await until(is_called.is_set)
        for _ in range(3):  # renewals
            (before,) = leases(server)
            await until(lambda before=before: leases(server)[0]["expires_at"] > before["expires_at"])
        assert not kept.lost
    assert leases(server) == []
    assert told == []
    may_return.set()
    await until(lambda: "gpu-pool on_lease_lost" not in {thread.name for thread in threading.enumerate()})
    assert told == [lost]


async def test_a_callback_may_stop_the_client(server: ServerProcess) -> None:
    stopped = threading.Event()

    def stop(_: GPUAssignment) -> None:
        client.stop()
        stopped.set()

    client = sync.GPUWorkerPoolClient(server.url, lease_ttl=2, polling_interval=0.5, on_lease_lost=stop, environ={})
    await asyncio.to_thread(client.start)
    assignment = await asyncio.to_thread(client.request_gpu)
    assert assignment.lease_id is not None
    take_away(server, assignment.lease_id)
    await until(stopped.is_set)


async def test_releasing_what_was_taken_away_ends_nothing_of_whoever_has_it_now(server: ServerProcess) -> None:
    """Before a renewal has found out."""
    async with client_of(server, lease_ttl=300) as client, client_of(server) as other:
        assignment = await client.request_gpu()
        assert assignment.lease_id is not None
        take_away(server, assignment.lease_id)
        both = await other.request_gpu(count=2)
        for _ in range(2):
            await client.release_gpu(assignment)
        assert [lease["lease_id"] for lease in leases(server)] == [both.lease_id]
        assert not both.lost
        await other.release_gpu(both)


async def test_a_block_ends_with_the_error_unless_it_has_one_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", GPU_POOL_ADMIN_KEYS=ADMIN, **QUICK) as server:
        async with client_of(server, lease_ttl=2) as client:

            async def block(error: Exception | None) -> None:
                async with GPUContextManager(client):
                    take_away(server, leases(server)[0]["lease_id"])
                    await until(lambda: client.get_pool_status().active_workers == 0)
                    if error is not None:
                        raise error

            with pytest.raises(StaleAssignmentError):
                await block(None)
            with pytest.raises(ZeroDivisionError):
                await block(ZeroDivisionError())


async def test_a_server_that_does_not_answer_for_a_ttl_loses_it_by_the_clock(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", **QUICK) as server:
        async with client_of(server, lease_ttl=2, request_timeout=1.0) as client:
            assignment = await client.request_gpu()
            assert server.process is not None
            os.killpg(server.process.pid, signal.SIGSTOP)
            try:
                begun = time.monotonic()
                async with asyncio.timeout(5):
                    await assignment.wait_lost()
                assert 1.0 < time.monotonic() - begun < 3.5
            finally:
                os.killpg(server.process.pid, signal.SIGCONT)
            with pytest.raises(StaleAssignmentError, match="could not be renewed for 2 s"):
                await client.release_gpu(assignment)


@pytest.mark.fault(11)
async def test_a_server_that_is_killed_and_returns_has_kept_the_lease_and_the_queue(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", **QUICK) as server:
        async with client_of(server, lease_ttl=20, request_timeout=1.0) as client:
            assignment = await client.request_gpu()
            waiting = [asyncio.create_task(client.request_gpu()) for _ in range(3)]
            await until(lambda: len(queue(server)) == 3)
            before = [waiter["request_id"] for waiter in queue(server)]
            server.kill()
            await asyncio.sleep(1)
            await asyncio.to_thread(server.start)
            assert [lease["lease_id"] for lease in leases(server)] == [assignment.lease_id]
            await until(lambda: [waiter["request_id"] for waiter in queue(server)] == before)
            assert not assignment.lost
            await client.release_gpu(assignment)
            for task in waiting:
                async with asyncio.timeout(20):
                    await client.release_gpu(await task)


# --- fault 6: giving back ---


@pytest.mark.fault(6)
async def test_releasing_twice_by_a_copy_and_what_is_not_ours(server: ServerProcess) -> None:
    async with client_of(server) as client, client_of(server) as other:
        assignment = await client.request_gpu()
        elsewhere = pickle.loads(pickle.dumps(assignment))  # noqa: S301  # our own
        with pytest.raises(InvalidAssignmentError, match="another one"):
            await other.release_gpu(assignment)
        assert leases(server)
        await client.release_gpu(elsewhere)
        for again in (assignment, copy.copy(assignment), elsewhere):
            await client.release_gpu(again)
        assert leases(server) == []
        for nonsense in ("GPU 0", None, 7):
            with pytest.raises(InvalidAssignmentError):
                await client.release_gpu(nonsense)  # type: ignore[arg-type]


async def test_a_release_need_not_wait_for_a_server_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", **QUICK) as server:
        async with client_of(server, lease_ttl=30, request_timeout=1.0) as client:
            assignment = await client.request_gpu()
            server.kill()
            begun = time.monotonic()
            await client.release_gpu(assignment)
            assert time.monotonic() - begun < 3
            assert "could not be given back" in caplog.text
            assert not assignment.lost
            await asyncio.to_thread(server.start)
            await is_clean(server)


async def test_an_assignment_that_nobody_has_any_more_runs_out(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(server, lease_ttl=2) as client:

        async def forget() -> None:
            await client.request_gpu()

        await asyncio.create_task(forget())
        await until(lambda: "without release_gpu()" in caplog.text)
        assert [lease["state"] for lease in leases(server)] == ["held"], "it runs out, and is not released"
        await until(lambda: client.get_pool_status().active_workers == 0)
        await is_clean(server)


# --- faults 3 and 4: cancelled or timed out in the moment of the grant ---


@pytest.mark.fault(3)
async def test_a_request_cancelled_at_any_moment_leaks_nothing(server: ServerProcess) -> None:
    async with client_of(server) as client:
        for turn in range(25):
            held = [await client.request_gpu(timeout=45) for _ in range(2)]
            waiting = asyncio.create_task(client.request_gpu())
            await asyncio.sleep(0.01 if turn % 2 else 0)
            releasing = asyncio.create_task(client.release_gpu(held[0]))
            await asyncio.sleep(turn / 1500)
            waiting.cancel()
            await asyncio.gather(waiting, releasing, return_exceptions=True)
            await client.release_gpu(held[1])
            if not waiting.cancelled():
                await client.release_gpu(waiting.result())
        await is_clean(server)


@pytest.mark.fault(4)
async def test_a_timeout_that_races_the_grant_has_one_outcome(server: ServerProcess) -> None:
    outcomes: Counter[str] = Counter()
    delay_seconds = 0.3
    async with client_of(server) as client:
        while outcomes.total() < 20 or len(outcomes) < 2:
            held = [await client.request_gpu(timeout=45) for _ in range(2)]
            waiting = asyncio.create_task(client.request_gpu(timeout=0.4))
            await asyncio.sleep(delay_seconds)
            await client.release_gpu(held[0])
            try:
                await client.release_gpu(await waiting)
                outcomes["granted"] += 1
                delay_seconds += 0.03  # so that it comes to be decided in one and the same moment
            except WorkerTimeoutError:
                outcomes["timed out"] += 1
                delay_seconds = max(delay_seconds - 0.03, 0.0)
            await client.release_gpu(held[1])
        await is_clean(server)


async def test_a_loop_that_cancels_everything_gives_everything_back(server: ServerProcess) -> None:
    """As Ctrl-C does, also in the middle of giving back."""

    async def program() -> None:
        client = client_of(server)
        async with client:
            held = [await client.request_gpu() for _ in range(2)]
            waiting = [asyncio.create_task(client.request_gpu()) for _ in range(3)]
            await until(lambda: len(queue(server)) == len(waiting))
            asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)  # type: ignore[union-attr]
            await client.release_gpu(held[0])
            await asyncio.sleep(10)

    def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(program())

    await asyncio.to_thread(run)
    await is_clean(server)


@pytest.mark.filterwarnings("ignore")  # which says that something was left open, as it was
async def test_a_loop_that_is_closed_without_a_stop(server: ServerProcess) -> None:
    client = client_of(server, lease_ttl=5)
    held = []

    async def program() -> None:
        await client.start()
        held.append(await client.request_gpu())

    await asyncio.to_thread(asyncio.run, program())
    assert leases(server)
    await client.start()  # which finds that it was abandoned
    await until(lambda: not leases(server), within_seconds=3)
    assert held[0].lost
    await client.stop()
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_request_that_outlives_its_loop_keeps_no_gpu(server: ServerProcess, *, is_stopped: bool) -> None:
    async with client_of(server) as holder:
        held = [await holder.request_gpu() for _ in range(2)]
        client = client_of(server)

        def program() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(client.start())
            waiting = loop.create_task(client.request_gpu(timeout=1000))
            loop.run_until_complete(until(lambda: queue(server)))
            loop.close()
            del waiting

        await asyncio.to_thread(program)
        if is_stopped:
            await client.stop()
            await until(lambda: not queue(server))
        await holder.release_gpu(held[0])
        await until(lambda: not queue(server) and len(leases(server)) == 1)
        if not is_stopped:
            await client.stop()
        await holder.release_gpu(held[1])
    gc.collect()


@pytest.mark.filterwarnings("ignore")
async def test_what_outlives_its_loop_is_kept_for_as_long_as_somebody_has_it(server: ServerProcess) -> None:
    """As a script does that has a GPU by `asyncio.run`, and then works without a loop."""
    clients = [client_of(server, lease_ttl=2)]

    async def get() -> GPUAssignment:
        await clients[0].start()
        return await clients[0].request_gpu()

    held = [await asyncio.to_thread(asyncio.run, get())]
    await asyncio.sleep(4)
    assert not held[0].lost
    assert [lease["state"] for lease in leases(server)] == ["held"]
    held.clear()
    gc.collect()
    await until(lambda: not leases(server))
    clients[0]._forget()
    clients.clear()
    gc.collect()


# --- fault 5: a reply that is lost ---


@pytest.mark.fault(5)
async def test_a_grant_whose_reply_is_lost_is_the_same_lease_when_asked_again(server: ServerProcess) -> None:
    with TCPProxy(server.port) as proxy:
        async with client_of(proxy.url) as client:
            proxy.only, proxy.mode = b"POST /leases ", "lose replies"
            waiting = asyncio.create_task(client.request_gpu())
            await until(lambda: proxy.lost)
            (granted,) = leases(server)
            proxy.mode = "forward"
            assignment = await waiting
            assert assignment.lease_id == granted["lease_id"]
            assert len(leases(server)) == 1
            await client.release_gpu(assignment)


@pytest.mark.fault(35)
async def test_a_grant_whose_reply_is_lost_and_nobody_asks_again_is_given_back(server: ServerProcess) -> None:
    with TCPProxy(server.port) as proxy:
        async with client_of(proxy.url) as client:
            proxy.only, proxy.mode = b"POST /leases ", "lose replies"
            with pytest.raises(ServiceUnavailableTimeoutError, match="it closed the connection"):
                await client.request_gpu(timeout=0.3)
            await is_clean(server)


async def test_connections_that_are_cut_while_it_waits(server: ServerProcess) -> None:
    with TCPProxy(server.port) as proxy:
        async with client_of(server) as holder, client_of(proxy.url) as client:
            held = [await holder.request_gpu() for _ in range(2)]
            waiting = asyncio.create_task(client.request_gpu())
            await until(lambda: queue(server))
            (before,) = queue(server)
            for _ in range(3):
                proxy.cut()
                await asyncio.sleep(0.3)
            assert queue(server)[0]["request_id"] == before["request_id"]
            await holder.release_gpu(held[0])
            async with asyncio.timeout(10):
                await client.release_gpu(await waiting)
            await holder.release_gpu(held[1])


# --- fault 8: stopping ---


@pytest.mark.fault(8)
async def test_a_stop_ends_those_who_wait_and_gives_back_what_is_held(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    threads_before = set(threading.enumerate())
    client = client_of(server)
    await client.start()
    held = [await client.request_gpu() for _ in range(2)]
    waiting = [asyncio.create_task(client.request_gpu()) for _ in range(3)]
    await until(lambda: len(queue(server)) == 3)
    begun = time.monotonic()
    await client.stop()
    assert time.monotonic() - begun < 3
    assert leases(server) == []
    assert queue(server) == []
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, PoolStoppedError)
        assert "the pool was stopped while" in str(outcome)
    assert "they are given back" in caplog.text
    assert all(assignment.lost for assignment in held)
    with pytest.raises(RuntimeError, match="not started"):
        await client.release_gpu(held[0])
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert "gpu-pool leases" not in {thread.name for thread in set(threading.enumerate()) - threads_before}
    async with client:
        await client.release_gpu(await client.request_gpu(timeout=45))


async def test_a_worker_gets_nothing_after_a_stop_also_if_it_was_granted_before(server: ServerProcess) -> None:
    """The grant arrives while the program computes, and the stop comes before its worker can take it."""
    async with client_of(server) as holder:
        held = [await holder.request_gpu() for _ in range(2)]
        client = client_of(server)
        await client.start()
        waiting = asyncio.create_task(client.request_gpu())
        await until(lambda: queue(server))
        stopping = asyncio.create_task(client.stop())  # runs when this task awaits something again
        take_away(server, held[0].lease_id)
        granted_by = time.monotonic() + 10
        while not {lease["lease_id"] for lease in leases(server)} - {assignment.lease_id for assignment in held}:
            assert time.monotonic() < granted_by
            time.sleep(0.01)  # noqa: ASYNC251  # the loop is to be blocked
        time.sleep(0.2)  # noqa: ASYNC251  # for the answer to arrive in the lease thread
        with pytest.raises(PoolStoppedError, match="the pool was stopped while"):
            await waiting
        await stopping
        await holder.release_gpu(held[1])


async def test_somebody_who_is_taken_out_of_the_queue_is_told(server: ServerProcess) -> None:
    async with client_of(server) as client:
        held = await client.request_gpu(count=2)
        waiting = asyncio.create_task(client.request_gpu())
        await until(lambda: queue(server))
        (waiter,) = queue(server)
        reply = server.get(f"/queue/{waiter['request_id']}", method="DELETE", Authorization=f"Bearer {ADMIN}")
        assert reply.status == 200
        with pytest.raises(RequestCancelledError):
            async with asyncio.timeout(5):
                await waiting
        await client.release_gpu(held)


# --- the blocking client ---


def test_threads_have_leases_too(servers: list[ServerProcess]) -> None:
    lost: list[GPUAssignment] = []
    url = servers[0].url
    with sync.GPUWorkerPoolClient(url, lease_ttl=2, coordination="leases", on_lease_lost=lost.append) as client:
        assignment = client.request_gpu()
        assert assignment.lease_id is not None
        take_away(servers[0], assignment.lease_id)
        deadline = time.monotonic() + 5
        while not assignment.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(StaleAssignmentError):
            client.release_gpu(assignment)
        eventually(lambda: lost == [assignment])  # in a thread of its own

        @with_gpu(client, timeout=10)
        def train(gpu: GPUAssignment) -> str:
            assert len(leases(servers[0])) == 1
            return str(gpu.lease_id)

        assert re.match("lease", train())
        assert leases(servers[0]) == []
