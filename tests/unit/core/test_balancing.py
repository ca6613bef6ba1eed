"""The balancing strategies do what they say, over many requests on equal and unequal endpoints."""

from __future__ import annotations

from collections import Counter

import pytest

from gpu_worker_pool.core import (
    ANY_GPU,
    Granted,
    Pool,
    PoolSettings,
    Released,
    Request,
    Requested,
    Requirements,
    Strategy,
    Unreachable,
)
from gpu_worker_pool.testing import gpus, snapshot


class Fleet:
    """Hosts of so many GPUs each; requests that hold their GPU, or give it back at once."""

    def __init__(self, strategy: Strategy, **hosts: int) -> None:
        self.pool = Pool(PoolSettings(strategy=strategy, remember_at_most=10))
        self.hosts = hosts
        self.requirements = ANY_GPU
        self.serial = 0
        for host in hosts:
            self.answers(host)

    def answers(self, host: str) -> None:
        readings = gpus(self.hosts[host], endpoint_id=host)
        self.pool.apply(snapshot(readings, at=0.0, endpoint_id=host), 0.0)

    def request(self) -> str:
        self.serial += 1
        (effect,) = self.pool.apply(Requested(Request(str(self.serial), self.requirements)), 0.0)
        assert isinstance(effect, Granted)
        self.last = effect.lease.lease_id
        return effect.lease.endpoint_id

    def passing(self, number: int) -> Counter[str]:
        """Requests one after the other, each given back before the next."""
        chosen: Counter[str] = Counter()
        for _ in range(number):
            chosen[self.request()] += 1
            self.pool.apply(Released(self.last), 0.0)
        return chosen


def test_round_robin_is_even_whatever_the_size() -> None:
    assert Fleet("round_robin", a=1, b=8, c=2).passing(9_999) == {"a": 3_333, "b": 3_333, "c": 3_333}


def test_weighted_is_in_proportion_to_size() -> None:
    chosen = Fleet("weighted", a=1, b=8, c=3).passing(12_000)
    assert chosen == {"a": 1_000, "b": 8_000, "c": 3_000}


def test_weighted_spreads_its_turns() -> None:
    fleet = Fleet("weighted", a=1, b=3)
    assert "aa" not in "".join(fleet.request() for _ in range(4))


def test_availability_takes_equal_endpoints_in_turn() -> None:
    assert Fleet("availability", a=4, b=4, c=4).passing(9_999) == {"a": 3_333, "b": 3_333, "c": 3_333}


def test_availability_prefers_the_largest_share_of_free_gpus_then_the_most() -> None:
    fleet = Fleet("availability", small=2, large=4)
    # 2/2 against 4/4: the share is equal, the number is not. Then 2/2 against 3/4: the share decides.
    assert [fleet.request() for _ in range(6)] == ["large", "small", "large", "large", "small", "large"]


def test_availability_fills_all_endpoints_to_the_same_share() -> None:
    fleet = Fleet("availability", a=10, b=20, c=30)
    chosen = Counter(fleet.request() for _ in range(30))
    assert chosen == {"a": 5, "b": 10, "c": 15}


@pytest.mark.parametrize("strategy", ["round_robin", "weighted", "availability"])
def test_an_endpoint_that_was_away_does_not_catch_up(strategy: Strategy) -> None:
    fleet = Fleet(strategy, a=4, b=4)
    fleet.passing(100)
    fleet.pool.apply(Unreachable("b"), 0.0)
    assert fleet.passing(1_000) == {"a": 1_000}
    fleet.answers("b")
    chosen = fleet.passing(100)
    assert abs(chosen["a"] - chosen["b"]) <= 2, f"b gets everything at once: {chosen}"


@pytest.mark.parametrize("strategy", ["round_robin", "weighted", "availability"])
def test_a_full_endpoint_is_passed_over(strategy: Strategy) -> None:
    fleet = Fleet(strategy, a=1, b=5)
    assert Counter(fleet.request() for _ in range(6)) == {"a": 1, "b": 5}


def test_special_requirements_are_balanced_too() -> None:
    fleet = Fleet("round_robin", a=4, b=4)
    fleet.requirements = Requirements(memory_mb=1000)
    assert fleet.passing(100) == {"a": 50, "b": 50}
