"""One request at several services: the first grant counts at once, and nobody waits for a service that is silent."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.cli.running import asking as asking_module
from gpu_worker_pool.cli.running.asking import Asking
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ServiceUnavailableTimeoutError
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeaseAsk, StillWaiting


class _Service:
    """Notes what it was asked."""

    longest_silence_seconds = 60.0

    def __init__(self, name: str) -> None:
        self.endpoint_id = name
        self.asked: list[str] = []

    async def rest(self) -> None:
        pass

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:  # noqa: ARG002
        self.asked.append("acquire")
        return HeldLease(self.endpoint_id, "lease-1", 1, (), ask, LeaseLife(ask.ttl_seconds, 0.0))

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        raise NotImplementedError

    async def release(self, lease: HeldLease) -> None:  # noqa: ARG002
        self.asked.append("release")

    async def cancel(self, ask: LeaseAsk) -> None:  # noqa: ARG002
        self.asked.append("cancel")

    def forget(self) -> None:
        pass


class _Silent(_Service):
    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        await super().acquire(ask, wait_seconds=wait_seconds, may_reserve=may_reserve)
        return await asyncio.Future[HeldLease]()

    async def cancel(self, ask: LeaseAsk) -> None:
        await super().cancel(ask)
        await asyncio.Future[None]()


def _asking(*services: _Service) -> Asking:
    asks = [(service, LeaseAsk.new("worker", Requirements(), None, 60.0)) for service in services]
    return Asking(asks, lambda *_: None, lambda *_: None)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEDGE_SECONDS", "LAST_WORD_SECONDS", "FIRST_ANSWER_SECONDS"):
        monkeypatch.setattr(asking_module, name, 0.01)


@pytest.mark.usefixtures("hurried")
async def test_a_grant_does_not_wait_for_a_service_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "GIVE_UP_SECONDS", 3600.0)
    silent, good = _Silent("silent"), _Service("good")
    async with asyncio.timeout(10):
        service, held = await _asking(silent, good).lease(None, is_no_wait=False)
    assert (service, held.lease_id) == (good, "lease-1")


@pytest.mark.usefixtures("hurried")
async def test_the_other_places_are_given_up_all_the_same_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "GIVE_UP_SECONDS", 0.05)
    silent, good = _Silent("silent"), _Service("good")
    asking = _asking(silent, good)
    async with asyncio.timeout(10):
        await asking.lease(None, is_no_wait=False)
        await asking.until_given_up()
    assert silent.asked == ["acquire", "cancel"]
    assert good.asked == ["acquire"]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("is_no_wait", [False, True])
async def test_the_time_is_over_also_where_nobody_answers(monkeypatch: pytest.MonkeyPatch, is_no_wait: bool) -> None:
    monkeypatch.setattr(asking_module, "GIVE_UP_SECONDS", 0.05)
    silent = _Silent("silent")
    with pytest.raises(ServiceUnavailableTimeoutError, match="silent: has not answered"):
        async with asyncio.timeout(10):
            await _asking(silent).lease(None if is_no_wait else 0.01, is_no_wait=is_no_wait)
    assert silent.asked == ["acquire", "cancel"]


async def test_once_somebody_has_won_nobody_else_is_bothered() -> None:
    first, second = _Service("first"), _Service("second")
    asking = _asking(first, second)
    service, _ = await asking.lease(None, is_no_wait=False)
    await asking.until_given_up()
    assert service is first
    assert second.asked == []
