"""Executors whose workers and programs are killed at random: every task is done once, or failed with its reason.

No GPU is used by two at once, and no lease is left. A program that was killed is started again with the tasks of which
it had not said how they ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.hardware.proc import children_of, descendants, process_stat
from tests.waiting import eventually
from tests.workers.conftest import Host

ROOT = Path(__file__).parents[2]


def entries(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Program:
    def __init__(
        self, folder: Path, environment: dict[str, str], numbers: list[int], retries: int, pace: float
    ) -> None:
        self.numbers, self.retries = numbers, retries
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.executing", str(folder), str(retries), str(pace)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # how workers died is in the outcomes
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(numbers))
        self.process.stdin.close()

    def workers(self) -> list[int]:
        """They are children of the lease process, which is the program's only child."""
        with suppress(OSError):
            return [pid for lease_process in children_of(self.process.pid) for pid in children_of(lease_process)]
        return []

    def kill(self) -> None:
        """Returns when nothing of it is left: only then its tasks may be begun again."""
        left = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        eventually(lambda: not any(is_there(pid) for pid in left))


def is_there(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.state != "Z"


def run(host: Host, folder: Path, tasks: int, programs: int, seconds: float, pace: float) -> None:
    draw = random.Random(31)
    share = tasks // programs
    running = [
        Program(folder, host.environment, list(range(place * share, (place + 1) * share)), place % 2, pace)
        for place in range(programs)
    ]
    killed = Counter[str]()
    attempts = Counter(number for program in running for number in program.numbers)
    deadline = time.monotonic() + seconds
    try:
        while any(program.process.poll() is None for program in running):
            let_them_work(folder, draw.randint(0, 12))
            place = draw.randrange(programs)
            victim = running[place]
            if time.monotonic() > deadline or victim.process.poll() is not None:
                continue  # now they may come to an end
            if draw.random() < 0.15:
                victim.kill()
                killed["programs"] += 1
                ended = {entry["task"] for entry in entries(folder, "ended.jsonl")}
                rest = [number for number in victim.numbers if number not in ended]
                attempts.update(rest)
                running[place] = Program(folder, host.environment, rest, victim.retries, pace)
            elif workers := victim.workers():
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(workers), signal.SIGKILL)
                    killed["workers"] += 1
    finally:
        for program in running:
            if program.process.poll() is None:
                program.kill()
    judge(folder, share * programs, attempts, {number: p.retries for p in running for number in p.numbers})
    assert [program.process.returncode for program in running] == [0] * programs
    assert killed["workers"], "no worker was killed: this has shown nothing"
    assert killed["programs"], "no program was killed: this has shown little"
    host.look_until_clean()


def let_them_work(folder: Path, tasks: int) -> None:
    """On a busy computer, too: where workers are killed by the clock, none may ever get to do anything."""

    def ended() -> int:
        path = folder / "ended.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    enough, latest = ended() + tasks, time.monotonic() + 2.0
    while ended() < enough and time.monotonic() < latest:
        time.sleep(0.02)


def judge(folder: Path, tasks: int, attempts: Counter[int], retries: dict[int, int]) -> None:
    assert entries(folder, "crimes.jsonl") == []
    ended = {entry["task"]: entry for entry in entries(folder, "ended.jsonl")}
    begun = Counter(entry["task"] for entry in entries(folder, "begun.jsonl"))
    done = Counter(entry["task"] for entry in entries(folder, "done.jsonl"))
    assert sorted(ended) == list(range(tasks)), "every task has an outcome"
    assert len(entries(folder, "ended.jsonl")) == tasks, "and only one"
    for number, entry in ended.items():
        if entry["error"] is None:
            assert entry["value"] == number
            assert done[number] >= 1
        else:
            assert entry["error"] == "BrokenGPUWorkerError"
            assert "(signal SIGKILL" in entry["why"]
        # Each time that it was handed to a program it was begun at most once, and once more for each retry.
        assert begun[number] <= attempts[number] * (1 + retries.get(number, 1)), number
    failed = sum(entry["error"] is not None for entry in ended.values())
    assert failed < tasks / 2, "too little was done to show anything"


@pytest.mark.timeout(150)
def test_workers_and_programs_that_are_killed(host: Host, tmp_path: Path) -> None:
    run(host, tmp_path, tasks=200, programs=2, seconds=6.0, pace=0.02)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_workers_and_programs_that_are_killed_for_a_minute(host: Host, tmp_path: Path) -> None:
    run(host, tmp_path, tasks=1002, programs=3, seconds=60.0, pace=0.15)
