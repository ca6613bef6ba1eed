"""The small structures the core stands on, each against the simplest thing that does the same."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core import (
    HeldGPU,
    Lease,
    LeaseState,
    Outcome,
    Quarantine,
    Request,
    Requirements,
    Waiter,
    WorkerAssignmentTracker,
    WorkerQueue,
)
from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState
from gpu_worker_pool.core.moves import LEASE_MOVES, REQUEST_MOVES, IllegalMoveError
from gpu_worker_pool.core.ranked import RankedSet
from gpu_worker_pool.core.saved import MOMENTS, STORED_NAMES
from gpu_worker_pool.core.timers import Timers

names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, st.one_of(st.none(), st.integers(0, 20)))))
def test_a_ranked_set_knows_its_best_member_whatever_came_before(changes: list[tuple[str, int | None]]) -> None:
    ranked: RankedSet[str] = RankedSet()
    simple: dict[str, tuple[int, str]] = {}
    for name, rank in changes:
        if rank is None:
            ranked.discard(name)
            simple.pop(name, None)
        else:
            ranked.put((rank, name))
            simple[name] = (rank, name)
        in_order = sorted(simple, key=simple.__getitem__)
        assert ranked.best() == (in_order[0] if in_order else None)
        assert ranked.first(lambda name: name != "a") == next((name for name in in_order if name != "a"), None)
        assert (len(ranked), "a" in ranked) == (len(simple), "a" in simple)


def test_a_ranked_set_does_not_grow_by_being_changed() -> None:
    ranked: RankedSet[str] = RankedSet()
    for rank in range(10_000):
        ranked.put((rank, "a"))
    assert len(ranked._heap) < 100


@given(
    st.lists(
        st.tuples(st.sampled_from(["waiter", "lease", "reading"]), names, st.one_of(st.none(), st.integers(0, 9)))
    ),
    st.lists(st.integers(0, 9)),
)
def test_timers_fall_due_in_order_and_only_as_last_set(changes: list, moments: list[int]) -> None:
    timers = Timers()
    simple: dict[tuple[str, str], int] = {}
    for kind, name, at in changes:
        if at is None:
            timers.clear(kind, name)
            simple.pop((kind, name), None)
        else:
            timers.set(kind, name, at)
            simple[kind, name] = at
        assert timers.get(kind, name) == simple.get((kind, name))
        assert timers.not_before <= min(simple.values(), default=math.inf)
    for now in sorted(moments):
        assert timers.next_at() == min(simple.values(), default=math.inf)
        due = []
        while (timer := timers.pop_due(now)) is not None:
            due.append(timer)
        expected = sorted((at, *key) for key, at in simple.items() if at <= now)
        assert due == [(kind, name) for _, kind, name in expected]
        for timer in due:
            del simple[timer]
        assert len(timers) == len(simple)


def test_timers_do_not_grow_by_being_set_and_cleared() -> None:
    timers = Timers()
    for at in range(10_000):
        timers.set("waiter", str(at), float(at))
        timers.clear("waiter", str(at))
    assert len(timers._heap) < 100


def waiter(name: str, ticket: int, requirements: Requirements | None = None) -> Waiter:
    return Waiter(Request(name, requirements or Requirements()), ticket, enqueued_at=0.0)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 2), st.booleans()), max_size=12))
def test_the_queue_is_in_order_of_priority_then_arrival(arrivals: list[tuple[int, int, bool]]) -> None:
    queue = WorkerQueue()
    expected = []
    for ticket, (priority, count, leaves) in enumerate(arrivals):
        one = waiter(str(ticket), ticket, Requirements(count=count, priority=priority))
        queue.enqueue(one)
        if leaves:
            queue.remove(one)
        else:
            expected.append(one)
    expected.sort(key=lambda one: (-one.request.requirements.priority, one.ticket))
    assert queue.in_order() == expected
    assert queue.size() == len(queue) == len(expected)
    heads = [head for _, head in queue.heads()]
    assert heads == sorted(heads, key=lambda one: one.order)
    assert [queue.position(one.order) for one in expected] == list(range(1, len(expected) + 1))
    assert [queue.dequeue() for _ in expected] == expected
    assert queue.dequeue() is None
    assert not queue


def test_clearing_the_queue_gives_back_who_waited() -> None:
    queue = WorkerQueue()
    first, urgent = waiter("first", 1), waiter("urgent", 2, Requirements(priority=1))
    queue.enqueue(first)
    queue.enqueue(urgent)
    assert queue.clear() == [urgent, first]
    assert queue.size() == 0
    assert queue.request_classes() == []


def test_the_tracker_knows_who_holds_what() -> None:
    gpu = GPUResourceState("0", EndpointState("", 0))
    tracker = WorkerAssignmentTracker({"0": gpu})
    lease = Lease("lease-1", Request("a"), "", ("0",), (HeldGPU("0"),), 1, LeaseState.HELD, 0.0, 0.0, None)
    tracker.assign(lease)
    assert (tracker.lookup("lease-1"), gpu.leases, list(tracker)) == (lease, {"lease-1": lease}, [lease])
    longer = lease.extended(5.0)
    tracker.assign(longer)
    assert tracker.lookup("lease-1") is longer
    assert gpu.leases["lease-1"] is longer
    assert tracker.gpus_of(longer) == [gpu]
    tracker.release(longer)
    assert (tracker.lookup("lease-1"), gpu.leases, len(tracker)) == (None, {}, 0)


def test_a_lease_moves_only_along_its_table() -> None:
    for origin, targets in LEASE_MOVES.items():
        lease = Lease("lease-1", Request("a"), "", ("0",), (HeldGPU("0"),), 1, origin, 0.0, 0.0, None)
        for target in LeaseState:
            if target in targets:
                assert lease.moved(target).state is target
            else:
                with pytest.raises(IllegalMoveError, match=f"from {origin} to {target}"):
                    lease.moved(target)
                assert lease.state is origin


def test_every_state_of_a_table_can_be_reached_and_left_or_is_an_end() -> None:
    for moves, starts in ((REQUEST_MOVES, {"waiting"}), (LEASE_MOVES, {"held", "offered"})):
        targets = {target for targets in moves.values() for target in targets}
        assert targets | starts == set(moves)


def test_every_moment_moves_when_the_clock_begins_anew() -> None:
    """A field that is a moment and is not in `MOMENTS` would stay in the old clock."""
    records = (Lease, Waiter, Quarantine, Outcome)
    fields = {field.name for record in records for field in dataclasses.fields(record)}
    moments = {name for name in fields if name.endswith("_at") or name in ("at", "since", "until", "deadline")}
    moments |= {"poll_deadline"}
    assert {STORED_NAMES.get(name, name) for name in moments} <= MOMENTS
    assert {name for name in fields if STORED_NAMES.get(name, name) in MOMENTS} == moments
