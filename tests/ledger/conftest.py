"""Tests of `opened` run for every kind of ledger there is; those of `lasting` for the kinds that outlive a process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_worker_pool.core import PoolSettings, Ticked
from gpu_worker_pool.ledger import Ledger
from tests.ledger.places import InMemory, InSQLite, Place, Told

LASTING = [InSQLite]
KINDS = [InMemory, *LASTING]


class Opened:
    """A place, and whatever was opened there; closed after the test."""

    def __init__(self, place: Place, stack: contextlib.AsyncExitStack) -> None:
        self.place = place
        self.clock = place.clock
        self._stack = stack
        #: What the ledger that was opened last has told.
        self.told = Told()

    def __call__(self, settings: PoolSettings | None = None, told: Told | None = None) -> Ledger:
        self.told = Told() if told is None else told
        ledger = self.place.open(self.told, settings)
        self._stack.push_async_callback(ledger.close)
        return ledger

    async def serves(self, ledger: Ledger, seconds: float) -> None:
        """Time passes, and the ledger is served: a leap of the clock would be an outage."""
        while seconds > 0:
            self.clock.advance(min(seconds, 1.0))
            seconds -= 1.0
            await ledger.submit(Ticked())


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with contextlib.AsyncExitStack() as stack:
        yield Opened(request.param(tmp_path), stack)


@pytest.fixture(params=LASTING, ids=lambda kind: kind.__name__)
async def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with contextlib.AsyncExitStack() as stack:
        yield Opened(request.param(tmp_path), stack)
