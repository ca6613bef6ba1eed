"""What a manager promises to the workers of one process, one test a promise. Time and readings are given by hand."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import math
import pickle
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from gpu_worker_pool import errors
from gpu_worker_pool.client.stats_readings import readings_from_stats
from gpu_worker_pool.config import EnvironmentConfigurationManager, MultiEndpointConfigurationManager
from gpu_worker_pool.core import PoolSettings, ProcessReading, Requirements
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.core.obstacles import reading_obstacles
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    ImpossibleRequestError,
    InvalidAssignmentError,
    NotStartedError,
    ServiceUnavailableError,
    ServiceUnavailableTimeoutError,
    StaleAssignmentError,
    WorkerTimeoutError,
    WrongThreadError,
)
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, GPUInfo, GPUStats, PoolStatus, WorkerInfo
from gpu_worker_pool.testing import FakeClock, gpu, gpus
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

NOW = datetime.fromisoformat("2025-07-23T10:30:00")


class RecordingClock(FakeClock):
    """Counts the timers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        self.calls.append(when)
        return super().call_at(when, callback)

    @property
    def live(self) -> list[float]:
        """When the timers are due that were neither called nor cancelled."""
        return [when for when, _, timer in sorted(self._timers, key=lambda entry: entry[:2]) if not timer.is_cancelled]


@pytest.fixture
def clock() -> RecordingClock:
    return RecordingClock()


@pytest.fixture
def wanted() -> list[str]:
    """The endpoints of which readings were wanted, in order."""
    return []


@pytest.fixture
async def pool(clock: RecordingClock, wanted: list[str]) -> AsyncIterator[WorkerPoolManager]:
    """Two idle GPUs of one host. Whatever a test did, the books are right in the end."""
    manager = WorkerPoolManager(clock=clock, on_reading_wanted=wanted.append)
    await manager.start()
    manager.observe(gpus(2))
    yield manager
    if manager._pool is not None:
        check_invariants(manager._pool)
        await manager.stop()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(manager: WorkerPoolManager, *args: Any, **requirements: Any) -> asyncio.Task[GPUAssignment]:
    task = asyncio.create_task(manager.request_gpu(*args, **requirements))
    # Some still wait when their test is over; that they are told of the stop then is no news.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def stats(*infos: GPUInfo, age_seconds: float = 0.0) -> GPUStats:
    return GPUStats(len(infos), None, None, None, list(infos), None, "", sample_age_seconds=age_seconds)


# ---- What a worker gets


async def test_an_assignment_says_which_gpu_who_and_when(pool: WorkerPoolManager) -> None:
    before = datetime.now()
    assignment = await pool.request_gpu()
    assert type(assignment) is GPUAssignment
    assert (assignment.gpu_id, assignment.gpu_ids, assignment.gpu_uuids) == (0, (0,), ("GPU-host-0",))
    assert before <= assignment.assigned_at <= datetime.now()
    assert assignment.env == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert (assignment.lease_id, assignment.expires_at) == (None, None), "within a process nothing expires"


async def test_every_assignment_has_a_worker_of_its_own_and_a_higher_fence(pool: WorkerPoolManager) -> None:
    seen = []
    for _ in range(5):
        assignment = await pool.request_gpu()
        seen.append((assignment.fence, assignment.worker_id))
        await pool.release_gpu(assignment)
    assert len({worker_id for _, worker_id in seen}) == 5
    assert seen == sorted(seen)


async def test_two_pools_never_name_a_worker_alike(pool: WorkerPoolManager) -> None:
    async with WorkerPoolManager() as other:
        other.observe(gpus(1))
        assert (await pool.request_gpu()).worker_id != (await other.request_gpu()).worker_id


async def test_without_uuids_an_assignment_names_none(pool: WorkerPoolManager) -> None:
    pool.observe([gpu(0, uuid=None), gpu(1)])
    pair = await pool.request_gpu(count=2)
    assert pair.gpu_uuids == ()


async def test_the_least_used_gpu_is_given_first(pool: WorkerPoolManager) -> None:
    pool.observe([gpu(0, utilization_percent=30.0), gpu(1, memory_used_mb=8_000.0), gpu(2, utilization_percent=20.0)])
    assert [(await pool.request_gpu()).gpu_id for _ in range(3)] == [1, 2, 0]


async def test_among_equals_the_one_given_longest_ago_is_next(pool: WorkerPoolManager) -> None:
    given = []
    for _ in range(4):
        assignment = await pool.request_gpu()
        given.append(assignment.gpu_id)
        await pool.release_gpu(assignment)
    assert given == [0, 1, 0, 1]


async def test_one_worker_a_gpu_however_idle_it_looks(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """The first of the two failures that must never happen: it looks idle until the model is loaded."""
    await pool.request_gpu()
    await pool.request_gpu()
    third = ask(pool)
    for _ in range(20):
        await clock.run(1.0)
        pool.observe(gpus(2))
        await settle()
    assert not third.done()
    third.cancel()


# ---- Eligible (rule 1, D14): strictly below the thresholds


@pytest.mark.parametrize(
    ("reading", "is_served"),
    [
        ({"memory_used_mb": 63_999.0}, True),
        ({"memory_used_mb": 64_000.0}, False),
        ({"memory_used_mb": 64_001.0}, False),
        ({"utilization_percent": 89.99}, True),
        ({"utilization_percent": 90.0}, False),
        ({"utilization_percent": 90.01}, False),
        ({"memory_used_mb": 63_999.0, "utilization_percent": 89.99}, True),
    ],
)
async def test_available_means_strictly_below_both_thresholds(
    pool: WorkerPoolManager, reading: dict[str, float], is_served: bool
) -> None:
    pool.observe([gpu(0, **reading)])
    assert pool.get_pool_status().available_gpus == is_served
    if is_served:
        await pool.request_gpu(timeout=0)
    else:
        with pytest.raises(WorkerTimeoutError):
            await pool.request_gpu(timeout=0)


async def test_thresholds_come_from_the_configuration(clock: FakeClock) -> None:
    config = EnvironmentConfigurationManager(
        {"GPU_MEMORY_THRESHOLD_PERCENT": "50", "GPU_UTILIZATION_THRESHOLD_PERCENT": "40", "GPU_POLLING_INTERVAL": "10"}
    )
    async with WorkerPoolManager(config, clock=clock) as manager:
        manager.observe([gpu(0, memory_used_mb=40_000.0), gpu(1, utilization_percent=40.0), gpu(2)])
        assert manager.get_pool_status().available_gpus == 1
        clock.advance(30.0)
        assert manager.get_pool_status().available_gpus == 1, "three polls old is fresh enough"
        clock.advance(0.1)
        assert manager.get_pool_status().available_gpus == 0


async def test_settings_win_over_a_configuration(clock: FakeClock) -> None:
    config = EnvironmentConfigurationManager({"GPU_MEMORY_THRESHOLD_PERCENT": "50"})
    async with WorkerPoolManager(config, settings=PoolSettings(memory_threshold_percent=70.0), clock=clock) as manager:
        manager.observe([gpu(0, memory_used_mb=48_000.0)])
        assert manager.get_pool_status().available_gpus == 1


async def test_a_gpu_that_an_outsider_fills_is_not_given(pool: WorkerPoolManager) -> None:
    """The second of the two failures that must never happen: the books say free, the card is full."""
    pool.observe([gpu(0, memory_used_mb=75_000.0), gpu(1, utilization_percent=100.0)])
    waiter = ask(pool)
    await settle()
    assert not waiter.done()
    pool.observe([gpu(0, memory_used_mb=75_000.0), gpu(1, utilization_percent=0.0)])
    assert (await waiter).gpu_id == 1


# ---- Order


async def test_first_come_first_served(pool: WorkerPoolManager) -> None:
    held = [await pool.request_gpu(), await pool.request_gpu()]
    waiters = [ask(pool) for _ in range(5)]
    await settle()
    order = []
    for _ in range(5):
        await pool.release_gpu(held.pop(0))
        await settle()
        served = next(number for number, waiter in enumerate(waiters) if waiter.done() and number not in order)
        order.append(served)
        held.append(waiters[served].result())
    assert order == [0, 1, 2, 3, 4]


async def test_a_newcomer_does_not_overtake_who_waits(pool: WorkerPoolManager) -> None:
    held = [await pool.request_gpu(), await pool.request_gpu()]
    waiter = ask(pool)
    await settle()
    await pool.release_gpu(held[0])
    # The waiter has not run yet; the newcomer asks in the very step of the release.
    newcomer = ask(pool)
    await settle()
    assert (waiter.done(), newcomer.done()) == (True, False)
    newcomer.cancel()


async def test_higher_priority_goes_first(pool: WorkerPoolManager) -> None:
    held = [await pool.request_gpu(), await pool.request_gpu()]
    waiters = {priority: ask(pool, priority=priority) for priority in (0, -1, 5, 1)}
    await settle()
    order = []
    for _ in range(4):
        await pool.release_gpu(held.pop(0))
        await settle()
        priority = next(each for each, waiter in waiters.items() if waiter.done() and each not in order)
        order.append(priority)
        held.append(waiters[priority].result())
    assert order == [5, 1, 0, -1]


async def test_a_released_gpu_goes_to_the_next_in_the_same_step(pool: WorkerPoolManager) -> None:
    """Rule 8: in process no new reading is waited for."""
    held = [await pool.request_gpu(), await pool.request_gpu()]
    waiter = ask(pool)
    await settle()
    await pool.release_gpu(held[1])
    assert (await waiter).gpu_id == held[1].gpu_id


# ---- Several GPUs


async def test_several_gpus_are_all_or_none(pool: WorkerPoolManager) -> None:
    single = await pool.request_gpu()
    pair = ask(pool, count=2)
    await settle()
    assert not pair.done()
    assert pool.get_pool_status().available_gpus == 1, "it takes nothing before it can have all"
    await pool.release_gpu(single)
    assignment = await pair
    assert sorted(assignment.gpu_ids) == [0, 1]
    assert assignment.gpu_id == assignment.gpu_ids[0]
    assert len(assignment.gpu_uuids) == 2
    assert pool.get_pool_status().available_gpus == 0


async def test_releasing_several_gpus_releases_all_of_them(pool: WorkerPoolManager) -> None:
    pair = await pool.request_gpu(count=2)
    singles = [ask(pool), ask(pool)]
    await settle()
    await pool.release_gpu(pair)
    assert {(await single).gpu_id for single in singles} == {0, 1}


# ---- Sharing


async def test_who_declares_memory_and_shares_may_share(pool: WorkerPoolManager) -> None:
    pool.observe(gpus(1))
    one = await pool.request_gpu(memory_mb=50_000, share=True)
    other = await pool.request_gpu(memory_mb=30_000, share=True)
    assert one.gpu_id == other.gpu_id == 0
    with pytest.raises(WorkerTimeoutError, match="0 MB left, 1 MB wanted"):
        await pool.request_gpu(memory_mb=1, share=True, timeout=0)
    status = pool.get_pool_status()
    assert (status.active_workers, status.available_gpus) == (2, 0)
    assert [worker.id for worker in status.gpu_assignments[0]] == [one.worker_id, other.worker_id]
    await pool.release_gpu(one)
    with pytest.raises(WorkerTimeoutError):
        await pool.request_gpu(timeout=0)
    await pool.release_gpu(other)
    await pool.request_gpu(timeout=0)


async def test_who_does_not_share_is_not_joined(pool: WorkerPoolManager) -> None:
    pool.observe(gpus(1))
    await pool.request_gpu(memory_mb=1_000)
    with pytest.raises(WorkerTimeoutError, match="held by"):
        await pool.request_gpu(memory_mb=1_000, share=True, timeout=0)


# ---- Wishes


@pytest.mark.parametrize(
    ("requirements", "gpu_id"),
    [
        ({"gpu_model": "a100"}, 1),
        ({"only": [2]}, 2),
        ({"only": ["GPU-host-3"]}, 3),
        ({"only": iter(["2", 3]), "exclude": [2]}, 3),
        ({"exclude": [0, "GPU-host-1", 2]}, 3),
        ({"min_free_memory_mb": 100_000}, 4),
        ({"memory_mb": 100_000}, 4),
        ({"policy": "idle", "exclude": [1, 2, 3, 4]}, 5),
    ],
)
async def test_wishes_are_heard(pool: WorkerPoolManager, requirements: dict[str, Any], gpu_id: int) -> None:
    notebook = ProcessReading(4711, name="notebook")
    pool.observe(
        [
            gpu(0, processes=(notebook,)),
            gpu(1, name="NVIDIA A100-SXM4-80GB"),
            gpu(2),
            gpu(3),
            gpu(4, memory_total_mb=140_000.0, utilization_percent=10.0),
            gpu(5, utilization_percent=20.0),
        ]
    )
    assert (await pool.request_gpu(timeout=0, **requirements)).gpu_id == gpu_id


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ({"count": 0}, "count must be a whole number of at least 1, not 0"),
        ({"count": 1.5}, "count"),
        ({"memory_mb": 0}, "memory_mb must be a number above 0"),
        ({"memory_mb": 10**400}, "memory_mb must be a number above 0"),
        ({"min_free_memory_mb": 10**400}, "min_free_memory_mb must be a number above 0"),
        ({"memory_mb": math.nan}, "memory_mb"),
        ({"min_free_memory_mb": -1}, "min_free_memory_mb"),
        ({"share": True}, "share=True needs memory_mb"),
        ({"gpu_model": ""}, "gpu_model must be part of a GPU's name"),
        ({"only": []}, "only must name at least one GPU"),
        ({"only": "GPU-host-1"}, "only must be a list"),
        ({"exclude": "GPU-host-0"}, "exclude must be a list"),
        ({"only": 1}, "only must be a list"),
        ({"policy": "lenient"}, "policy must be 'thresholds' or 'idle', not 'lenient'"),
        ({"priority": 0.5}, "priority must be a whole number"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
    ],
)
async def test_a_senseless_wish_is_refused_and_leaves_nothing_behind(
    pool: WorkerPoolManager, requirements: dict[str, Any], message: str
) -> None:
    """D6. A wish that is silently not heard gives somebody a GPU that he said he must not have."""
    with pytest.raises(ValueError, match=re.escape(message)):
        await pool.request_gpu(**requirements)
    status = pool.get_pool_status()
    assert (status.available_gpus, status.blocked_workers) == (2, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"worker_timeout": -1.0},
        {"worker_timeout": math.nan},
        {"max_assignment_age_seconds": 0.0},
        {"max_assignment_age_seconds": -1.0},
        {"max_assignment_age_seconds": math.nan},
    ],
)
def test_a_senseless_argument_of_a_manager_is_refused(arguments: dict[str, float]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        WorkerPoolManager(**arguments)


# ---- Timeouts


async def test_a_timeout_of_zero_takes_what_is_free_and_waits_for_nothing(
    pool: WorkerPoolManager, clock: RecordingClock
) -> None:
    await pool.request_gpu(timeout=0)
    await pool.request_gpu(timeout=0)
    with pytest.raises(WorkerTimeoutError):
        await pool.request_gpu(timeout=0)
    assert clock.calls == []
    assert pool.get_pool_status().blocked_workers == 0


async def test_a_request_times_out_at_its_own_time_and_not_before(pool: WorkerPoolManager, clock: FakeClock) -> None:
    await pool.request_gpu(count=2)
    waiter = ask(pool, 2.5)
    await settle()
    await clock.run(2.4)
    assert not waiter.done()
    assert pool.get_pool_status().blocked_workers == 1
    await clock.run(0.1)
    with pytest.raises(WorkerTimeoutError):
        await waiter
    assert pool.get_pool_status().blocked_workers == 0


async def test_a_timeout_is_an_ordinary_timeout_error_too(pool: WorkerPoolManager) -> None:
    await pool.request_gpu(count=2)
    with pytest.raises(TimeoutError) as timeout:
        await pool.request_gpu(timeout=0)
    assert isinstance(timeout.value, errors.GPUWorkerPoolError)
    assert timeout.value.retryable


async def test_the_default_timeout_is_five_minutes(pool: WorkerPoolManager, clock: FakeClock) -> None:
    await pool.request_gpu(count=2)
    waiter = ask(pool)
    await settle()
    await clock.run(299.9)
    assert not waiter.done()
    await clock.run(0.1)
    with pytest.raises(WorkerTimeoutError):
        await waiter


async def test_the_managers_timeout_holds_where_a_request_names_none(clock: FakeClock) -> None:
    async with WorkerPoolManager(worker_timeout=7.0, clock=clock) as manager:
        manager.observe(gpus(1))
        held = await manager.request_gpu()
        default, shorter, longer = ask(manager), ask(manager, 3.0), ask(manager, 30.0)
        await settle()
        done = []
        for _ in range(4):
            await clock.run(3.5)
            done.append([waiter.done() for waiter in (default, shorter, longer)])
        assert done == [[False, True, False], [True, True, False], [True, True, False], [True, True, False]]
        assert isinstance(default.exception(), WorkerTimeoutError)
        assert isinstance(shorter.exception(), WorkerTimeoutError)
        longer.cancel()
        await manager.release_gpu(held)


async def test_no_timeout_at_all_waits_for_days(clock: RecordingClock) -> None:
    async with WorkerPoolManager(worker_timeout=None, clock=clock) as manager:
        manager.observe(gpus(1))
        held = await manager.request_gpu()
        waiter = ask(manager)
        await settle()
        assert clock.calls == [], "nothing to wake up for"
        await clock.run(7 * 24 * 3600.0)
        manager.observe(gpus(1))
        assert not waiter.done()
        await manager.release_gpu(held)
        await manager.release_gpu(await waiter)


async def test_an_endless_timeout_is_no_timeout(pool: WorkerPoolManager, clock: FakeClock) -> None:
    pair = await pool.request_gpu(count=2)
    waiter = ask(pool, math.inf)
    await settle()
    await clock.run(1e9)
    pool.observe(gpus(2))
    assert not waiter.done()
    await pool.release_gpu(pair)
    await waiter


async def test_who_timed_out_is_not_served_later(pool: WorkerPoolManager, clock: FakeClock) -> None:
    pair = await pool.request_gpu(count=2)
    waiter = ask(pool, 1.0)
    await settle()
    await clock.run(1.0)
    assert isinstance(waiter.exception(), WorkerTimeoutError)
    await pool.release_gpu(pair)
    assert pool.get_pool_status().available_gpus == 2


# ---- Errors say who, what and why


async def test_a_timeout_says_who_waited_for_what_and_what_each_gpu_did(
    pool: WorkerPoolManager, clock: FakeClock
) -> None:
    holder = await pool.request_gpu()
    pool.observe([gpu(0, memory_used_mb=70_000.0), gpu(1, utilization_percent=95.0)])
    waiter = ask(pool, 10.0)
    await settle()
    await clock.run(10.0)
    with pytest.raises(WorkerTimeoutError) as timeout:
        await waiter
    first, *gpu_lines = str(timeout.value).splitlines()
    assert re.search(r"worker-\S+, which waited [0-9.]+ s for one GPU", first)
    assert holder.worker_id not in first, "the one who waited, not the one who holds"
    for line, reasons in zip(
        gpu_lines,
        [
            ["GPU 0: ", "memory 87.5 % used, not below 80 %", f"held by {holder.worker_id} for 10 s"],
            ["GPU 1: ", "utilization 95.0 %, not below 90 %"],
        ],
        strict=True,
    ):
        assert [reason for reason in reasons if reason not in line] == []


async def test_a_timeout_tells_what_is_so_and_not_what_was(pool: WorkerPoolManager) -> None:
    """However little time has passed since somebody else was told."""
    pool.observe([gpu(0, utilization_percent=95.0)])
    with pytest.raises(WorkerTimeoutError, match=re.escape("utilization 95.0 %")):
        await pool.request_gpu(timeout=0)
    pool.observe([gpu(0, memory_used_mb=70_000.0)])
    with pytest.raises(WorkerTimeoutError, match=re.escape("memory 87.5 % used")):
        await pool.request_gpu(timeout=0)


async def test_a_timeout_names_the_wishes(pool: WorkerPoolManager) -> None:
    await pool.request_gpu(count=2)
    with pytest.raises(WorkerTimeoutError, match="2 H100 GPUs, 500 MB free, priority 3"):
        await pool.request_gpu(timeout=0, count=2, gpu_model="H100", min_free_memory_mb=500, priority=3)


async def test_a_timeout_of_ten_thousand_gpus_is_still_readable(pool: WorkerPoolManager) -> None:
    pool.observe([gpu(number, utilization_percent=100.0) for number in range(10_000)])
    with pytest.raises(WorkerTimeoutError) as timeout:
        await pool.request_gpu(timeout=0)
    assert len(str(timeout.value)) < 2_000


async def test_a_timeout_where_there_are_no_gpus_says_so(pool: WorkerPoolManager) -> None:
    async with WorkerPoolManager() as manager:
        manager.observe([])
        with pytest.raises(WorkerTimeoutError, match="there are no GPUs") as timeout:
            await manager.request_gpu(timeout=0)
        assert not isinstance(timeout.value, ServiceUnavailableError), "it answered: none"


@pytest.mark.parametrize(
    ("requirements", "reason"),
    [
        ({"count": 3}, "2 of 2"),
        ({"gpu_model": "B200"}, "NVIDIA H100 80GB HBM3, not B200"),
        ({"memory_mb": 90_000}, "has 80000 MB in all, 90000 MB are needed"),
        ({"only": [7]}, "not among 7"),
        ({"exclude": [0, 1]}, "excluded"),
    ],
)
async def test_an_impossible_request_fails_at_once_and_says_why(
    pool: WorkerPoolManager, requirements: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ImpossibleRequestError, match=re.escape(reason)) as impossible:
        await pool.request_gpu(**requirements)
    assert impossible.value.reasons
    assert isinstance(impossible.value, ValueError)
    assert not impossible.value.retryable
    assert pool.get_pool_status().blocked_workers == 0


async def test_nothing_is_impossible_before_anything_is_known(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        pair, eight = ask(manager, count=2), ask(manager, count=8)
        await settle()
        assert not pair.done()
        assert not eight.done()
        manager.observe(gpus(2))
        assert len((await pair).gpu_ids) == 2
        with pytest.raises(ImpossibleRequestError):
            await eight


async def test_a_host_that_shows_nothing_makes_nothing_impossible(pool: WorkerPoolManager) -> None:
    """Rule 5: never judged against an empty or unreachable inventory."""
    pool.endpoint_lost()
    three = ask(pool, count=3)
    await settle()
    assert not three.done()
    pool.observe(gpus(3))
    await three


async def test_errors_survive_pickling(pool: WorkerPoolManager) -> None:
    with pytest.raises(ImpossibleRequestError) as impossible:
        await pool.request_gpu(count=9)
    again = pickle.loads(pickle.dumps(impossible.value))  # noqa: S301 - our own
    assert (type(again), str(again), again.reasons) == (
        ImpossibleRequestError,
        str(impossible.value),
        impossible.value.reasons,
    )


# ---- D7: nothing answers


async def test_a_timeout_while_nothing_was_ever_read_is_both_errors() -> None:
    async with WorkerPoolManager() as manager:
        with pytest.raises(ServiceUnavailableTimeoutError, match="no GPU service answered") as timeout:
            await manager.request_gpu(timeout=0)
        assert isinstance(timeout.value, WorkerTimeoutError)
        assert isinstance(timeout.value, ServiceUnavailableError)


async def test_a_timeout_while_the_endpoint_is_lost_is_both_errors(pool: WorkerPoolManager) -> None:
    pool.endpoint_lost()
    with pytest.raises(ServiceUnavailableTimeoutError):
        await pool.request_gpu(timeout=0)
    pool.observe(gpus(2))
    await pool.request_gpu(timeout=0)


async def test_a_timeout_while_one_of_two_endpoints_answers_is_a_timeout(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        manager.endpoint_lost("down")
        manager.observe([gpu(0, endpoint_id="up", utilization_percent=100.0)], endpoint_id="up")
        with pytest.raises(WorkerTimeoutError) as timeout:
            await manager.request_gpu(timeout=0)
        assert not isinstance(timeout.value, ServiceUnavailableError)


# ---- Readings


async def test_stale_readings_give_nothing(pool: WorkerPoolManager, clock: FakeClock) -> None:
    clock.advance(15.0)
    held = await pool.request_gpu(timeout=0)
    clock.advance(0.1)
    status = pool.get_pool_status()
    assert (status.total_gpus, status.available_gpus) == (2, 0)
    with pytest.raises(WorkerTimeoutError, match=re.escape("last read 15.1 s ago, more than 15 s")):
        await pool.request_gpu(timeout=0)
    waiter = ask(pool)
    await settle()
    await pool.release_gpu(held)
    await settle()
    assert not waiter.done(), "a released GPU is judged by its last reading, too"
    pool.observe(gpus(2))
    await waiter


async def test_readings_are_as_old_as_their_server_says(pool: WorkerPoolManager, clock: FakeClock) -> None:
    clock.advance(100.0)
    pool.observe(gpus(2), age_seconds=15.1)
    assert pool.get_pool_status().available_gpus == 0
    pool.observe(gpus(2), age_seconds=15.0)
    assert pool.get_pool_status().available_gpus == 2


async def test_an_older_reading_does_not_replace_a_newer_one(pool: WorkerPoolManager, clock: FakeClock) -> None:
    clock.advance(5.0)
    pool.observe([gpu(0, utilization_percent=100.0), gpu(1, utilization_percent=100.0)], age_seconds=1.0)
    pool.observe(gpus(2), age_seconds=3.0)
    assert pool.get_pool_status().available_gpus == 0


@pytest.mark.parametrize(
    "reading",
    [
        {"fault": "GPU is lost"},
        {"memory_used_mb": None},
        {"memory_used_mb": 90_000.0},
        {"memory_used_mb": math.nan},
        {"memory_used_mb": -5.0},
        {"utilization_percent": None},
        {"utilization_percent": math.nan},
        {"utilization_percent": 250.0},
        {"utilization_percent": -5.0},
        {"utilization_percent": math.inf},
        {"is_leased_elsewhere": True},
    ],
    ids=str,
)
async def test_a_bad_reading_spoils_its_own_gpu_and_no_other(pool: WorkerPoolManager, reading: dict[str, Any]) -> None:
    pool.observe([gpu(0, **reading), gpu(1)])
    status = pool.get_pool_status()
    assert (status.total_gpus, status.available_gpus) == (2, 1)
    assert (await pool.request_gpu(timeout=0)).gpu_id == 1
    with pytest.raises(WorkerTimeoutError):
        await pool.request_gpu(timeout=0)


async def test_a_gpu_that_comes_back_to_health_is_given(pool: WorkerPoolManager) -> None:
    pool.observe([gpu(0, fault="reset required")])
    waiter = ask(pool)
    await settle()
    assert not waiter.done()
    pool.observe([gpu(0)])
    assert (await waiter).gpu_id == 0


async def test_statistics_of_a_server_are_readings(pool: WorkerPoolManager) -> None:
    pool.update_stats(
        stats(
            GPUInfo(0, "NVIDIA A100", 20.0, 95.0),
            GPUInfo(1, "NVIDIA A100", 20.0, 15.0, uuid="GPU-x"),
            GPUInfo(2, "NVIDIA A100", 10.0, 15.0, fault="fell off the bus"),
            GPUInfo(3, "NVIDIA A100", 10.0, 15.0, leased=True),
            GPUInfo(4, "NVIDIA A100", None, 15.0),
            GPUInfo(5, "NVIDIA A100", 10.0, None),
        )
    )
    status = pool.get_pool_status()
    assert (status.total_gpus, status.available_gpus) == (6, 1)
    assignment = await pool.request_gpu(timeout=0, gpu_model="A100")
    assert (assignment.gpu_id, assignment.gpu_uuids) == (1, ("GPU-x",))


async def test_faulty_statistics_say_why_they_serve_nobody(pool: WorkerPoolManager) -> None:
    pool.update_stats(
        stats(
            GPUInfo(0, "NVIDIA A100", 10.0, 15.0, fault="fell off the bus"),
            GPUInfo(1, "NVIDIA A100", 10.0, 15.0, leased=True),
            GPUInfo(2, "NVIDIA A100", None, 15.0),
        )
    )
    with pytest.raises(WorkerTimeoutError) as timeout:
        await pool.request_gpu(timeout=0)
    for reason in ("unhealthy: fell off the bus", "leased by its server", "does not report its memory usage"):
        assert reason in str(timeout.value)


async def test_statistics_carry_their_age(pool: WorkerPoolManager, clock: FakeClock) -> None:
    clock.advance(100.0)
    pool.update_stats(stats(GPUInfo(0, "NVIDIA A100", 0.0, 0.0), age_seconds=15.1))
    assert pool.get_pool_status().available_gpus == 0
    pool.update_stats(stats(GPUInfo(0, "NVIDIA A100", 0.0, 0.0), age_seconds=1.0))
    assert pool.get_pool_status().available_gpus == 1


async def test_a_lost_endpoint_gives_nothing_and_takes_nothing_away(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    pool.endpoint_lost()
    status = pool.get_pool_status()
    assert (status.total_gpus, status.available_gpus, status.active_workers) == (0, 0, 1)
    waiter = ask(pool)
    await settle()
    assert not waiter.done()
    await pool.release_gpu(held)
    await settle()
    assert not waiter.done()
    pool.observe(gpus(2))
    await waiter


async def test_no_gpus_at_all_let_everybody_wait() -> None:
    """Fault 22."""
    async with WorkerPoolManager() as manager:
        manager.observe([])
        status = manager.get_pool_status()
        assert (status.total_gpus, status.available_gpus) == (0, 0)
        waiter = ask(manager)
        await settle()
        assert not waiter.done()
        manager.observe(gpus(1))
        await waiter


async def test_ten_thousand_gpus_are_given_like_two(pool: WorkerPoolManager) -> None:
    """Fault 22."""
    pool.observe(gpus(10_000))
    assignments = [await pool.request_gpu(timeout=0) for _ in range(500)]
    assert len({assignment.gpu_id for assignment in assignments}) == 500
    assert pool.get_pool_status().available_gpus == 9_500


# ---- Fresh readings are asked for when they are worth it (rule 8)


async def test_after_a_release_readings_are_wanted_at_once_and_three_times_more_while_someone_waits(
    clock: FakeClock,
) -> None:
    moments: list[tuple[str, float]] = []
    manager = WorkerPoolManager(clock=clock, on_reading_wanted=lambda name: moments.append((name, clock.now())))
    async with manager:
        manager.observe(gpus(1))
        held = await manager.request_gpu()
        manager.observe([gpu(0, utilization_percent=100.0)])
        waiter = ask(manager)
        await settle()
        clock.advance(3.0)
        assert moments == [], "the holder is at work, what should there be to see"
        await manager.release_gpu(held)
        assert moments == [("", 3.0)]
        clock.advance(10.0)
        assert [at for _, at in moments] == pytest.approx([3.0, 3.1, 3.3, 4.0])
        await settle()
        assert not waiter.done()
        manager.observe(gpus(1))
        await waiter


async def test_no_reading_is_wanted_while_nobody_waits(
    pool: WorkerPoolManager, clock: RecordingClock, wanted: list[str]
) -> None:
    await pool.release_gpu(await pool.request_gpu())
    await clock.run(5.0)
    assert (wanted, clock.calls) == ([], [])


async def test_once_nobody_waits_no_more_readings_are_wanted(
    pool: WorkerPoolManager, clock: FakeClock, wanted: list[str]
) -> None:
    pair = await pool.request_gpu(count=2)
    pool.observe([gpu(0, utilization_percent=100.0), gpu(1, utilization_percent=100.0)])
    waiter = ask(pool)
    await settle()
    await pool.release_gpu(pair)
    assert wanted == [""]
    await clock.run(0.1)
    pool.observe(gpus(2))
    await waiter
    wanted.clear()
    await clock.run(5.0)
    assert wanted == []


async def test_readings_are_wanted_of_the_endpoint_that_was_released(clock: FakeClock) -> None:
    wanted: list[str] = []
    async with WorkerPoolManager(clock=clock, on_reading_wanted=wanted.append) as manager:
        for name in ("a", "b"):
            manager.observe(gpus(1, endpoint_id=name), endpoint_id=name)
        held = {held.endpoint_id: held for held in [await manager.request_gpu(), await manager.request_gpu()]}
        for name in ("a", "b"):
            manager.observe([gpu(0, endpoint_id=name, utilization_percent=100.0)], endpoint_id=name)
        waiter = ask(manager)
        await settle()
        await manager.release_gpu(held["b"])
        assert wanted == ["b"]
        waiter.cancel()
        await settle()
        await manager.release_gpu(held["a"])


async def test_a_reading_may_be_given_in_the_very_call_that_wants_it(clock: FakeClock) -> None:
    """A reader that needs no time, as on this host, answers from within the callback."""

    def read(endpoint_id: str) -> None:
        manager.observe(gpus(1), endpoint_id=endpoint_id)

    manager = WorkerPoolManager(clock=clock, on_reading_wanted=read)
    async with manager:
        manager.observe(gpus(1))
        first = await manager.request_gpu()
        waiter = ask(manager)
        await settle()
        manager.observe([gpu(0, utilization_percent=100.0)])
        await manager.release_gpu(first)
        second = await waiter
        manager.observe([gpu(0, utilization_percent=100.0)])
        await manager.release_gpu(second)
        # Nobody waits, so nothing was read since the release: the next one who asks lets it be read.
        third = await manager.request_gpu(timeout=5.0)
        await manager.release_gpu(third)
        assert manager.get_pool_status().available_gpus == 1


async def test_a_reader_that_fails_harms_nobody(clock: FakeClock) -> None:
    """What was decided is told to everybody whom it concerns, whatever becomes of the reading."""

    def fail(endpoint_id: str) -> None:
        raise OSError("no such device")

    async with WorkerPoolManager(clock=clock, on_reading_wanted=fail) as manager:
        manager.observe(gpus(1))
        held = await manager.request_gpu()
        waiters = [ask(manager) for _ in range(2)]
        await settle()
        await manager.release_gpu(held)
        await settle()
        waiters[1].cancel()
        await settle()
        assert [waiter.done() for waiter in waiters] == [True, True]
        assert waiters[1].cancelled()
        await manager.release_gpu(waiters[0].result())
        manager.observe([gpu(0, utilization_percent=100.0)])
        late = ask(manager)
        await settle()
        assert not late.done()
        manager.observe(gpus(1))
        await manager.release_gpu(await late)
        assert manager.get_pool_status().available_gpus == 1


# ---- Looking


async def test_the_status_counts_gpus_and_workers(pool: WorkerPoolManager, clock: FakeClock) -> None:
    pool.observe([*gpus(3), gpu(3, memory_used_mb=79_000.0)])
    assert pool.get_pool_status() == PoolStatus(4, 3, 0, 0, {})
    pair = await pool.request_gpu(count=2)
    waiters = [ask(pool, count=2), ask(pool, count=2)]
    await settle()
    clock.advance(10.0)
    pool.observe([*gpus(3), gpu(3, memory_used_mb=79_000.0)])
    status = pool.get_pool_status()
    assert (status.total_gpus, status.available_gpus, status.active_workers, status.blocked_workers) == (4, 1, 1, 2)
    assert status.gpu_assignments.keys() == set(pair.gpu_ids)
    (worker,) = status.gpu_assignments[pair.gpu_id]
    assert worker.id == pair.worker_id
    assert timedelta(seconds=9) < datetime.now() - worker.enqueued_at < timedelta(seconds=11)
    for waiter in waiters:
        waiter.cancel()
    await settle()
    await pool.release_gpu(pair)
    assert pool.get_pool_status() == PoolStatus(4, 3, 0, 0, {})


async def test_somebody_can_ask_why_he_would_wait(pool: WorkerPoolManager) -> None:
    pair = await pool.request_gpu(count=2)
    told = pool.explain(count=2)
    assert told.position == 1
    assert [str(each) for each in told.gpus] == [f"GPU {number}: held by {pair.worker_id} for 0 s" for number in (0, 1)]


# ---- Giving back


async def test_releasing_twice_is_harmless(pool: WorkerPoolManager) -> None:
    """Fault 6."""
    first = await pool.request_gpu()
    await pool.release_gpu(first)
    await pool.release_gpu(first)
    pair = await pool.request_gpu(count=2)
    await pool.release_gpu(first)
    assert pool.get_pool_status().active_workers == 1, "it is the other's now"
    await pool.release_gpu(pair)


async def test_an_equal_assignment_releases(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu(count=2)
    again = GPUAssignment(
        held.gpu_id,
        held.worker_id,
        held.assigned_at,
        gpu_ids=held.gpu_ids,
        gpu_uuids=held.gpu_uuids,
        fence=held.fence,
    )
    assert again == held
    assert again is not held
    await pool.release_gpu(again)
    assert pool.get_pool_status().available_gpus == 2
    await pool.release_gpu(held)


async def test_an_assignment_of_the_documented_fields_releases(pool: WorkerPoolManager) -> None:
    """As a program rebuilds it that kept what is documented: GPU, worker and time."""
    held = await pool.request_gpu()
    again = GPUAssignment(gpu_id=held.gpu_id, worker_id=held.worker_id, assigned_at=held.assigned_at)
    await pool.release_gpu(again)
    assert pool.get_pool_status().available_gpus == 2
    await pool.release_gpu(again)
    await pool.release_gpu(held)


@pytest.mark.parametrize("make_copy", [lambda held: pickle.loads(pickle.dumps(held)), copy.copy, copy.deepcopy])  # noqa: S301 - our own
async def test_a_copy_releases(pool: WorkerPoolManager, make_copy: Callable[[GPUAssignment], GPUAssignment]) -> None:
    held = await pool.request_gpu()
    again = make_copy(held)
    assert again is not held
    await pool.release_gpu(again)
    assert pool.get_pool_status().available_gpus == 2


async def test_a_copy_releases_when_the_original_is_gone(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    held = await pool.request_gpu()
    again = copy.copy(held)
    del held
    await settle()
    assert len(warnings(caplog)) == 1, "its object is gone, and nothing tells that a copy is not"
    await pool.release_gpu(again)
    assert pool.get_pool_status().available_gpus == 2


@pytest.mark.parametrize(
    "forge",
    [
        lambda held: replace_fields(held, gpu_id=1, gpu_ids=(1,)),
        lambda held: replace_fields(held, fence=held.fence + 1),
        lambda held: replace_fields(held, gpu_ids=(0, 1)),
        lambda _: GPUAssignment(0, "worker-1", NOW),
        lambda held: GPUAssignment(0, "worker-1", NOW, fence=held.fence),
    ],
    ids=["other GPU", "other fence", "more GPUs", "other worker", "other worker, right fence"],
)
async def test_what_this_pool_did_not_assign_is_refused_and_changes_nothing(
    pool: WorkerPoolManager, forge: Callable[[GPUAssignment], GPUAssignment]
) -> None:
    held = await pool.request_gpu()
    with pytest.raises(ValueError, match="worker-") as refused:
        await pool.release_gpu(forge(held))
    assert isinstance(refused.value, InvalidAssignmentError)
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(held)


def replace_fields(held: GPUAssignment, **changes: Any) -> GPUAssignment:
    values = {"gpu_id": held.gpu_id, "gpu_ids": held.gpu_ids, "fence": held.fence, **changes}
    return GPUAssignment(
        values["gpu_id"], held.worker_id, held.assigned_at, gpu_ids=values["gpu_ids"], fence=values["fence"]
    )


async def test_an_assignment_of_a_worker_that_was_never_served_is_refused(pool: WorkerPoolManager) -> None:
    await pool.request_gpu(count=2)
    with pytest.raises(WorkerTimeoutError) as timeout:
        await pool.request_gpu(timeout=0)
    worker = re.search(r"worker-[\w-]+", str(timeout.value))
    assert worker is not None
    with pytest.raises(ValueError, match=worker.group()):
        await pool.release_gpu(GPUAssignment(0, worker.group(), NOW))


async def test_another_pools_assignment_is_refused(pool: WorkerPoolManager) -> None:
    async with WorkerPoolManager() as other:
        other.observe(gpus(2))
        mine, theirs = await pool.request_gpu(), await other.request_gpu()
        assert (mine.gpu_id, mine.fence) == (theirs.gpu_id, theirs.fence)
        with pytest.raises(InvalidAssignmentError, match=theirs.worker_id):
            await pool.release_gpu(theirs)
        await pool.release_gpu(mine)
        with pytest.raises(InvalidAssignmentError, match=theirs.worker_id):
            await pool.release_gpu(theirs)
        await other.release_gpu(theirs)


@pytest.mark.parametrize("nonsense", [None, 0, "worker-1", ()])
async def test_what_is_no_assignment_at_all_is_a_value_error(pool: WorkerPoolManager, nonsense: Any) -> None:
    """Who kept only `assignment.gpu_id` tries to release that."""
    with pytest.raises(ValueError, match="GPUAssignment"):
        await pool.release_gpu(nonsense)
    assert pool.get_pool_status().available_gpus == 2


# ---- Several endpoints (D4)


async def test_with_endpoints_an_assignment_has_global_ids(pool: WorkerPoolManager) -> None:
    async with WorkerPoolManager() as manager:
        for name in ("server1", "server2"):
            manager.observe(gpus(2, endpoint_id=name), endpoint_id=name)
        assignments = [await manager.request_gpu() for _ in range(4)]
        assert {type(assignment) for assignment in assignments} == {GlobalGPUAssignment}
        assert sorted(assignment.gpu_id for assignment in assignments) == [
            "server1:0",
            "server1:1",
            "server2:0",
            "server2:1",
        ]
        for assignment in assignments:
            assert isinstance(assignment, GlobalGPUAssignment)
            assert assignment.gpu_id == assignment.global_gpu_id
            assert assignment.global_gpu_id == f"{assignment.endpoint_id}:{assignment.local_gpu_id}"
            assert assignment.gpu_uuids == (f"GPU-{assignment.endpoint_id}-{assignment.local_gpu_id}",)
        assert manager.get_pool_status().gpu_assignments.keys() == {each.gpu_id for each in assignments}
        for assignment in assignments:
            await manager.release_gpu(copy.copy(assignment))
        assert manager.get_pool_status().available_gpus == 4


async def test_several_gpus_are_of_one_endpoint(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        for name in ("a", "b"):
            manager.observe(gpus(2, endpoint_id=name), endpoint_id=name)
        first, second = await manager.request_gpu(), await manager.request_gpu()
        assert {first.gpu_id, second.gpu_id} == {"a:0", "b:0"}
        pair = ask(manager, count=2)
        await settle()
        assert not pair.done(), "one of each is free"
        await manager.release_gpu(first)
        assert (await pair).gpu_ids in (("a:0", "a:1"), ("a:1", "a:0"))
        with pytest.raises(ImpossibleRequestError, match=r"\ba\b.*; .*\bb\b"):
            await manager.request_gpu(count=3)


async def test_statistics_of_an_endpoint_have_global_ids(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        manager.update_stats(stats(GPUInfo(3, "NVIDIA A100", 0.0, 0.0)), endpoint_id="gpu-server-1_8000")
        assert (await manager.request_gpu()).gpu_id == "gpu-server-1_8000:3"


async def test_one_endpoint_lost_leaves_the_other(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        for name in ("a", "b"):
            manager.observe(gpus(1, endpoint_id=name), endpoint_id=name)
        manager.endpoint_lost("a")
        status = manager.get_pool_status()
        assert (status.total_gpus, status.available_gpus) == (1, 1)
        assert (await manager.request_gpu()).gpu_id == "b:0"


# ---- Workers that are called back (D21)


async def test_a_worker_is_called_back_with_its_gpu(pool: WorkerPoolManager) -> None:
    given: list[int] = []
    worker = WorkerInfo("trainer", NOW, callback=given.append, on_error=pytest.fail)
    pool.enqueue_worker(worker)
    assert given == [], "not before the caller goes on"
    await settle()
    assert given == [0]
    assert pool.get_pool_status().gpu_assignments == {0: [worker]}
    pool.release_worker("trainer")
    assert pool.get_pool_status().available_gpus == 2


async def test_a_worker_that_waits_is_called_back_in_its_turn(pool: WorkerPoolManager) -> None:
    pair = await pool.request_gpu(count=2)
    given: list[tuple[str, int]] = []
    for name in ("first", "second"):
        pool.enqueue_worker(WorkerInfo(name, NOW, callback=lambda gpu_id, name=name: given.append((name, gpu_id))))
    third = ask(pool)
    await settle()
    assert (given, pool.get_pool_status().blocked_workers) == ([], 3)
    await pool.release_gpu(pair)
    await settle()
    assert sorted(given) == [("first", 0), ("second", 1)]
    assert not third.done()
    pool.release_worker("second")
    assert (await third).gpu_id == 1


async def test_a_worker_on_an_endpoint_is_called_back_with_a_global_id(clock: FakeClock) -> None:
    async with WorkerPoolManager(clock=clock) as manager:
        manager.observe(gpus(1, endpoint_id="a"), endpoint_id="a")
        given: list[str] = []
        manager.enqueue_worker(WorkerInfo("trainer", NOW, callback=given.append))
        await settle()
        assert given == ["a:0"]


async def test_a_worker_hears_of_its_timeout(pool: WorkerPoolManager, clock: FakeClock) -> None:
    await pool.request_gpu(count=2)
    errors: list[Exception] = []
    pool.enqueue_worker(WorkerInfo("trainer", NOW, callback=pytest.fail, on_error=errors.append), timeout=2.0)
    await clock.run(2.0)
    assert [type(error) for error in errors] == [WorkerTimeoutError]
    assert "trainer" in str(errors[0])


async def test_a_worker_hears_that_it_asks_the_impossible(pool: WorkerPoolManager) -> None:
    errors: list[Exception] = []
    worker = WorkerInfo("trainer", NOW, callback=pytest.fail, on_error=errors.append)
    pool.enqueue_worker(worker, requirements=Requirements(count=3))
    await settle()
    assert [type(error) for error in errors] == [ImpossibleRequestError]


async def test_a_worker_enqueues_once(pool: WorkerPoolManager) -> None:
    pool.enqueue_worker(WorkerInfo("trainer", NOW))
    with pytest.raises(ValueError, match="'trainer'"):
        pool.enqueue_worker(WorkerInfo("trainer", NOW))
    await settle()
    with pytest.raises(ValueError, match="'trainer'"):
        pool.enqueue_worker(WorkerInfo("trainer", NOW))
    pool.release_worker("trainer")
    pool.enqueue_worker(WorkerInfo("trainer", NOW))


async def test_releasing_a_worker_that_holds_nothing_is_refused(pool: WorkerPoolManager) -> None:
    with pytest.raises(InvalidAssignmentError, match="'stranger'"):
        pool.release_worker("stranger")


async def test_a_worker_that_is_called_back_never_looks_abandoned(
    pool: WorkerPoolManager, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no assignment to keep."""
    pool.enqueue_worker(WorkerInfo("trainer", NOW))
    await settle()
    gc.collect()
    await clock.run(60.0)
    pool.observe(gpus(2))
    assert warnings(caplog) == []
    assert pool.get_pool_status().active_workers == 1
    pool.release_worker("trainer")


# ---- Life


async def test_nothing_works_before_the_start() -> None:
    manager = WorkerPoolManager()
    assert not manager.is_running
    calls: list[Callable[[], object]] = [
        manager.get_pool_status,
        manager.explain,
        manager.endpoint_lost,
        lambda: manager.observe(gpus(1)),
        lambda: manager.update_stats(stats()),
        lambda: manager.enqueue_worker(WorkerInfo("trainer", NOW)),
        lambda: manager.release_worker("trainer"),
    ]
    for call in calls:
        with pytest.raises(NotStartedError, match="start"):
            call()
    with pytest.raises(NotStartedError):
        await manager.request_gpu()
    with pytest.raises(RuntimeError):
        await manager.release_gpu(GPUAssignment(0, "worker-1", NOW))


async def test_nothing_works_after_the_stop(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    await pool.stop()
    assert not pool.is_running
    with pytest.raises(NotStartedError):
        await pool.request_gpu()
    with pytest.raises(NotStartedError):
        await pool.release_gpu(held)
    with pytest.raises(NotStartedError):
        pool.get_pool_status()


async def test_starting_twice_is_refused_and_changes_nothing(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    with pytest.raises(AlreadyStartedError) as started:
        await pool.start()
    assert isinstance(started.value, RuntimeError)
    await pool.release_gpu(held)


async def test_a_restarted_pool_begins_anew(pool: WorkerPoolManager) -> None:
    await pool.request_gpu()
    await pool.stop()
    await pool.start()
    assert pool.get_pool_status() == PoolStatus(0, 0, 0, 0, {})
    pool.observe(gpus(2))
    assert pool.get_pool_status().available_gpus == 2


def test_a_manager_may_live_in_one_loop_after_another() -> None:
    manager = WorkerPoolManager()

    async def use() -> PoolStatus:
        async with manager:
            manager.observe(gpus(1))
            held = await manager.request_gpu()
            waiter = ask(manager)
            await settle()
            await manager.release_gpu(held)
            await manager.release_gpu(await waiter)
            return manager.get_pool_status()

    assert asyncio.run(use()) == asyncio.run(use()) == PoolStatus(1, 1, 0, 0, {})


def test_a_manager_is_made_where_no_loop_runs() -> None:
    assert not WorkerPoolManager().is_running


async def test_the_pools_own_log_says_who_got_and_gave_back_what(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpu_worker_pool")
    pool.observe(gpus(2))  # whether anybody reads the log is looked at now and then
    pair = await pool.request_gpu(count=2)
    waiter = ask(pool)
    await settle()
    await pool.release_gpu(pair)
    single = await waiter
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert [pair.worker_id in message for message in messages] == [True, False, True, False]
    assert [single.worker_id in message for message in messages] == [False, True, False, True]
    assert "GPUs 0, 1" in messages[0]
    assert "waits" in messages[1]
    assert "released" in messages[2]


# ---- Threads and loops


async def test_from_another_thread_everything_is_refused_and_nothing_happens(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    calls: list[Callable[[], object]] = [
        pool.get_pool_status,
        pool.explain,
        pool.endpoint_lost,
        lambda: pool.observe([]),
        lambda: pool.update_stats(stats()),
        lambda: pool.enqueue_worker(WorkerInfo("trainer", NOW)),
        lambda: pool.release_worker(held.worker_id),
        lambda: asyncio.run(pool.request_gpu(timeout=0)),
        lambda: asyncio.run(pool.release_gpu(held)),
        lambda: asyncio.run(pool.stop()),
    ]
    seen: list[object] = []

    def call_all() -> None:
        for call in calls:
            try:
                seen.append(call())
            except Exception as error:
                seen.append(type(error))

    await asyncio.to_thread(call_all)
    assert seen == [WrongThreadError] * len(calls)
    assert issubclass(WrongThreadError, RuntimeError)
    status = pool.get_pool_status()
    assert (status.total_gpus, status.active_workers, status.blocked_workers) == (2, 1, 0)
    assert pool.is_running


def test_the_refusal_says_what_is_wrong() -> None:
    assert "thread" in str(WrongThreadError())


def test_from_another_loop_of_the_same_thread_a_request_is_refused_and_leaves_nothing_behind() -> None:
    """What waits in one loop cannot be woken by another; it must not stay in the queue and be given a GPU."""
    manager = WorkerPoolManager()
    mine, other = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def begin() -> GPUAssignment:
        await manager.start()
        manager.observe(gpus(1))
        return await manager.request_gpu()

    async def end() -> PoolStatus:
        await manager.release_gpu(held)
        status = manager.get_pool_status()
        await manager.stop()
        return status

    try:
        held = mine.run_until_complete(begin())
        with pytest.raises(RuntimeError):
            other.run_until_complete(manager.request_gpu(timeout=5.0))
        status = mine.run_until_complete(end())
        assert (status.available_gpus, status.active_workers, status.blocked_workers) == (1, 0, 0)
    finally:
        mine.close()
        other.close()


# ---- Assignments that nobody will release: found by evidence, not by age


def loaded(*, pid: int = 4711) -> list[Any]:
    """Somebody's model is on GPU 0."""
    return [gpu(0, memory_used_mb=40_000.0, processes=(ProcessReading(pid),)), gpu(1)]


async def test_an_assignment_that_is_dropped_unreleased_is_told_of_at_once(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    assignment = await pool.request_gpu()
    worker_id = assignment.worker_id
    del assignment
    await asyncio.sleep(0)
    (warning,) = warnings(caplog)
    assert worker_id in warning
    assert "GPU 0" in warning
    assert "release_gpu()" in warning


async def test_an_assignment_in_a_cycle_is_found_when_it_is_collected(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    cycle: list[Any] = [await pool.request_gpu()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    await settle()
    assert len(warnings(caplog)) == 1


async def test_a_released_assignment_may_be_dropped(pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture) -> None:
    assignment = await pool.request_gpu()
    await pool.release_gpu(assignment)
    del assignment
    gc.collect()
    await settle()
    assert warnings(caplog) == []


async def test_released_by_a_copy_before_anybody_looked_it_was_not_dropped(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    """That an object is gone is heard of in the next step of the loop, when there is nothing to warn of any more."""
    held = await pool.request_gpu()
    again = copy.copy(held)
    del held
    await pool.release_gpu(again)
    await settle()
    assert warnings(caplog) == []
    assert pool.get_pool_status().available_gpus == 2


async def test_while_the_task_that_asked_runs_its_gpu_is_its_own(
    pool: WorkerPoolManager, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """`gpu = (await client.request_gpu()).gpu_id` is common code, and its model may take minutes to load."""
    may_end = asyncio.Event()

    async def common_code() -> int:
        gpu = (await pool.request_gpu()).gpu_id
        await may_end.wait()
        assert isinstance(gpu, int)
        return gpu

    task = asyncio.create_task(common_code())
    for _ in range(600):
        await clock.run(1.0)
        pool.observe(gpus(2))
    status = pool.get_pool_status()
    assert (status.active_workers, status.available_gpus) == (1, 1)
    assert len(warnings(caplog)) == 1
    may_end.set()
    assert await task == 0
    await settle()
    for _ in range(6):
        await clock.run(1.0)
        pool.observe(gpus(2))
    assert pool.get_pool_status().available_gpus == 2, "now the task has finished, and the GPU is empty"


async def gathered(pool: WorkerPoolManager) -> list[Any]:
    return [assignment.gpu_id for assignment in await asyncio.gather(pool.request_gpu(), pool.request_gpu())]


async def waited_for(pool: WorkerPoolManager) -> list[Any]:
    return [(await asyncio.wait_for(pool.request_gpu(), 10.0)).gpu_id for _ in range(2)]


async def wrapped(pool: WorkerPoolManager) -> list[Any]:
    async def passes_on() -> Any:
        return await pool.request_gpu()

    return [(await asyncio.create_task(passes_on())).gpu_id for _ in range(2)]


@pytest.mark.parametrize("ask_for_two", [gathered, waited_for, wrapped])
async def test_who_asked_by_way_of_a_helper_task_keeps_its_gpus_while_it_runs(
    pool: WorkerPoolManager, clock: FakeClock, ask_for_two: Callable[[WorkerPoolManager], Awaitable[list[Any]]]
) -> None:
    """`gather`, and `wait_for` before 3.12, ask in a task of their own that ends with the answer.

    That this one has finished says nothing about whoever has the number of the GPU and is about to load its model.
    """
    numbers = await ask_for_two(pool)
    for _ in range(60):
        await clock.run(1.0)
        pool.observe(gpus(2))
    assert sorted(numbers) == [0, 1]
    with pytest.raises(WorkerTimeoutError):
        await pool.request_gpu(timeout=0)


async def test_when_the_task_has_finished_and_the_gpu_is_empty_it_is_taken_back(
    pool: WorkerPoolManager, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def careless() -> str:
        return (await pool.request_gpu(count=2)).worker_id

    worker_id = await asyncio.create_task(careless())
    waiter = ask(pool)
    await settle()
    assert not waiter.done()
    for _ in range(6):
        await clock.run(1.0)
        pool.observe(gpus(2))
    await waiter
    assert pool.get_pool_status().active_workers == 1
    told = warnings(caplog)
    assert all(worker_id in warning for warning in told)
    assert "dropped" in told[0]
    assert "taken back" in told[-1]


async def test_what_a_failed_task_held_is_taken_back_and_its_error_is_still_logged(
    pool: WorkerPoolManager, clock: FakeClock
) -> None:
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))

    async def fails() -> None:
        _held = await pool.request_gpu(count=2)
        raise ValueError("out of memory")

    task = asyncio.create_task(fails())
    await settle()
    assert pool.get_pool_status().active_workers == 1, "the traceback has it"
    del task
    gc.collect()
    for _ in range(6):
        await clock.run(1.0)
        pool.observe(gpus(2))
    assert pool.get_pool_status().available_gpus == 2
    assert logged == ["Task exception was never retrieved"]


async def test_a_task_that_asks_often_remembers_only_what_it_holds(pool: WorkerPoolManager) -> None:
    for _ in range(3):
        await pool.release_gpu(await pool.request_gpu())
    task: Any = asyncio.current_task()
    assert "requesting_task_done" not in repr(task)


async def test_it_is_not_taken_back_without_a_reading(pool: WorkerPoolManager, clock: FakeClock) -> None:
    async def careless() -> None:
        await pool.request_gpu(count=2)

    await asyncio.create_task(careless())
    await clock.run(14.0)
    with pytest.raises(WorkerTimeoutError, match="in quarantine"):
        await pool.request_gpu(timeout=0)
    pool.observe(gpus(2), age_seconds=14.5)
    with pytest.raises(WorkerTimeoutError, match="in quarantine"):
        await pool.request_gpu(timeout=0)
    pool.observe(gpus(2))
    await pool.request_gpu(timeout=0)


async def test_while_the_gpu_is_full_it_is_not_taken_back(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """The task has finished, but it left a process that runs on."""

    async def careless() -> None:
        await pool.request_gpu()
        pool.observe(loaded())

    await asyncio.create_task(careless())
    for _ in range(600):
        await clock.run(1.0)
        pool.observe(loaded())
    status = pool.get_pool_status()
    assert (status.active_workers, status.available_gpus) == (0, 1), "nobody's, and nobody gets it"
    pool.observe(gpus(2))
    assert pool.get_pool_status().available_gpus == 2


async def test_where_processes_cannot_be_seen_memory_is_the_evidence(pool: WorkerPoolManager, clock: FakeClock) -> None:
    unseen = [gpu(0, processes=None, memory_used_mb=1_000.0)]
    pool.observe(unseen)

    async def careless() -> None:
        await pool.request_gpu()

    await asyncio.create_task(careless())
    await clock.run(6.0)
    pool.observe([gpu(0, processes=None, memory_used_mb=1_257.0)])
    assert pool.get_pool_status().available_gpus == 0
    pool.observe([gpu(0, processes=None, memory_used_mb=1_256.0)])
    assert pool.get_pool_status().available_gpus == 1


async def test_where_nothing_can_be_seen_nothing_is_taken_back(pool: WorkerPoolManager, clock: FakeClock) -> None:
    async def careless() -> None:
        await pool.request_gpu()

    await asyncio.create_task(careless())
    await clock.run(6.0)
    pool.observe([gpu(0, fault="lost", memory_used_mb=None, processes=None)])
    assert pool.get_pool_status().available_gpus == 0
    await clock.run(1.0)
    pool.observe([])
    await clock.run(1.0)
    assert len(pool._pool.leases if pool._pool else ()) == 1
    pool.observe(gpus(1))
    assert pool.get_pool_status().available_gpus == 1


async def test_a_late_release_says_that_it_was_taken_back(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """Somebody had a copy, and the GPU is another's by now."""
    copies = []

    async def careless() -> None:
        copies.append(copy.copy(await pool.request_gpu(count=2)))

    await asyncio.create_task(careless())
    await settle()
    (late,) = copies
    with pytest.raises(StaleAssignmentError, match=late.worker_id) as in_quarantine:
        await pool.release_gpu(late)
    assert isinstance(in_quarantine.value, ValueError)
    await clock.run(6.0)
    pool.observe(gpus(2))
    again = await pool.request_gpu(timeout=0)
    with pytest.raises(StaleAssignmentError, match=late.worker_id):
        await pool.release_gpu(late)
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(again)


async def test_a_failed_task_is_a_finished_task(pool: WorkerPoolManager, clock: FakeClock) -> None:
    async def failing() -> None:
        assignment = await pool.request_gpu(count=2)
        raise RuntimeError(f"on {assignment.gpu_ids}")

    task = asyncio.create_task(failing())
    await settle()
    assert isinstance(task.exception(), RuntimeError)
    del task
    gc.collect()
    await settle()
    await clock.run(6.0)
    pool.observe(gpus(2))
    assert pool.get_pool_status().available_gpus == 2


async def test_age_alone_takes_nothing_back(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """Training runs for days."""
    held = await pool.request_gpu()
    for _ in range(14):
        await clock.run(12 * 3600.0)
        pool.observe(gpus(2))
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(held)


async def test_where_an_age_is_given_it_is_taken_back_after_that_and_when_empty(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerPoolManager(max_assignment_age_seconds=3600.0, clock=clock) as manager:
        manager.observe([gpu(0)])
        held = await manager.request_gpu()
        waiter = ask(manager, 24 * 3600.0)
        await settle()
        await clock.run(3590.0)
        manager.observe(loaded()[:1])
        assert manager.get_pool_status().active_workers == 1
        await clock.run(15.0)
        manager.observe(loaded()[:1])
        status = manager.get_pool_status()
        assert (status.active_workers, status.available_gpus) == (0, 0), "too old, but not empty"
        assert held.worker_id in warnings(caplog)[0]
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            await manager.release_gpu(held)
        await clock.run(10.0)
        manager.observe([gpu(0)])
        assert (await waiter).gpu_id == held.gpu_id
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            await manager.release_gpu(held)


async def test_who_was_told_that_it_is_too_late_is_not_told_to_release(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerPoolManager(max_assignment_age_seconds=10.0, clock=clock) as manager:
        manager.observe([gpu(0)])
        held = await manager.request_gpu()
        await clock.run(20.0)
        with pytest.raises(StaleAssignmentError):
            await manager.release_gpu(held)
        caplog.clear()
        del held
        gc.collect()
        await settle()
        assert [warning for warning in warnings(caplog) if "without release_gpu()" in warning] == []


async def test_within_its_age_an_assignment_is_released_as_ever(clock: FakeClock) -> None:
    async with WorkerPoolManager(max_assignment_age_seconds=3600.0, clock=clock) as manager:
        manager.observe([gpu(0)])
        held = await manager.request_gpu()
        await clock.run(10.0)
        await manager.release_gpu(held)
        await manager.release_gpu(held)
        manager.observe([gpu(0)])
        await clock.run(10_000.0)
        manager.observe([gpu(0)])
        assert manager.get_pool_status().available_gpus == 1


# ---- One timer instead of sweeps


async def test_an_idle_manager_has_no_timer(pool: WorkerPoolManager, clock: RecordingClock) -> None:
    for _ in range(10):
        await pool.release_gpu(await pool.request_gpu())
    held = await pool.request_gpu()
    await clock.run(3600.0)
    pool.observe(gpus(2))
    assert clock.calls == []
    await pool.release_gpu(held)


async def test_a_thousand_waiters_have_one_timer(pool: WorkerPoolManager, clock: RecordingClock) -> None:
    pair = await pool.request_gpu(count=2)
    waiters = [ask(pool, 100.0 + number) for number in range(1000)]
    await settle()
    assert clock.live == [100.0]
    assert len(clock.calls) == 1
    await pool.release_gpu(pair)
    for waiter in waiters:
        waiter.cancel()
    await settle()


async def test_a_shorter_wait_moves_the_timer(pool: WorkerPoolManager, clock: RecordingClock) -> None:
    await pool.request_gpu(count=2)
    waiters = [ask(pool, timeout) for timeout in (50.0, 20.0, 30.0, 10.0, 40.0)]
    await settle()
    assert clock.live == [10.0]
    assert clock.calls == [50.0, 20.0, 10.0]
    for at in (10.0, 20.0, 30.0, 40.0, 50.0):
        await clock.run(at - clock.now())
        assert sum(waiter.done() for waiter in waiters) == at / 10
        assert len(clock.live) <= 1
    assert {type(waiter.exception()) for waiter in waiters} == {WorkerTimeoutError}
    assert clock.live == []


async def test_each_of_a_thousand_waiters_times_out_at_its_own_moment(
    pool: WorkerPoolManager, clock: RecordingClock
) -> None:
    await pool.request_gpu(count=2)
    waiters = [ask(pool, float(1 + number * 7919 % 1000)) for number in range(1000)]
    await settle()
    for second in range(1, 1001):
        clock.advance(1.0)
        assert len(clock.live) == (second < 1000)
    await settle()
    assert {type(waiter.exception()) for waiter in waiters} == {WorkerTimeoutError}
    assert len(clock.calls) < 2500


async def test_when_the_last_waiter_is_gone_at_most_one_idle_wake_up_follows(
    pool: WorkerPoolManager, clock: RecordingClock
) -> None:
    pair = await pool.request_gpu(count=2)
    waiters = [ask(pool, 10.0 + number) for number in range(100)]
    await settle()
    for waiter in waiters:
        waiter.cancel()
    await pool.release_gpu(pair)
    await settle()
    calls = len(clock.calls)
    await clock.run(1000.0)
    assert len(clock.calls) == calls
    assert clock.live == []


async def test_a_timer_that_comes_a_moment_early_is_not_lost() -> None:
    """Loops round: asyncio runs a timer up to its clock's resolution early, uvloop counts whole milliseconds."""

    class EarlyClock(FakeClock):
        def call_at(self, when: float, callback: Callable[[], object]) -> Any:
            early = when - 0.0004
            return super().call_at(early if early > self.now() else when, callback)

    clock = EarlyClock()
    async with WorkerPoolManager(clock=clock) as manager:
        waiter = ask(manager, 1.0)
        await settle()
        await clock.run(1.1)
        assert isinstance(waiter.exception() if waiter.done() else None, WorkerTimeoutError)


async def test_a_late_timer_makes_a_late_timeout_and_no_other_harm(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """The loop was blocked: many deadlines have passed when it runs again."""
    pair = await pool.request_gpu(count=2)
    waiters = [ask(pool, 1.0 + number) for number in range(10)]
    await settle()
    clock._now = 5.5
    pool.observe(gpus(2))
    await pool.release_gpu(pair)
    await settle()
    assert [waiter.done() for waiter in waiters] == [True] * 7 + [False] * 3
    assert [type(waiter.exception()) for waiter in waiters[:5]] == [WorkerTimeoutError] * 5
    assert {waiter.result().gpu_id for waiter in waiters[5:7]} == {0, 1}
    for waiter in waiters[7:]:
        waiter.cancel()


async def test_real_time_works_as_well() -> None:
    async with WorkerPoolManager(worker_timeout=0.02) as manager:
        manager.observe(gpus(1))
        held = await manager.request_gpu()
        with pytest.raises(WorkerTimeoutError):
            await manager.request_gpu()
        waiter = ask(manager, 10.0)
        await asyncio.sleep(0.01)
        await manager.release_gpu(held)
        await manager.release_gpu(await waiter)


# ---- What must not harm others


async def test_a_reading_by_another_name_than_its_assignment_would_have_is_refused(pool: WorkerPoolManager) -> None:
    with pytest.raises(ValueError, match="gpu_id"):
        pool.observe([gpu(0, gpu_id="GPU-xyz")], endpoint_id="a")
    with pytest.raises(ValueError, match="endpoint_id"):
        pool.observe([gpu(0, gpu_id="h:8000:0")], endpoint_id="h:8000")
    with pytest.raises(ValueError, match="age_seconds"):
        pool.observe(gpus(2), age_seconds=math.nan)
    assert pool.get_pool_status().total_gpus == 2


async def test_a_worker_s_name_used_again_keeps_its_new_gpu(clock: FakeClock) -> None:
    worker = WorkerInfo("w1", NOW)
    async with WorkerPoolManager(max_assignment_age_seconds=10.0, clock=clock) as manager:
        manager.observe(gpus(2))
        manager.enqueue_worker(worker)
        await clock.run(13.0)
        with pytest.raises(StaleAssignmentError):
            manager.release_worker("w1")
        manager.observe(gpus(2))
        manager.enqueue_worker(worker)
        await clock.run(6.0)
        manager.observe(gpus(2))
        manager.release_worker("w1")
        manager.observe(gpus(2))
        assert manager.get_pool_status().active_workers == 0


async def test_callbacks_that_would_have_to_be_awaited_are_refused(pool: WorkerPoolManager) -> None:
    async def callback(gpu_id: Any) -> None:
        """Nobody would ever run this."""

    with pytest.raises(ValueError, match="plain functions"):
        pool.enqueue_worker(WorkerInfo("w1", NOW, callback))
    assert pool.get_pool_status().active_workers == 0


def test_the_strategy_of_a_configuration_for_many_endpoints_counts() -> None:
    config = MultiEndpointConfigurationManager({"GPU_LOAD_BALANCING_STRATEGY": "weighted"})
    assert WorkerPoolManager(config)._settings.strategy == "weighted"


def test_what_a_server_counts_is_enough_for_an_idle_gpu() -> None:
    """`/gpu/summary` has numbers of processes, not the processes."""
    memory = {"memory_total_mb": 120_000.0, "memory_used_mb": 90_000.0}
    infos = [
        GPUInfo(0, "A", 0.0, 0.0, process_count=2),
        GPUInfo(1, "A", 75.0, 0.0, process_count=0, **memory),
        GPUInfo(2, "GB10", 75.0, 0.0, process_count=0, unified_memory=True, **memory),
        GPUInfo(3, "A", 0.0, 0.0),
    ]
    stats = GPUStats(4, 0.0, 0.0, 0.0, infos, 0.0, "")
    idle = Requirements(policy="idle")
    found = [list(reading_obstacles(reading, idle, PoolSettings())) for reading in readings_from_stats(stats)]
    assert [[str(obstacle) for obstacle in obstacles] for obstacles in found] == [
        ["in use by 2 processes"],
        ["87.9 GiB in use by no visible process; 5.9 GiB are allowed"],
        [],
        [],
    ]
