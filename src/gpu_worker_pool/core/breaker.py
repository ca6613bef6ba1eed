"""The circuit breaker of one endpoint: whether to call it now, and when again. Time and jitter are arguments."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import IllegalMoveError, State
from gpu_worker_pool.errors import IllegalEventError

if TYPE_CHECKING:
    from collections.abc import Mapping


class BreakerState(State):
    #: Every call goes through.
    CLOSED = "closed"
    #: It failed and is left alone until `retry_at`.
    OPEN = "open"
    #: One caller at a time may probe it.
    HALF_OPEN = "half_open"


#: For each state the next ones, and what leads there.
BREAKER_MOVES: Mapping[BreakerState, Mapping[BreakerState, str]] = {
    BreakerState.CLOSED: {BreakerState.OPEN: "a fetch and all its retries failed"},
    BreakerState.OPEN: {BreakerState.HALF_OPEN: "its time is over, or an administrator asks for a probe"},
    BreakerState.HALF_OPEN: {BreakerState.CLOSED: "the probe succeeded", BreakerState.OPEN: "the probe failed"},
}


class Breaker:
    """Every `try_enter` that returned True must be answered by exactly one `succeeded`, `failed` or `left`.

    A caller that entered before the breaker opened may answer after it did; such a late answer is ignored. The probe
    waits until all of them have answered, so that no late answer is taken for the probe's.
    """

    def __init__(self, open_seconds: float = 5.0, longest_open_seconds: float = 300.0) -> None:
        # False for NaN, too.
        if not 0 < open_seconds <= longest_open_seconds < inf:
            raise ValueError(
                "open_seconds must be above 0 and at most longest_open_seconds, which must be finite, "
                f"not {open_seconds!r} and {longest_open_seconds!r}"
            )
        self.open_seconds = open_seconds
        self.longest_open_seconds = longest_open_seconds
        #: When the next probe may be made; `None` while closed. In the past while half open.
        self.retry_at: float | None = None
        #: Failures in a row; late answers are not among them.
        self.failures: int = 0
        #: How often a working endpoint was lost; a failed probe does not count again.
        self.times_opened: int = 0
        # Doubled, because 2 to the power of `failures` would overflow some day.
        self._nominal_seconds = open_seconds
        self._not_before = -inf
        self._inside = 0
        self._last_state = BreakerState.CLOSED

    def __repr__(self) -> str:
        retry = "" if self.retry_at is None else f", retry_at={self.retry_at}"
        return f"<Breaker {self._last_state}, {self._inside} inside, {self.failures} failures in a row{retry}>"

    def state(self, now: float) -> BreakerState:
        return BreakerState.HALF_OPEN if self._is_open_time_over(now) else self._last_state

    def try_enter(self, now: float) -> bool:
        if self._last_state is not BreakerState.CLOSED:
            if self._inside or self.state(now) is not BreakerState.HALF_OPEN:
                return False
            if self._last_state is BreakerState.OPEN:
                self._move(BreakerState.HALF_OPEN)
        self._inside += 1
        return True

    def succeeded(self) -> None:
        self._leave()
        if self._last_state is BreakerState.HALF_OPEN:
            self._move(BreakerState.CLOSED)
            self.retry_at = None
            self._nominal_seconds = self.open_seconds
        if self._last_state is BreakerState.CLOSED:
            self.failures = 0

    def failed(self, now: float, jitter: float, not_before: float = -inf) -> None:
        """`jitter`, from 0 to below 1, spreads the probes of clients that lost the endpoint together.

        `not_before` is what the endpoint itself asked for.
        """
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be from 0 to below 1, not {jitter!r}")
        self._leave()
        if self._last_state is BreakerState.OPEN:
            return
        if self._last_state is BreakerState.CLOSED:
            self.times_opened += 1
        else:
            self._nominal_seconds = min(2 * self._nominal_seconds, self.longest_open_seconds)
        self._move(BreakerState.OPEN)
        self.failures += 1
        self.retry_at = max(now + self._nominal_seconds * (0.75 + 0.5 * jitter), not_before)
        self._not_before = not_before

    def left(self) -> None:
        """Leave without a verdict: the fetch was cancelled, or its answer says nothing about health."""
        self._leave()

    def probe_soon(self, now: float) -> None:
        """Let the next `try_enter` be a probe, whatever is left of the open time; still only one at a time."""
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now)

    def probe_by(self, at: float) -> None:
        """Let a probe be made by then, unless the endpoint asked for a longer pause."""
        if self.retry_at is not None:
            self.retry_at = max(min(self.retry_at, at), self._not_before)

    def _is_open_time_over(self, now: float) -> bool:
        return self._last_state is BreakerState.OPEN and self.retry_at is not None and now >= self.retry_at

    def _leave(self) -> None:
        if not self._inside:
            raise IllegalEventError("no caller is inside the breaker: a verdict needs a try_enter() that returned True")
        self._inside -= 1

    def _move(self, target: BreakerState) -> None:
        if target not in BREAKER_MOVES[self._last_state]:
            raise IllegalMoveError(f"a breaker does not go from {self._last_state} to {target}")
        self._last_state = target
