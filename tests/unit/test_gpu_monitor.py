"""Monitors: who asks when, what a failure does to the breaker, and how an endpoint comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gpu_worker_pool.api.http_client import Fetched
from gpu_worker_pool.client.endpoints import Endpoint, EndpointManager
from gpu_worker_pool.client.monitor import RETURN_SECONDS, GPUMonitor, MultiEndpointGPUMonitor, coming_back
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.core.breaker import BreakerState
from gpu_worker_pool.errors import (
    NetworkRetryableError,
    RetryableError,
    ServiceRefusedError,
    ServiceRetryableError,
)
from gpu_worker_pool.models import GPUInfo, GPUStats


def stats(count: int = 2) -> GPUStats:
    rows = [GPUInfo(index, "A", 0.0, 0.0) for index in range(count)]
    return GPUStats(count, None, None, None, rows, None, "")


class Server:
    """Answers as it is told, and counts."""

    def __init__(self) -> None:
        self.fetches = 0
        self.at_once = 0
        self.most_at_once = 0
        self.error: Exception | None = None
        self.fails_once = False
        self.is_silent = False
        self.problems: tuple[str, ...] = ()

    async def fetch(self) -> Fetched:
        self.fetches += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.is_silent:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if self.error is not None:
                error, self.error = self.error, None if self.fails_once else self.error
                raise error
            return Fetched(stats(), self.problems, time.monotonic(), 0.001)
        finally:
            self.at_once -= 1


class Bench:
    """A monitor, the server it asks, and what it tells."""

    def __init__(self, name: str = "a", **settings: Any) -> None:
        self.server = Server()
        self.endpoint = Endpoint(EndpointConfig(name, f"http://{name}:1"))
        self.told: list[str] = []
        settings = {"polling_interval": 0.02, "max_retries": 2, "health_check_interval": 30.0, **settings}
        self.monitor = GPUMonitor(
            self.endpoint,
            self.server,
            on_stats=lambda endpoint, fetched, since_return: self.told.append("stats"),
            on_lost=lambda endpoint: self.told.append("lost"),
            draw=lambda: 0.0,
            **settings,
        )

    def state(self) -> BreakerState:
        return self.endpoint.breaker.state(time.monotonic())


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for bench in made:
        await bench.monitor.stop()


async def until(look: Callable[[], object], within_seconds: float = 5.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not look():
            await asyncio.sleep(0.005)


async def test_it_asks_again_and_again_and_tells(make: Callable[..., Bench]) -> None:
    bench = make()
    heard: list[GPUStats] = []
    bench.monitor.add_callback(heard.append)
    bench.monitor.start()
    await until(lambda: len(bench.told) >= 4)
    assert set(bench.told) == {"stats"}
    assert heard[0] == stats()
    assert bench.monitor.current_stats == stats()
    assert bench.endpoint.is_healthy
    assert bench.server.most_at_once == 1
    bench.monitor.remove_callback(heard.append)


async def test_a_callback_that_fails_stops_nothing(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.monitor.add_callback(lambda _: 1 / 0)
    bench.monitor.start()
    await until(lambda: len(bench.told) >= 3)
    assert "a callback for new statistics failed" in caplog.text


@pytest.mark.parametrize("error", [NetworkRetryableError("refused"), ServiceRetryableError("500", status=500)])
async def test_the_breaker_opens_when_a_fetch_and_its_retries_have_failed(
    make: Callable[..., Bench], error: RetryableError, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.server.error = error
    bench.monitor.start()
    await until(lambda: bench.told)
    assert bench.server.fetches == 3
    assert bench.told == ["lost"]
    assert bench.state() is BreakerState.OPEN
    assert bench.endpoint.last_error == str(error)
    assert not bench.endpoint.is_healthy
    await asyncio.sleep(0.1)
    assert bench.server.fetches == 3, "it is left alone"
    assert caplog.text.count("endpoint a is down") == 1


async def test_a_retry_that_succeeds_is_no_failure(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.server.error = NetworkRetryableError("once")
    bench.server.fails_once = True
    bench.monitor.start()
    await until(lambda: bench.told)
    assert bench.told[0] == "stats"
    assert bench.state() is BreakerState.CLOSED


async def test_a_refusal_is_told_and_not_counted(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.server.error = ServiceRefusedError("404", status=404)
    bench.monitor.start()
    await until(lambda: len(bench.told) >= 3)
    assert set(bench.told) == {"lost"}
    assert bench.state() is BreakerState.CLOSED
    assert not bench.endpoint.is_healthy
    bench.server.error = None
    await until(lambda: "stats" in bench.told)
    assert bench.endpoint.is_healthy


async def test_a_server_that_asks_for_patience_gets_it(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.server.error = ServiceRetryableError("busy", status=429, retry_after_seconds=0.3)
    begun = time.monotonic()
    bench.monitor.start()
    await until(lambda: bench.server.fetches == 2)
    assert time.monotonic() - begun >= 0.3


async def test_a_server_that_asks_for_much_patience_is_lost_meanwhile(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.server.error = ServiceRetryableError("busy", status=503, retry_after_seconds=200)
    bench.monitor.start()
    await until(lambda: bench.told == ["lost"])
    assert bench.server.fetches == 1
    retry = bench.endpoint.breaker_stats(time.monotonic())
    assert (retry["state"], retry["retry_in_seconds"] > 150) == ("open", True), "also before the next health check"


@pytest.mark.fault(15)
async def test_one_probe_when_half_open_and_a_recovery_closes_it(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = make()
    bench.server.error = NetworkRetryableError("down")
    bench.monitor.start()
    await until(lambda: bench.told == ["lost"])
    fetches = bench.server.fetches
    bench.monitor.recover()
    await until(lambda: bench.server.fetches > fetches)
    await asyncio.sleep(0.05)
    assert bench.server.fetches == fetches + 1, "a probe is not retried"
    assert bench.state() is BreakerState.OPEN
    assert caplog.text.count("endpoint a is down") == 1, "it was down already"
    bench.server.error = None
    bench.monitor.recover()
    await until(lambda: bench.told[-1] == "stats")
    assert bench.state() is BreakerState.CLOSED
    assert "endpoint a is back" in caplog.text
    events = [record.__dict__.get("event") for record in caplog.records]
    assert events == ["endpoint_down", "breaker", "breaker", "endpoint_up", "breaker"]
    moves = [
        (record.__dict__["before"], record.__dict__["after"]) for record in caplog.records if "after" in record.__dict__
    ]
    assert moves == [("closed", "open"), ("half_open", "open"), ("half_open", "closed")]


async def test_a_sick_endpoint_is_tried_at_the_next_health_check(make: Callable[..., Bench]) -> None:
    bench = make(health_check_interval=0.1)
    bench.server.error = NetworkRetryableError("down")
    bench.monitor.start()
    await until(lambda: bench.told)
    fetches, begun = bench.server.fetches, time.monotonic()
    await until(lambda: bench.server.fetches > fetches)
    assert time.monotonic() - begun < 1, "long before the breaker's five seconds"


async def test_a_cancelled_probe_frees_its_place(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.server.error = NetworkRetryableError("down")
    bench.monitor.start()
    await until(lambda: bench.told)
    bench.server.is_silent = True
    bench.monitor.recover()
    await until(lambda: bench.server.at_once == 1)
    await bench.monitor.stop()
    assert bench.endpoint.breaker.try_enter(time.monotonic() + 1000)


async def test_waking_asks_at_once_unless_the_breaker_is_open(make: Callable[..., Bench]) -> None:
    bench = make(polling_interval=3600.0)
    bench.monitor.start()
    await until(lambda: bench.told)
    bench.monitor.wake()
    await until(lambda: len(bench.told) == 2)
    bench.server.error = NetworkRetryableError("down")
    bench.monitor.wake()
    await until(lambda: bench.told[-1] == "lost")
    fetches = bench.server.fetches
    bench.monitor.wake()
    await asyncio.sleep(0.05)
    assert bench.server.fetches == fetches


async def test_one_fetch_serves_everybody_who_waits_for_it(make: Callable[..., Bench]) -> None:
    bench = make(polling_interval=3600.0)
    waiting = [asyncio.create_task(bench.monitor.next_fetch()) for _ in range(50)]
    bench.monitor.start()
    await asyncio.gather(*waiting)
    assert bench.server.fetches == 1


async def test_what_is_wrong_with_a_reply_is_said_once(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.server.problems = ("GPU 0 is listed twice",)
    bench.monitor.start()
    await until(lambda: len(bench.told) > 4)
    assert caplog.text.count("GPU 0 is listed twice") == 1


async def test_nobody_waits_longer_than_asked_for_silent_endpoints(make: Callable[..., Bench]) -> None:
    benches = [make(name=name) for name in "abc"]
    benches[1].server.is_silent = True
    monitors = MultiEndpointGPUMonitor(bench.monitor for bench in benches)
    monitors.start()
    begun = time.monotonic()
    await monitors.next_fetches(0.2)
    assert 0.15 < time.monotonic() - begun < 2
    assert [len(bench.told) > 0 for bench in benches[::2]] == [True, True]
    await monitors.stop()


async def test_a_bug_of_whoever_is_told_does_not_look_like_health(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.monitor._on_stats = lambda *_: 1 / 0
    bench.monitor.start()
    await until(lambda: bench.server.fetches > 5)
    await bench.monitor.stop()
    assert not bench.endpoint.is_healthy
    assert bench.endpoint.last_error == "division by zero"
    assert caplog.text.count("polling a failed") == 1


# --- coming back ---


@pytest.mark.parametrize(
    ("seconds", "joined"), [(0.0, 1), (1.0, 1), (2.0, 2), (5.0, 5), (9.9, 9), (RETURN_SECONDS, 10), (100.0, 10)]
)
def test_gpus_of_an_endpoint_that_is_back_join_one_after_the_other(seconds: float, joined: int) -> None:
    rows = coming_back(stats(10), seconds).gpus_summary
    assert [row.fault is None for row in rows] == [True] * joined + [False] * (10 - joined)


def test_what_waits_to_join_says_so() -> None:
    row = coming_back(stats(4), 2.5).gpus_summary[-1]
    assert row.fault == "its server has just come back; it joins the pool within 8 s"


def test_gpus_in_use_or_faulty_are_nobodys_to_rush_at() -> None:
    rows = [GPUInfo(0, "A", 0.0, 0.0), GPUInfo(1, "A", 0.0, 0.0, fault="lost"), *stats(6).gpus_summary[2:]]
    back = coming_back(GPUStats(6, None, None, None, rows, None, ""), 0.0, in_use_before={0})
    assert [row.gpu_id for row in back.gpus_summary if row.fault is None] == [0, 2]


def test_one_gpu_alone_is_back_at_once() -> None:
    alone = stats(1)
    assert coming_back(alone, 0.0) is alone


# --- endpoints ---


def test_endpoints_are_added_under_names_of_their_own() -> None:
    manager = EndpointManager([EndpointConfig("a", "http://a:8000")])
    assert manager.add("http://b:8000").endpoint_id == "b_8000"
    assert manager.add("c=http://b:9000").endpoint_id == "c"
    for taken in ("http://a:8000", "http://A:8000/", "x=http://b:8000", "a=http://new:1"):
        with pytest.raises(ValueError, match=r"already|taken|named"):
            manager.add(taken)
    with pytest.raises(ValueError, match="expected a URL"):
        manager.add("ftp://x")
    assert [endpoint.endpoint_id for endpoint in manager] == ["a", "b_8000", "c"]
    manager.remove("a")
    assert manager.get("a") is None
    assert manager.add("http://a:8000").endpoint_id == "a_8000"


def test_metrics_of_an_endpoint() -> None:
    endpoint = Endpoint(EndpointConfig("a", "http://a:1"))
    assert endpoint.metrics()["success_rate"] is None
    endpoint.answered(Fetched(stats(), (), 0.0, 0.010))
    endpoint.answered(Fetched(stats(), (), 0.0, 0.060))
    endpoint.failed(NetworkRetryableError("down"))
    metrics = endpoint.metrics()
    assert metrics["success_rate"] == pytest.approx(2 / 3)
    assert metrics["response_time_ms"] == pytest.approx(20.0)
    assert metrics["slowest_response_ms"] == pytest.approx(60.0)
    assert metrics["last_error"] == "down"
    assert 0 <= metrics["availability"] <= 1
