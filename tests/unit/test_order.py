"""Who is served when, as properties: arrival order for equal wishes, and the bound on overtaking for large ones.

Everything runs through a manager with assignments within one process, in a stepped loop and its own time. The order in
which GPUs were granted is that of the fences: a worker may hear of its grant later than one that was granted after it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core import PoolSettings
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.testing import gpu, gpus
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager
from tests.unit.test_cancellation import SteppedLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core import Reading
    from gpu_worker_pool.models import GPUAssignment

MAX_BYPASS = 60.0

#: The examples are small and the loop is fast; many are worth more than long ones.
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Worker:
    """One request, and what became of it."""

    number: int
    requirements: dict[str, Any]
    asked_at: float = -1.0
    granted_at: float | None = None
    released_at: float | None = None
    assignment: GPUAssignment | None = None
    was_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    may_end: asyncio.Future[None] | None = None

    @property
    def waits(self) -> bool:
        return self.asked_at >= 0 and self.granted_at is None and not self.was_cancelled

    @property
    def holds(self) -> bool:
        return self.granted_at is not None and self.released_at is None

    @property
    def fence(self) -> int:
        assert self.assignment is not None
        assert self.assignment.fence is not None
        return self.assignment.fence


@dataclass
class Company:
    """A pool and everybody who ever asked it, numbered in the order of their asking."""

    readings: Callable[[], list[Reading]]
    loop: SteppedLoop = field(default_factory=SteppedLoop)
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = WorkerPoolManager(
            settings=PoolSettings(max_bypass_seconds=MAX_BYPASS), worker_timeout=None, clock=self.loop
        )
        self.loop.run(self.manager.start())
        self.read()

    def read(self) -> None:
        async def observe() -> None:
            self.manager.observe(self.readings())

        self.loop.run(observe())
        self.settle()

    def settle(self) -> None:
        """Let everything run that can without time passing."""
        while self.loop.is_anything_ready:
            self.loop.step()
        assert self.manager._pool is not None
        check_invariants(self.manager._pool)

    def let_pass(self, seconds: float) -> None:
        """Time, in which readings go on coming."""
        end = self.loop.time() + seconds
        while end - self.loop.time() > 1e-9:
            self.loop.run(asyncio.sleep(min(5.0, end - self.loop.time())))
            self.read()

    def ask(self, *, holds: float | None = None, **requirements: Any) -> Worker:
        """One more; it holds what it gets for so long, or until it is told to release it."""
        worker = Worker(len(self.workers), requirements)
        self.workers.append(worker)
        worker.task = self.loop.create_task(self._work(worker, holds))
        return worker

    async def _work(self, worker: Worker, holds: float | None) -> None:
        worker.asked_at = self.loop.time()
        worker.assignment = await self.manager.request_gpu(**worker.requirements)
        worker.granted_at = self.loop.time()
        worker.may_end = self.loop.create_future()
        if holds is not None:
            self.loop.call_later(holds, self.release, worker)
        await worker.may_end
        await self.manager.release_gpu(worker.assignment)
        worker.released_at = self.loop.time()

    def release(self, worker: Worker) -> None:
        if worker.may_end is not None and not worker.may_end.done():
            worker.may_end.set_result(None)

    def cancel(self, worker: Worker) -> None:
        """Before it has heard of a grant; a holder is released instead."""
        assert worker.task is not None
        if worker.granted_at is None:
            worker.was_cancelled = True
            worker.task.cancel()

    def close(self) -> None:
        """Everybody releases until nobody is left; whoever was not cancelled has been served then."""
        for _ in range(len(self.workers) + 1):
            for worker in self.workers:
                self.release(worker)
            self.settle()
        assert all(worker.was_cancelled or worker.released_at is not None for worker in self.workers)
        for worker in self.workers:
            assert worker.task is not None
            assert worker.task.cancelled() == worker.was_cancelled
        self.loop.run(self.manager.stop())
        assert self.loop.complaints == []

    @property
    def waiting(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.waits]

    @property
    def holding(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.holds]


# ---- Plain requests: strictly in order of arrival

#: What happens next: somebody asks, or the n-th of those who hold or wait releases or is cancelled. "Now" lets what was
#: begun run to its end; without it the next thing happens in the same step of the loop.
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "release", "cancel", "cancel first", "busy", "idle", "now", "now", "time"]),
        st.integers(0, 7),
    ),
    min_size=20,
    max_size=60,
)


@many
@given(number=st.integers(1, 3), moves=MOVES)
def test_plain_requests_are_granted_strictly_in_order_of_arrival(number: int, moves: list[tuple[str, int]]) -> None:
    busy: set[int] = set()

    def readings() -> list[Reading]:
        return [gpu(index, utilization_percent=100.0 if index in busy else 0.0) for index in range(number)]

    company = Company(readings)
    for move, which in moves:
        if move == "ask":
            company.ask()
        elif move == "release" and company.holding:
            company.release(company.holding[which % len(company.holding)])
        elif move == "cancel" and company.waiting:
            company.cancel(company.waiting[which % len(company.waiting)])
        elif move == "cancel first" and company.waiting:
            company.cancel(company.waiting[0])
        elif move in ("busy", "idle"):
            (busy.add if move == "busy" else busy.discard)(which % number)
            company.read()
        elif move == "time":
            company.let_pass(float(which))
        elif move == "now":
            company.settle()
    company.settle()
    busy.clear()
    company.read()
    company.close()
    served = sorted((worker for worker in company.workers if not worker.was_cancelled), key=lambda worker: worker.fence)
    assert [worker.number for worker in served] == sorted(worker.number for worker in served)
    event(f"{len(served) // 5 * 5} or more served")


@many
@given(
    requests=st.lists(st.tuples(st.integers(-1, 1), st.booleans()), min_size=1, max_size=20),
    number=st.integers(1, 2),
)
def test_within_a_priority_plain_requests_are_granted_in_order_of_arrival(
    requests: list[tuple[int, bool]], number: int
) -> None:
    company = Company(lambda: list(gpus(number)))
    for _ in range(number):
        company.ask()
    company.settle()
    for priority, is_cancelled in requests:
        worker = company.ask(priority=priority)
        company.settle()
        if is_cancelled:
            company.cancel(worker)
    company.settle()
    company.close()
    served = sorted((worker for worker in company.workers if not worker.was_cancelled), key=lambda worker: worker.fence)
    queued = [worker for worker in served if worker.number >= number]
    assert queued == sorted(queued, key=lambda worker: (-worker.requirements["priority"], worker.number))


# ---- Large requests: passed by smaller ones for `max_bypass` seconds, and not longer

#: How long each of the small ones holds its GPU, over and over.
HOLDS = st.lists(st.integers(1, 50), min_size=6, max_size=16, unique=True)


def run_stream(company: Company, holds: list[int], *, count: int, begins_at: int) -> Worker:
    """A large request in a stream of small ones that never ends: two of them wait at every second."""
    large: Worker | None = None
    small = 0
    while large is None or large.waits:
        second = company.loop.time()
        while len([worker for worker in company.waiting if worker is not large]) < 2:
            company.ask(holds=float(holds[small % len(holds)]))
            company.settle()
            small += 1
        if second == begins_at:
            large = company.ask(count=count)
            company.settle()
        company.let_pass(1.0)
        assert second < 250, f"it starves: {company.manager._pool}"
    return large


# Not shrunk: a stream that starves somebody takes long, and is small enough to read.
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(holds=HOLDS, number=st.integers(2, 5), begins_at=st.integers(1, 40), data=st.data())
def test_a_large_request_is_overtaken_for_max_bypass_seconds_and_no_longer(
    holds: list[int], number: int, begins_at: int, data: st.DataObject
) -> None:
    """The bound, exactly: from `max_bypass` seconds after it came, no later request of its priority is granted a GPU
    that it could use. So of those who hold GPUs at that moment only as many have to release as it wants GPUs, however
    many come after it; and until then they pass it.
    """
    count = data.draw(st.integers(2, number), label="count")
    company = Company(lambda: list(gpus(number)))
    large = run_stream(company, holds, count=count, begins_at=begins_at)
    company.let_pass(60.0)
    bound = large.asked_at + MAX_BYPASS
    event(f"served {'before' if granted_at(large) < bound else 'after'} the bound")

    others = [worker for worker in company.workers if worker.granted_at is not None and worker is not large]
    passed = [worker for worker in others if worker.number > large.number and worker.fence < large.fence]
    assert all(granted_at(worker) < bound for worker in passed)
    event(f"{len(passed) // 10 * 10} or more passed it")
    if granted_at(large) > bound:
        holding = [worker for worker in others if granted_at(worker) < bound <= released_at(worker)]
        assert granted_at(large) == sorted(map(released_at, holding))[count - 1]
    company.close()


def granted_at(worker: Worker) -> float:
    assert worker.granted_at is not None
    return worker.granted_at


def released_at(worker: Worker) -> float:
    return math.inf if worker.released_at is None else worker.released_at


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(small=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6)), max_size=30), number=st.integers(2, 4))
def test_until_the_bound_a_large_request_costs_the_others_nothing(small: list[tuple[int, int]], number: int) -> None:
    """GPUs are not left idle for it: while it waits and its time has not come, whoever can be served is served."""
    company = Company(lambda: list(gpus(number)))
    blocker = company.ask()
    company.settle()
    large = company.ask(count=number)
    company.settle()
    for holds, pause in small:
        if company.loop.time() + pause >= large.asked_at + MAX_BYPASS:
            break
        worker = company.ask(holds=float(holds))
        company.settle()
        assert worker.holds or len(company.holding) == number, "a GPU stands idle, and somebody waits"
        company.let_pass(float(pause))
    assert large.waits
    assert blocker.holds
    company.close()


def test_the_bound_to_the_second() -> None:
    """One GPU of two is held for ever so long; the other is given to whoever comes, for 60 s."""
    company = Company(lambda: list(gpus(2)))
    blocker = company.ask()
    company.settle()
    large = company.ask(count=2)
    company.settle()
    served_at = []
    for _ in range(100):
        worker = company.ask(holds=0.5)
        company.settle()
        if worker.granted_at is not None:
            served_at.append(worker.granted_at)
        company.let_pass(1.0)
    assert served_at == [float(second) for second in range(60)]
    assert large.waits
    company.release(blocker)
    company.settle()
    assert large.holds
    company.close()


def test_one_that_came_before_is_not_one_that_overtakes() -> None:
    """Nobody who stood in front of the large request loses his place to it, however long it has waited."""
    company = Company(lambda: list(gpus(2)))
    holders = [company.ask(), company.ask()]
    company.settle()
    before, large, after = company.ask(), company.ask(count=2), company.ask()
    company.settle()
    company.let_pass(MAX_BYPASS + 10.0)
    company.release(holders[0])
    company.settle()
    assert (before.holds, large.waits, after.waits) == (True, True, True)
    company.release(holders[1])
    company.settle()
    assert (large.waits, after.waits) == (True, True)
    company.release(before)
    company.settle()
    assert (large.holds, after.waits) == (True, True)
    company.close()


def test_higher_priority_overtakes_also_after_the_bound() -> None:
    company = Company(lambda: list(gpus(2)))
    blocker = company.ask()
    company.settle()
    large = company.ask(count=2)
    company.settle()
    company.let_pass(MAX_BYPASS + 1.0)
    equal, higher = company.ask(), company.ask(priority=1)
    company.settle()
    assert (equal.waits, higher.holds, large.waits) == (True, True, True)
    company.release(blocker)
    company.release(higher)
    company.settle()
    assert large.holds
    company.close()


def test_gpus_are_kept_for_the_first_large_request_only() -> None:
    company = Company(lambda: list(gpus(4)))
    blockers = [company.ask(), company.ask(), company.ask()]
    company.settle()
    first, second = company.ask(count=2), company.ask(count=2)
    company.settle()
    company.let_pass(MAX_BYPASS + 1.0)
    company.release(blockers[0])
    company.settle()
    assert (first.holds, second.waits) == (True, True)
    # Two are held, one by a blocker each; those are what the second one waits for now, and nobody passes it any more.
    company.release(blockers[1])
    company.settle()
    single = company.ask()
    company.settle()
    assert (second.waits, single.waits) == (True, True)
    company.release(blockers[2])
    company.settle()
    assert (second.holds, single.waits) == (True, True)
    company.close()


# ---- Outsiders: a GPU that no lease holds may stay full for ever


def filled(number: int, outsiders: set[int]) -> list[Reading]:
    """As many GPUs; on some of them a notebook that nobody of this pool has started."""
    return [gpu(index, memory_used_mb=79_000.0 if index in outsiders else 0.0) for index in range(number)]


def test_an_outsider_does_not_freeze_the_pool() -> None:
    """Rule 4, the last clause: the large request lacks a GPU that no holder will give back, so nothing is kept."""
    outsiders = {2}
    company = Company(lambda: filled(3, outsiders))
    large = company.ask(count=3)
    company.settle()
    company.let_pass(MAX_BYPASS + 40.0)
    for _ in range(20):
        worker = company.ask(holds=1.0)
        company.settle()
        assert worker.holds, "it could have a GPU that the large request cannot use yet"
        company.let_pass(2.0)
    assert large.waits
    # The outsider leaves: from now on GPUs are kept, for it has waited long enough.
    blocker = company.ask()
    company.settle()
    outsiders.clear()
    company.read()
    late = company.ask()
    company.settle()
    assert (large.waits, late.waits) == (True, True)
    company.release(blocker)
    company.settle()
    assert (large.holds, late.waits) == (True, True)
    company.close()


def test_an_outsider_who_comes_while_gpus_are_kept_does_not_freeze_the_pool() -> None:
    """Kept for a minute already, and then the GPU it lacks is filled by somebody else when its holder leaves."""
    outsiders: set[int] = set()
    company = Company(lambda: filled(2, outsiders))
    blocker = company.ask()
    company.settle()
    large = company.ask(count=2)
    company.settle()
    company.let_pass(MAX_BYPASS + 1.0)
    single = company.ask()
    company.settle()
    assert single.waits, "kept"
    assert blocker.assignment is not None
    outsiders.add(int(blocker.assignment.gpu_id))
    company.read()
    company.release(blocker)
    company.settle()
    company.let_pass(30.0)
    assert large.waits
    assert single.holds, "nobody may wait beside a GPU that the large request cannot use"
    outsiders.clear()
    company.read()
    company.release(single)
    company.settle()
    assert large.holds
    company.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    number=st.integers(2, 4),
    waits=st.integers(0, 200),
    small=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=25),
    data=st.data(),
)
def test_whatever_outsiders_fill_no_gpu_idles_that_is_of_no_use_to_the_large_request(
    number: int, waits: int, small: list[tuple[int, int]], data: st.DataObject
) -> None:
    """It wants all of them, one or more are full for ever: everybody else goes on as if it were not there."""
    outsiders = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=number - 1), label="outsiders")
    company = Company(lambda: filled(number, outsiders))
    large = company.ask(count=number)
    company.settle()
    company.let_pass(float(waits))
    for holds, pause in small:
        worker = company.ask(holds=float(holds))
        company.settle()
        assert worker.holds or len(company.holding) == number - len(outsiders)
        company.let_pass(float(pause))
    assert large.waits
    outsiders.clear()
    company.let_pass(1.0)
    company.close()
