"""`--max-time`: the command is told in time, and then its lease ends. `--expect` enforces nothing."""

from __future__ import annotations

import asyncio
import sys
import time

from gpu_worker_pool import GPUAssignment, GPUWorkerPoolClient
from tests.cli.programs import Programs
from tests.leasing import until


def test_the_command_is_told_before_its_time_limit_and_then_killed(programs: Programs) -> None:
    begun = time.monotonic()
    script = "trap 'echo told; trap - TERM; sleep 60 & wait' TERM; echo begun; sleep 60 & wait"
    done = programs.call("run", "--max-time", "4s", "--grace", "2s", "--ttl", "2s", "--", "bash", "-c", script)
    assert done.stdout == "begun\ntold\n"
    assert 3.5 < time.monotonic() - begun < 20
    assert done.returncode == 137
    assert "the time limit is reached in" in done.stderr


def test_what_the_command_has_started_is_killed_at_the_limit_too(programs: Programs) -> None:
    """The shell ends when told; its child does not, and would hold the GPU for ever."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
    )
    begun = time.monotonic()
    done = programs.call(
        "run", "--max-time", "6s", "--grace", "3s", "--", "bash", "-c", f'{sys.executable} -c "{child}"; exit 3'
    )
    assert (done.returncode, done.stdout) == (143, "begun\n")
    assert "left processes running" not in done.stderr
    assert "the time limit is reached in 3 s" in done.stderr
    assert 5.0 < time.monotonic() - begun < 40


def test_a_command_that_ends_when_told_gives_its_gpu_back_at_once(programs: Programs) -> None:
    done = programs.call("run", "--max-time", "2s", "--grace", "1s", "--", "sleep", "60")
    assert done.returncode == 143
    assert programs.leases() == []


def test_what_is_declared_is_seen_and_not_enforced(programs: Programs) -> None:
    with programs:
        programs.holding("--expect", "1s", "--max-time", "2h")
        (lease,) = programs.leases()
        assert (lease["expected_seconds"], lease["max_seconds"]) == (1.0, 7200.0)
        assert 7100 < lease["ends_in_seconds"] <= 7200


async def test_a_python_holder_is_told_before_the_limit_and_loses_it_then(programs: Programs) -> None:
    told: list[tuple[GPUAssignment, bool]] = []
    environ = programs.environment
    async with GPUWorkerPoolClient(
        "local://", environ=environ, lease_ttl=2.0, on_lease_lost=lambda each: told.append((each, each.lost))
    ) as client:
        begun = time.monotonic()
        assignment = await client.request_gpu(max_seconds=4.0)
        await until(lambda: bool(told))
        assert told == [(assignment, False)]  # half of a limit that is so short
        assert 1.5 < time.monotonic() - begun < 3.9
        await until(lambda: assignment.lost)
        assert time.monotonic() - begun >= 3.9
        assert assignment.lost_reason == "it reached its time limit of 4 s"
        await asyncio.sleep(0.2)
        assert len(told) == 1
