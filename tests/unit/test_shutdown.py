"""Stopping at any moment: at every step of a busy scenario, in every order of its callbacks that a seed may draw.

Everybody who waits is told so, nothing hangs, nobody complains afterwards, and the manager can be started again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from gpu_worker_pool.core import PoolSettings
from gpu_worker_pool.errors import InvalidAssignmentError, NotStartedError, PoolStoppedError, WorkerTimeoutError
from gpu_worker_pool.models import WorkerInfo
from gpu_worker_pool.testing import FakeClock, gpus
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager
from tests.unit.test_cancellation import (
    WORKERS,
    Scenario,
    SteppedLoop,
    in_order,
    leftovers,
    number_of_steps,
    settle,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.models import GPUAssignment

#: Two hundred, in bundles.
SEEDS = [range(first, first + 25) for first in range(0, 200, 25)]
NOW = datetime.fromisoformat("2025-07-23T10:30:00")


@cache
def steps() -> int:
    return number_of_steps(Scenario())


class Stopping(Scenario):
    """The scenario of the cancellations, whose workers do not mind if the pool is gone when they are done."""

    def __init__(self, pick: Callable[[int], int] = in_order, *, debug: bool = False) -> None:
        super().__init__(pick, debug=debug)
        self.stops: list[asyncio.Task[None]] = []
        #: Who had neither an answer nor been cancelled when the pool was stopped.
        self.waiting: set[str] = set()
        self.was_stopped = False

    async def give_back(self, assignment: GPUAssignment) -> None:
        with suppress(NotStartedError):
            await super().give_back(assignment)

    async def ask(self, name: str, **requirements: Any) -> GPUAssignment:
        self.waiting.add(name)
        try:
            assignment = await super().ask(name, **requirements)
        finally:
            self.waiting.discard(name)
        assert not self.was_stopped, "served by a pool that is stopped"
        return assignment

    async def stop(self) -> None:
        await self.manager.stop()
        self.was_stopped = True

    def stop_soon(self) -> None:
        self.stops.append(self.loop.create_task(self.stop(), name="stop"))

    def finish_stopped(self, *, cancelled: Iterable[str] = ()) -> dict[str, str]:
        """Run to the end; how everybody ended."""
        self.run_out()
        assert all(stop.done() and stop.exception() is None for stop in self.stops)
        outcomes = {}
        for name, task in self.workers.items():
            assert task.done(), f"{name} hangs"
            if task.cancelled():
                assert name in cancelled, f"{name} was cancelled by nobody"
            else:
                assert name not in cancelled, f"{name} swallowed its cancellation"
                outcomes[name] = task.result()
        assert self.using == {gpu_id: {} for gpu_id in self.using}
        assert not self.manager.is_running
        assert leftovers(self.manager) == {}
        assert left_to_run(self.loop) == []
        return outcomes

    def start_again(self) -> None:
        """A manager that was stopped is as good as new."""

        async def use() -> None:
            await self.manager.start()
            with pytest.raises(WorkerTimeoutError):
                await self.manager.request_gpu(timeout=0.0)
            self.manager.observe(gpus(2))
            pair = await self.manager.request_gpu(count=2)
            single = asyncio.create_task(self.manager.request_gpu())
            await asyncio.sleep(0)
            await self.manager.release_gpu(pair)
            await self.manager.release_gpu(await single)
            status = self.manager.get_pool_status()
            assert (status.total_gpus, status.available_gpus, status.blocked_workers) == (2, 2, 0)
            await self.manager.stop()

        self.loop.run(use())
        assert left_to_run(self.loop) == []


def left_to_run(loop: SteppedLoop) -> list[asyncio.Handle]:
    """Without the notices that a task has ended: asyncio runs them before whoever awaits it, this loop in any order."""
    return [handle for handle in loop.pending if "Holder.asker_done" not in repr(handle)]


def check_complaints(scenarios: list[Scenario]) -> None:
    """An exception that nobody retrieved is told of when its future dies, so the scenarios must die first."""
    complaints = [scenario.loop.complaints for scenario in scenarios]
    scenarios.clear()
    gc.collect()
    assert [complaint for complaint in complaints if complaint] == []


# ---- Every step


@pytest.mark.parametrize("debug", [False, True])
def test_stopped_at_whatever_step_everybody_is_told(debug: bool) -> None:
    scenarios: list[Scenario] = []
    seen: set[str] = set()
    for step in range(steps() + 2):
        with told(f"stopped after step {step}"):
            scenario = Stopping(debug=debug)
            scenario.loop.run_until(step)
            scenario.loop.run(scenario.stop())
            waiting = set(scenario.waiting)
            outcomes = scenario.finish_stopped()
            told_so = {name for name, outcome in outcomes.items() if outcome == "stopped"}
            assert told_so <= waiting
            # Whoever still waited and was not told so had its answer, a timeout, in the step before.
            assert {outcomes[name] for name in waiting - told_so} <= {"timed out"}
            assert "timed out" not in outcomes.values() or outcomes["hasty"] == "timed out"
            seen |= set(outcomes.values())
            scenario.start_again()
            scenarios.append(scenario)
    assert seen >= {"served", "stopped", "too late"}
    check_complaints(scenarios)


def test_stopped_twice_at_whatever_step() -> None:
    scenarios: list[Scenario] = []
    for step in range(steps() + 2):
        with told(f"stopped after step {step}"):
            scenario = Stopping()
            scenario.loop.run_until(step)
            scenario.stop_soon()
            scenario.stop_soon()
            scenario.finish_stopped()
            scenario.start_again()
            scenarios.append(scenario)
    check_complaints(scenarios)


@pytest.mark.parametrize("name", WORKERS)
def test_stopped_and_cancelled_in_one_step_whatever_step(name: str) -> None:
    """A cancellation is never turned into the news that the pool was stopped, nor the other way round."""
    scenarios: list[Scenario] = []
    for step in range(1, steps() + 2):
        for is_stopped_first in (True, False):
            with told(f"stopped, and {name} cancelled, after step {step}; {is_stopped_first=}"):
                scenario = Stopping()
                scenario.loop.run_until(step)
                if is_stopped_first:
                    scenario.loop.run(scenario.stop())
                was_cancelled = scenario.cancel(name)
                if not is_stopped_first:
                    scenario.loop.run(scenario.stop())
                scenario.finish_stopped(cancelled=[name] if was_cancelled else [])
                scenarios.append(scenario)
    check_complaints(scenarios)


class Restarting(Stopping):
    async def give_back(self, assignment: GPUAssignment) -> None:
        # What was held of the pool of before is not the new one's to take back.
        with suppress(InvalidAssignmentError):
            await super().give_back(assignment)

    async def restart(self) -> None:
        await self.manager.stop()
        await self.manager.start()
        status = self.manager.get_pool_status()
        assert (status.active_workers, status.blocked_workers, status.total_gpus) == (0, 0, 0)
        self.using.clear()


def test_started_again_in_the_step_in_which_it_was_stopped() -> None:
    """Whoever waited for the pool of before is told that it was stopped; the new one serves those who ask it."""
    scenarios: list[Scenario] = []
    seen: set[str] = set()
    for step in range(steps() + 2):
        with told(f"stopped and started after step {step}"):
            scenario = Restarting()
            scenario.loop.run_until(step)
            scenario.loop.run(scenario.restart())
            waiting = set(scenario.waiting)
            scenario.loop.run(scenario.observe_now())
            scenario.run_out()
            outcomes = {name: task.result() for name, task in scenario.workers.items()}
            assert {outcomes[name] for name in waiting} <= {"stopped", "timed out"}
            assert {outcomes[name] for name in outcomes.keys() - waiting} <= {"served", "timed out"}
            assert outcomes["hasty"] == "timed out" or "timed out" not in outcomes.values()
            scenario.finish_books()
            seen |= set(outcomes.values())
            scenarios.append(scenario)
    assert seen >= {"stopped", "served"}
    check_complaints(scenarios)


# ---- Every order


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_in_any_order_of_callbacks_everybody_is_served_and_no_gpu_twice(seeds: range) -> None:
    """`Scenario` looks at the pool's books after every step. Callbacks may be late; nothing may depend on that."""
    for seed in seeds:
        with told(f"seed {seed}"):
            Scenario(random.Random(seed).randrange).finish()


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_in_any_order_cancelled_and_stopped_at_any_moment(seeds: range) -> None:
    scenarios: list[Scenario] = []
    for seed in seeds:
        with told(f"seed {seed}"):
            draw = random.Random(seed)
            scenario = Stopping(draw.randrange, debug=True)
            cancelled = set()
            for _ in range(draw.randrange(4)):
                scenario.loop.run_until(scenario.loop.steps + draw.randrange(steps() // 3))
                name = draw.choice(WORKERS)
                if scenario.cancel(name):
                    cancelled.add(name)
            scenario.loop.run_until(scenario.loop.steps + draw.randrange(steps() // 3))
            scenario.stop_soon()
            scenario.finish_stopped(cancelled=cancelled)
            scenario.start_again()
            scenarios.append(scenario)
    check_complaints(scenarios)


# ---- One promise each


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def pool(clock: FakeClock) -> WorkerPoolManager:
    """One GPU."""
    manager = WorkerPoolManager(clock=clock)
    await manager.start()
    manager.observe(gpus(1))
    return manager


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_error_says_who_waited_for_what(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    single = asyncio.create_task(pool.request_gpu())
    other = asyncio.create_task(pool.request_gpu(gpu_model="H100", min_free_memory_mb=1000))
    await settle()
    await pool.stop()
    with pytest.raises(PoolStoppedError, match=r"stopped while worker-\S+ waited \(\d\.\d s\) for one GPU") as stopped:
        await single
    assert isinstance(stopped.value, RuntimeError)
    with pytest.raises(PoolStoppedError, match="one H100 GPU, 1000 MB free"):
        await other
    assert held.worker_id not in str(stopped.value)


async def test_a_thousand_waiters_are_told_each(pool: WorkerPoolManager) -> None:
    await pool.request_gpu()
    waiters = [asyncio.create_task(pool.request_gpu()) for _ in range(1000)]
    await settle()
    await pool.stop()
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {PoolStoppedError}


async def test_granted_and_stopped_in_one_step_it_is_told_and_has_nothing(pool: WorkerPoolManager) -> None:
    """Otherwise it would hold a GPU of a pool that no longer knows of it."""
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu())
    await settle()
    await pool.release_gpu(held)
    await pool.stop()
    with pytest.raises(PoolStoppedError):
        await waiter


async def test_granted_stopped_and_started_in_one_step_it_is_told_and_has_nothing(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu())
    await settle()
    await pool.release_gpu(held)
    await pool.stop()
    await pool.start()
    pool.observe(gpus(1))
    with pytest.raises(PoolStoppedError):
        await waiter
    assert pool.get_pool_status().available_gpus == 1
    await pool.stop()


async def test_stopping_stops_the_timer(pool: WorkerPoolManager, clock: FakeClock) -> None:
    await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu(timeout=5.0))
    await settle()
    assert [timer.is_cancelled for _, _, timer in clock._timers] == [False]
    await pool.stop()
    assert [timer.is_cancelled for _, _, timer in clock._timers] == [True]
    with pytest.raises(PoolStoppedError):
        await waiter
    clock.advance(10.0)


async def test_the_timer_of_a_pool_of_before_does_not_wake_the_next_one(
    pool: WorkerPoolManager, clock: FakeClock
) -> None:
    await pool.request_gpu()
    early = asyncio.create_task(pool.request_gpu(timeout=5.0))
    await settle()
    await pool.stop()
    await pool.start()
    late = asyncio.create_task(pool.request_gpu(timeout=50.0))
    await settle()
    await clock.run(49.0)
    assert (early.done(), late.done()) == (True, False)
    await clock.run(1.0)
    with pytest.raises(WorkerTimeoutError):
        await late
    with pytest.raises(PoolStoppedError):
        await early
    await pool.stop()


async def test_stopping_what_is_not_started_does_nothing(pool: WorkerPoolManager) -> None:
    await WorkerPoolManager().stop()
    await pool.stop()
    await pool.stop()
    assert not pool.is_running


async def test_leaving_a_with_block_stops_also_on_an_error() -> None:
    manager = WorkerPoolManager()
    waiters = []

    async def fail() -> None:
        async with manager:
            manager.observe(gpus(1))
            waiters.append(asyncio.create_task(manager.request_gpu(count=1, only=[0])))
            await settle()
            waiters.append(asyncio.create_task(manager.request_gpu()))
            await settle()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not manager.is_running
    assert (await waiters[0]).gpu_id == 0
    with pytest.raises(PoolStoppedError):
        await waiters[1]


async def test_stopping_while_gpus_are_held_says_by_whom(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    held = await pool.request_gpu()
    await pool.stop()
    (warning,) = warnings(caplog)
    assert held.worker_id in warning
    assert "GPU 0" in warning


async def test_stopping_with_nothing_held_is_silent(pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture) -> None:
    held = await pool.request_gpu()
    await pool.release_gpu(held)
    await pool.stop()
    assert warnings(caplog) == []


async def test_an_assignment_that_dies_after_the_stop_is_nobodys_business(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    held = await pool.request_gpu()
    await pool.stop()
    caplog.clear()
    del held
    gc.collect()
    await settle()
    assert warnings(caplog) == []


async def test_an_assignment_that_dies_just_before_the_stop(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of once, by the stop: when its death would be looked at, there is no pool any more."""
    held = await pool.request_gpu()
    worker_id = held.worker_id
    del held
    gc.collect()
    await pool.stop()
    await settle()
    (warning,) = warnings(caplog)
    assert worker_id in warning
    assert "stopped" in warning


async def test_an_assignment_that_dies_after_a_restart_is_not_taken_for_one_of_the_new_pool(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    held = await pool.request_gpu()
    await pool.stop()
    await pool.start()
    pool.observe(gpus(1))
    again = await pool.request_gpu()
    caplog.clear()
    del held
    gc.collect()
    await settle()
    assert warnings(caplog) == []
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(again)
    await pool.stop()


async def test_an_assignment_of_before_a_restart_cannot_release_one_of_after(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    await pool.stop()
    await pool.start()
    pool.observe(gpus(1))
    again = await pool.request_gpu()
    assert (again.gpu_id, again.fence) == (held.gpu_id, held.fence), "they differ in their worker only"
    with suppress(InvalidAssignmentError):
        await pool.release_gpu(held)
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(again)
    await pool.stop()


async def test_a_task_that_ends_after_the_stop_does_not_touch_the_next_pool(pool: WorkerPoolManager) -> None:
    """Its assignment was dropped, so the pool of before waits for its end; the next one has a lease of that name."""
    may_end = asyncio.Event()

    async def careless() -> None:
        await pool.request_gpu()
        await may_end.wait()

    task = asyncio.create_task(careless())
    await settle()
    await pool.stop()
    await pool.start()
    pool.observe(gpus(1))
    again = await pool.request_gpu()
    may_end.set()
    await task
    await settle()
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(again)
    await pool.stop()


def test_an_assignment_that_outlives_its_loop_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody called stop(); the loop is closed when the garbage is collected."""

    async def forget_to_stop() -> tuple[WorkerPoolManager, GPUAssignment]:
        manager = WorkerPoolManager()
        await manager.start()
        manager.observe(gpus(1))
        return manager, await manager.request_gpu()

    manager, held = asyncio.run(forget_to_stop())
    del held
    gc.collect()
    assert warnings(caplog) == []
    assert manager.is_running


def test_an_assignment_that_dies_in_another_thread_is_told_of_in_the_loops_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def lose_it_elsewhere() -> None:
        async with WorkerPoolManager() as manager:
            manager.observe(gpus(1))
            box = [await manager.request_gpu()]
            await asyncio.to_thread(box.clear)
            await settle()

    asyncio.run(lose_it_elsewhere())
    told_of = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert [record.threadName for record in told_of] == ["MainThread"]


async def test_workers_that_are_called_back_are_told_of_the_stop(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    errors: list[Exception] = []
    pool.enqueue_worker(WorkerInfo("called back", NOW, callback=pytest.fail, on_error=errors.append))
    await pool.stop()
    await settle()
    assert [type(error) for error in errors] == [PoolStoppedError]
    assert "called back" in str(errors[0])
    del held


def test_a_real_loop_in_debug_mode_has_nothing_to_complain_of() -> None:
    complaints: list[dict[str, Any]] = []

    async def busy() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        manager = WorkerPoolManager(settings=PoolSettings(max_bypass_seconds=0.01))
        await manager.start()
        manager.observe(gpus(2))

        async def work(number: int) -> None:
            assignment = await manager.request_gpu(count=1 + number % 2)
            await asyncio.sleep(0.001 * (number % 3))
            with suppress(NotStartedError):
                await manager.release_gpu(assignment)

        tasks = [asyncio.create_task(work(number)) for number in range(40)]
        await asyncio.sleep(0.01)
        for task in tasks[5::5]:
            task.cancel()
        await manager.stop()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(outcome) for outcome in outcomes}
        assert kinds <= {type(None), PoolStoppedError, asyncio.CancelledError}
        assert PoolStoppedError in kinds
        del tasks, outcomes
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(busy(), debug=True)
    gc.collect()
    assert complaints == []


def test_stepped_loops_complaints_would_be_noticed() -> None:
    """That they are empty means something only if they can be other than empty."""
    loop = SteppedLoop()

    async def fail() -> None:
        raise RuntimeError("nobody hears")

    task = loop.create_task(fail())
    loop.run_out()
    del task
    gc.collect()
    assert [complaint for complaint in loop.complaints if "never retrieved" in complaint]
