"""The twelve rules, in their order, each by the smallest history that shows it. Effects are compared whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Effect,
    Ended,
    Event,
    GPUsVanished,
    Granted,
    HolderGone,
    Lease,
    LeaseEnded,
    LeaseState,
    ObstacleKind,
    PollAbandoned,
    PoolSettings,
    ProcessReading,
    QuarantineEnded,
    Reading,
    ReadingWanted,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Resumed,
    Stopped,
    Ticked,
    Unreachable,
    Waiter,
    WakeAt,
    explain,
    explain_requirements,
    restore,
    save,
)
from gpu_worker_pool.errors import (
    IllegalEventError,
    LeaseEndedError,
    NotYourLeaseError,
    RequestMismatchError,
    UnknownLeaseError,
)
from gpu_worker_pool.testing import History, gpu, gpus, replay, snapshot

STRANGER = ProcessReading(4711, 1.0, name="notebook")
TTL = 60.0


class Story(History):
    """A pool to tell a short history to, second by second."""

    now = 0.0

    def happens(self, event: Event, *, after: float = 0.0) -> tuple[Effect, ...]:
        self.now += after
        return self.apply(event, self.now)

    def reads(self, *readings: Reading, after: float = 0.01, endpoint_id: str = "") -> tuple[Effect, ...]:
        self.now += after
        return self.happens(snapshot(readings, at=self.now, endpoint_id=endpoint_id))

    def asks(
        self,
        name: str,
        requirements: Requirements = ANY_GPU,
        *,
        ttl: float | None = None,
        deadline: float | None = None,
        poll_deadline: float | None = None,
        owner: str = "",
    ) -> tuple[Effect, ...]:
        request = Request(name, requirements, owner=owner, ttl_seconds=ttl)
        return self.happens(Requested(request, deadline, poll_deadline))

    def lease(self, name: str) -> Lease:
        lease = self.pool.requests[name]
        assert isinstance(lease, Lease), f"{name} has no lease"
        return lease

    def gpus_of(self, name: str) -> tuple[str, ...]:
        return self.lease(name).gpu_ids

    def releases(self, name: str, *, after: float = 0.0) -> tuple[Effect, ...]:
        return self.happens(Released(self.lease(name).lease_id), after=after)

    def waits(self) -> list[str]:
        return [waiter.request.request_id for waiter in self.pool.queue.in_order()]


@pytest.fixture
def story() -> Story:
    return Story(PoolSettings())


def granted(effects: tuple[Effect, ...]) -> list[tuple[str, tuple[str, ...]]]:
    return [(e.lease.request.request_id, e.lease.gpu_ids) for e in effects if isinstance(e, Granted)]


# ---- Rule 1: eligible


@pytest.mark.parametrize(
    ("reading", "kind"),
    [
        ({"memory_used_mb": 64_000.0}, ObstacleKind.MEMORY_IN_USE),  # exactly 80 %: available means strictly below
        ({"utilization_percent": 90.0}, ObstacleKind.UTILIZED),
        ({"memory_used_mb": None}, ObstacleKind.MEMORY_UNKNOWN),
        ({"utilization_percent": None}, ObstacleKind.UTILIZATION_UNKNOWN),
        ({"fault": "GPU is lost"}, ObstacleKind.UNHEALTHY),
        ({"is_leased_elsewhere": True}, ObstacleKind.LEASED_ELSEWHERE),
        (
            {"utilization_percent": None, "reports_utilization": False, "processes": (STRANGER,)},
            ObstacleKind.FOREIGN_PROCESS,
        ),
        (
            {"utilization_percent": None, "reports_utilization": False, "processes": None},
            ObstacleKind.PROCESSES_UNKNOWN,
        ),
        ({"memory_usage_percent": float("nan")}, ObstacleKind.UNHEALTHY),
        ({"memory_usage_percent": 250.0}, ObstacleKind.UNHEALTHY),
        ({"memory_used_mb": 90_000.0}, ObstacleKind.UNHEALTHY),
        ({"utilization_percent": -5.0}, ObstacleKind.UNHEALTHY),
    ],
)
def test_rule_1_what_a_reading_shows_can_forbid_a_grant(
    story: Story, reading: dict[str, Any], kind: ObstacleKind
) -> None:
    story.reads(gpu(0, **reading))
    assert story.asks("a") == ()
    told = explain(story.pool, "a", story.now)
    assert told is not None
    assert kind in [obstacle.kind for obstacle in told.gpus[0].obstacles]
    assert granted(story.reads(gpu(0))) == [("a", ("0",))]


@pytest.mark.parametrize(
    "reading",
    [
        {"memory_used_mb": 63_999.0},
        {"utilization_percent": 89.9},
        {"utilization_percent": None, "reports_utilization": False},
        {"processes": (STRANGER,)},
        {"processes": None},
        {"memory_total_mb": None, "memory_used_mb": None, "memory_usage_percent": 10.0},
    ],
)
def test_rule_1_what_is_below_the_thresholds_is_granted(story: Story, reading: dict[str, Any]) -> None:
    story.reads(gpu(0, **reading))
    assert granted(story.asks("a")) == [("a", ("0",))]


def test_rule_1_nothing_is_granted_on_old_readings(story: Story) -> None:
    story.reads(gpu(0))
    story.now += 15.0
    assert granted(story.asks("a")) == [("a", ("0",))]
    story.releases("a")
    story.now += 0.1
    story.asks("b")
    assert story.waits() == ["b"]
    assert granted(story.reads(gpu(0))) == [("b", ("0",))]


def test_rule_1_a_slow_poll_allows_older_readings() -> None:
    story = Story(PoolSettings(poll_seconds=20.0))
    story.reads(gpu(0))
    story.now += 60.0
    assert granted(story.asks("a")) == [("a", ("0",))]


def test_rule_1_a_lease_needs_a_reading_begun_after_the_last_one_ended(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    story.now += 1.0
    story.asks("b", ttl=TTL)
    story.releases("a")
    assert story.waits() == ["b"], "the reading is from before the release"
    assert granted(story.happens(snapshot([gpu(0)], at=story.now))) == [], "begun in the very moment of the release"
    assert granted(story.reads(gpu(0))) == [("b", ("0",))]


def test_rule_1_idle_means_no_foreign_process(story: Story) -> None:
    idle = Requirements(policy="idle")
    unseen = gpu(1, processes=None, memory_used_mb=20_000.0)
    story.reads(gpu(0, processes=(STRANGER,)), unseen)
    story.asks("a", idle)
    told = explain(story.pool, "a", story.now)
    assert told is not None
    assert [[o.kind for o in found.obstacles] for found in told.gpus] == [
        [ObstacleKind.FOREIGN_PROCESS],
        [ObstacleKind.UNEXPLAINED_MEMORY],
    ]
    assert granted(story.reads(gpu(0), unseen)) == [("a", ("0",))]


def test_rule_1_thresholds_count_for_sharing_requests_only_where_they_name_them(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=68_000.0, utilization_percent=99.0))
    story.asks("plain")
    story.asks("named", Requirements(memory_mb=1000, share=True, memory_threshold=80.0))
    assert granted(story.asks("sharing", Requirements(memory_mb=1000, share=True))) == [("sharing", ("0",))]
    assert story.waits() == ["plain", "named"]


def test_rule_1_shared_memory_counts_what_is_used_and_what_was_declared(story: Story) -> None:
    def share(mb: float) -> Requirements:
        return Requirements(memory_mb=mb, share=True)

    story.reads(gpu(0, memory_used_mb=10_000.0))
    assert granted(story.asks("a", share(30_000))) == [("a", ("0",))]
    # 10,000 were used before, 30,000 are declared: 40,000 are left, though the reading still shows 70,000 free.
    assert granted(story.asks("b", share(40_001))) == []
    assert granted(story.asks("c", share(40_000))) == [("c", ("0",))]
    story.releases("c")
    # Now more is used than was declared: only what the reading shows is left.
    story.reads(gpu(0, memory_used_mb=75_000.0))
    assert granted(story.asks("d", share(5_001))) == []
    assert granted(story.asks("e", share(5_000))) == [("e", ("0",))]


def test_rule_1_who_is_handed_a_gpu_before_it_was_read_again_does_not_inherit_the_last_one_s_load(story: Story) -> None:
    loaded = gpu(0, memory_used_mb=40_000.0)
    share = Requirements(memory_mb=30_000, share=True)
    story.reads(gpu(0))
    story.asks("holder", Requirements(memory_mb=40_000))
    story.reads(loaded)
    story.asks("first", share)
    story.asks("second", share)
    assert granted(story.releases("holder")) == [("first", ("0",)), ("second", ("0",))]
    assert [held.memory_used_mb for held in story.lease("first").held] == [0.0]
    assert granted(story.asks("third", Requirements(memory_mb=20_000, share=True))) == [("third", ("0",))]


def test_rule_1_memory_that_must_be_free_now(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=50_000.0))
    assert granted(story.asks("a", Requirements(min_free_memory_mb=30_001))) == []
    assert granted(story.asks("b", Requirements(min_free_memory_mb=30_000))) == [("b", ("0",))]


# ---- Rule 2: one worker a GPU


def test_rule_2_one_worker_a_gpu_although_it_still_looks_idle(story: Story) -> None:
    story.reads(*gpus(2))
    assert granted(story.asks("a")) == [("a", ("0",))]
    assert granted(story.asks("b")) == [("b", ("1",))]
    assert story.asks("c") == ()
    assert granted(story.reads(*gpus(2))) == []


@pytest.mark.parametrize("newcomer", [ANY_GPU, Requirements(memory_mb=1000), Requirements(memory_mb=1000, share=True)])
def test_rule_2_who_does_not_share_is_alone(story: Story, newcomer: Requirements) -> None:
    story.reads(gpu(0))
    story.asks("a", Requirements(memory_mb=1000))
    assert granted(story.asks("b", newcomer)) == []


# ---- Rule 3: ranking


def test_rule_3_the_least_used_then_the_one_granted_longest_ago_then_by_id(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=8_000.0), gpu(1, utilization_percent=9.0), gpu(2), gpu(3))
    order = [story.asks(name) and story.gpus_of(name)[0] for name in "abcd"]
    assert order == ["2", "3", "1", "0"]
    for name in "abcd":
        story.releases(name)
    assert [story.asks(name) and story.gpus_of(name)[0] for name in "ef"] == ["2", "3"]
    story.releases("e")
    story.releases("f")
    story.reads(*gpus(4))
    assert [story.asks(name) and story.gpus_of(name)[0] for name in "ghij"] == ["1", "0", "2", "3"]


def test_rule_3_ids_are_ordered_as_numbers(story: Story) -> None:
    story.reads(*gpus(11))
    order = [story.asks(f"r{n}") and story.gpus_of(f"r{n}")[0] for n in range(11)]
    assert order == [str(n) for n in range(11)]


def test_rule_3_what_cannot_report_its_utilization_comes_last(story: Story) -> None:
    story.reads(gpu(0, utilization_percent=None, reports_utilization=False), gpu(1, utilization_percent=80.0))
    assert granted(story.asks("a")) == [("a", ("1",))]


def test_rule_3_several_gpus_come_from_one_endpoint(story: Story) -> None:
    story.reads(*gpus(2, endpoint_id="x"), endpoint_id="x")
    story.reads(*gpus(3, endpoint_id="y"), endpoint_id="y")
    assert granted(story.asks("a", Requirements(count=3))) == [("a", ("y:0", "y:1", "y:2"))]
    assert granted(story.asks("b", Requirements(count=3))) == []
    assert granted(story.asks("c", Requirements(count=2))) == [("c", ("x:0", "x:1"))]


# ---- Rule 4: order


def test_rule_4_first_come_first_served(story: Story) -> None:
    story.reads(gpu(0))
    for name in "abcd":
        story.asks(name)
    assert [granted(story.releases(name)) for name in "abc"] == [
        [("b", ("0",))],
        [("c", ("0",))],
        [("d", ("0",))],
    ]


def test_rule_4_priority_goes_first(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("low", Requirements(priority=-1))
    story.asks("plain")
    story.asks("high", Requirements(priority=5))
    assert story.waits() == ["high", "plain", "low"]
    assert granted(story.releases("holder")) == [("high", ("0",))]


def test_rule_4_a_newcomer_does_not_overtake_one_that_the_same_gpu_would_serve(story: Story) -> None:
    story.reads(gpu(0), gpu(1))
    story.asks("a")
    story.asks("b")
    story.asks("picky", Requirements(only=("1",)))
    story.asks("newcomer")
    assert granted(story.releases("b")) == [("picky", ("1",))]
    assert granted(story.releases("a")) == [("newcomer", ("0",))]


def test_rule_4_several_gpus_all_or_none(story: Story) -> None:
    story.reads(*gpus(3))
    story.asks("a")
    story.asks("b")
    assert story.asks("pair", Requirements(count=2)) == ()
    assert granted(story.releases("a")) == [("pair", ("2", "0"))]


def test_rule_4_a_large_request_is_passed_only_until_max_bypass(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("a")
    story.asks("pair", Requirements(count=2))
    assert granted(story.asks("small")) == [("small", ("1",))], "until then the pool does not stand idle"
    story.now += 59.9
    story.reads(*gpus(2))
    story.releases("small")
    assert granted(story.asks("late small")) == [("late small", ("1",))]
    story.now += 0.2
    story.releases("late small")
    assert granted(story.asks("too late")) == [], "GPU 1 is kept for the pair now"
    told = explain(story.pool, "too late", story.now)
    assert told is not None
    assert [obstacle.kind for obstacle in told.gpus[1].obstacles] == [ObstacleKind.RESERVED]
    assert granted(story.releases("a")) == [("pair", ("0", "1"))]


def test_rule_4_after_the_one_with_reserved_gpus_comes_the_next_like_it(story: Story) -> None:
    story.reads(*gpus(3))
    story.asks("triple", Requirements(count=3))
    story.asks("one")
    story.asks("other")
    story.now += 61.0
    story.reads(*gpus(3))
    story.asks("pair", Requirements(count=2))
    assert story.pool.reserved_for is not None
    assert story.pool.reserved_for.request.request_id == "one"
    assert [name for name, _ in granted(story.releases("triple"))] == ["one", "other"]


def test_rule_4_gpus_are_kept_for_the_first_such_waiter_only(story: Story) -> None:
    story.reads(*gpus(4))
    for name in "abc":
        story.asks(name)
    story.asks("pair", Requirements(count=2))
    story.asks("triple", Requirements(count=3))
    story.now += 61.0
    story.reads(*gpus(4))
    assert story.pool.reserved_for is not None
    assert story.pool.reserved_for.request.request_id == "pair"
    assert len(story.pool.reserved_for.reserved) == 2
    story.releases("a")
    assert story.gpus_of("pair") == ("3", "0")
    assert granted(story.releases("b")) == []
    assert story.pool.reserved_for.request.request_id == "triple"


def test_rule_4_nothing_is_kept_against_a_higher_priority(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("a")
    story.asks("pair", Requirements(count=2))
    story.now += 61.0
    story.reads(*gpus(2))
    assert granted(story.asks("urgent", Requirements(priority=1))) == [("urgent", ("1",))]


def test_rule_4_an_outsider_does_not_freeze_the_pool(story: Story) -> None:
    full = gpu(0, memory_used_mb=79_000.0)
    story.reads(full, gpu(1))
    story.asks("pair", Requirements(count=2))
    story.now += 61.0
    story.reads(full, gpu(1))
    assert granted(story.asks("small")) == [("small", ("1",))]


def test_rule_4_nor_does_a_quarantine_that_does_not_end(story: Story) -> None:
    still_there = gpu(0, processes=(ProcessReading(99, 0.5),))
    story.reads(*gpus(2))
    story.asks("gone", ttl=10.0)
    story.asks("other")
    story.asks("pair", Requirements(count=2))
    story.now += 61.0
    story.reads(still_there, gpu(1))
    story.reads(still_there, gpu(1), after=6.0)
    story.releases("other")
    assert granted(story.asks("small")) == [("small", ("1",))]


def test_rule_4_nor_does_a_quarantine_that_has_just_begun(story: Story) -> None:
    story.reads(*gpus(3))
    story.asks("stays")
    story.asks("gone", ttl=1000.0)
    story.asks("other")
    story.asks("triple", Requirements(count=3))
    story.now += 61.0
    story.reads(*gpus(3))
    story.happens(HolderGone(story.lease("gone").lease_id))
    story.releases("other")
    assert granted(story.asks("small")) == [("small", ("2",))]


def test_rule_4_a_shared_gpu_drains_for_one_that_needs_all_of_it(story: Story) -> None:
    quarter = Requirements(memory_mb=20_000, share=True)
    story.reads(gpu(0))
    story.asks("s1", quarter)
    story.asks("s2", quarter)
    story.asks("alone")
    assert granted(story.asks("s3", quarter)) == [("s3", ("0",))]
    story.now += 61.0
    story.reads(gpu(0))
    assert granted(story.asks("s4", quarter)) == []
    for name in ("s1", "s2"):
        assert granted(story.releases(name)) == []
    assert granted(story.releases("s3")) == [("alone", ("0",))]


def test_rule_4_what_was_kept_is_free_again_when_its_waiter_leaves(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("a")
    story.asks("pair", Requirements(count=2))
    story.now += 61.0
    story.reads(*gpus(2))
    story.asks("small", Requirements(memory_mb=10))
    assert story.waits() == ["pair", "small"]
    assert granted(story.happens(Cancelled("pair"))) == [("small", ("1",))]


# ---- Rule 5: impossible requests


@pytest.mark.parametrize(
    ("requirements", "reason"),
    [
        (Requirements(count=3), "3 GPUs requested, 2 of 2 could ever serve it"),
        (Requirements(memory_mb=80_001), "80001 MB are needed"),
        (Requirements(memory_mb=103_809_024), "103809024 MB are needed"),
        (Requirements(min_free_memory_mb=90_000), "90000 MB are needed"),
        (Requirements(gpu_model="B200"), "0 of 2 could ever serve it (GPU 0, 1: NVIDIA H100 80GB HBM3, not B200)"),
        (Requirements(only=("7",)), "not among 7"),
        (Requirements(exclude=("0", "1")), "GPU 0, 1: excluded"),
        (Requirements(count=2, exclude=("0",)), "GPU 0: excluded"),
        (Requirements(memory_threshold=0.0), "threshold of 0"),
    ],
)
def test_rule_5_what_no_gpu_can_ever_serve_fails_at_once(story: Story, requirements: Requirements, reason: str) -> None:
    story.reads(*gpus(2))
    (ended,) = story.asks("a", requirements)
    assert isinstance(ended, Ended)
    assert (ended.request_id, ended.state) == ("a", RequestState.REJECTED)
    assert reason in "; ".join(ended.reasons)


def test_rule_5_nothing_is_judged_by_an_inventory_that_is_not_known(story: Story) -> None:
    assert story.asks("a", Requirements(count=3)) == ()
    story.reads()
    assert story.waits() == ["a"], "no GPU to see is no proof"
    effects = story.reads(*gpus(2))
    assert [(e.request_id, e.state) for e in effects if isinstance(e, Ended)] == [("a", RequestState.REJECTED)]


def test_rule_5_one_of_several_endpoints_excludes_only_itself(story: Story) -> None:
    story.happens(Unreachable("y"))
    story.reads(*gpus(1, endpoint_id="x"), endpoint_id="x")
    story.asks("a", Requirements(count=2))
    assert story.waits() == ["a"], "y may have two"
    assert granted(story.reads(*gpus(2, endpoint_id="y"), endpoint_id="y")) == [("a", ("y:0", "y:1"))]


def test_rule_5_an_endpoint_that_was_removed_can_no_longer_serve_anybody(story: Story) -> None:
    story.happens(Unreachable("y"))
    story.reads(*gpus(1, endpoint_id="x"), endpoint_id="x")
    story.asks("pair", Requirements(count=2))
    ended = [effect for effect in story.happens(Unreachable("y", is_removed=True)) if isinstance(effect, Ended)]
    assert [(effect.request_id, effect.state) for effect in ended] == [("pair", RequestState.REJECTED)]
    assert granted(story.reads(*gpus(2, endpoint_id="y"), endpoint_id="y")) == []
    assert granted(story.asks("again", Requirements(count=2))) == [("again", ("y:0", "y:1"))], (
        "it is asked again, and counts"
    )


def test_rule_5_what_was_assigned_at_a_removed_endpoint_is_kept(story: Story) -> None:
    story.reads(*gpus(1, endpoint_id="x"), endpoint_id="x")
    story.asks("holder")
    story.happens(Unreachable("x", is_removed=True))
    assert [lease.request.request_id for lease in story.pool.leases] == ["holder"]
    story.releases("holder")
    assert len(story.pool.leases) == 0


def test_rule_5_who_waits_is_told_when_a_gpu_ceased_to_exist(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("holder")
    story.asks("pair", Requirements(count=2))
    (ended,) = [effect for effect in story.happens(GPUsVanished(("1",))) if isinstance(effect, Ended)]
    assert (ended.request_id, ended.state) == ("pair", RequestState.REJECTED)


def test_rule_5_a_gpu_that_is_missing_for_a_moment_is_still_part_of_the_host(story: Story) -> None:
    story.reads(*gpus(2))
    story.reads(gpu(0))
    story.asks("pair", Requirements(count=2))
    assert granted(story.reads(*gpus(2))) == [("pair", ("0", "1"))]


# ---- Rule 6: every request ends exactly once


def test_rule_6_each_end_is_told_once(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    assert story.asks("timed out", deadline=5.0) == (WakeAt(5.0),)
    story.asks("cancelled")
    story.asks("given up", ttl=TTL, poll_deadline=story.now)
    story.asks("stopped")
    story.now = 0.0
    assert story.happens(Ticked(), after=5.0) == (
        Ended("timed out", RequestState.TIMED_OUT),
        WakeAt(pytest.approx(30.01)),
    )
    assert story.happens(Cancelled("cancelled")) == (Ended("cancelled", RequestState.CANCELLED),)
    assert story.happens(Ticked(), after=30.0) == (Ended("given up", RequestState.GIVEN_UP),)
    assert story.happens(Stopped()) == (Ended("stopped", RequestState.STOPPED),)
    assert story.happens(Stopped(), after=100.0) == ()


def test_rule_6_a_deadline_that_has_passed_still_tries_once(story: Story) -> None:
    story.reads(gpu(0))
    assert granted(story.asks("a", deadline=0.0)) == [("a", ("0",))]
    assert story.asks("b", deadline=story.now) == (Ended("b", RequestState.TIMED_OUT),)


def test_rule_6_a_timeout_that_meets_a_release_is_one_or_the_other(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a", deadline=5.0)
    story.now = 5.0
    effects = story.releases("holder")
    assert [type(effect) for effect in effects] == [Ended]
    assert story.pool.queue.size() == 0
    assert granted(story.asks("b")) == [("b", ("0",))]


# ---- Rule 7: cancelled in the instant of the grant


def test_rule_7_a_cancelled_grant_goes_to_the_next(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a")
    story.asks("b")
    assert granted(story.releases("holder")) == [("a", ("0",))]
    assert granted(story.happens(Cancelled("a"))) == [("b", ("0",))]


# ---- Rule 8: release hands on at once


def test_rule_8_in_process_the_next_has_it_in_the_same_step(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a")
    story.asks("b")
    assert [type(effect) for effect in story.releases("a")] == [Granted]


def test_rule_8_also_where_the_assignment_had_a_limit(story: Story) -> None:
    story.reads(gpu(0))
    story.happens(Requested(Request("a", max_seconds=100.0)))
    story.asks("b")
    assert [type(effect) for effect in story.releases("a")] == [Granted]


def test_rule_8_a_reading_from_before_the_release_does_not_send_the_gpu_past_the_next_waiter(story: Story) -> None:
    busy = gpu(0, utilization_percent=95.0)
    sharing = Requirements(memory_mb=1000, share=True)
    story.reads(gpu(0))
    story.asks("holder")
    story.reads(busy)
    story.asks("next")
    story.asks("does not mind", sharing)
    assert granted(story.releases("holder")) == []
    assert granted(story.asks("newcomer", Requirements(memory_mb=2000, share=True))) == []
    told = explain(story.pool, "newcomer", story.now)
    assert told is not None
    assert str(told.gpus[0]) == "GPU 0: reserved for next, which is ahead of you, until it is read again"
    assert granted(story.reads(gpu(0))) == [("next", ("0",))]


def test_rule_8_what_was_awaited_for_one_that_left_serves_another(story: Story) -> None:
    busy = gpu(0, utilization_percent=95.0)
    story.reads(gpu(0))
    story.asks("holder")
    story.reads(busy)
    story.asks("next")
    story.asks("does not mind", Requirements(memory_mb=1000, share=True))
    story.releases("holder")
    assert granted(story.happens(Cancelled("next"))) == [("does not mind", ("0",))]


@pytest.mark.parametrize("readings", [0, 1])
def test_rule_8_but_others_do_not_wait_for_ever_for_that(story: Story, readings: int) -> None:
    busy = gpu(0, utilization_percent=95.0)
    story.reads(gpu(0))
    story.asks("holder")
    story.reads(busy)
    story.asks("next")
    story.asks("does not mind", Requirements(memory_mb=1000, share=True))
    story.releases("holder")
    if readings:
        assert granted(story.reads(busy)) == [("does not mind", ("0",))], "it is busy, with somebody else's work"
    else:
        assert granted(story.happens(Ticked(), after=0.9)) == []
        assert granted(story.happens(Ticked(), after=0.1)) == [("does not mind", ("0",))]


def test_rule_8_fresh_readings_are_wanted_while_someone_waits(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=1000.0)
    story.asks("b", ttl=1000.0)
    wanted = []
    for delay in (0.0, 0.05, 0.1, 0.2, 0.3, 0.6, 1.0, 5.0):
        story.now = 10.0 + delay
        effects = story.happens(Ticked()) if delay else story.releases("a")
        if ReadingWanted("") in effects:
            wanted.append(delay)
    assert wanted == [0.0, 0.1, 0.3, 1.0]


def test_rule_8_nobody_waits_nothing_is_read(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    assert story.releases("a") == ()
    story.now += 1.0
    effects = story.asks("b", ttl=TTL)
    assert effects == (ReadingWanted(""),), "who comes before the next reading asks for one"


# ---- Rule 9: ids are remembered


def test_rule_9_asking_twice_is_one_lease(story: Story) -> None:
    story.reads(*gpus(2))
    (first,) = [e for e in story.asks("a", ttl=TTL) if isinstance(e, Granted)]
    assert story.asks("a", ttl=TTL) == (Granted(first.lease),)
    with pytest.raises(RequestMismatchError, match="'a' was used for another"):
        story.asks("a", Requirements(count=2), ttl=TTL)


def test_rule_9_asking_again_keeps_the_place_and_after_the_end_tells_the_outcome(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a", ttl=TTL, poll_deadline=story.now)
    story.asks("b", ttl=TTL, poll_deadline=story.now)
    story.now += 20.0
    story.asks("a", ttl=TTL, poll_deadline=story.now)
    story.happens(Ticked(), after=15.0)
    assert story.waits() == ["a"], "b has not asked for more than 30 s"
    assert story.asks("b", ttl=TTL) == (Ended("b", RequestState.GIVEN_UP),)


def test_rule_9_who_listens_until_it_is_answered_is_not_given_up(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a", ttl=TTL, poll_deadline=story.now)
    story.asks("a", ttl=TTL)
    story.happens(Ticked(), after=1000.0)
    assert story.waits() == ["a"]


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf")])
def test_rule_9_a_lease_that_could_not_expire_is_refused(story: Story, ttl: float) -> None:
    story.reads(gpu(0))
    with pytest.raises(IllegalEventError, match="ttl_seconds"):
        story.asks("a", ttl=ttl)
    assert story.pool.ticket == 0


def test_rule_9_a_grant_between_two_polls_waits_for_its_asker(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a", ttl=TTL, poll_deadline=story.now + 1)
    story.now += 5.0
    story.releases("holder")
    assert story.lease("a").state is LeaseState.OFFERED
    assert story.lease("a").expires_at == pytest.approx(story.now + 10.0)
    story.now += 9.0
    (told,) = [e for e in story.asks("a", ttl=TTL, poll_deadline=story.now) if isinstance(e, Granted)]
    assert told.lease.state is LeaseState.HELD
    assert told.lease.expires_at == pytest.approx(story.now + TTL)


def test_rule_9_one_that_went_keeps_its_place_and_is_only_offered_a_gpu(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.happens(Requested(Request("a", ttl_seconds=TTL), poll_deadline=story.now + 20, poll_id="only"))
    story.happens(PollAbandoned("a", "only"), after=1.0)
    assert story.waits() == ["a"]
    story.releases("holder")
    assert story.lease("a").state is LeaseState.OFFERED, "in the same moment already"


@pytest.mark.parametrize(
    ("is_gone", "kept_seconds"), [(True, 10.0), (False, 30.0)], ids=["it went", "its server stops"]
)
def test_rule_9_one_that_nobody_answers_is_given_up_unless_it_comes_back(
    story: Story, is_gone: bool, kept_seconds: float
) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.happens(Requested(Request("a", ttl_seconds=TTL), poll_deadline=story.now + 20, poll_id="only"))
    story.happens(PollAbandoned("a", "only", is_gone), after=1.0)
    story.happens(Ticked(), after=kept_seconds - 1.0)
    assert story.waits() == ["a"]
    assert Ended("a", RequestState.GIVEN_UP) in story.happens(Ticked(), after=1.0)


def test_rule_9_no_gpu_is_kept_longer_for_one_that_went_than_its_place_would_be(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.happens(Requested(Request("a", ttl_seconds=TTL), poll_deadline=story.now + 20, poll_id="only"))
    story.happens(PollAbandoned("a", "only"), after=1.0)
    went_at = story.now
    story.now += 7.0
    story.releases("holder")
    assert story.lease("a").state is LeaseState.OFFERED
    assert story.lease("a").expires_at == pytest.approx(went_at + 10.0)


def test_rule_9_no_gpu_is_kept_for_one_that_has_not_asked_for_longer_than_its_place_would_be(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    last_heard = story.now + 1
    story.asks("a", ttl=TTL, poll_deadline=last_heard)
    story.now += 26.0
    story.reads(gpu(0))
    story.releases("holder")
    assert story.lease("a").expires_at == pytest.approx(last_heard + 30.0)


def test_rule_9_the_end_of_an_old_asking_says_nothing_of_a_newer_one(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    for asking in ("old", "new"):
        story.happens(Requested(Request("a", ttl_seconds=TTL), poll_deadline=story.now + 60, poll_id=asking))
    story.happens(PollAbandoned("a", "old"), after=1.0)
    story.happens(Ticked(), after=40.0)
    assert story.waits() == ["a"], "it listens"
    story.reads(gpu(0))
    story.releases("holder")
    assert story.lease("a").state is LeaseState.HELD
    story.happens(PollAbandoned("a", "old"))
    assert story.lease("a").state is LeaseState.HELD
    story.happens(PollAbandoned("a", "new"))
    assert story.lease("a").state is LeaseState.OFFERED


def test_rule_9_a_grant_that_nobody_comes_for_goes_to_the_next(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("dead", ttl=TTL, poll_deadline=story.now)
    story.asks("alive", ttl=TTL)
    story.now += 1.0
    story.releases("holder")
    offered = story.lease("dead")
    effects = story.happens(Ticked(), after=10.0)
    assert effects[0] == LeaseEnded(offered, LeaseState.RECLAIMED, "it was not claimed in time")
    assert granted(effects) == [("alive", ("0",))], "nobody used it: no fresh reading is needed"


def test_rule_9_releasing_twice_is_harmless(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    release = Released(story.lease("a").lease_id)
    story.happens(release)
    before = save(story.pool)
    assert story.happens(release) == ()
    assert save(story.pool) == before


def test_rule_9_renewing_what_ended_is_refused(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    lease = story.lease("a")
    story.releases("a")
    with pytest.raises(LeaseEndedError):
        story.happens(Renewed(lease.lease_id))
    with pytest.raises(UnknownLeaseError):
        story.happens(Renewed("lease-99"))
    with pytest.raises(UnknownLeaseError):
        story.happens(Released("lease-99"))


def test_rule_9_releasing_an_expired_lease_says_that_it_was_lost(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=10.0)
    lease = story.lease("a")
    story.now += 12.01
    for _ in range(2):
        with pytest.raises(LeaseEndedError, match="not renewed in time"):
            story.happens(Released(lease.lease_id))
        story.happens(Ticked())
    story.happens(QuarantineEnded(lease.lease_id))
    with pytest.raises(LeaseEndedError, match="not renewed in time"):
        story.happens(Released(lease.lease_id))


@pytest.mark.fault(7)
@pytest.mark.parametrize("event", [Released, Renewed])
def test_rule_9_a_stranger_and_an_old_fence_change_nothing(story: Story, event: type[Released | Renewed]) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL, owner="anna")
    lease = story.lease("a")
    before = save(story.pool)
    with pytest.raises(NotYourLeaseError):
        story.happens(event(lease.lease_id, by="bob"))
    with pytest.raises(NotYourLeaseError):
        story.happens(Cancelled("a", by="bob"))
    with pytest.raises(LeaseEndedError, match="outdated"):
        story.happens(event(lease.lease_id, by="anna", fence=lease.fence - 1))
    assert save(story.pool) == before
    story.happens(event(lease.lease_id, by="anna", fence=lease.fence))


def test_rule_9_an_end_that_comes_as_it_is_asked_for_is_told_once(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("holder")
    story.asks("a", deadline=5.0)
    story.now = 6.0
    assert story.asks("a") == (Ended("a", RequestState.TIMED_OUT),)


def test_rule_9_what_was_forgotten_may_be_asked_anew(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a")
    story.releases("a")
    story.now += 24 * 3600.0
    story.reads(gpu(0))
    assert granted(story.asks("a", Requirements(memory_mb=10))) == [("a", ("0",))]


def test_rule_9_ended_requests_are_forgotten_after_a_day(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    lease_id = story.lease("a").lease_id
    story.releases("a")
    story.happens(Ticked(), after=24 * 3600.0 - 1)
    story.happens(Released(lease_id))
    story.happens(Ticked(), after=1.0)
    with pytest.raises(UnknownLeaseError):
        story.happens(Released(lease_id))


def test_rule_9_no_more_outcomes_are_remembered_than_allowed() -> None:
    story = Story(PoolSettings(remember_at_most=2))
    story.reads(gpu(0))
    for name in "abc":
        story.asks(name)
        story.releases(name)
    assert [outcome.request.request_id for outcome in story.pool.outcomes] == ["b", "c"]


# ---- Rule 10: time in which nobody served does not count


def test_rule_10_after_a_silence_everybody_gets_one_full_ttl(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=20.0)
    story.asks("b", ttl=20.0, poll_deadline=story.now, deadline=40.0)
    lease_id = story.lease("a").lease_id
    story.now = 1000.0
    effects = story.happens(Resumed(unserved_seconds=999.0))
    assert [effect for effect in effects if not isinstance(effect, WakeAt)] == [], "nothing has ended meanwhile"
    assert story.lease("a").expires_at == pytest.approx(1020.0)
    waiter = story.pool.requests["b"]
    assert isinstance(waiter, Waiter)
    assert waiter.gives_up_at == pytest.approx(1020.0)
    assert waiter.deadline == pytest.approx(1039.0)
    story.happens(Renewed(lease_id))
    story.happens(Ticked(), after=10.0)
    assert [lease.state for lease in story.pool.leases] == [LeaseState.HELD]
    story.happens(Ticked(), after=12.1)
    assert [lease.state for lease in story.pool.leases] == [LeaseState.QUARANTINED]


def test_rule_10_a_lease_that_has_longer_to_live_keeps_it(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=20.0)
    story.happens(Resumed(unserved_seconds=1.0), after=1.0)
    story.happens(Resumed(unserved_seconds=1.0))
    assert story.lease("a").expires_at == pytest.approx(story.now + 20.0)


def test_rule_10_what_nobody_came_for_is_not_kept_for_an_hour(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a")
    story.asks("offered", ttl=3600.0, poll_deadline=story.now)
    story.asks("waiting", ttl=3600.0, poll_deadline=story.now)
    story.now += 1.0
    story.releases("a")
    story.reads(gpu(0))
    assert story.lease("offered").state is LeaseState.OFFERED
    story.happens(Resumed(unserved_seconds=20.0))
    assert story.lease("offered").expires_at == pytest.approx(story.now + story.pool.settings.offer_ttl_seconds)
    waiter = story.pool.requests["waiting"]
    assert isinstance(waiter, Waiter)
    assert waiter.gives_up_at == pytest.approx(story.now + TTL)


def test_rule_10_after_a_reboot_times_begin_anew_and_process_ids_mean_nothing(story: Story) -> None:
    story.now = 5000.0
    story.reads(gpu(0, memory_used_mb=300.0, processes=(STRANGER,)))
    story.asks("a", ttl=20.0)
    story.asks("b", ttl=20.0, poll_deadline=story.now)
    again = Story(start=save(restore(save(story.pool), clock_restarted_at=7.0)))
    again.now = 7.0
    again.happens(Resumed(unserved_seconds=0.0))
    assert again.lease("a").expires_at == pytest.approx(27.0)
    assert again.waits() == ["b"]
    again.happens(HolderGone(again.lease("a").lease_id, is_proven=True))
    desktop = ProcessReading(900, 3.0, name="Xorg")
    assert granted(again.reads(gpu(0, memory_used_mb=350.0, processes=(desktop,)))) == [("b", ("0",))]
    assert again.lease("b").fence > 1


def test_rule_10_a_restored_lease_still_knows_its_gpu(story: Story) -> None:
    story.reads(*gpus(4))
    story.asks("a", Requirements(only=("3",)), ttl=TTL)
    (told,) = Story(start=save(story.pool)).asks("a", Requirements(only=("3",)), ttl=TTL)[:1]
    assert isinstance(told, Granted)
    assert [(held.gpu_id, held.index, held.uuid) for held in told.lease.held] == [("3", 3, "GPU-host-3")]


def test_rule_10_a_holder_that_is_provably_gone_ends_at_once(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=TTL)
    story.asks("b", ttl=TTL)
    story.happens(HolderGone(story.lease("a").lease_id, is_proven=True))
    assert granted(story.reads(gpu(0))) == [("b", ("0",))]


# ---- Rule 11: quarantine


def expired(story: Story, **reading: Any) -> Lease:
    """A lease on GPU 0 that was not renewed, and somebody who waits for the GPU."""
    story.reads(gpu(0, **reading))
    story.asks("a", ttl=10.0)
    story.asks("b", ttl=10.0)
    story.now = story.lease("a").expires_at + 2.0  # type: ignore[operator]
    assert story.happens(Ticked())[0] == LeaseEnded(
        story.lease("a"), LeaseState.QUARANTINED, "its lease was not renewed in time"
    )
    return story.lease("a")


def test_rule_11_the_pool_waits_two_seconds_longer_than_the_holder(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=10.0)
    lease = story.lease("a")
    assert lease.expires_at == pytest.approx(story.now + 10.0)
    story.happens(Ticked(), after=11.9)
    story.happens(Renewed(lease.lease_id))
    story.happens(Ticked(), after=12.0)
    assert story.lease("a").state is LeaseState.QUARANTINED


@pytest.mark.fault(2)
def test_rule_11_a_quarantine_lasts_five_seconds_and_until_a_reading_shows_the_gpu_empty(story: Story) -> None:
    expired(story)
    assert granted(story.reads(gpu(0), after=4.9)) == []
    assert granted(story.happens(Ticked(), after=0.1)) == [("b", ("0",))]


def test_rule_11_a_process_that_came_after_the_grant_prolongs_it(story: Story) -> None:
    expired(story, processes=(STRANGER,))
    worker = ProcessReading(99, 0.5)
    assert granted(story.reads(gpu(0, processes=(STRANGER, worker)), after=6.0)) == []
    told = explain(story.pool, "b", story.now)
    assert told is not None
    assert "in quarantine for 6 s: its lease was not renewed in time" in str(told.gpus[0])
    reused_pid = ProcessReading(4711, 20.0)
    assert granted(story.reads(gpu(0, processes=(reused_pid,)), after=1.0)) == []
    assert granted(story.reads(gpu(0, processes=(STRANGER,)), after=1.0)) == [("b", ("0",))]


def test_rule_11_a_process_that_was_there_before_may_be_the_holder_s_own(story: Story) -> None:
    expired(story, processes=(STRANGER,), memory_used_mb=500.0)
    assert granted(story.reads(gpu(0, processes=(STRANGER,), memory_used_mb=60_000.0), after=6.0)) == []
    assert granted(story.reads(gpu(0, processes=(STRANGER,), memory_used_mb=600.0), after=1.0)) == [("b", ("0",))]


def test_rule_11_of_those_who_share_a_dead_one_is_told_from_the_living(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("dead", Requirements(memory_mb=16_000, share=True))
    old = ProcessReading(1, 1.0, name="dead")
    story.reads(gpu(0, memory_used_mb=16_000.0, processes=(old,)))
    story.asks("living", Requirements(memory_mb=4_000, share=True))
    young = ProcessReading(2, 2.0, name="living")
    story.reads(gpu(0, memory_used_mb=20_000.0, processes=(old, young)))
    story.happens(HolderGone(story.lease("dead").lease_id, is_proven=True))
    story.asks("next", Requirements(memory_mb=70_000, share=True))
    assert granted(story.reads(gpu(0, memory_used_mb=3_000.0, processes=(old,)))) == [], "it is there yet"
    assert granted(story.reads(gpu(0, memory_used_mb=4_257.0, processes=(young,)))) == [], "more than was promised"
    assert granted(story.reads(gpu(0, memory_used_mb=None, processes=(young,)))) == [], "who knows"
    assert granted(story.reads(gpu(0, memory_used_mb=4_256.0, processes=(young,)))) == [("next", ("0",))]


@pytest.mark.parametrize(
    ("before", "still_there", "gone"),
    [
        ({"memory_used_mb": 500.0}, {"memory_used_mb": 757.0}, {"memory_used_mb": 756.0}),
        ({"memory_usage_percent": 1.0}, {"memory_usage_percent": 2.1}, {"memory_usage_percent": 2.0}),
    ],
)
def test_rule_11_where_processes_cannot_be_seen_memory_tells(
    story: Story, before: dict[str, Any], still_there: dict[str, Any], gone: dict[str, Any]
) -> None:
    unseen: dict[str, Any] = {"processes": None}
    if "memory_usage_percent" in before:
        unseen |= {"memory_total_mb": None, "memory_used_mb": None}
    expired(story, **unseen | before)
    assert granted(story.reads(gpu(0, **unseen | still_there), after=6.0)) == []
    assert granted(story.reads(gpu(0, **unseen | gone), after=1.0)) == [("b", ("0",))]


def test_rule_11_where_nothing_can_be_seen_it_lasts_until_an_administrator_ends_it(story: Story) -> None:
    lease = expired(story)
    blind = gpu(0, processes=None, memory_used_mb=None, memory_total_mb=None, memory_usage_percent=None)
    assert granted(story.reads(blind, after=600.0)) == []
    story.happens(QuarantineEnded(lease.lease_id))
    with pytest.raises(IllegalEventError, match="not in quarantine"):
        story.happens(QuarantineEnded(lease.lease_id))
    assert granted(story.reads(gpu(0))) == [("b", ("0",))]


def test_rule_11_an_administrator_may_be_late_by_a_moment(story: Story) -> None:
    lease = expired(story)
    story.reads(gpu(0), after=4.0)
    story.now += 2.0
    assert granted(story.happens(QuarantineEnded(lease.lease_id))) == [("b", ("0",))]


def test_rule_11_a_gpu_that_ceased_to_exist_loses_its_leases(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("a", ttl=TTL)
    lease = story.lease("a")
    assert story.happens(GPUsVanished(("0",))) == (LeaseEnded(lease, LeaseState.LOST, "GPU 0 is gone"),)
    with pytest.raises(LeaseEndedError, match="GPU 0 is gone"):
        story.happens(Renewed(lease.lease_id))


def test_rule_11_the_other_gpus_of_a_lost_lease_are_quarantined(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("pair", Requirements(count=2), ttl=TTL)
    story.happens(GPUsVanished(("0",)))
    assert story.lease("pair").state is LeaseState.QUARANTINED
    story.asks("b", ttl=TTL)
    worker = ProcessReading(99, 0.5)
    assert granted(story.reads(gpu(1, processes=(worker,)), after=6.0)) == []
    assert granted(story.reads(gpu(1), after=1.0)) == [("b", ("1",))]


def test_rule_11_a_gpu_that_is_only_missing_keeps_its_lease(story: Story) -> None:
    story.reads(*gpus(2))
    story.asks("a", ttl=TTL)
    story.reads(gpu(1))
    assert story.lease("a").state is LeaseState.HELD
    story.happens(Unreachable(""))
    assert story.lease("a").state is LeaseState.HELD
    story.reads(*gpus(2))
    assert granted(story.asks("b")) == [("b", ("1",))]


# ---- Rule 12: explain


def test_rule_12_every_gpu_is_explained_with_its_numbers(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=72_000.0), gpu(1, utilization_percent=97.0), gpu(2), gpu(3, fault="Xid 79"))
    story.asks("a", ttl=TTL)
    story.asks("b")
    story.now += 3.0
    told = explain(story.pool, "b", story.now)
    assert told is not None
    assert (told.position, told.waiting_seconds) == (1, pytest.approx(3.0))
    assert str(told).splitlines() == [
        "one GPU: next in line; of 4 GPUs: 1 memory in use, 1 utilized, 1 held, 1 unhealthy",
        "  GPU 0: memory 90.0 % used, not below 80 %",
        "  GPU 1: utilization 97.0 %, not below 90 %",
        "  GPU 2: held by a for 3 s",
        "  GPU 3: unhealthy: Xid 79",
    ]
    memory = told.gpus[0].obstacles[0]
    assert (memory.actual, memory.limit) == (90.0, 80.0)
    assert explain(story.pool, "a", story.now) is None, "it does not wait"


def test_rule_5_gpus_are_named_in_order_whichever_was_known_first(story: Story) -> None:
    story.reads(gpu(2), gpu(0))
    story.reads(gpu(0), gpu(1), gpu(2))
    told = story.asks("a", requirements=Requirements(gpu_model="B200"))
    (ended,) = [effect for effect in told if isinstance(effect, Ended)]
    assert "(GPU 0, 1, 2: " in ended.reasons[0]


def test_rule_12_how_many_gpus_there_are_together_is_told(story: Story) -> None:
    story.reads(gpu(0), gpu(1))
    story.asks("a")
    two = Requirements(count=2)
    assert (
        explain_requirements(story.pool, two, story.now).summary
        == "2 GPUs: next in line; 1 of 2 free; of 2 GPUs: 1 held"
    )
    story.reads(gpu(2), endpoint_id="other")
    summary = "2 GPUs: next in line; 1 of 2 free on one endpoint; of 3 GPUs: 1 held"
    assert explain_requirements(story.pool, two, story.now).summary == summary


def test_rule_12_requirements_can_be_explained_before_a_request(story: Story) -> None:
    assert explain_requirements(story.pool, ANY_GPU, story.now).summary == "one GPU: no GPU is known yet"
    story.reads(gpu(0))
    assert explain_requirements(story.pool, ANY_GPU, story.now).summary == "one GPU: could be granted now"
    assert "can never be granted" in explain_requirements(story.pool, Requirements(count=2), story.now).summary


# ---- What holds for all of them


def test_the_same_events_give_the_same_pool_and_effects(story: Story) -> None:
    test_rule_11_a_process_that_came_after_the_grant_prolongs_it(story)
    assert save(replay(story)) == save(story.pool)
    event, now, effects = story.steps[-1]
    story.steps[-1] = (event, now, (*effects, Ended("nobody", RequestState.STOPPED)))
    with pytest.raises(AssertionError, match=r"step \d+"):
        replay(story)


def test_time_does_not_go_back(story: Story) -> None:
    story.reads(gpu(0))
    story.asks("a", ttl=10.0)
    story.apply(Ticked(), 5.0)
    story.apply(Ticked(), 1.0)
    assert story.pool.now == 5.0


def test_readings_that_come_late_are_not_taken_for_news(story: Story) -> None:
    story.now = 10.0
    story.reads(gpu(0, memory_used_mb=79_000.0))
    story.happens(snapshot([gpu(0)], at=9.0))
    assert story.asks("a") == ()


def test_a_reading_from_the_future_is_from_now(story: Story) -> None:
    story.happens(snapshot([gpu(0)], at=1e9))
    story.now = 16.0
    assert story.asks("a") == ()
    assert granted(story.reads(gpu(0))) == [("a", ("0",))]


def test_a_reading_of_no_known_time_is_ignored(story: Story) -> None:
    story.happens(snapshot([gpu(0)], at=float("nan")))
    assert story.asks("a", Requirements(memory_mb=10)) == ()


def test_a_gpu_listed_twice_counts_once(story: Story) -> None:
    story.reads(gpu(0), gpu(0, memory_used_mb=79_000.0))
    assert granted(story.asks("a")) == [("a", ("0",))]
    assert granted(story.asks("b")) == []


def test_requests_are_values(story: Story) -> None:
    assert replace(Request("a"), label="x") != Request("a")
    assert Requirements(only=[0, "1"]) == Requirements(only=("0", "1"))  # type: ignore[arg-type]
    assert Requirements(exclude=None) == ANY_GPU  # type: ignore[arg-type]
    assert hash(Requirements(only=[0, "1"])) == hash(Requirements(only=("0", "1")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ({"count": 0}, "count must be"),
        ({"count": True}, "count must be"),
        ({"count": 1.5}, "count must be"),
        ({"memory_mb": 0}, "memory_mb must be"),
        ({"memory_mb": float("nan")}, "memory_mb must be"),
        ({"memory_mb": float("inf")}, "memory_mb must be"),
        ({"min_free_memory_mb": -1}, "min_free_memory_mb must be"),
        ({"share": True}, "needs memory_mb"),
        ({"share": 1, "memory_mb": 5}, "share must be"),
        ({"policy": "free"}, "policy must be"),
        ({"gpu_model": " "}, "gpu_model must be"),
        ({"gpu_model": 4090}, "gpu_model must be"),
        ({"gpu_model": ["A100"]}, "gpu_model must be"),
        ({"only": ()}, "only must name"),
        ({"only": "0,1"}, "only must be a list"),
        ({"only": [None]}, "only must hold"),
        ({"exclude": 3}, "exclude must be a list"),
        ({"exclude": "0"}, "exclude must be a list"),
        ({"priority": "high"}, "priority must be"),
        ({"memory_threshold": 101}, "memory_threshold must be"),
        ({"utilization_threshold": "90"}, "utilization_threshold must be"),
    ],
)
def test_requirements_that_make_no_sense_are_refused(requirements: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Requirements(**requirements)


def test_a_state_that_another_version_saved_is_refused(story: Story) -> None:
    with pytest.raises(ValueError, match="format 2"):
        restore({**save(story.pool), "format": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "random"}, "strategy must be"),
        ({"poll_seconds": float("nan")}, "poll_seconds must be"),
        ({"quarantine_seconds": -1.0}, "quarantine_seconds must be"),
        ({"reading_delays_seconds": ()}, "reading_delays_seconds must"),
        ({"reading_delays_seconds": (0.0, float("inf"))}, "reading_delays_seconds must"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(**settings)


def test_requirements_keep_no_hash_of_another_process() -> None:
    requirements = Requirements(gpu_model="A100", only=("0",))
    make, arguments = requirements.__reduce__()
    assert make(*arguments) == requirements
    assert requirements._hash not in arguments


@pytest.mark.parametrize("total", [10**400, float("inf"), -1.0])
def test_absurd_numbers_spoil_only_their_own_gpu(story: Story, total: float) -> None:
    story.reads(gpu(0, memory_total_mb=total), gpu(1))
    assert granted(story.asks("a")) == [("a", ("1",))]
    assert granted(story.asks("b")) == []
