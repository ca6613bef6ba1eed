"""What we ship for tests is tested too."""

from __future__ import annotations

import asyncio
import doctest

import pytest

import gpu_worker_pool.testing
from gpu_worker_pool.core import Released, Request, Requested, Ticked
from gpu_worker_pool.testing import FakeClock, History, gpu, gpus, replay, snapshot


def test_its_examples_are_true() -> None:
    results = doctest.testmod(gpu_worker_pool.testing)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_fake_clock_calls_what_falls_due_in_order_and_at_its_own_time() -> None:
    clock = FakeClock(100.0)
    called: list[tuple[str, float]] = []
    clock.call_at(103.0, lambda: called.append(("late", clock.now())))
    clock.call_at(101.0, lambda: called.append(("early", clock.now())))
    clock.call_at(102.0, lambda: called.append(("never", clock.now()))).cancel()
    clock.advance(0.5)
    assert called == []
    clock.advance(10.0)
    assert called == [("early", 101.0), ("late", 103.0)]
    assert clock.now() == 110.5


def test_a_fake_clock_calls_what_is_set_while_it_moves() -> None:
    clock = FakeClock()
    called: list[float] = []

    def again() -> None:
        called.append(clock.now())
        if len(called) < 3:
            clock.call_at(clock.now() + 1.0, again)

    clock.call_at(1.0, again)
    clock.advance(2.0)
    assert called == [1.0, 2.0]


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        FakeClock().advance(-1.0)


async def test_running_a_fake_clock_lets_woken_tasks_run() -> None:
    clock = FakeClock()
    woken = asyncio.Event()
    clock.call_at(1.0, woken.set)
    task = asyncio.create_task(woken.wait())
    await clock.run(1.0)
    assert task.done()


def test_readings_are_idle_except_for_what_is_said() -> None:
    assert [reading.gpu_id for reading in gpus(2)] == ["0", "1"]
    assert [reading.gpu_id for reading in gpus(2, endpoint_id="x")] == ["x:0", "x:1"]
    assert gpu(3, utilization_percent=50.0).utilization_percent == 50.0


def test_a_history_can_be_replayed() -> None:
    history = History()
    history.apply(snapshot(gpus(1), at=0.0), now=0.0)
    history.apply(Requested(Request("a")), now=1.0)
    history.apply(Released("lease-1"), now=2.0)
    assert replay(history).fence == 1


def test_a_replay_tells_where_it_differs() -> None:
    history = History()
    history.apply(snapshot(gpus(1), at=0.0), now=0.0)
    history.apply(Requested(Request("a")), now=1.0)
    history.steps[1] = (Ticked(), 1.0, history.steps[1][2])
    with pytest.raises(AssertionError, match=r"step 1, Ticked\(\) at 1.0"):
        replay(history)


def test_a_history_notices_a_broken_pool() -> None:
    history = History()
    history.apply(snapshot(gpus(1), at=0.0), now=0.0)
    history.apply(Requested(Request("a")), now=1.0)
    history.pool.fence = 0
    with pytest.raises(AssertionError, match="fence"):
        history.apply(Ticked(), now=2.0)
