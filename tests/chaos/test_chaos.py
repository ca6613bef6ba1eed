"""Eight workers, eight GPUs, and everything killed at random: no GPU is held twice, none is lost, everybody is told.

Fault 37, with a server that is killed and restarted in between, with four workers of one, and without any server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_worker_pool import GPUWorkerPoolClient
from tests.chaos.history import History, Span
from tests.chaos.server_watch import ServerWatch
from tests.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
GPUS = WORKERS = 8
#: So many hold what they get for longer than a lease lives without being renewed. Few: what they hold when they are
#: killed is nobody's for long, and the others must not all wait for that.
SLOW = 2
#: Short, so that what a killed worker held comes back within the test: TTL, 2 s of grace, 5 s of quarantine.
TTL_SECONDS = 2.0
END_SECONDS = 60.0


class Workers:
    """Processes that ask one endpoint for GPUs; those that are killed are replaced."""

    def __init__(self, endpoint: str, folder: Path, state: Path, draw: random.Random) -> None:
        #: By the number of the worker, as it is in what it wrote: pids repeat within half an hour.
        self.killed_at: dict[int, float] = {}
        self._numbers: dict[subprocess.Popen[bytes], int] = {}
        #: When one of them was.
        self.paused: list[Span] = []
        self._endpoint, self._folder, self._draw = endpoint, folder, draw
        self._env = os.environ | {
            "GPU_BACKEND": f"simulated:{GPUS}",
            "GPU_POOL_STATE_DIR": str(state),
            "PYTHONPATH": str(ROOT),
        }
        self._running = [self._start(place) for place in range(WORKERS)]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        seed, pace = str(self._draw.random()), "slow" if place < SLOW else "quick"
        number = len(self._numbers) + 1
        arguments = [sys.executable, "-m", "tests.chaos.worker", self._endpoint, str(self._folder), str(number), seed]
        command = [*arguments, str(TTL_SECONDS), pace]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=self._env, cwd=ROOT)
        self._numbers[worker] = number
        return worker

    def kill_one(self) -> None:
        place = self._draw.randrange(WORKERS)
        victim = self._running[place]
        self.killed_at[self._numbers[victim]] = time.monotonic()
        _kill(victim)
        self._running[place] = self._start(place)

    def pause_one(self, seconds: float) -> None:
        victim = self._running[self._draw.randrange(WORKERS)]
        paused_at = time.monotonic()
        victim.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        victim.send_signal(signal.SIGCONT)
        self.paused.append(Span(paused_at, time.monotonic()))

    def granted(self) -> int:
        return sum(path.read_bytes().count(b'"granted"') for path in self._folder.glob("worker-*.jsonl"))

    def finish(self) -> None:
        """Each ends what it is at."""
        for worker in self._running:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._running:
            assert worker.wait(END_SECONDS) == 0

    def kill_all(self) -> None:
        for worker in self._running:
            _kill(worker)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    assert worker.stdin is not None
    worker.stdin.close()


@contextmanager
def workers_of(endpoint: str, tmp_path: Path, state: Path, draw: random.Random) -> Iterator[Workers]:
    folder = tmp_path / "histories"
    folder.mkdir()
    workers = Workers(endpoint, folder, state, draw)
    try:
        yield workers
    finally:
        workers.kill_all()


def wreak_havoc(workers: Workers, draw: random.Random, requests: int, also: Callable[[], None] | None) -> None:
    done = times = 0
    began = time.monotonic()
    while done < requests:
        _let_them_work(workers, done + draw.randint(1, 30))
        what = draw.random()
        if what < 0.6 or not workers.killed_at:
            workers.kill_one()
        elif what < 0.7:
            workers.pause_one(draw.uniform(0.1, 1.5 * TTL_SECONDS))
        done = workers.granted()
        if also is not None and done > (times + 1) * requests / 4:
            times += 1
            also()
        assert time.monotonic() - began < 60 + requests / 5, f"only {done} of {requests} requests were granted"


def _let_them_work(workers: Workers, until_granted: int) -> None:
    """On a busy computer, too: where workers are killed by the clock they may never get to ask for anything."""
    latest = time.monotonic() + 3.0
    while workers.granted() < until_granted and time.monotonic() < latest:
        time.sleep(0.05)


def judge(workers: Workers, folder: Path, requests: int, away: Sequence[Span] = ()) -> None:
    history = History.read(folder, workers.killed_at, away)
    problems = history.problems()
    assert problems == [], problems  # said, as `make soak` runs without pytest
    assert len(history.holdings) >= requests
    assert workers.killed_at, "nobody was killed: this has shown nothing"
    longest = max(holding.until - holding.told_at for holding in history.holdings if holding.lost_at is None)
    assert longest > TTL_SECONDS, "nothing was renewed: this has shown little"


async def all_can_be_had(endpoint: str) -> set[str]:
    """None has leaked: what the dead held comes back, and then somebody can have all of them at once."""
    async with GPUWorkerPoolClient(endpoint, lease_ttl=10.0) as client:
        assignment = await client.request_gpu(timeout=40.0, count=GPUS)
        await client.release_gpu(assignment)
        return set(assignment.gpu_uuids)


def run_against_a_server(tmp_path: Path, requests: int, workers_of_server: int = 1) -> None:
    draw = random.Random(17)
    env = {"GPU_BACKEND": f"simulated:{GPUS}", "LOG_LEVEL": "warning", "WORKERS": str(workers_of_server)}
    with ServerProcess(tmp_path, arguments=(), wait=True, **env) as server:
        away: list[Span] = []

        def restart() -> None:
            killed_at = time.monotonic()
            server.kill()
            time.sleep(draw.uniform(0.0, 1.0))
            server.start()
            away.append(Span(killed_at, time.monotonic()))

        histories = tmp_path / "histories"
        with workers_of(server.url, tmp_path, tmp_path / "not-used", draw) as workers:
            with ServerWatch(server, TTL_SECONDS / 4) as watch:
                wreak_havoc(workers, draw, requests, restart)
                workers.finish()
            judge(workers, histories, requests, [*away, *watch.silences])
        assert len(asyncio.run(all_can_be_had(server.url))) == GPUS
        assert away, "the server was never killed: this has shown nothing"
        assert "Traceback" not in server.log


def run_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    draw = random.Random(23)
    state = tmp_path / "state"
    monkeypatch.setenv("GPU_BACKEND", f"simulated:{GPUS}")
    monkeypatch.setenv("GPU_POOL_STATE_DIR", str(state))
    with workers_of("local://", tmp_path, state, draw) as workers:
        wreak_havoc(workers, draw, requests, None)
        workers.finish()
        # Fault 33: one that stands still inside a transaction keeps everybody from renewing until it goes on.
        stalls = History.read(tmp_path / "histories", workers.killed_at).stalls
        still = [*workers.paused, *(span for spans in stalls.values() for span in spans)]
        away = [span for span in still if span.ended_at - span.begun_at > TTL_SECONDS / 4]
        judge(workers, tmp_path / "histories", requests, away)
    assert len(asyncio.run(all_can_be_had("local://"))) == GPUS


@pytest.mark.fault(37)
@pytest.mark.timeout(240)
def test_a_server_that_is_killed_and_restarted(tmp_path: Path) -> None:
    run_against_a_server(tmp_path, 1000)


@pytest.mark.timeout(240)
def test_no_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_a_server(tmp_path, monkeypatch, 500)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_server_of_four_workers_for_long(tmp_path: Path) -> None:
    run_against_a_server(tmp_path, 10_000, workers_of_server=4)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_no_server_at_all_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_a_server(tmp_path, monkeypatch, 10_000)
