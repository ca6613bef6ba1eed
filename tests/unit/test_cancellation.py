"""Cancellation and timeouts, exhaustively: every task of a busy scenario is cancelled at every step of the event loop.

`SteppedLoop` makes that possible. It is a whole event loop, but one that runs a single callback when told to and knows
no time but its own: nothing is ready means that the next timer is due. So a scenario is a sequence of numbered steps
that is the same in every run, "between any two of them" is a loop over the number, and a test that waits for five
minutes takes none. Nothing of the package is replaced: the loop is the manager's clock, as `FakeClock` could be.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import Counter
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import combinations_with_replacement, count
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from gpu_worker_pool.core import PoolSettings
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.errors import NotStartedError, PoolStoppedError, WorkerTimeoutError
from gpu_worker_pool.testing import FakeClock, gpus
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
    from contextvars import Context

    from gpu_worker_pool.models import GPUAssignment, PoolStatus

Result = TypeVar("Result")


def in_order(ready: int) -> int:
    """What asyncio promises: callbacks run in the order in which they became ready."""
    return 0


class SteppedLoop(asyncio.AbstractEventLoop):
    """An event loop that runs one callback a step, in its own time.

    `pick` says which of so many ready callbacks is next. Whatever asyncio would complain of (an exception that nobody
    retrieved, a task that was destroyed) is kept in `complaints`, which must be empty in the end.
    """

    def __init__(self, pick: Callable[[int], int] = in_order, *, debug: bool = False) -> None:
        self._pick = pick
        self._debug = debug
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = count()
        self._is_running = False
        #: How many callbacks have run.
        self.steps = 0
        self.complaints: list[str] = []

    # What drives it

    def step(self) -> bool:
        """Run one callback; False if there is nothing to run, now or ever."""
        self._ready = [handle for handle in self._ready if not handle.cancelled()]
        while not self._ready and self._timers:
            self._let_time_pass()
        if not self._ready:
            return False
        handle = self._ready.pop(self._pick(len(self._ready)))
        self.steps += 1
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)
            self._is_running = False
        return True

    def _let_time_pass(self) -> None:
        """Until the next timer, and whatever else is due in the same instant."""
        when = self._timers[0][0]
        while self._timers and self._timers[0][0] <= when:
            _, _, timer = heappop(self._timers)
            if not timer.cancelled():
                self._now = max(self._now, when)
                self._ready.append(timer)

    def run_until(self, step: int) -> None:
        while self.steps < step and self.step():
            pass

    def run_out(self, *, after_each: Callable[[], object] = lambda: None) -> None:
        """Until nothing is left to do."""
        while self.step():
            after_each()
            assert self.steps < 100_000, "it never ends"

    def run(self, work: Awaitable[Result]) -> Result:
        task = asyncio.ensure_future(work, loop=self)
        while not task.done():
            assert self.step(), f"{task} waits for something that never comes"
        return task.result()

    @property
    def is_anything_ready(self) -> bool:
        """Whether there is something to run before time passes."""
        return any(not handle.cancelled() for handle in self._ready)

    @property
    def pending(self) -> list[asyncio.Handle]:
        """What would still run: callbacks that are ready, timers that are not cancelled."""
        handles = [*self._ready, *(timer for _, _, timer in self._timers)]
        return [handle for handle in handles if not handle.cancelled()]

    # What asyncio asks of a loop

    def time(self) -> float:
        return self._now

    now = time  # what a manager asks of a clock, together with `call_at`

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._serial), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return self._debug

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")


#: Sharing workers ask like this; two of them fit on a GPU.
SHARED = {"share": True, "memory_mb": 30_000}


class Scenario:
    """Eight workers on two GPUs, one of whom is served or times out in the very instant in which a GPU is released.

    Everybody's behaviour is checked as it runs: a GPU is used by one worker at a time, or by such as share it, and
    the pool's own books are looked at after every step.
    """

    def __init__(self, pick: Callable[[int], int] = in_order, *, debug: bool = False, checks: bool = True) -> None:
        self.loop = SteppedLoop(pick, debug=debug)
        self.checks = checks
        self.manager = WorkerPoolManager(settings=PoolSettings(max_bypass_seconds=2.5), clock=self.loop)
        self.using: dict[Any, dict[str, bool]] = {}
        self.served: Counter[str] = Counter()
        self.workers: dict[str, asyncio.Task[str]] = {}
        self.loop.run(self.manager.start())
        self.set_up()

    def set_up(self) -> None:
        for second in range(10):
            self.loop.call_at(second, self.read)
        self.employ("first", holds=1.0)
        self.employ("second", holds=2.0)
        self.employ("pair", count=2, timeout=60.0)
        self.employ("third", holds=1.0)
        self.employ("hasty", timeout=1.0)
        self.employ("latecomer", begins=1.0)
        self.employ("sharer", begins=0.5, holds=1.0, **SHARED)
        self.employ("other sharer", begins=0.5, **SHARED)

    def employ(self, name: str, **habits: Any) -> asyncio.Task[str]:
        task = self.workers[name] = self.loop.create_task(self.work(name, **habits), name=name)
        return task

    def read(self) -> None:
        if self.manager.is_running:
            self.manager.observe(gpus(2))

    async def work(self, name: str, *, begins: float = 0.0, holds: float = 0.25, **requirements: Any) -> str:
        await asyncio.sleep(begins)
        try:
            assignment = await self.ask(name, **requirements)
        except (WorkerTimeoutError, TimeoutError):
            return "timed out"
        except PoolStoppedError:
            return "stopped"
        except NotStartedError:
            return "too late"
        self.served[name] += 1
        self.take(name, assignment, is_shared="share" in requirements)
        try:
            await asyncio.sleep(holds)
        finally:
            self.leave(name)
            await self.give_back(assignment)
        return "served"

    async def ask(self, name: str, **requirements: Any) -> GPUAssignment:
        return await self.manager.request_gpu(label=name, **requirements)

    async def give_back(self, assignment: GPUAssignment) -> None:
        await self.manager.release_gpu(assignment)

    def take(self, name: str, assignment: GPUAssignment, *, is_shared: bool) -> None:
        assert len(assignment.gpu_ids) == (2 if name == "pair" else 1)
        for gpu_id in assignment.gpu_ids:
            others = self.using.setdefault(gpu_id, {})
            assert not others or (is_shared and all(others.values())), f"{name} gets GPU {gpu_id} of {list(others)}"
            others[name] = is_shared

    def leave(self, name: str) -> None:
        for users in self.using.values():
            users.pop(name, None)

    def check(self) -> None:
        if self.manager._pool is not None:
            check_invariants(self.manager._pool)

    def run_out(self) -> None:
        self.loop.run_out(after_each=self.check if self.checks else lambda: None)
        self.check()

    def status(self) -> PoolStatus:
        async def look() -> PoolStatus:
            return self.manager.get_pool_status()

        return self.loop.run(look())

    def finish(self, *, cancelled: Iterable[str] = ()) -> None:
        """Run to the end; whoever was not cancelled had its turn, and nothing is left behind."""
        self.run_out()
        for name, task in self.workers.items():
            assert task.done(), f"{name} hangs"
            if name in cancelled:
                assert task.cancelled(), f"{name} swallowed its cancellation: {task}"
                assert self.served[name] <= 1
            elif task.cancelled():
                pytest.fail(f"{name} was cancelled by nobody")
            else:
                ends = {"served", "timed out"} if name == "hasty" else {"served"}
                assert task.result() in ends, f"{name} was {task.result()}"
                assert self.served[name] == (task.result() == "served")
        self.finish_books()

    def finish_books(self) -> None:
        self.loop.run(self.observe_now())
        status = self.status()
        assert (status.total_gpus, status.available_gpus) == (2, 2), f"a GPU leaked: {status}"
        assert (status.active_workers, status.blocked_workers) == (0, 0)
        assert leftovers(self.manager) == {}
        self.loop.run(self.manager.stop())
        assert self.loop.pending == []
        assert self.loop.complaints == []

    async def observe_now(self) -> None:
        self.manager.observe(gpus(2))

    def cancel(self, name: str) -> bool:
        """False if the task is done already, and cannot be cancelled any more."""
        return self.workers[name].cancel()


class Queue(Scenario):
    """A smaller one, for trying everything in pairs: four workers on two GPUs."""

    def set_up(self) -> None:
        self.loop.call_at(0.0, self.read)
        self.loop.call_at(1.0, self.read)
        self.employ("pair", count=2, holds=0.5)
        self.employ("first", holds=0.5)
        self.employ("second", holds=0.5)
        self.employ("hasty", timeout=0.5)


def leftovers(manager: WorkerPoolManager) -> dict[str, Any]:
    """Whatever a manager has noted down about anybody, wherever it does that; not what errors said of GPUs last."""
    noted = {name: noted for name, noted in vars(manager).items() if isinstance(noted, (dict, list, set)) and noted}
    noted.pop("_explained", None)
    return noted


WORKERS = ("first", "second", "pair", "third", "hasty", "latecomer", "sharer", "other sharer")


@contextmanager
def told(what: str) -> Iterator[None]:
    """A failure in one of very many runs says which it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


def number_of_steps(scenario: Scenario) -> int:
    before = scenario.loop.steps
    scenario.finish()
    return scenario.loop.steps - before


def last_steps(scenario: Scenario) -> dict[str, int]:
    """After which step each worker can be cancelled for the last time."""
    last: dict[str, int] = {}
    while scenario.loop.step():
        last |= {name: scenario.loop.steps for name, task in scenario.workers.items() if not task.done()}
    scenario.finish()
    return last


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whoever was cancelled has nothing to be warned of, and nothing that dies later complains."""
    yield
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.records]
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []


# ---- Every step, every task


def test_the_scenario_is_worth_cancelling() -> None:
    scenario = Scenario()
    steps = number_of_steps(scenario)
    assert sorted(scenario.workers) == sorted(WORKERS)
    assert steps > 50
    # Among them the moments that matter: granted at once, granted later, timed out or not, passed over, shared.
    outcomes = {name: task.result() for name, task in scenario.workers.items()}
    assert outcomes.pop("hasty") in ("served", "timed out")
    assert set(outcomes.values()) == {"served"}


def test_the_same_steps_happen_in_every_run() -> None:
    assert number_of_steps(Scenario()) == number_of_steps(Scenario())


@pytest.mark.parametrize("name", WORKERS)
def test_whoever_is_cancelled_at_whatever_step_leaves_everything_in_order(name: str) -> None:
    steps = number_of_steps(Scenario())
    cancelled = 0
    for step in range(1, steps + 2):
        with told(f"{name} cancelled after step {step}"):
            scenario = Scenario()
            scenario.loop.run_until(step)
            was_cancelled = scenario.cancel(name)
            cancelled += was_cancelled
            scenario.finish(cancelled=[name] if was_cancelled else [])
    assert cancelled > 5


def test_everybody_is_cancelled_at_once_at_whatever_step() -> None:
    for step in range(1, number_of_steps(Scenario()) + 2):
        with told(f"all cancelled after step {step}"):
            scenario = Scenario()
            scenario.loop.run_until(step)
            cancelled = [name for name in WORKERS if scenario.cancel(name)]
            scenario.finish(cancelled=cancelled)


def test_everybody_but_one_is_cancelled_at_whatever_step() -> None:
    for step in range(1, number_of_steps(Scenario()) + 2):
        scenario = Scenario()
        spared = WORKERS[step % len(WORKERS)]
        with told(f"all but {spared} cancelled after step {step}"):
            scenario.loop.run_until(step)
            scenario.finish(cancelled=[name for name in WORKERS if name != spared and scenario.cancel(name)])


def test_any_two_are_cancelled_at_any_two_steps() -> None:
    """The same one twice is among them: the second time finds it waiting, giving back, or gone."""
    moments = [(step, name) for name, last in last_steps(Queue()).items() for step in range(1, last + 1)]
    for (first_step, one), (second_step, other) in combinations_with_replacement(sorted(moments), 2):
        with told(f"{one} cancelled after step {first_step}, {other} after step {second_step}"):
            scenario = Queue(checks=False)  # thousands of runs: the books are looked at in the end
            scenario.loop.run_until(first_step)
            cancelled = [one] if scenario.cancel(one) else []
            scenario.loop.run_until(second_step)
            cancelled += [other] if scenario.cancel(other) else []
            scenario.finish(cancelled=cancelled)


def test_cancelled_at_whatever_step_while_everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Saying who waits for what must not be where it goes wrong."""
    caplog.set_level(logging.DEBUG, "gpu_worker_pool")
    for step in range(1, number_of_steps(Queue()) + 1):
        for name in ("pair", "first", "second", "hasty"):
            with told(f"{name} cancelled after step {step}"):
                scenario = Queue()
                scenario.loop.run_until(step)
                scenario.finish(cancelled=[name] if scenario.cancel(name) else [])


# ---- Guards: what people put around a request


async def with_timeout(request: Coroutine[Any, Any, GPUAssignment]) -> GPUAssignment:
    async with asyncio.timeout(0.5):
        return await request


async def with_two_timeouts(request: Coroutine[Any, Any, GPUAssignment]) -> GPUAssignment:
    async with asyncio.timeout(0.5), asyncio.timeout(0.5):
        return await request


async def with_wait_for(request: Coroutine[Any, Any, GPUAssignment]) -> GPUAssignment:
    return await asyncio.wait_for(request, 0.5)


GUARDS = [with_timeout, with_two_timeouts, with_wait_for]


class Guarded(Queue):
    """Workers whose requests end from outside in the very instant in which a GPU is released."""

    def __init__(self, guard: Callable[[Coroutine[Any, Any, GPUAssignment]], Awaitable[GPUAssignment]]) -> None:
        self.guard = guard
        super().__init__()

    def set_up(self) -> None:
        self.loop.call_at(0.0, self.read)
        self.employ("pair", count=2, holds=0.5)
        self.employ("guarded", holds=0.5)
        self.employ("guarded, too", holds=0.5)
        self.employ("first", holds=0.5)
        self.employ("hasty", timeout=0.5)

    async def ask(self, name: str, **requirements: Any) -> GPUAssignment:
        request = self.manager.request_gpu(**requirements)
        return await (self.guard(request) if name.startswith("guarded") else request)

    def finish(self, *, cancelled: Iterable[str] = ()) -> None:
        self.run_out()
        for name, task in self.workers.items():
            if name in cancelled:
                # Before 3.12 `wait_for` itself prefers a result that is there to a cancellation.
                is_excused = self.guard is with_wait_for and sys.version_info < (3, 12) and name.startswith("guarded")
                assert task.cancelled() or is_excused, f"{name} swallowed its cancellation: {task}"
            else:
                ends = {"served"} if name in ("pair", "first") else {"served", "timed out"}
                assert task.result() in ends, f"{name} was {task.result()}"
                assert self.served[name] == (task.result() == "served")
        self.finish_books()


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guarded_request_is_cancelled_at_whatever_step(guard: Any) -> None:
    steps = number_of_steps(Guarded(guard))
    for step in range(1, steps + 2):
        for name in ("pair", "guarded", "guarded, too", "first"):
            with told(f"{name} cancelled after step {step}"):
                scenario = Guarded(guard)
                scenario.loop.run_until(step)
                scenario.finish(cancelled=[name] if scenario.cancel(name) else [])


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("holds", [0.25, 0.5, 0.75])
def test_a_guard_that_ends_before_with_or_after_the_release(guard: Any, holds: float) -> None:
    loop = SteppedLoop()
    manager = WorkerPoolManager(clock=loop)
    outcomes: list[str] = []

    async def hold() -> None:
        assignment = await manager.request_gpu()
        await asyncio.sleep(holds)
        await manager.release_gpu(assignment)

    async def guarded() -> None:
        try:
            assignment = await guard(manager.request_gpu())
        except TimeoutError:
            outcomes.append("timed out")
        else:
            outcomes.append("served")
            await manager.release_gpu(assignment)

    async def scenario() -> None:
        await manager.start()
        manager.observe(gpus(1))
        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            group.create_task(guarded())
        assert manager.get_pool_status().available_gpus == 1
        await manager.stop()

    loop.run(scenario())
    assert len(outcomes) == 1
    assert outcomes == ["served"] or holds >= 0.5
    assert outcomes == ["timed out"] or holds <= 0.5
    assert (loop.pending, loop.complaints) == ([], [])


def test_a_group_that_fails_at_whatever_step_takes_its_workers_with_it() -> None:
    """One worker of a `TaskGroup` fails: the others are cancelled, waiting or holding, and all GPUs are there again."""

    class Group(Queue):
        def set_up(self) -> None:
            self.loop.call_at(0.0, self.read)
            self.fails_now = self.loop.create_future()
            self.group = self.loop.create_task(self.in_group())

        async def in_group(self) -> None:
            async with asyncio.TaskGroup() as group:
                for name, habits in {"one": {}, "two": {}, "three": {}, "pair": {"count": 2}, "four": {}}.items():
                    self.workers[name] = group.create_task(self.work(name, **habits))
                group.create_task(self.fail())

        async def fail(self) -> None:
            await self.fails_now
            raise ZeroDivisionError

    for step in range(1, 40):
        with told(f"failed after step {step}"):
            scenario = Group()
            scenario.loop.run_until(step)
            scenario.fails_now.set_result(None)
            scenario.run_out()
            with pytest.raises(ExceptionGroup) as failure:
                scenario.group.result()
            assert [type(error) for error in failure.value.exceptions] == [ZeroDivisionError]
            assert all(task.cancelled() or task.result() == "served" for task in scenario.workers.values())
            scenario.finish_books()


# ---- The moments that have a name


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


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_cancelled_before_its_first_step_it_never_asked(pool: WorkerPoolManager) -> None:
    task = asyncio.create_task(pool.request_gpu())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    status = pool.get_pool_status()
    assert (status.available_gpus, status.blocked_workers) == (1, 0)


async def test_cancelled_while_it_waits_it_leaves_the_queue(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiters = [asyncio.create_task(pool.request_gpu()) for _ in range(3)]
    await settle()
    waiters[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
    assert pool.get_pool_status().blocked_workers == 2
    await pool.release_gpu(held)
    await settle()
    assert [waiter.done() for waiter in waiters] == [True, True, False]
    await pool.release_gpu(await waiters[1])
    await pool.release_gpu(await waiters[2])


@pytest.mark.fault(3)
async def test_granted_and_then_cancelled_in_one_step_it_gives_back_and_the_next_one_gets_it(
    pool: WorkerPoolManager,
) -> None:
    held = await pool.request_gpu()
    waiter, following = asyncio.create_task(pool.request_gpu()), asyncio.create_task(pool.request_gpu())
    await settle()
    await pool.release_gpu(held)
    assert pool.get_pool_status().active_workers == 1, "the GPU goes straight on"
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (await following).gpu_id == held.gpu_id
    await pool.release_gpu(await following)
    assert pool.get_pool_status().available_gpus == 1


async def test_cancelled_and_then_granted_in_one_step_it_gives_back_and_the_next_one_gets_it(
    pool: WorkerPoolManager,
) -> None:
    """The task is cancelled but has not run, so that the pool still counts it among those who wait."""
    held = await pool.request_gpu()
    waiter, following = asyncio.create_task(pool.request_gpu()), asyncio.create_task(pool.request_gpu())
    await settle()
    waiter.cancel()
    await pool.release_gpu(held)
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (await following).gpu_id == held.gpu_id
    await pool.release_gpu(await following)
    assert pool.get_pool_status().available_gpus == 1


async def test_with_nobody_behind_it_the_gpu_of_a_cancelled_grant_is_simply_free(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu())
    await settle()
    await pool.release_gpu(held)
    waiter.cancel()
    await settle()
    assert waiter.cancelled()
    status = pool.get_pool_status()
    assert (status.available_gpus, status.active_workers, status.blocked_workers) == (1, 0, 0)


async def test_a_chain_of_cancelled_grants_ends_with_the_first_who_still_wants_it(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiters = [asyncio.create_task(pool.request_gpu()) for _ in range(50)]
    await settle()
    for waiter in waiters[:49]:
        waiter.cancel()
    await pool.release_gpu(held)
    assert (await waiters[49]).gpu_id == held.gpu_id
    assert all(waiter.cancelled() for waiter in waiters[:49])
    await pool.release_gpu(await waiters[49])


async def test_cancelled_twice_in_one_step(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu())
    await settle()
    await pool.release_gpu(held)
    waiter.cancel()
    waiter.cancel()
    await settle()
    assert waiter.cancelled()
    assert waiter.cancelling() == 2
    assert pool.get_pool_status().available_gpus == 1


async def test_a_cancellation_says_what_its_sender_said(pool: WorkerPoolManager) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu())
    await settle()
    waiter.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await waiter
    await pool.release_gpu(held)


async def test_cancelled_in_the_instant_of_its_deadline_it_is_cancelled(
    pool: WorkerPoolManager, clock: FakeClock
) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu(timeout=5.0))
    await settle()
    clock.advance(5.0)
    waiter.cancel()
    await settle()
    assert waiter.cancelled(), "a cancellation is never turned into a timeout"
    await pool.release_gpu(held)
    assert pool.get_pool_status().available_gpus == 1


async def test_cancelled_just_before_its_deadline_comes(pool: WorkerPoolManager, clock: FakeClock) -> None:
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu(timeout=5.0))
    await settle()
    waiter.cancel()
    clock.advance(5.0)
    await settle()
    assert waiter.cancelled()
    await pool.release_gpu(held)
    assert pool.get_pool_status().available_gpus == 1


@pytest.mark.fault(4)
async def test_released_in_the_instant_of_a_deadline_exactly_one_thing_happens(
    pool: WorkerPoolManager, clock: FakeClock
) -> None:
    """Fault 4. The deadline has come, but its timer has not been served yet when the GPU is released."""
    late = FakeClock()
    manager = WorkerPoolManager(clock=late)
    await manager.start()
    manager.observe(gpus(1))
    held = await manager.request_gpu()
    waiter = asyncio.create_task(manager.request_gpu(timeout=5.0))
    await settle()
    late._now = 5.0
    await manager.release_gpu(held)
    with pytest.raises(WorkerTimeoutError):
        await waiter
    assert manager.get_pool_status().available_gpus == 1
    await manager.stop()


async def test_granted_just_before_its_deadline_it_is_served(pool: WorkerPoolManager, clock: FakeClock) -> None:
    """Fault 4, the other way round: the deadline passes between the grant and the step in which it is heard of."""
    held = await pool.request_gpu()
    waiter = asyncio.create_task(pool.request_gpu(timeout=5.0))
    await settle()
    await pool.release_gpu(held)
    clock.advance(10.0)
    assignment = await waiter
    assert pool.get_pool_status().active_workers == 1
    await pool.release_gpu(assignment)


async def test_released_and_cancelled_in_one_step_of_the_holder(pool: WorkerPoolManager) -> None:
    """A holder releases and is cancelled before it runs on."""

    async def hold() -> None:
        assignment = await pool.request_gpu()
        await pool.release_gpu(assignment)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    holder = asyncio.create_task(hold())
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert pool.get_pool_status().available_gpus == 1


async def test_a_task_that_is_being_cancelled_may_still_ask_and_release(pool: WorkerPoolManager) -> None:
    """Cleaning up with a GPU, after a cancellation that was caught on purpose."""
    held = await pool.request_gpu()

    async def stubborn() -> GPUAssignment:
        try:
            return await pool.request_gpu()
        except asyncio.CancelledError:
            return await pool.request_gpu()

    task = asyncio.create_task(stubborn())
    await settle()
    task.cancel()
    await settle()
    assert pool.get_pool_status().blocked_workers == 1
    await pool.release_gpu(held)
    await pool.release_gpu(await task)


async def test_a_request_that_is_closed_instead_of_cancelled_leaks_nothing(pool: WorkerPoolManager) -> None:
    """As happens to a coroutine that somebody else than a task drives, and drops at its await."""
    held = await pool.request_gpu()
    request = pool.request_gpu()
    request.send(None)
    request.close()
    assert pool.get_pool_status().blocked_workers == 0
    await pool.release_gpu(held)
    status = pool.get_pool_status()
    assert (status.available_gpus, status.active_workers) == (1, 0)


async def test_an_assignment_that_is_lost_on_its_way_is_told_of(
    pool: WorkerPoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for a task that asks may be cancelled when that task has its answer, and nobody has it then."""
    held = await pool.request_gpu()

    async def ask_by_task() -> GPUAssignment:
        return await asyncio.create_task(pool.request_gpu())

    asker = asyncio.create_task(ask_by_task())
    await settle()
    await pool.release_gpu(held)
    await asyncio.sleep(0)
    asker.cancel()
    await settle()
    assert asker.cancelled()
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    caplog.clear()
    assert len(dropped) == 1


async def test_several_gpus_of_a_cancelled_grant_all_come_back(clock: FakeClock) -> None:
    manager = WorkerPoolManager(clock=clock)
    await manager.start()
    manager.observe(gpus(4))
    held = [await manager.request_gpu() for _ in range(4)]
    four = asyncio.create_task(manager.request_gpu(count=4))
    await settle()
    for assignment in held:
        await manager.release_gpu(assignment)
    assert manager.get_pool_status().available_gpus == 0
    four.cancel()
    await settle()
    assert four.cancelled()
    assert manager.get_pool_status().available_gpus == 4
    await manager.stop()


async def test_a_large_request_that_is_cancelled_lets_those_behind_it_pass(clock: FakeClock) -> None:
    """GPUs were kept for it; whoever stood back for it must not stand there for ever."""
    manager = WorkerPoolManager(settings=PoolSettings(max_bypass_seconds=1.0), clock=clock)
    await manager.start()
    manager.observe(gpus(2))
    held = [await manager.request_gpu() for _ in range(2)]
    pair = asyncio.create_task(manager.request_gpu(count=2))
    await settle()
    single = asyncio.create_task(manager.request_gpu())
    await clock.run(1.0)
    await manager.release_gpu(held[0])
    await settle()
    assert not single.done(), "it waits for the GPUs that are kept"
    pair.cancel()
    await settle()
    await manager.release_gpu(await single)
    await manager.release_gpu(held[1])
    await manager.stop()


async def test_cancelled_with_a_real_loop_and_real_time() -> None:
    """The same once more without anything of ours in between."""
    manager = WorkerPoolManager()
    outcomes: Mapping[str, int] = Counter()

    async def work(number: int) -> None:
        async with asyncio.timeout(0.001 * (number % 7)) if number % 3 else asyncio.timeout(None):
            assignment = await manager.request_gpu(count=1 + number % 2)
            try:
                await asyncio.sleep(0.0005 * (number % 5))
            finally:
                await manager.release_gpu(assignment)

    async with manager:
        manager.observe(gpus(2))
        results = await asyncio.gather(*(work(number) for number in range(60)), return_exceptions=True)
        outcomes = Counter(type(result).__name__ for result in results)
        assert manager.get_pool_status().available_gpus == 2
    assert set(outcomes) <= {"NoneType", "TimeoutError"}
    assert outcomes["NoneType"] >= 20
