"""Requests inside a lease, each rule by the smallest history that shows it. Effects are compared whole."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Effect,
    Ended,
    GPUsVanished,
    Granted,
    HolderGone,
    LeaseEnded,
    LeaseState,
    PollAbandoned,
    PoolSettings,
    ProcessReading,
    QuarantineEnded,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Ticked,
    explain,
    explain_requirements,
    restore,
    save,
)
from gpu_worker_pool.errors import LeaseEndedError
from gpu_worker_pool.testing import gpu, gpus
from tests.unit.core.test_rules import TTL, Story, granted

BUSY: dict[str, Any] = {"memory_used_mb": 70_000.0, "utilization_percent": 99.0, "processes": (ProcessReading(77),)}


@pytest.fixture
def story() -> Story:
    """Four GPUs, of which "outer" holds two."""
    told = Story(PoolSettings())
    told.reads(*gpus(4))
    told.asks("outer", Requirements(count=2), ttl=TTL)
    assert told.gpus_of("outer") == ("0", "1")
    return told


def asks_inside(
    story: Story, around: str, name: str, requirements: Requirements = ANY_GPU, *, poll_deadline: float | None = None
) -> tuple[Effect, ...]:
    within = story.lease(around).lease_id
    request = Request(name, requirements, ttl_seconds=TTL, within=within)
    return story.happens(Requested(request, poll_deadline=poll_deadline))


def ended(effects: tuple[Effect, ...]) -> list[tuple[str, LeaseState, str]]:
    return [(e.lease.request.request_id, e.state, e.reason) for e in effects if isinstance(e, LeaseEnded)]


def test_they_divide_what_the_lease_has_and_wait_for_each_other(story: Story) -> None:
    assert granted(asks_inside(story, "outer", "a")) == [("a", ("0",))]
    assert granted(asks_inside(story, "outer", "b")) == [("b", ("1",))]
    assert granted(asks_inside(story, "outer", "c")) == []
    assert story.waits() == ["c"]
    assert granted(story.releases("b")) == [("c", ("1",))]  # at once: no reading is needed


def test_the_lease_stands_for_them_outside(story: Story) -> None:
    asks_inside(story, "outer", "a")
    assert granted(story.asks("outside", Requirements(count=2))) == [("outside", ("2", "3"))]
    assert granted(story.asks("next")) == []
    story.releases("a")
    assert story.waits() == ["next"]  # what was given back inside is still the outer lease's


def test_the_load_inside_does_not_count_but_health_does(story: Story) -> None:
    story.reads(gpu(0, **BUSY, fault="GPU is lost"), gpu(1, **BUSY), gpu(2), gpu(3))
    idle = Requirements(policy="idle", memory_threshold=10.0, utilization_threshold=0.0)
    assert granted(asks_inside(story, "outer", "a", idle)) == [("a", ("1",))]
    assert granted(asks_inside(story, "outer", "b", idle)) == []
    assert granted(story.reads(*gpus(4))) == [("b", ("0",))]


def test_nothing_is_granted_inside_by_old_readings(story: Story) -> None:
    story.now += 20.0
    assert granted(asks_inside(story, "outer", "a")) == []
    assert granted(story.reads(*gpus(4))) == [("a", ("0",))]


@pytest.mark.parametrize(
    ("requirements", "reason"),
    [
        (Requirements(count=3), "lease-1, inside which this runs, has 2 GPUs; 3 were requested"),
        (
            Requirements(only=("3",)),
            "lease-1, inside which this runs, has 2 GPUs; none of them could ever serve it (GPU 0, 1: not among 3)",
        ),
        (
            Requirements(count=2, exclude=("1",)),
            "lease-1, inside which this runs, has 2 GPUs; 1 of them could ever serve it (GPU 1: excluded)",
        ),
        (
            Requirements(memory_mb=90_000),
            (
                "lease-1, inside which this runs, has 2 GPUs; none of them could ever serve it "
                "(GPU 0, 1: has 80000 MB in all, 90000 MB are needed)"
            ),
        ),
    ],
)
def test_what_the_lease_can_never_give_is_refused_at_once(
    story: Story, requirements: Requirements, reason: str
) -> None:
    assert asks_inside(story, "outer", "a", requirements) == (Ended("a", RequestState.REJECTED, (reason,)),)


def test_sharing_inside_a_lease(story: Story) -> None:
    half = Requirements(memory_mb=40_000, share=True, only=("0",))
    for name in ("a", "b"):
        assert granted(asks_inside(story, "outer", name, half)) == [(name, ("0",))]
    assert granted(asks_inside(story, "outer", "c", half)) == []
    assert granted(asks_inside(story, "outer", "alone")) == [("alone", ("1",))]
    assert granted(story.releases("a")) == [("c", ("0",))]


def test_inside_a_share_there_is_only_that_share() -> None:
    story = Story(PoolSettings())
    story.reads(gpu(0))
    story.asks("share", Requirements(memory_mb=20_000, share=True), ttl=TTL)
    story.asks("other", Requirements(memory_mb=20_000, share=True), ttl=TTL)
    story.reads(gpu(0, memory_used_mb=30_000.0))
    reason = (
        "lease-1, inside which this runs, has one GPU; none of them could ever serve it"
        " (GPU 0: lease-1 has 20000 MB of it, 30000 MB are needed)"
    )
    assert asks_inside(story, "share", "more", Requirements(memory_mb=30_000)) == (
        Ended("more", RequestState.REJECTED, (reason,)),
    )
    part = Requirements(memory_mb=12_000, share=True)
    assert granted(asks_inside(story, "share", "a", part)) == [("a", ("0",))]
    assert granted(asks_inside(story, "share", "b", part)) == []
    # One that shares nothing has the whole share, and what is inside it has no more.
    assert granted(asks_inside(story, "other", "whole")) == [("whole", ("0",))]
    assert granted(asks_inside(story, "whole", "deep", part)) == [("deep", ("0",))]
    assert granted(asks_inside(story, "whole", "deeper", part)) == []


def test_inside_an_inner_lease_there_is_only_its_part(story: Story) -> None:
    asks_inside(story, "outer", "a")
    assert granted(asks_inside(story, "a", "deep")) == [("deep", ("0",))]
    assert granted(asks_inside(story, "a", "deep too")) == []
    assert granted(asks_inside(story, "outer", "b")) == [("b", ("1",))]
    assert granted(story.releases("b")) == []
    assert granted(story.releases("deep")) == [("deep too", ("0",))]


@pytest.mark.parametrize("gives_up", [False, True])
def test_first_come_first_served_with_a_bound_on_being_overtaken(story: Story, gives_up: bool) -> None:
    asks_inside(story, "outer", "a")
    asks_inside(story, "outer", "both", Requirements(count=2))
    assert granted(asks_inside(story, "outer", "quick")) == [("quick", ("1",))]  # it may pass for a while
    story.happens(Renewed("lease-1"), after=50.0)
    story.happens(Renewed(story.lease("a").lease_id))
    story.happens(Renewed(story.lease("quick").lease_id))
    story.now += 11.0
    story.reads(*gpus(4))
    assert granted(story.releases("quick")) == []
    assert granted(asks_inside(story, "outer", "late")) == []
    told = explain(story.pool, "late", story.now)
    assert told is not None
    assert [str(each) for each in told.gpus] == [
        "GPU 0: held by a for 61 s; reserved for both, which has waited longer",
        "GPU 1: reserved for both, which has waited longer",
    ]
    if gives_up:
        assert granted(story.happens(Cancelled("both"))) == [("late", ("1",))]
    else:
        assert granted(story.releases("a")) == [("both", ("0", "1"))]


def test_one_that_waits_for_a_broken_gpu_holds_nobody_back(story: Story) -> None:
    story.reads(gpu(0, fault="GPU is lost"), *gpus(4)[1:])
    asks_inside(story, "outer", "both", Requirements(count=2))
    story.now += 61.0
    story.happens(Renewed("lease-1"))
    story.reads(gpu(0, fault="GPU is lost"), *gpus(4)[1:])
    assert granted(asks_inside(story, "outer", "late")) == [("late", ("1",))]


def test_those_inside_and_those_outside_do_not_overtake_each_other(story: Story) -> None:
    story.asks("all", Requirements(count=4))
    story.now += 61.0
    story.happens(Renewed("lease-1"))
    story.reads(*gpus(4))
    assert granted(story.asks("later")) == []  # all GPUs are reserved for "all" by now
    assert story.pool.reserved_for is not None
    assert granted(asks_inside(story, "outer", "a")) == [("a", ("0",))]
    asks_inside(story, "outer", "b", Requirements(count=2))
    story.now += 61.0
    story.happens(Renewed("lease-1"))
    story.reads(*gpus(4))
    assert story.pool.reserved_for.request.request_id == "all"


def test_an_inner_lease_that_expires_just_ends(story: Story) -> None:
    asks_inside(story, "outer", "a", Requirements(count=2))
    asks_inside(story, "outer", "b")
    story.happens(Renewed("lease-1"), after=50.0)
    story.reads(*gpus(4))
    effects = story.happens(Ticked(), after=TTL - 50.0 + 2.0)
    assert ended(effects) == [("a", LeaseState.RECLAIMED, "its lease was not renewed in time")]
    assert granted(effects) == [("b", ("0",))]
    with pytest.raises(LeaseEndedError, match="not renewed in time"):
        story.happens(Released("lease-2"))


@pytest.mark.parametrize("is_proven", [True, False])
def test_an_inner_holder_that_is_gone_gives_its_part_back_at_once(story: Story, is_proven: bool) -> None:
    asks_inside(story, "outer", "a", Requirements(count=2))
    asks_inside(story, "outer", "b")
    story.reads(gpu(0, **BUSY), gpu(1, **BUSY), gpu(2), gpu(3))
    effects = story.happens(HolderGone(story.lease("a").lease_id, is_proven))
    assert ended(effects) == [("a", LeaseState.RECLAIMED, "its holder is gone")]
    assert granted(effects) == [("b", ("0",))]


def test_a_lease_released_around_held_ones_is_not_handed_on_before_they_end(story: Story) -> None:
    story.asks("next", Requirements(count=3))
    asks_inside(story, "outer", "a")
    asks_inside(story, "outer", "b", Requirements(count=2))
    effects = story.releases("outer")
    why = "it was released while leases inside it are held"
    assert ended(effects) == [("outer", LeaseState.QUARANTINED, why)]
    assert [e for e in effects if isinstance(e, Ended)] == [
        Ended("b", RequestState.REJECTED, ("lease-1, inside which this runs, has ended",))
    ]
    story.happens(Released("lease-1"))  # twice is harmless
    assert granted(story.reads(*gpus(4))) == []  # however empty it looks
    assert asks_inside(story, "outer", "late") == (
        Ended("late", RequestState.REJECTED, ("lease-1, inside which this runs, has ended",)),
    )
    story.happens(Renewed(story.lease("a").lease_id), after=50.0)  # it goes on
    assert granted(story.reads(*gpus(4))) == []
    assert granted(story.releases("a")) == []  # the reading is from before
    assert story.happens(Released("lease-1")) == ()
    story.reads(gpu(0, **BUSY), *gpus(4)[1:])
    assert story.lease("outer").state is LeaseState.QUARANTINED  # what ran inside is still seen
    effects = story.reads(*gpus(4))
    assert ended(effects) == [("outer", LeaseState.RECLAIMED, "readings show nothing of its holder any more")]
    assert granted(effects) == [("next", ("2", "3", "0"))]


@pytest.mark.parametrize("end", ["expired", "holder gone"])
def test_a_lease_lost_around_held_ones_stays_in_quarantine_until_they_end(story: Story, end: str) -> None:
    asks_inside(story, "outer", "a")
    if end == "expired":
        story.happens(Renewed(story.lease("a").lease_id), after=50.0)
        story.happens(Ticked(), after=TTL - 50.0 + 2.0)
    else:
        story.happens(HolderGone("lease-1", is_proven=True))
    assert story.lease("outer").state is LeaseState.QUARANTINED
    story.reads(*gpus(4), after=6.0)
    assert story.lease("outer").state is LeaseState.QUARANTINED
    assert story.lease("a").state is LeaseState.HELD
    story.releases("a")
    story.reads(*gpus(4))
    assert not list(story.pool.leases)


def test_an_administrator_ends_it_with_all_that_is_inside(story: Story) -> None:
    asks_inside(story, "outer", "a")
    asks_inside(story, "a", "deep")
    story.releases("outer")
    effects = story.happens(QuarantineEnded("lease-1"))
    assert ended(effects) == [
        ("deep", LeaseState.LOST, "lease-2, inside which this runs, has ended"),
        ("a", LeaseState.LOST, "lease-1, inside which this runs, has ended"),
        ("outer", LeaseState.RECLAIMED, "an administrator ended its quarantine"),
    ]


def test_an_inner_lease_released_around_others_ends_with_the_last_of_them(story: Story) -> None:
    asks_inside(story, "outer", "a")
    asks_inside(story, "a", "deep")
    asks_inside(story, "outer", "b", Requirements(count=2))
    story.releases("a")
    assert story.lease("a").state is LeaseState.QUARANTINED
    assert story.waits() == ["b"]
    effects = story.releases("deep")
    assert ended(effects) == [("a", LeaseState.RECLAIMED, "nothing inside it is held any more")]
    assert granted(effects) == [("b", ("0", "1"))]


def test_all_its_gpus_are_gone(story: Story) -> None:
    asks_inside(story, "outer", "a")
    effects = story.happens(GPUsVanished(("0", "1")))
    assert ended(effects) == [
        ("a", LeaseState.LOST, "GPU 0 is gone"),
        ("outer", LeaseState.LOST, "GPU 0, 1 is gone"),
    ]


def test_one_that_nobody_has_claimed_ends_with_the_lease_around_it(story: Story) -> None:
    asks_inside(story, "outer", "a", Requirements(count=2))
    asks_inside(story, "outer", "b", poll_deadline=story.now + 1.0)
    story.now += 2.0
    assert granted(story.releases("a")) == [("b", ("0",))]
    assert story.lease("b").state is LeaseState.OFFERED
    effects = story.releases("outer")
    assert ended(effects) == [("b", LeaseState.LOST, "lease-1, inside which this runs, has ended")]
    assert not list(story.pool.leases)


def test_cancelling_a_grant_around_others_is_like_releasing_it(story: Story) -> None:
    asks_inside(story, "outer", "a")
    story.happens(Cancelled("outer"))
    assert story.lease("outer").state is LeaseState.QUARANTINED


def test_a_lease_with_something_inside_has_reached_its_client() -> None:
    story = Story(PoolSettings())
    story.reads(*gpus(2))
    story.happens(Requested(Request("outer", ttl_seconds=TTL), poll_deadline=1.0, poll_id="p"))
    asks_inside(story, "outer", "a")
    assert story.happens(PollAbandoned("outer", "p")) == ()
    assert story.lease("outer").state is LeaseState.HELD


def test_nobody_gets_inside_a_lease_that_is_not_there(story: Story) -> None:
    request = Request("a", within="lease-99")
    reason = "lease-99, inside which this runs, has ended"
    assert story.happens(Requested(request)) == (Ended("a", RequestState.REJECTED, (reason,)),)


def test_the_explanation_is_about_the_lease_around_it(story: Story) -> None:
    story.asks("outside", Requirements(count=4))
    asks_inside(story, "outer", "a", Requirements(count=2))
    asks_inside(story, "outer", "b")
    asks_inside(story, "outer", "c")
    told = explain(story.pool, "c", story.now + 1.0)
    assert told is not None
    assert told.summary == "one GPU, inside lease-1: number 2 in line; of 2 GPUs: 2 held"
    assert [str(each) for each in told.gpus] == ["GPU 0: held by a for 1 s", "GPU 1: held by a for 1 s"]
    outside = explain(story.pool, "outside", story.now)
    assert outside is not None
    assert outside.summary == "4 GPUs: next in line; 2 of 4 free; of 4 GPUs: 2 held"
    assert explain_requirements(story.pool, ANY_GPU, story.now, within="lease-1").position == 3
    assert explain_requirements(story.pool, ANY_GPU, story.now).position == 2


def test_a_grant_is_told_whole_and_saved(story: Story) -> None:
    story.reads(gpu(0, **BUSY), gpu(1, **BUSY), gpu(2), gpu(3))
    effects = asks_inside(story, "outer", "a", Requirements(only=("0",)))
    lease = story.lease("a")
    assert effects == (Granted(lease),)
    assert (lease.within, lease.held) == ("lease-1", story.lease("outer").held[:1])
    asks_inside(story, "outer", "both", Requirements(count=2))
    saved = save(story.pool)
    again = restore(saved)
    assert save(again) == saved
    assert [each.lease_id for each in again.leases.inside("lease-1")] == [lease.lease_id]
    (waiter,) = again.queue.inside("lease-1")
    assert (waiter.request.request_id, waiter.may_reserve) == ("both", False)
    # Without readings nothing is granted; who can never be served is told all the same.
    reason = "lease-1, inside which this runs, has ended"
    again.apply(Released(lease.lease_id), story.now)
    effects = again.apply(Released("lease-1"), story.now)
    assert [e for e in effects if isinstance(e, Ended)] == [Ended("both", RequestState.REJECTED, (reason,))]


def test_nothing_outside_is_kept_for_one_that_waits_inside(story: Story) -> None:
    story.asks("other", Requirements(only=("2",)), ttl=TTL)
    asks_inside(story, "outer", "a", Requirements(count=2))
    asks_inside(story, "outer", "b")
    story.releases("other", after=1.0)
    told = explain_requirements(story.pool, Requirements(only=("2",)), story.now)
    assert str(told.gpus[2]) == "GPU 2: not read since its last lease ended"
