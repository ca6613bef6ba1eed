"""Monitors: poll endpoints at an interval and pass their statistics on.

Each endpoint has one fetch in flight at a time. A slow endpoint delays no other. The breaker decides when a failing
endpoint is polled; when an endpoint comes back, its GPUs join the pool gradually.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.core.breaker import BreakerState
from gpu_worker_pool.errors import NetworkRetryableError, RetryableError, ServiceRefusedError, ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from gpu_worker_pool.api.replies import Fetched
    from gpu_worker_pool.client.endpoints import Endpoint
    from gpu_worker_pool.models import GPUStats

logger: logging.Logger = logging.getLogger("gpu_worker_pool.gpu_monitor")

#: Time until all GPUs of an endpoint that came back are in the pool again.
RETURN_SECONDS = 10.0
#: Polling interval during that time.
RETURN_POLL_SECONDS = 1.0
#: Whatever goes wrong, the monitor does not spin.
SHORTEST_TURN_SECONDS = 0.01
#: A server whose Retry-After is longer counts as down; the fetch does not wait for it.
LONGEST_RETRY_SECONDS = 10.0


class StatsClient(Protocol):
    async def fetch(self) -> Fetched: ...


class GPUMonitor:
    """Polls one endpoint.

    `on_stats(endpoint, fetched, since_return)` and `on_lost(endpoint)` are called in the loop's thread;
    `since_return` is the time since the endpoint came back, or None. `callbacks`, a list that several monitors may
    share, and those given to `add_callback` get only the statistics.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: StatsClient,
        *,
        polling_interval: float,
        max_retries: int,
        health_check_interval: float,
        on_stats: Callable[[Endpoint, Fetched, float | None], object],
        on_lost: Callable[[Endpoint], object],
        callbacks: list[Callable[[GPUStats], object]] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.endpoint = endpoint
        self._client = client
        self._polling_interval = polling_interval
        #: Older readings cannot be used (rule 1).
        self._silence_seconds = max(3 * polling_interval, 15.0)
        self._max_retries = max_retries
        self._health_check_interval = health_check_interval
        self._on_stats = on_stats
        self._on_lost = on_lost
        self._draw = draw
        self._callbacks = [] if callbacks is None else callbacks
        self._woken = asyncio.Event()
        self._next_fetch: asyncio.Future[None] | None = None
        #: When the endpoint came back; None once all its GPUs are in the pool.
        self._returned_at: float | None = None
        self._problems: tuple[str, ...] = ()
        self._has_outcome = False
        self._bug = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"gpu-monitor {self.endpoint.endpoint_id}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._end_waiting()

    def add_callback(self, callback: Callable[[GPUStats], object]) -> None:
        self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[GPUStats], object]) -> None:
        self._callbacks.remove(callback)

    @property
    def current_stats(self) -> GPUStats | None:
        fetched = self.endpoint.last_fetched
        return None if fetched is None else fetched.stats

    def wake(self) -> None:
        """Poll now instead of at the next turn, unless the breaker is open."""
        if self.endpoint.breaker.state(time.monotonic()) is BreakerState.CLOSED:
            self._woken.set()

    async def next_fetch(self) -> None:
        """Wait for the end of the fetch in flight, or of the next one, whatever its outcome."""
        if self._next_fetch is None:
            self._next_fetch = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_fetch)

    def recover(self) -> None:
        """Poll now, whatever the breaker says, or as soon as the fetch in flight has ended."""
        self.endpoint.breaker.probe_soon(time.monotonic())
        self._woken.set()

    # --- turns ---

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            if await self._turn():
                self._end_waiting()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next_turn()):
                    await self._woken.wait()

    async def _turn(self) -> bool:
        """Returns whether the endpoint was polled."""
        breaker = self.endpoint.breaker
        state = breaker.state(time.monotonic())
        if not breaker.try_enter(time.monotonic()):
            return False
        self._has_outcome = False
        silence = self._watch_for_silence()
        try:
            await self._poll(is_probe=state is BreakerState.HALF_OPEN)
        except Exception as error:
            # A bug here or in a callback: the monitor must continue, and the turn must not count as a success.
            if repr(error) != self._bug:
                self._bug = repr(error)
                logger.exception("polling %s failed", self.endpoint.endpoint_id)
            self.endpoint.failed(error)
            self._lose(error)
        finally:
            if silence is not None:
                silence.cancel()
            if not self._has_outcome:
                breaker.left()
        self._log_breaker(state)
        return True

    def _watch_for_silence(self) -> asyncio.TimerHandle | None:
        """Declare a healthy endpoint lost when it stops answering, even before its last retry times out."""
        answered_at = self.endpoint.answered_at
        if answered_at is None or self.endpoint.is_lost:
            return None
        return asyncio.get_running_loop().call_later(
            max(answered_at + self._silence_seconds - time.monotonic(), 0.0), self._fall_silent
        )

    def _fall_silent(self) -> None:
        answered_at = self.endpoint.answered_at or 0.0
        error = NetworkRetryableError(f"no answer for {time.monotonic() - answered_at:.0f} s")
        self.endpoint.last_error = str(error)
        self._lose(error)

    async def _poll(self, *, is_probe: bool) -> None:
        breaker = self.endpoint.breaker
        attempt = 0
        while True:
            try:
                fetched = await self._client.fetch()
            except ServiceRefusedError as error:
                # It answers, so the breaker stays closed; but it cannot be used.
                self.endpoint.failed(error)
                breaker.succeeded()
                self._has_outcome = True
                self._lose(error)
                return
            except RetryableError as error:
                self.endpoint.failed(error)
                delay = backoff_seconds(attempt, self._draw())
                asked_for = error.retry_after_seconds if isinstance(error, ServiceRetryableError) else None
                delay = max(delay, asked_for or 0.0)
                if is_probe or attempt >= self._max_retries or delay > LONGEST_RETRY_SECONDS:
                    now = time.monotonic()
                    breaker.failed(now, self._draw(), not_before=now + (asked_for or 0.0))
                    breaker.probe_by(now + self._health_check_interval)
                    self._has_outcome = True
                    self._lose(error)
                    return
                attempt += 1
                await asyncio.sleep(delay)
            else:
                breaker.succeeded()
                self._has_outcome = True
                self._take(fetched)
                return

    def _seconds_to_next_turn(self) -> float:
        retry_at = self.endpoint.breaker.retry_at
        if retry_at is not None:
            wait = retry_at - time.monotonic()
        elif self._returned_at is not None:
            wait = min(RETURN_POLL_SECONDS, self._polling_interval)
        else:
            wait = self._polling_interval
        return max(wait, SHORTEST_TURN_SECONDS)

    def _log_breaker(self, before: BreakerState) -> None:
        endpoint_id, after = self.endpoint.endpoint_id, self.endpoint.breaker.state(time.monotonic())
        if after is not before:
            extra = {"event": "breaker", "endpoint_id": endpoint_id, "before": before.value, "after": after.value}
            logger.info("the breaker of %s changed from %s to %s", endpoint_id, before.value, after.value, extra=extra)

    # --- outcomes ---

    def _take(self, fetched: Fetched) -> None:
        endpoint = self.endpoint
        was_lost = endpoint.is_lost
        endpoint.answered(fetched)
        if fetched.problems != self._problems:  # logged once, not with every poll
            self._problems = fetched.problems
            for problem in fetched.problems:
                logger.warning("%s: %s", endpoint.endpoint_id, problem)
        if was_lost:
            self._returned_at = time.monotonic()
            logger.info(
                "endpoint %s is back",
                endpoint.endpoint_id,
                extra={"event": "endpoint_up", "endpoint_id": endpoint.endpoint_id},
            )
        since_return = None if self._returned_at is None else time.monotonic() - self._returned_at
        if since_return is not None and since_return >= RETURN_SECONDS:
            self._returned_at = since_return = None
        self._on_stats(endpoint, fetched, since_return)
        for callback in list(self._callbacks):
            try:
                callback(fetched.stats)
            # There is no await here, so a CancelledError is the callback's own.
            except (Exception, asyncio.CancelledError):
                logger.exception("a callback for new statistics failed")

    def _lose(self, error: Exception) -> None:
        endpoint = self.endpoint
        if not endpoint.is_lost:
            endpoint.lost()
            state = endpoint.breaker.state(time.monotonic()).value
            logger.warning(
                "endpoint %s is down: %s",
                endpoint.endpoint_id,
                error,
                extra={"event": "endpoint_down", "endpoint_id": endpoint.endpoint_id, "breaker": state},
            )
        self._returned_at = None
        self._on_lost(endpoint)

    def _end_waiting(self) -> None:
        waiting, self._next_fetch = self._next_fetch, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class MultiEndpointGPUMonitor:
    """A monitor for each of several endpoints."""

    def __init__(self, monitors: Iterable[GPUMonitor]) -> None:
        self._monitors = {monitor.endpoint.endpoint_id: monitor for monitor in monitors}

    def start(self) -> None:
        for monitor in self._monitors.values():
            monitor.start()

    async def stop(self) -> None:
        await asyncio.gather(*(monitor.stop() for monitor in self._monitors.values()))

    def add(self, monitor: GPUMonitor) -> None:
        self._monitors[monitor.endpoint.endpoint_id] = monitor
        monitor.start()

    def remove(self, endpoint_id: str) -> GPUMonitor:
        """The caller must stop it."""
        return self._monitors.pop(endpoint_id)

    def get(self, endpoint_id: str) -> GPUMonitor | None:
        return self._monitors.get(endpoint_id)

    async def next_fetches(self, timeout_seconds: float) -> None:
        """Wait until every endpoint has been polled once more, or the timeout expires."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*(monitor.next_fetch() for monitor in self._monitors.values()))


def coming_back(stats: GPUStats, since_return_seconds: float, in_use_before: Container[int] = ()) -> GPUStats:
    """The statistics of an endpoint that has just come back, with a fault on each GPU that may not be used yet.

    One GPU may be used at once, all after `RETURN_SECONDS`: otherwise every waiting request would go there at the same
    moment. GPUs that are faulty, or were in use when it came back, do not count.
    """
    usable = [row for row in stats.gpus_summary if row.fault is None and row.gpu_id not in in_use_before]
    joined = max(1, math.floor(len(usable) * since_return_seconds / RETURN_SECONDS))
    if joined >= len(usable):
        return stats
    left = max(RETURN_SECONDS - since_return_seconds, 0.0)
    fault = f"its server has just come back; it joins the pool within {math.ceil(left)} s"
    waiting = {row.gpu_id for row in usable[joined:]}
    rows = [replace(row, fault=fault) if row.gpu_id in waiting else row for row in stats.gpus_summary]
    return replace(stats, gpus_summary=rows)
