"""Backoff with full jitter: any time up to a bound that doubles, and never more than the longest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.backoff import backoff_seconds

ALMOST_ONE = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [(0, 0.25), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0), (6, 5.0), (1_000_000, 5.0), (10**400, 5.0)],
)
def test_the_bound_doubles_up_to_the_longest(attempt: int, seconds: float) -> None:
    assert backoff_seconds(attempt, 0.5) == seconds


def test_base_and_longest_can_be_given() -> None:
    assert [backoff_seconds(attempt, 0.5, base=2.0, longest=7.0) for attempt in range(3)] == [1.0, 2.0, 3.5]


@given(
    attempt=st.integers(0, 10_000),
    draw=st.floats(0.0, 1.0, exclude_max=True),
    base=st.floats(0.001, 1e6),
    longest=st.floats(0.001, 1e6),
)
def test_is_a_share_of_the_bound(attempt: int, draw: float, base: float, longest: float) -> None:
    bound = backoff_seconds(attempt, ALMOST_ONE, base, longest)
    assert backoff_seconds(attempt, 0.0, base, longest) == 0.0
    assert 0.0 <= backoff_seconds(attempt, draw, base, longest) <= bound <= longest
    assert bound <= backoff_seconds(attempt + 1, ALMOST_ONE, base, longest)


@pytest.mark.parametrize("draw", [-0.1, 1.0, math.nan])
def test_a_draw_out_of_range_is_refused(draw: float) -> None:
    with pytest.raises(ValueError, match="draw must be from 0 to below 1"):
        backoff_seconds(0, draw)


def test_a_negative_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="attempt must not be negative"):
        backoff_seconds(-1, 0.5)
