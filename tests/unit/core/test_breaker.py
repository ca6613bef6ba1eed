"""The breaker: its moves and times exactly, and at most one probe whatever the order of calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker_pool.core.breaker import BREAKER_MOVES, Breaker, BreakerState
from gpu_worker_pool.errors import IllegalEventError

#: The jitter that leaves the nominal time as it is.
NO_JITTER = 0.5


def opened(now: float = 0.0, **kwargs: float) -> Breaker:
    breaker = Breaker(**kwargs)
    assert breaker.try_enter(now)
    breaker.failed(now, NO_JITTER)
    return breaker


def fail_probe(breaker: Breaker, jitter: float = NO_JITTER) -> float:
    """At the first moment it is allowed; how long the breaker is open after that."""
    now = breaker.retry_at
    assert now is not None
    assert breaker.try_enter(now)
    breaker.failed(now, jitter)
    assert breaker.retry_at is not None
    return breaker.retry_at - now


# --- one by one ---


def test_the_states_have_the_documented_names() -> None:
    assert [str(state) for state in BreakerState] == ["closed", "open", "half_open"]


def test_closed_lets_everyone_in() -> None:
    breaker = Breaker()
    assert [breaker.try_enter(float(now)) for now in range(5)] == [True] * 5
    breaker.succeeded()
    assert breaker.state(5.0) is BreakerState.CLOSED
    assert (breaker.retry_at, breaker.failures, breaker.times_opened) == (None, 0, 0)


def test_one_failure_opens_it_until_exactly_its_time_is_over() -> None:
    breaker = opened(100.0)
    assert (breaker.retry_at, breaker.failures, breaker.times_opened) == (105.0, 1, 1)
    for now, state in [
        (100.0, BreakerState.OPEN),
        (104.999, BreakerState.OPEN),
        (105.0, BreakerState.HALF_OPEN),
        (1e9, BreakerState.HALF_OPEN),
    ]:
        assert breaker.state(now) is state
    assert not breaker.try_enter(104.999)
    assert breaker.try_enter(105.0)


@pytest.mark.fault(15)
def test_half_open_lets_exactly_one_in_until_it_says_how_it_went() -> None:
    breaker = opened()
    assert [breaker.try_enter(5.0) for _ in range(3)] == [True, False, False]
    assert not breaker.try_enter(1e6)


def test_a_probe_that_succeeds_closes_it_and_everything_starts_anew() -> None:
    breaker = opened()
    fail_probe(breaker)
    fail_probe(breaker)
    now = breaker.retry_at
    assert now == 35.0
    assert breaker.try_enter(now)
    breaker.succeeded()
    assert breaker.state(36.0) is BreakerState.CLOSED
    assert (breaker.retry_at, breaker.failures, breaker.times_opened) == (None, 0, 1)
    assert [breaker.try_enter(36.0) for _ in range(2)] == [True, True]
    breaker.failed(40.0, NO_JITTER)
    assert (breaker.retry_at, breaker.failures, breaker.times_opened) == (45.0, 1, 2)


def test_every_failed_probe_doubles_the_open_time_up_to_the_longest() -> None:
    breaker = opened()
    times = [fail_probe(breaker) for _ in range(9)]
    assert times == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0]
    assert (breaker.failures, breaker.times_opened) == (10, 1)


def test_thousands_of_failures_do_not_overflow() -> None:
    breaker = opened()
    for _ in range(5_000):
        fail_probe(breaker)
    # Less exact than at first: the moment itself has grown by then.
    assert fail_probe(breaker) == pytest.approx(300.0)


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 7.5), (0.25, 8.75), (0.5, 10.0), (0.75, 11.25)])
def test_jitter_spreads_the_open_time_by_a_quarter_each_way(jitter: float, seconds: float) -> None:
    assert fail_probe(opened(), jitter) == seconds


def test_a_cancelled_probe_frees_its_place_and_says_nothing() -> None:
    breaker = opened()
    assert breaker.try_enter(5.0)
    breaker.left()
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert (breaker.failures, breaker.retry_at) == (1, 5.0)
    assert [breaker.try_enter(5.0) for _ in range(2)] == [True, False]


def test_one_who_leaves_while_it_is_closed_changes_nothing() -> None:
    breaker = Breaker()
    assert breaker.try_enter(0.0)
    breaker.left()
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.failures == 0


def test_an_administrator_may_ask_for_a_probe_at_once_but_only_one() -> None:
    breaker = opened()
    breaker.probe_soon(1.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    assert [breaker.try_enter(1.0) for _ in range(2)] == [True, False]
    breaker.probe_soon(1.0)
    assert not breaker.try_enter(1.0)
    breaker.failed(2.0, NO_JITTER)
    assert breaker.retry_at == 12.0


def test_asking_for_a_probe_never_puts_one_off_and_means_nothing_while_closed() -> None:
    breaker = opened()
    breaker.probe_soon(50.0)
    assert breaker.retry_at == 5.0
    closed = Breaker()
    closed.probe_soon(0.0)
    assert (closed.state(0.0), closed.retry_at) == (BreakerState.CLOSED, None)


def test_late_answers_of_those_who_entered_before_it_opened_change_nothing() -> None:
    breaker = Breaker()
    for _ in range(4):
        assert breaker.try_enter(0.0)
    breaker.failed(0.0, NO_JITTER)
    breaker.failed(1.0, NO_JITTER)
    breaker.succeeded()
    assert breaker.state(2.0) is BreakerState.OPEN
    assert (breaker.retry_at, breaker.failures, breaker.times_opened) == (5.0, 1, 1)
    # One is still in there: its answer could be taken for the probe's.
    assert not breaker.try_enter(5.0)
    breaker.failed(6.0, NO_JITTER)
    assert breaker.retry_at == 5.0
    assert breaker.try_enter(6.0)


@pytest.mark.parametrize("verdict", ["succeeded", "failed", "left"])
def test_a_verdict_of_nobody_is_refused_and_changes_nothing(verdict: str) -> None:
    for breaker in (Breaker(), opened()):
        before = dict(vars(breaker))
        with pytest.raises(IllegalEventError, match="no caller is inside"):
            {
                "succeeded": lambda it: it.succeeded(),
                "failed": lambda it: it.failed(1.0, NO_JITTER),
                "left": lambda it: it.left(),
            }[verdict](breaker)
        assert vars(breaker) == before


@pytest.mark.parametrize("jitter", [-0.1, 1.0, math.nan])
def test_a_jitter_out_of_range_is_refused_and_changes_nothing(jitter: float) -> None:
    breaker = Breaker()
    assert breaker.try_enter(0.0)
    before = dict(vars(breaker))
    with pytest.raises(ValueError, match="jitter must be from 0 to below 1"):
        breaker.failed(0.0, jitter)
    assert vars(breaker) == before


@pytest.mark.parametrize("times", [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_times_that_make_no_sense_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="open_seconds must be above 0"):
        Breaker(*times)


def test_its_repr_is_a_status_line() -> None:
    assert repr(opened()) == "<Breaker open, 0 inside, 1 failures in a row, retry_at=5.0>"
    assert repr(Breaker()) == "<Breaker closed, 0 inside, 0 failures in a row>"


def test_the_table_of_moves_is_whole() -> None:
    assert BREAKER_MOVES.keys() == set(BreakerState)
    assert {(origin, target) for origin, targets in BREAKER_MOVES.items() for target in targets} == {
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "closed"),
        ("half_open", "open"),
    }


# --- in any order ---

times = st.floats(0.001, 1e6)


class BreakerMachine(RuleBasedStateMachine):
    """Callers come, answer late, are cancelled; time passes as it likes."""

    @initialize(open_seconds=times, factor=st.floats(1.0, 1000.0))
    def begin(self, open_seconds: float, factor: float) -> None:
        self.breaker = Breaker(open_seconds, open_seconds * factor)
        self.now = 0.0
        self.state = BreakerState.CLOSED
        #: Of each caller inside, whether it is a probe.
        self.inside: list[bool] = []
        self.failures = 0

    @rule()
    def enter(self) -> None:
        state = self.breaker.state(self.now)
        entered = self.breaker.try_enter(self.now)
        assert entered is (state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self.inside))
        if entered:
            self.inside.append(state is not BreakerState.CLOSED)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), jitter=st.floats(0.0, 1.0, exclude_max=True))
    def fail(self, data: st.DataObject, jitter: float) -> None:
        is_probe, was, retry_at = self._someone(data), self.breaker.state(self.now), self.breaker.retry_at
        self.breaker.failed(self.now, jitter)
        if is_probe or was is BreakerState.CLOSED:
            self.failures += 1
            # Compared with a margin, because the largest of these times have no exact double.
            nominal = min(self.breaker.open_seconds * 2.0 ** (self.failures - 1), self.breaker.longest_open_seconds)
            assert self.breaker.state(self.now) is BreakerState.OPEN
            assert self.breaker.retry_at is not None
            open_seconds = self.breaker.retry_at - self.now
            assert 0.7499 * nominal <= open_seconds <= 1.2501 * nominal
        else:
            assert self.breaker.retry_at == retry_at, "a late answer moves no probe"

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        is_probe, was = self._someone(data), self.breaker.state(self.now)
        self.breaker.succeeded()
        if is_probe or was is BreakerState.CLOSED:
            self.failures = 0
            assert self.breaker.state(self.now) is BreakerState.CLOSED
        else:
            assert self.breaker.state(self.now) is was, "a late answer closes nothing"

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._someone(data)
        was = self.breaker.state(self.now)
        self.breaker.left()
        assert self.breaker.state(self.now) is was

    @rule()
    def ask_for_a_probe(self) -> None:
        was = self.breaker.state(self.now)
        self.breaker.probe_soon(self.now)
        if was is not BreakerState.CLOSED:
            assert self.breaker.state(self.now) is BreakerState.HALF_OPEN

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.retry_at is not None)
    @rule()
    def its_time_is_over(self) -> None:
        assert self.breaker.retry_at is not None
        self.now = max(self.now, self.breaker.retry_at)
        assert self.breaker.state(self.now) is BreakerState.HALF_OPEN

    @invariant()
    def at_most_one_probe(self) -> None:
        assert sum(self.inside) <= 1
        assert not any(self.inside) or self.breaker.state(self.now) is BreakerState.HALF_OPEN

    @invariant()
    def only_legal_moves(self) -> None:
        state = self.breaker.state(self.now)
        assert state is self.state or state in BREAKER_MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    @invariant()
    def what_it_tells_agrees(self) -> None:
        is_closed = self.breaker.state(self.now) is BreakerState.CLOSED
        assert (self.breaker.retry_at is None) == is_closed
        assert self.breaker.failures == self.failures
        assert (self.breaker.failures == 0) is is_closed

    def _someone(self, data: st.DataObject) -> bool:
        return self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1), label="who"))


TestBreakerInAnyOrder = BreakerMachine.TestCase
TestBreakerInAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
