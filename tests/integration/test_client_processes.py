"""Programs that hold leases and are killed, paused, forked or simply end: real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self

import pytest
from tests.server_process import ServerProcess
from tests.waiting import eventually

HEAD = """
import asyncio, json, logging, os, signal, sys, threading, time
from gpu_worker_pool import GPUWorkerPoolClient, sync
from gpu_worker_pool.errors import *

settings = json.loads(sys.argv[1])
# That this machine is busy, or this process was paused, is told by asyncio too.
logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))

def say(**what):
    print(json.dumps(what), flush=True)

def listen():
    return sys.stdin.readline().strip()

"""


class Program:
    """A program of its own, which says what happens to it in lines of JSON, and does what it is told in lines."""

    def __init__(self, text: str, **settings: Any) -> None:
        self._text = HEAD + textwrap.dedent(text)
        self._settings = settings

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", self._text, json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._said: Queue[str] = Queue()
        self.errors = ""
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_errors)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin,):
            if pipe is not None:
                pipe.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        for reader in self._readers:
            reader.join(20)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def hear(self, within_seconds: float = 20.0) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads(self._said.get(timeout=within_seconds))
        except Empty:
            raise AssertionError(f"it says nothing: {self.errors}") from None
        return said

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def send(self, what: signal.Signals) -> None:
        os.kill(self.process.pid, what)

    def end(self) -> str:
        """What it complained of, once it has ended well."""
        status = self.process.wait(30)
        for reader in self._readers:
            reader.join(20)
        assert status == 0, self.errors
        return self.errors


@pytest.fixture(params=["server", "local"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """One GPU, given by a server or by nobody."""
    environment = {"GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(tmp_path / "state")}
    with ServerProcess(tmp_path, REFRESH_INTERVAL="0.2", ACCESS_LOG="false", **environment) as server:
        # The server of the same ledger shows also what is leased without it.
        yield Host(server, "local://" if request.param == "local" else server.url, environment)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Host]:
    environment = {"GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(tmp_path / "state")}
    with ServerProcess(tmp_path, REFRESH_INTERVAL="0.2", ACCESS_LOG="false", **environment) as server:
        yield Host(server, server.url, environment)


class Host:
    def __init__(self, server: ServerProcess, url: str, environ: dict[str, str]) -> None:
        self.server = server
        self.client = {"service_endpoint": url, "environ": environ, "polling_interval": 0.5}

    @property
    def is_local(self) -> bool:
        return self.client["service_endpoint"] == "local://"

    def leases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.server.get("/leases").json["leases"]
        return found

    def waiting(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.server.get("/queue").json["queue"]
        return found

    def is_clean(self) -> bool:
        return not self.leases() and not self.waiting()

    def program(self, text: str, **settings: Any) -> Program:
        return Program(text, **{**self.client, **settings})


HOLD = """
async def main():
    async with GPUWorkerPoolClient(**settings) as client:
        assignment = await client.request_gpu()
        say(lease=assignment.lease_id, fence=assignment.fence)
        await asyncio.to_thread(listen)
        say(lost=assignment.lost)
        await client.release_gpu(assignment)

asyncio.run(main())
"""


def seconds_until(look: Callable[[], object], within_seconds: float) -> float:
    begun = time.monotonic()
    eventually(look, within_seconds)
    return time.monotonic() - begun


# --- fault 1 ---


@pytest.mark.fault(1)
def test_a_holder_that_is_killed_and_the_next_one(host: Host) -> None:
    with host.program(HOLD, lease_ttl=2) as holder:
        first = holder.hear()
        with host.program(HOLD, lease_ttl=2) as waiter:
            eventually(lambda: len(host.waiting()) == 1)
            begun = time.monotonic()
            holder.send(signal.SIGKILL)
            second = waiter.hear()
            took = time.monotonic() - begun
            assert second["fence"] > first["fence"]
            # One of this host is seen to be gone; of others the lease runs out, and then the GPU is looked at for 5 s.
            assert took < 3 if host.is_local else 2 < took < 12
            waiter.tell()
            assert waiter.hear() == {"lost": False}
            waiter.end()
    eventually(host.is_clean)


# --- fault 35 ---


@pytest.mark.fault(35)
def test_a_waiter_that_is_killed_leaves_its_place(host: Host) -> None:
    with host.program(HOLD, lease_ttl=30) as holder:
        holder.hear()
        with host.program(HOLD, lease_ttl=30) as killed:
            eventually(lambda: len(host.waiting()) == 1)
            with host.program(HOLD, lease_ttl=30) as waiter:
                eventually(lambda: len(host.waiting()) == 2)
                killed.send(signal.SIGKILL)
                if host.is_local:
                    eventually(lambda: len(host.waiting()) == 1, within_seconds=3)
                time.sleep(0.5)  # a reply that was on its way already would be as good as delivered
                holder.tell()
                holder.hear()
                # Elsewhere it keeps its place for a while, but what it is granted is only offered, for 10 s.
                waiter.hear(within_seconds=5 if host.is_local else 15)
                waiter.tell()
                waiter.hear()
                waiter.end()
    eventually(host.is_clean, within_seconds=45)


# --- fault 2 ---


PAUSED = """
def main():
    lost = []
    with sync.GPUWorkerPoolClient(on_lease_lost=lambda one: lost.append(one.lease_id), **settings) as client:
        assignment = client.request_gpu()
        last = time.monotonic()
        say(lease=assignment.lease_id)
        while time.monotonic() - last < 1.0:
            last = time.monotonic()
            time.sleep(0.001)
        # The very first thing after it woke up.
        say(lost=assignment.lost)
        try:
            client.release_gpu(assignment)
            say(released=True)
        except StaleAssignmentError as error:
            say(error=str(error))
        deadline = time.monotonic() + 5
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        say(told=lost)

logging.disable(logging.WARNING)
main()
"""


@pytest.mark.fault(2)
def test_a_holder_that_is_paused_for_longer_than_its_lease_knows_as_soon_as_it_wakes(host: Host) -> None:
    with host.program(PAUSED, lease_ttl=2) as holder:
        lease = holder.hear()["lease"]
        holder.send(signal.SIGSTOP)
        time.sleep(5)
        assert [one["state"] for one in host.leases()] in (["quarantined"], [])
        holder.send(signal.SIGCONT)
        assert holder.hear() == {"lost": True}
        assert "lost GPU 0" in holder.hear()["error"]
        assert holder.hear() == {"told": [lease]}
        assert holder.end() == ""
    eventually(host.is_clean, within_seconds=20)


def test_a_holder_that_is_paused_for_less_keeps_it(host: Host) -> None:
    with host.program(HOLD, lease_ttl=6) as holder:
        lease = holder.hear()["lease"]
        for _ in range(3):
            holder.send(signal.SIGSTOP)
            time.sleep(2.5)
            holder.send(signal.SIGCONT)
            time.sleep(0.5)
        assert [(one["lease_id"], one["state"]) for one in host.leases()] == [(lease, "held")]
        holder.tell()
        assert holder.hear() == {"lost": False}
        assert holder.end() == ""
    eventually(host.is_clean)


# --- fault 32 ---


@pytest.mark.fault(32)
def test_a_holder_that_blocks_its_loop_and_every_thread_but_ours(host: Host) -> None:
    program = """
    async def main():
        async with GPUWorkerPoolClient(**settings) as client:
            assignment = await client.request_gpu()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                sum(range(100_000))  # Python code, which lets others have their turn
            say(lost=assignment.lost)
            await client.release_gpu(assignment)
            say(released=True)

    asyncio.run(main())
    """
    with host.program(program, lease_ttl=2) as holder:
        assert holder.hear() == {"lost": False}
        assert holder.hear() == {"released": True}
        holder.end()


# --- fault 9 ---


FORKED = """
async def main():
    client = GPUWorkerPoolClient(**settings)
    await client.start()
    assignment = await client.request_gpu()
    say(lease=assignment.lease_id)
    child = os.fork()
    if child == 0:
        # Outside of the parent's loop, as after multiprocessing.Process.start.
        asyncio._set_running_loop(None)

        async def in_child():
            said = {}
            for name, call in (("request", client.request_gpu), ("release", lambda: client.release_gpu(assignment))):
                try:
                    await call()
                except NotStartedError as error:
                    said[name] = str(error)
            said["running"], said["lost"] = client.is_running, assignment.lost
            await client.stop()
            time.sleep(3)  # for longer than the lease lives without being renewed
            said["lost later"] = assignment.lost
            say(**said)
            async with GPUWorkerPoolClient(**settings) as own:
                try:
                    await own.request_gpu(timeout=0.5)
                except WorkerTimeoutError:
                    say(own="waits for the parent's")

        status = 1
        try:
            asyncio.run(in_child())
            status = 0
        finally:
            os._exit(status)
    waited = await asyncio.to_thread(os.waitpid, child, 0)
    say(child=os.waitstatus_to_exitcode(waited[1]))
    await asyncio.sleep(2.5)
    say(lost=assignment.lost, status=client.get_health()["status"], free=client.get_pool_status().total_gpus)
    await client.release_gpu(assignment)
    again = await client.request_gpu(timeout=45)
    await client.release_gpu(again)
    await client.stop()
    say(done=True)

asyncio.run(main())
"""


@pytest.mark.fault(9)
def test_a_forked_child_touches_nothing_of_its_parent_s(host: Host) -> None:
    with host.program(FORKED, lease_ttl=2) as parent:
        lease = parent.hear()["lease"]
        child = parent.hear(within_seconds=30)
        assert "make a new client in this process" in child["request"]
        assert "the parent has the GPU" in child["release"]
        assert (child["running"], child["lost"], child["lost later"]) == (False, False, False)
        assert parent.hear() == {"own": "waits for the parent's"}
        assert parent.hear() == {"child": 0}
        assert [(one["lease_id"], one["state"]) for one in host.leases()] == [(lease, "held")]
        assert parent.hear() == {"lost": False, "status": "healthy", "free": 1}
        assert parent.hear() == {"done": True}
        errors = parent.end()
        assert "Error" not in errors, errors
    eventually(host.is_clean)


def test_children_of_a_blocking_client(served: Host) -> None:
    """As data loaders make them: many, which end by themselves, with everything that Python does at an end."""
    program = """
    import multiprocessing

    def load(number):
        import gc
        gc.collect()
        return number

    def main():
        with sync.GPUWorkerPoolClient(**settings) as client:
            assignment = client.request_gpu()
            for _ in range(3):
                with multiprocessing.get_context("fork").Pool(3) as pool:
                    assert pool.map(load, range(10)) == list(range(10))
                child = os.fork()
                if child == 0:
                    sys.exit(0)
                os.waitpid(child, 0)
            time.sleep(3)
            say(lost=assignment.lost)
            client.release_gpu(assignment)
            client.release_gpu(client.request_gpu(timeout=45))
            say(done=True)

    main()
    """
    with served.program(program, lease_ttl=2) as parent:
        said = parent.hear(within_seconds=40)
        while said != {"lost": False}:
            said = parent.hear(within_seconds=40)
        assert parent.hear() == {"done": True}
        parent.end()
    eventually(served.is_clean)


# --- the end of a program ---


@pytest.mark.parametrize("how", ["without a stop", "sys.exit(0)", "raise SystemExit(0)"])
def test_a_program_that_ends_gives_back_what_it_holds(host: Host, how: str) -> None:
    program = f"""
    import warnings
    warnings.simplefilter("ignore")

    async def main():
        client = GPUWorkerPoolClient(**settings)
        await client.start()
        assignment = await client.request_gpu()
        say(lease=assignment.lease_id)
        kept.append((client, assignment))

    kept = []
    logging.disable(logging.CRITICAL)
    asyncio.run(main())
    {how if how != "without a stop" else "pass"}
    """
    with host.program(program, lease_ttl=300) as ending:
        ending.hear()
        assert ending.process.wait(15) == 0
        assert seconds_until(host.is_clean, 5) < 5


def test_a_terminated_program_gives_back_what_it_holds_if_it_stops_its_client(host: Host) -> None:
    program = """
    async def main():
        async with GPUWorkerPoolClient(**settings) as client:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
            assignment = await client.request_gpu()
            say(lease=assignment.lease_id)
            await asyncio.sleep(60)

    logging.disable(logging.WARNING)
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        say(stopped=True)
    """
    with host.program(program, lease_ttl=300) as holder:
        holder.hear()
        holder.send(signal.SIGTERM)
        assert holder.hear() == {"stopped": True}
        eventually(host.is_clean, within_seconds=5)
        holder.end()
