"""What the order is worth, on small generated workloads: waits against EASY, floods, and no starvation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from bench.scheduling import LOADS, against_easy, flood_ratio, generated_workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core import Granted, Pool, PoolSettings, Released, Request, Requested, Requirements, explain
from gpu_worker_pool.core.fair_share import Use
from gpu_worker_pool.simulation.workload import generated
from gpu_worker_pool.testing import gpus, snapshot
from gpu_worker_pool.wording import spoken_gpu_seconds

DAY = 86_400.0


@pytest.mark.parametrize(("declares", "most", "most_large"), [(False, 1.15, 1.3), (True, 1.0, 1.2)])
def test_waits_are_near_those_of_easy_backfill_that_knows_all_run_times(
    declares: bool, most: float, most_large: float
) -> None:
    ratio, large = against_easy(generated_workloads(3_000, range(1, 3), LOADS), declares=declares)
    assert ratio <= most
    assert large <= most_large


def test_a_flood_costs_others_at_most_a_quarter_of_what_it_costs_first_come_first_served() -> None:
    assert flood_ratio(generated_workloads(1_000, range(1, 5), [0.6])) <= 0.25


def pool_with(number: int, **rules: Any) -> Pool:
    pool = Pool(
        PoolSettings(poll_seconds=1e12, fair_share_half_life_seconds=DAY, reading_delays_seconds=(0.0,), **rules)
    )
    pool.apply(snapshot(gpus(number), at=0.0), 0.0)
    return pool


def ask(pool: Pool, name: str, account: str, now: float, **requirements: Any) -> list[str]:
    effects = pool.apply(Requested(Request(name, Requirements(**requirements), account=account)), now)
    return [effect.lease.lease_id for effect in effects if isinstance(effect, Granted)]


def release(pool: Pool, lease_id: str, now: float) -> list[tuple[str, str]]:
    effects = pool.apply(Released(lease_id), now)
    return [(each.lease.request.request_id, each.lease.lease_id) for each in effects if isinstance(each, Granted)]


def test_who_used_least_of_late_is_served_first_and_it_is_said_in_words() -> None:
    pool = pool_with(1)
    (held,) = ask(pool, "long", "key:maths", 0.0)
    ask(pool, "again", "key:maths", 10.0)
    ask(pool, "new", "key:physics", 20.0)
    now = 41 * 3600.0
    found = explain(pool, "again", now)
    assert found is not None
    assert found.position == 2
    ask(pool, "more", "key:maths", now)  # puts them in order by what was used until now
    found = explain(pool, "again", now)
    assert found is not None
    assert "; account physics is ahead of yours: it used no GPU lately, yours 2" in found.summary
    assert found.summary.endswith("GPU hours")
    assert release(pool, held, now + 1)[0][0] == "new"


@pytest.mark.parametrize(
    ("seconds", "spoken"),
    [
        (0.0, "no GPU"),
        (61.0, "1 GPU minute"),
        (720.0, "12 GPU minutes"),
        (3600.0, "1 GPU hour"),
        (3.5 * 3600, "3.5 GPU hours"),
        (41 * 3600.0, "41 GPU hours"),
    ],
)
def test_use_in_words(seconds: float, spoken: str) -> None:
    assert spoken_gpu_seconds(seconds) == spoken


def test_half_of_the_use_counts_after_a_half_life_and_shares_count_by_their_part() -> None:
    pool = pool_with(2)
    (whole,) = ask(pool, "whole", "user:1", 0.0)
    total_mb = pool.allocator.gpus["0"].last_seen.memory_total_mb  # type: ignore[union-attr]
    (part,) = ask(pool, "part", "user:2", 0.0, memory_mb=total_mb / 4, share=True)
    release(pool, whole, 3600.0)
    release(pool, part, 3600.0)
    fair_share = pool.fair_share
    assert fair_share is not None
    assert fair_share.used("user:1", 3600.0) == pytest.approx(3600.0, rel=0.02)
    assert fair_share.used("user:2", 3600.0) == pytest.approx(900.0, rel=0.02)
    assert fair_share.used("user:1", 3600.0 + DAY) == pytest.approx(fair_share.used("user:1", 3600.0) / 2)


def test_what_is_replicated_is_what_was_stored() -> None:
    pool = pool_with(1)
    ask(pool, "a", "user:1", 0.0)
    pool.replicate([], uses=[Use("user:1", 500.0, 0.0), Use("user:2", 7.0, 0.0)])
    assert pool.fair_share is not None
    assert pool.fair_share.used("user:2", 0.0) == 7.0
    assert 500.0 < pool.fair_share.used("user:1", 10.0) < 510.0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), age=st.sampled_from([2_000.0, 20_000.0]))
def test_nobody_waits_beyond_the_age_bound_and_what_came_before(seed: int, age: float) -> None:
    """With equal requests on one GPU: once a waiter is older than the bound, only earlier ones are served before it."""
    draw = random.Random(seed)
    pool = pool_with(1, fair_share_age_seconds=age)
    jobs = generated(60, draw)
    now, held, waiting = 0.0, "", {}
    for job in jobs:
        now += draw.uniform(0, 60)
        account = "user:1" if draw.random() < 0.2 else f"user:{draw.randrange(2, 9)}"
        granted = ask(pool, str(job.number), account, now)
        if granted:
            (held,) = granted
        else:
            waiting[str(job.number)] = now
    while held:
        now += draw.uniform(10, 600)
        served = release(pool, held, now)
        held = served[0][1] if served else ""
        for name, _ in served:
            since = waiting.pop(name)
            old = [other for other, at in waiting.items() if now - at > age and at < since]
            assert not old, f"{name} was served before {old}, which had waited for longer than {age} s"
    assert not waiting
