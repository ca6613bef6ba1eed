"""Monitors: ask endpoints again and again, and tell who wants to know what they said.

One fetch of an endpoint is in flight at a time, and serves everybody who asks meanwhile. A slow endpoint delays no
other. An endpoint that fails is asked as its breaker says; one that comes back beside others comes back gradually.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.core.breaker import BreakerState
from gpu_worker_pool.errors import RetryableError, ServiceRefusedError, ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.endpoints import Endpoint
    from gpu_worker_pool.http_client import Fetched
    from gpu_worker_pool.models import GPUStats

logger = logging.getLogger(__name__)

#: An endpoint that came back has all its GPUs in the pool again after so long.
RETURN_SECONDS = 10.0
#: And is asked so often meanwhile.
RETURN_POLL_SECONDS = 1.0
#: Whatever goes wrong, the monitor does not spin.
SHORTEST_TURN_SECONDS = 0.01
#: A server that asks for more than this is given up on for now, rather than waited for in the middle of a fetch.
LONGEST_RETRY_SECONDS = 10.0


class StatsClient(Protocol):
    async def fetch(self) -> Fetched: ...


class GPUMonitor:
    """Keeps asking one endpoint.

    `on_stats(endpoint, fetched)` and `on_lost(endpoint)` are called in the loop's thread. `callbacks`, a list that
    several monitors may share, and those given to `add_callback` get the statistics alone.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: StatsClient,
        *,
        polling_interval: float,
        max_retries: int,
        health_check_interval: float,
        on_stats: Callable[[Endpoint, Fetched], object],
        on_lost: Callable[[Endpoint], object],
        callbacks: list[Callable[[GPUStats], object]] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.endpoint = endpoint
        self._client = client
        self._polling_interval = polling_interval
        self._max_retries = max_retries
        self._health_check_interval = health_check_interval
        self._on_stats = on_stats
        self._on_lost = on_lost
        self._draw = draw
        self._callbacks = [] if callbacks is None else callbacks
        self._woken = asyncio.Event()
        self._next_fetch: asyncio.Future[None] | None = None
        self._not_before = 0.0
        #: When it was found to be back, while it still comes back.
        self.returned_at: float | None = None
        self._problems: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"gpu-monitor {self.endpoint.endpoint_id}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._tell_waiting()

    def add_callback(self, callback: Callable[[GPUStats], object]) -> None:
        self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[GPUStats], object]) -> None:
        self._callbacks.remove(callback)

    @property
    def current_stats(self) -> GPUStats | None:
        fetched = self.endpoint.last_fetched
        return None if fetched is None else fetched.stats

    def wake(self) -> None:
        """Ask now instead of at the next turn; an endpoint whose breaker is open is left alone."""
        if self.endpoint.breaker.state(time.monotonic()) is BreakerState.CLOSED:
            self._woken.set()

    async def next_fetch(self) -> None:
        """Wait for the fetch that comes next, or that is under way, to end well or not."""
        if self._next_fetch is None:
            self._next_fetch = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_fetch)

    def recover(self) -> None:
        """Ask now, whatever the breaker says."""
        self.endpoint.breaker.probe_soon(time.monotonic())
        self._not_before = 0.0
        self._woken.set()

    # --- one turn after the other ---

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._turn()
            except Exception:  # one bad turn must not be the last one
                logger.exception("asking %s failed", self.endpoint.endpoint_id)
            self._tell_waiting()
            try:
                async with asyncio.timeout(self._seconds_to_next_turn()):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _turn(self) -> None:
        now = time.monotonic()
        breaker = self.endpoint.breaker
        if now < self._not_before or not breaker.try_enter(now):
            return
        is_probe = breaker.state(now) is BreakerState.HALF_OPEN
        has_verdict = False
        try:
            attempt = 0
            while True:
                try:
                    fetched = await self._client.fetch()
                except ServiceRefusedError as error:
                    # It is there and does not want us: no reason to leave it alone, and none to use it.
                    self.endpoint.failed(error)
                    breaker.succeeded(time.monotonic())
                    has_verdict = True
                    self._lose(error)
                    return
                except RetryableError as error:
                    self.endpoint.failed(error)
                    delay = backoff_seconds(attempt, self._draw())
                    asked_for = error.retry_after_seconds if isinstance(error, ServiceRetryableError) else None
                    delay = max(delay, asked_for or 0.0)
                    if is_probe or attempt >= self._max_retries or delay > LONGEST_RETRY_SECONDS:
                        breaker.failed(time.monotonic(), self._draw())
                        has_verdict = True
                        self._not_before = time.monotonic() + (asked_for or 0.0)
                        self._lose(error)
                        return
                    attempt += 1
                    await asyncio.sleep(delay)
                else:
                    breaker.succeeded(time.monotonic())
                    has_verdict = True
                    self._take(fetched)
                    return
        finally:
            if not has_verdict:
                breaker.left()

    def _seconds_to_next_turn(self) -> float:
        now = time.monotonic()
        retry_at = self.endpoint.breaker.retry_at
        if retry_at is not None:
            health_check_at = now + self._health_check_interval
            if retry_at > health_check_at:
                self.endpoint.breaker.probe_soon(health_check_at)
            wait = min(retry_at, health_check_at) - now
        elif self.returned_at is not None:
            wait = min(RETURN_POLL_SECONDS, self._polling_interval)
        else:
            wait = self._polling_interval
        return max(wait, self._not_before - now, SHORTEST_TURN_SECONDS)

    # --- what came of it ---

    def _take(self, fetched: Fetched) -> None:
        endpoint = self.endpoint
        was_lost = endpoint.is_lost
        endpoint.answered(fetched)
        if fetched.problems != self._problems:  # said once, not with every poll
            self._problems = fetched.problems
            for problem in fetched.problems:
                logger.warning("%s: %s", endpoint.endpoint_id, problem)
        if was_lost:
            self.returned_at = time.monotonic()
            logger.info(
                "endpoint %s is back",
                endpoint.endpoint_id,
                extra={"event": "endpoint_up", "endpoint_id": endpoint.endpoint_id},
            )
        self._on_stats(endpoint, fetched)
        for callback in list(self._callbacks):
            try:
                callback(fetched.stats)
            except Exception:
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
        self.returned_at = None
        self._on_lost(endpoint)

    def _tell_waiting(self) -> None:
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

    async def remove(self, endpoint_id: str) -> None:
        await self._monitors.pop(endpoint_id).stop()

    def get(self, endpoint_id: str) -> GPUMonitor | None:
        return self._monitors.get(endpoint_id)

    async def next_fetches(self, timeout_seconds: float) -> None:
        """Wait until every endpoint has been asked once more, but no longer than that."""
        waiting = [asyncio.ensure_future(monitor.next_fetch()) for monitor in self._monitors.values()]
        if not waiting:
            return
        try:
            await asyncio.wait(waiting, timeout=timeout_seconds)
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def coming_back(stats: GPUStats, since_return_seconds: float) -> GPUStats:
    """Of an endpoint that has just come back, the GPUs that may be used already; the others say when.

    One at once, all after `RETURN_SECONDS`: otherwise everybody who waits would be sent to it in one moment.
    """
    count = len(stats.gpus_summary)
    joined = max(1, math.floor(count * since_return_seconds / RETURN_SECONDS))
    if joined >= count:
        return stats
    left = max(RETURN_SECONDS - since_return_seconds, 0.0)
    fault = f"its server has just come back; it joins the pool within {math.ceil(left)} s"
    rows = [
        row if number < joined or row.fault is not None else replace(row, fault=fault)
        for number, row in enumerate(stats.gpus_summary)
    ]
    return replace(stats, gpus_summary=rows)
