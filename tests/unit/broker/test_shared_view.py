"""A view that many look at is built once, and shows what was there when it was asked for."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.broker.shared_view import SharedView


class Counted:
    def __init__(self) -> None:
        self.now = 0.0
        self.value = 0
        self.builds = 0
        self.seconds = 0.0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.view = SharedView(self.build, lambda: self.now)

    async def build(self) -> int:
        self.builds += 1
        found = self.value
        await self.may_go_on.wait()
        self.now += self.seconds
        return found

    def change(self) -> None:
        self.value += 1
        self.view.outdate()


async def test_it_is_built_once_for_all_until_something_changes_or_it_is_old() -> None:
    counted = Counted()
    assert await asyncio.gather(*(counted.view.get() for _ in range(400))) == [0] * 400
    assert await counted.view.get() == 0
    assert counted.builds == 1
    counted.change()
    assert await asyncio.gather(*(counted.view.get() for _ in range(400))) == [1] * 400
    assert counted.builds == 2
    counted.now += 1.0
    await counted.view.get()
    assert counted.builds == 3


async def test_who_asks_after_a_change_is_not_shown_what_was_before_it() -> None:
    counted = Counted()
    counted.may_go_on.clear()
    early = asyncio.ensure_future(counted.view.get())
    await asyncio.sleep(0.01)
    counted.change()
    late = [asyncio.ensure_future(counted.view.get()) for _ in range(10)]
    await asyncio.sleep(0.01)
    counted.may_go_on.set()
    assert await early == 0
    assert await asyncio.gather(*late) == [1] * 10
    assert counted.builds == 2


async def test_what_is_slow_to_build_is_built_less_often_and_never_old() -> None:
    counted = Counted()
    counted.seconds = 0.02
    loop = asyncio.get_running_loop()
    await counted.view.get()
    begun = loop.time()
    counted.change()
    assert await counted.view.get() == 1
    assert loop.time() - begun >= 0.17


async def test_a_failure_is_told_to_all_who_asked_and_not_remembered() -> None:
    counted = Counted()
    failing = SharedView(lambda: counted.build() if counted.value else _fails(), lambda: counted.now)
    found = await asyncio.gather(*(failing.get() for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in found] == ["no ledger"] * 3
    counted.value = 7
    assert await failing.get() == 7


async def _fails() -> int:
    raise OSError("no ledger")


async def test_who_goes_away_takes_it_from_nobody() -> None:
    counted = Counted()
    counted.may_go_on.clear()
    first, second = (asyncio.ensure_future(counted.view.get()) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    counted.may_go_on.set()
    assert await second == 0
    with pytest.raises(asyncio.CancelledError):
        await first
