"""Taking over what another process has decided: each case by the smallest history that shows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    Event,
    GPUsVanished,
    Granted,
    HolderGone,
    Lease,
    LeaseState,
    Outcome,
    PollAbandoned,
    Pool,
    PoolSettings,
    ProcessReading,
    ReadingWanted,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Ticked,
    Waiter,
    explain,
    save,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.core.replication import GPUHistory
from gpu_worker_pool.core.saved import lease_of, outcome_of, to_json, waiter_of
from gpu_worker_pool.errors import IllegalEventError, TooManyWaitingError
from gpu_worker_pool.testing import gpu, gpus, snapshot

TTL = 60.0


def request_for(name: str, **requirements: Any) -> Request:
    return Request(name, Requirements(**requirements), ttl_seconds=TTL)


class Process:
    """A pool that is told of by another one, as two processes on one ledger are."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.pool = Pool(settings or PoolSettings())

    def does(self, event: Event, at: float) -> list[Any]:
        return list(self.pool.apply(event, at))

    def follows(self, other: Process, at: float) -> list[Any]:
        """Take over everything as it is there, in the form it has in a ledger; then look at it."""
        theirs = other.pool
        news: list[Waiter | Lease | Outcome] = []
        for known in theirs.requests.values():
            row = copy.deepcopy(to_json(known))
            of = waiter_of if isinstance(known, Waiter) else lease_of if isinstance(known, Lease) else outcome_of
            news.append(of(row))
        news.sort(key=lambda known: known.ticket if isinstance(known, Waiter) else 0)
        histories = [
            GPUHistory(gpu.gpu_id, gpu.endpoint.endpoint_id, gpu.last_fence, gpu.freed_at, gpu.read_after)
            for gpu in theirs.allocator.gpus.values()
            if gpu.last_fence
        ]
        self.pool.replicate(news, histories)
        self.pool.fence, self.pool.ticket = theirs.fence, theirs.ticket
        self.pool.tally.update(theirs.tally)
        effects = self.does(Ticked(), at)
        check_invariants(self.pool)
        return effects

    def books(self) -> dict[str, Any]:
        saved = save(self.pool)
        return {name: saved[name] for name in ("leases", "waiters", "fence", "ticket")}


def two(settings: PoolSettings | None = None) -> tuple[Process, Process]:
    return Process(settings), Process(settings)


def test_everything_that_can_become_of_a_request_is_taken_over() -> None:
    one, other = two()
    one.does(snapshot(gpus(1), at=0.0), 0.0)
    steps: list[tuple[Event, float]] = [
        (Requested(request_for("first"), poll_id="a"), 1.0),
        (Requested(request_for("second"), poll_deadline=9.0), 2.0),
        (PollAbandoned("first", "a"), 3.0),
        (Requested(request_for("first")), 4.0),
        (Renewed("lease-1"), 5.0),
        (Requested(request_for("second"), poll_deadline=12.0, may_reserve=False), 6.0),
        (HolderGone("lease-1", is_proven=True), 7.0),
        (snapshot(gpus(1), at=8.0), 8.0),
        (Cancelled("second"), 9.0),
    ]
    for event, at in steps:
        one.does(event, at)
        other.follows(one, at)
        assert other.books() == one.books(), event
    assert [type(known).__name__ for known in other.pool.requests.values()] == ["Outcome", "Outcome"]


def test_whoever_takes_over_a_waiter_serves_it_if_it_can() -> None:
    one, other = two()
    other.does(snapshot(gpus(1), at=0.0), 0.0)
    one.does(Requested(request_for("waits"), poll_deadline=30.0), 1.0)
    (grant, *_) = other.follows(one, 2.0)
    assert isinstance(grant, Granted)
    assert (grant.lease.request.request_id, grant.lease.state) == ("waits", LeaseState.HELD)


def test_those_who_came_first_are_first_wherever_they_came_in() -> None:
    one, other = two()
    one.does(Requested(request_for("low")), 1.0)
    one.does(Requested(request_for("high", priority=1)), 2.0)
    one.does(Requested(request_for("low too")), 3.0)
    other.follows(one, 3.0)
    assert [waiter.request.request_id for waiter in other.pool.queue.in_order()] == ["high", "low", "low too"]
    effects = other.does(snapshot(gpus(2), at=4.0), 4.0)
    granted = [effect.lease.request.request_id for effect in effects if isinstance(effect, Granted)]
    assert granted == ["high", "low"]


def test_what_was_released_elsewhere_is_read_again_here_although_nobody_waited_then() -> None:
    one, other = two()
    for process in (one, other):
        process.does(snapshot(gpus(1), at=0.0), 0.0)
    one.does(Requested(request_for("holds")), 1.0)
    other.follows(one, 1.0)
    one.does(Released("lease-1"), 2.0)
    other.follows(one, 2.0)
    assert ReadingWanted("") in other.does(Requested(request_for("late")), 2.05)


def test_a_reading_that_began_after_the_release_counts_also_if_the_release_is_learnt_later() -> None:
    """And what it shows is what was there before the next grant: an outsider who came meanwhile is no newcomer."""
    one, other = two()
    for process in (one, other):
        process.does(snapshot(gpus(1), at=0.0), 0.0)
    one.does(Requested(request_for("holds")), 1.0)
    other.follows(one, 1.0)
    one.does(Released("lease-1"), 2.0)
    outsider = ProcessReading(7, 1.0)
    other.does(snapshot([gpu(0, memory_used_mb=5_000.0, processes=(outsider,))], at=3.0), 3.0)
    other.follows(one, 3.1)
    (grant, *_) = other.does(Requested(request_for("next")), 3.2)
    assert isinstance(grant, Granted)
    assert grant.lease.held[0].memory_used_mb == 5_000.0
    assert grant.lease.held[0].processes == {outsider.identity}


def test_a_renewal_elsewhere_changes_nothing_of_what_was_there_before_a_second_holder() -> None:
    one, other = two()
    for process in (one, other):
        process.does(snapshot(gpus(1), at=0.0), 0.0)
    share = {"memory_mb": 10_000.0, "share": True}
    one.does(Requested(request_for("first", **share)), 1.0)
    other.follows(one, 1.0)
    theirs = ProcessReading(7, 1.0)
    other.does(snapshot([gpu(0, memory_used_mb=8_000.0, processes=(theirs,))], at=2.0), 2.0)
    one.does(Renewed("lease-1"), 3.0)
    other.follows(one, 3.0)
    (grant, *_) = other.does(Requested(request_for("second", **share)), 3.1)
    assert isinstance(grant, Granted)
    assert grant.lease.held[0].processes == {theirs.identity}, "the first one's process would seem to be the second's"


def test_a_gpu_seen_for_the_first_time_is_known_by_name_in_the_grant() -> None:
    """A process that has just begun may know a reading from before the last lease ended."""
    one, other = two()
    one.does(snapshot(gpus(1), at=0.0), 0.0)
    one.does(Requested(request_for("offered"), poll_id="a"), 1.0)
    one.does(PollAbandoned("offered", "a"), 1.0)
    one.does(Cancelled("offered"), 2.0)
    other.follows(one, 2.0)
    other.does(snapshot(gpus(1), at=1.5), 2.1)
    (grant, *_) = other.does(Requested(request_for("next")), 2.2)
    assert isinstance(grant, Granted)
    assert (grant.lease.held[0].uuid, grant.lease.held[0].name) == ("GPU-host-0", "NVIDIA H100 80GB HBM3")


def test_an_id_that_was_forgotten_and_used_anew_elsewhere() -> None:
    one, other = two(PoolSettings(remember_seconds=10.0))
    one.does(Requested(request_for("same", count=2)), 1.0)
    one.does(Cancelled("same"), 1.0)
    other.follows(one, 1.0)
    one.does(Requested(request_for("same")), 20.0)
    other.follows(one, 20.0)
    assert isinstance(other.pool.requests["same"], Waiter)
    assert list(other.pool.outcomes) == []


def test_impossible_requests_are_rejected_by_who_took_them_in_only() -> None:
    """Fault 34: what one process cannot see may be there for the other."""
    sees_all, sees_few = two()
    sees_all.does(Requested(request_for("both", count=2)), 1.0)
    sees_few.follows(sees_all, 1.0)
    assert sees_few.does(snapshot(gpus(1), at=2.0), 2.0) == []
    sees_few.does(GPUsVanished(("0",)), 2.1)
    assert sees_few.does(snapshot(gpus(1), at=2.15), 2.15) == []
    assert "both" in sees_few.books()["waiters"][0]["request"]["request_id"]
    (rejected,) = sees_few.does(Requested(request_for("own", count=2)), 2.2)
    assert isinstance(rejected, Ended)
    assert rejected.state is RequestState.REJECTED
    # Asked of this one itself, it answers for itself.
    (rejected,) = sees_few.does(Requested(request_for("both", count=2)), 2.3)
    assert isinstance(rejected, Ended)
    assert rejected.state is RequestState.REJECTED
    (rejected,) = sees_all.does(snapshot(gpus(1), at=3.0), 3.0)
    assert isinstance(rejected, Ended), "who took it in has seen all there is"


# ---- keeping


KEEPS = PoolSettings(max_bypass_seconds=1.0)


def kept_by(process: Process) -> tuple[str, ...]:
    return () if process.pool.reserved_for is None else process.pool.reserved_for.reserved


def test_what_is_kept_elsewhere_is_kept_here() -> None:
    one, other = two(KEEPS)
    for process in (one, other):
        process.does(snapshot(gpus(2), at=0.0), 0.0)
    one.does(Requested(request_for("holds")), 0.1)
    one.does(Requested(request_for("both", count=2)), 0.2)
    one.does(Requested(request_for("beside it", only=("0",))), 0.3)
    one.does(snapshot(gpus(2), at=2.0), 2.0)
    assert kept_by(one) == ("1", "0")
    other.follows(one, 2.1)
    assert kept_by(other) == ("1", "0")
    assert other.does(Requested(request_for("small")), 2.2) == []
    one.follows(other, 2.2)
    one.does(Cancelled("both"), 2.3)
    other.follows(one, 2.3)
    assert other.books() == one.books()
    assert [lease.worker for lease in other.pool.leases] == ["holds", "small"]


@pytest.mark.parametrize("seen", [(), (0,)], ids=["nothing", "one of two"])
def test_who_cannot_see_what_is_kept_leaves_it_as_it_is(seen: tuple[int, ...]) -> None:
    one, other = two(KEEPS)
    one.does(snapshot(gpus(2), at=0.0), 0.0)
    one.does(Requested(request_for("holds")), 0.1)
    one.does(Requested(request_for("both", count=2)), 0.2)
    one.does(Requested(request_for("beside it", only=("0",))), 0.3)
    one.does(snapshot(gpus(2), at=2.0), 2.0)
    other.follows(one, 2.1)
    if seen:
        other.does(snapshot([gpu(index) for index in seen], at=2.2), 2.2)
    other.does(Requested(request_for("small")), 2.3)
    assert kept_by(other) == kept_by(one) == ("1", "0")
    other.does(Cancelled("both"), 2.4)
    check_invariants(other.pool)
    assert "1" not in kept_by(other)


def test_older_readings_undo_nothing_that_newer_ones_decided() -> None:
    one, other = two(KEEPS)
    other.does(snapshot(gpus(2, memory_used_mb=79_000.0), at=1.0), 1.0)  # an outsider's, who has left since
    one.does(snapshot(gpus(2), at=0.0), 0.0)
    one.does(Requested(request_for("holds")), 0.1)
    one.does(Requested(request_for("both", count=2)), 0.2)
    one.does(Requested(request_for("beside it", only=("0",))), 0.3)
    one.does(snapshot(gpus(2), at=2.0), 2.0)
    other.follows(one, 2.1)
    assert kept_by(other) == kept_by(one) == ("1", "0")
    # Newer ones do: the outsider is back.
    other.does(snapshot([gpu(0), gpu(1, memory_used_mb=79_000.0)], at=3.0), 3.0)
    assert kept_by(other) == ("0",), "for the next one"
    one.follows(other, 3.1)
    one.does(Ticked(), 3.2)
    assert kept_by(one) == ("0",)
    assert one.books() == other.books()


def test_the_same_decision_is_not_written_again() -> None:
    written: list[str] = []

    class Noting(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            written.append(key)
            super().__setitem__(key, value)

    pool = Pool(KEEPS, Noting())
    pool.apply(snapshot(gpus(2), at=0.0), 0.0)
    pool.apply(Requested(request_for("holds")), 0.1)
    pool.apply(Requested(request_for("both", count=2)), 0.2)
    pool.apply(Requested(request_for("beside it", only=("0",))), 0.3)
    pool.apply(snapshot(gpus(2), at=2.0), 2.0)
    assert pool.reserved_for is not None
    written.clear()
    for at in (3.0, 4.0):
        pool.replicate([])
        pool.apply(snapshot(gpus(2), at=at), at)
    assert written == []


def test_one_that_waits_in_several_places_has_gpus_kept_in_one_only() -> None:
    pool = Pool(KEEPS)
    pool.apply(snapshot(gpus(2), at=0.0), 0.0)
    pool.apply(Requested(request_for("holds")), 0.1)
    pool.apply(Requested(request_for("both", count=2), may_reserve=False), 0.2)
    pool.apply(Requested(request_for("beside it", only=("0",)), may_reserve=False), 0.3)
    pool.apply(snapshot(gpus(2), at=2.0), 2.0)
    assert pool.reserved_for is None
    pool.apply(Requested(request_for("both", count=2), may_reserve=True), 2.1)
    pool.apply(snapshot(gpus(2), at=2.2), 2.2)
    assert pool.reserved_for is not None
    small = pool.apply(Requested(request_for("small")), 2.3)
    assert not any(isinstance(effect, Granted) for effect in small)
    effects = pool.apply(Requested(request_for("both", count=2), may_reserve=False), 2.4)
    assert [effect.lease.request.request_id for effect in effects if isinstance(effect, Granted)] == ["small"]
    check_invariants(pool)


# ---- what else is new in the core for ledgers


def test_gpus_of_the_past_are_not_among_the_reasons() -> None:
    """The ledger remembers when each was last granted; that says nothing about what there is."""
    pool = Pool()
    pool.replicate([], [GPUHistory("MIG-long-gone", "", 3, 1.0, 1.0)])
    pool.apply(snapshot(gpus(1), at=2.0), 2.0)
    pool.apply(Requested(request_for("holds")), 2.1)
    pool.apply(Requested(request_for("waits")), 2.2)
    told = explain(pool, "waits", 2.3)
    assert told is not None
    assert [gpu.gpu_id for gpu in told.gpus] == ["0"]
    assert "of 1 GPU" in told.summary


def test_an_account_that_has_enough_who_wait_may_still_ask_for_what_it_asked_for_before() -> None:
    pool = Pool(PoolSettings(most_waiting_of_an_account=1, remember_seconds=5.0))

    def asked(name: str, at: float) -> tuple[Any, ...]:
        return pool.apply(Requested(Request(name, account="ours", ttl_seconds=TTL)), at)

    asked("old", 0.0)
    pool.apply(Cancelled("old"), 0.0)
    asked("one", 1.0)
    asked("one", 2.0)
    with pytest.raises(TooManyWaitingError):
        asked("two", 3.0)
    assert asked("old", 4.0) == (Ended("old", RequestState.CANCELLED),)
    with pytest.raises(TooManyWaitingError):  # forgotten by now: it would be a new one
        asked("old", 6.0)
    pool.apply(Requested(Request("theirs", account="others")), 6.0)
    pool.apply(Requested(Request("nobody's")), 6.0)
    check_invariants(pool)


def test_several_mig_devices_are_never_given_to_one() -> None:
    pool = Pool()
    devices = [gpu(n, is_mig_device=True, utilization_percent=None, reports_utilization=False) for n in range(2)]
    pool.apply(snapshot(devices, at=0.0), 0.0)
    (rejected,) = pool.apply(Requested(request_for("both", count=2)), 0.1)
    assert isinstance(rejected, Ended)
    assert "a MIG device, of which a process can use only one" in rejected.reasons[0]
    (grant,) = (effect for effect in pool.apply(Requested(request_for("one")), 0.2) if isinstance(effect, Granted))
    assert len(grant.lease.gpu_ids) == 1


def test_only_what_was_told_to_nobody_else_is_offered_again() -> None:
    pool = Pool(PoolSettings(offer_ttl_seconds=5.0))
    pool.apply(snapshot(gpus(1), at=0.0), 0.0)
    pool.apply(Requested(request_for("one"), poll_id="first"), 1.0)

    def state() -> LeaseState | None:
        lease = pool.leases.lookup("lease-1")
        return None if lease is None else lease.state

    pool.apply(PollAbandoned("one", "second"), 1.1)
    pool.apply(PollAbandoned("one", ""), 1.1)
    assert state() is LeaseState.HELD
    pool.apply(PollAbandoned("one", "first"), 1.2)
    assert state() is LeaseState.OFFERED
    with pytest.raises(IllegalEventError, match="not claimed yet"):
        pool.apply(Renewed("lease-1"), 1.3)
    pool.apply(Requested(request_for("one"), poll_id="second"), 2.0)
    assert state() is LeaseState.HELD
    pool.apply(PollAbandoned("one", "second"), 2.1)
    pool.apply(PollAbandoned("nobody", "second"), 2.1)
    assert state() is LeaseState.OFFERED
    pool.apply(Ticked(), 2.1 + 5.0)
    assert state() is None
    check_invariants(pool)


def test_asking_again_for_what_one_holds_is_a_renewal() -> None:
    pool = Pool()
    pool.apply(snapshot(gpus(1), at=0.0), 0.0)
    pool.apply(Requested(request_for("one")), 1.0)
    effects = pool.apply(Requested(request_for("one")), 41.0)
    grants = [effect.lease for effect in effects if isinstance(effect, Granted)]
    assert [(lease.lease_id, lease.expires_at) for lease in grants] == [("lease-1", 101.0)]
    pool.apply(Ticked(), 102.9)
    assert pool.leases.lookup("lease-1") is not None
    check_invariants(pool)
