"""One request at several services: one outcome, and no place or lease left where it is not needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fakes.lease_service import FakeLeaseService, ask_for

from gpu_worker_pool.cli.running.asking import Asking
from gpu_worker_pool.cli.running.values import Service
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    RequestCancelledError,
    RequestEndedError,
    ServiceRefusedError,
    ServiceRetryableError,
    ServiceUnavailableTimeoutError,
    WorkerTimeoutError,
)
from gpu_worker_pool.leases.values import HeldLease, StillWaiting


@dataclass
class Fake(FakeLeaseService):
    longest_silence_seconds: float = math.inf

    async def rest(self) -> None: ...

    def forget(self) -> None: ...


class Heard:
    """What is told while it waits."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.troubles: list[str] = []

    def tell_waiting(self, service: Service, _waiting: StillWaiting) -> None:
        self.waiting.append(service.endpoint_id)

    def tell_trouble(self, service: Service, _error: GPUWorkerPoolError) -> None:
        self.troubles.append(service.endpoint_id)


def asking(*services: Fake) -> tuple[Asking, Heard]:
    heard = Heard()
    return Asking([(service, ask_for()) for service in services], heard.tell_waiting, heard.tell_trouble), heard


Lease = Coroutine[Any, Any, tuple[Service, HeldLease]]


def outcome(make: Callable[[], Lease]) -> tuple[Service, HeldLease]:
    return asyncio.run(make())


async def in_the_end(ask: Asking) -> tuple[Service, HeldLease]:
    """What is granted, once every other place is given up."""
    won = await ask.lease(None, is_no_wait=False)
    await ask.until_given_up()
    return won


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():  # whoever is waited for tells nobody
        await asyncio.sleep(0.001)


def test_the_first_that_has_something_is_asked_alone() -> None:
    first, second = Fake("first"), Fake("second")
    service, lease = outcome(lambda: asking(first, second)[0].lease(None, is_no_wait=False))
    assert (service, lease) == (first, next(iter(first.held.values())))
    assert second.calls == []


def test_one_that_is_silent_does_not_keep_the_next_from_being_asked() -> None:
    silent, second = Fake("silent", delay_seconds=0.0), Fake("second")
    silent.on_the_way_seconds = iter([math.inf])
    service, _ = outcome(lambda: in_the_end(asking(silent, second)[0]))
    assert service is second
    assert silent.count("cancel") == 1, "it may have arrived there all the same"


async def waiting_at(*services: Fake) -> asyncio.Task[tuple[Service, HeldLease]]:
    """A request that waits at all of them."""
    for service in services:
        service.granting = False
    ask, heard = asking(*services)
    task = asyncio.create_task(in_the_end(ask))
    await until(lambda: {*heard.waiting} == {service.endpoint_id for service in services})
    return task


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def with_limit() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(with_limit())


def test_the_first_grant_wins_and_every_other_place_is_given_up() -> None:
    async def test() -> None:
        first, second = Fake("first"), Fake("second")
        task = await waiting_at(first, second)
        second.granting = True
        second.wake()
        service, lease = await task
        assert (service, lease.endpoint_id) == (second, "second")
        assert (first.count("cancel"), first.count("release")) == (1, 0)
        assert (second.count("cancel"), second.count("release")) == (0, 0)

    run(test)


def test_a_second_grant_of_the_same_instant_is_given_back() -> None:
    async def test() -> None:
        first, second = Fake("first"), Fake("second")
        task = await waiting_at(first, second)
        for service in (first, second):
            service.granting = True
            service.wake()
        won, lease = await task
        assert won is first
        assert [*first.held.values()] == [lease]
        assert second.held == {}
        assert second.count("release") == 1

    run(test)


def test_whoever_takes_it_back_has_no_place_left() -> None:
    async def test() -> None:
        first, second = Fake("first"), Fake("second")
        task = await waiting_at(first, second)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert first.count("cancel") == second.count("cancel") == 1

    run(test)


def test_gpus_are_kept_for_it_in_one_place() -> None:
    async def test() -> None:
        first, second = Fake("first"), Fake("second")
        task = await waiting_at(first, second)
        assert [may_reserve for _, may_reserve in first.polls] == [True] * len(first.polls)
        assert [may_reserve for _, may_reserve in second.polls] == [False] * len(second.polls)
        task.cancel()

    run(test)


@pytest.mark.parametrize("error", [ImpossibleRequestError(reasons=("no H100",)), ServiceRefusedError("no key")])
def test_what_is_final_at_one_excludes_that_one_only(error: GPUWorkerPoolError) -> None:
    first, second = Fake("first", failing={"acquire": error}), Fake("second")
    service, _ = outcome(lambda: asking(first, second)[0].lease(None, is_no_wait=False))
    assert service is second


def test_what_is_final_everywhere_is_told_of_all() -> None:
    impossible, refused = ImpossibleRequestError(reasons=("no H100",)), ServiceRefusedError("no key")
    cases: list[tuple[list[GPUWorkerPoolError], type[GPUWorkerPoolError]]] = [
        ([impossible, impossible], ImpossibleRequestError),
        ([impossible, refused], ServiceRefusedError),
    ]
    for errors, kind in cases:
        services = [Fake(f"server-{number}", failing={"acquire": error}) for number, error in enumerate(errors)]
        with pytest.raises(kind, match=r"server-0: .*; server-1: ") as raised:
            outcome(lambda services=services: asking(*services)[0].lease(None, is_no_wait=False))
        assert type(raised.value) is kind
        assert [service.count("cancel") for service in services] == [0, 0], "there is nothing to give up"
    with pytest.raises(ServiceRefusedError) as alone:
        outcome(lambda: asking(Fake(failing={"acquire": refused}))[0].lease(None, is_no_wait=False))
    assert alone.value is refused


def test_whoever_does_not_wait_is_told_and_leaves_no_place() -> None:
    busy = Fake(granting=False)
    with pytest.raises(WorkerTimeoutError, match="all are busy"):
        outcome(lambda: asking(busy)[0].lease(None, is_no_wait=True))
    assert busy.count("cancel") == 1


def test_out_of_time() -> None:
    busy = Fake(granting=False)
    with pytest.raises(WorkerTimeoutError) as late:
        outcome(lambda: asking(busy)[0].lease(0.5, is_no_wait=False))
    assert not isinstance(late.value, ServiceUnavailableTimeoutError)
    assert busy.count("cancel") == 1
    away = Fake(failing={"acquire": ServiceRetryableError("connection refused")})
    ask, heard = asking(away)
    with pytest.raises(ServiceUnavailableTimeoutError, match="fake: connection refused"):
        outcome(lambda: ask.lease(0.5, is_no_wait=False))
    assert set(heard.troubles) == {"fake"}


def test_a_request_that_has_ended_is_made_anew_unless_somebody_ended_it() -> None:
    async def test() -> None:
        fake = Fake(failing={"acquire": RequestEndedError(state="given_up")})
        fake.before = lambda _: fake.failing.clear() if fake.calls[0] != fake.calls[-1] else None
        _, lease = await asking(fake)[0].lease(None, is_no_wait=False)
        first = fake.calls[0][1]
        assert lease.ask.request_id != first
        cancelled = Fake(failing={"acquire": RequestEndedError(state="cancelled")})
        with pytest.raises(RequestCancelledError):
            await asking(cancelled)[0].lease(None, is_no_wait=False)

    run(test)
