"""The protocol of a fleet in a world where everything goes wrong, and defects that this world must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.fleet.dispatcher import Dispatcher
from gpu_worker_pool.fleet.host_side import HostEffect, HostSide
from gpu_worker_pool.fleet.hosts import KnownHost
from gpu_worker_pool.fleet.messages import Welcome
from gpu_worker_pool.fleet.placements import Asked
from tests.unit.fleet.world import BrokenPromiseError, World, run

#: A run of so many steps has a dozen faults.
STEPS = 300


@given(seed=st.integers(min_value=0, max_value=2**32))
@settings(max_examples=8, deadline=None)
def test_promises_hold_whatever_goes_wrong(seed: int) -> None:
    run(seed, STEPS)


@pytest.mark.long
@given(seed=st.integers(min_value=0, max_value=2**32))
@settings(max_examples=400, deadline=None)
def test_promises_hold_in_more_than_100_000_steps(seed: int) -> None:
    run(seed, STEPS)


def test_without_faults_everybody_is_served() -> None:
    world = World(1)
    world.faults = False
    world.settle()  # all hosts have joined: what no host can serve is refused at once
    for _ in range(10):
        world.new_client()
    while any(host.side.order is None for host in world.hosts.values()):
        world.now = world.store.now = world.now + 0.25
        world.work()
    for _ in range(10):
        world.new_program()
    world.settle()
    assert (world.served, world.served_by_fleet) == (20, 10)


# --- defects that the world must find ---


class NoEpoch(HostSide):
    """Obeys whoever commands."""

    def _is_obeyed(self, epoch: int, owner: str) -> bool:  # noqa: ARG002
        return True


class LosesThePlace(Dispatcher):
    """A refused request goes to the end of the queue."""

    def _put_back(self, asked: Asked, now: float) -> None:
        asked.ticket = self.pool.ticket + 1000
        super()._put_back(asked, now)


class DoesNotListen(Dispatcher):
    """Grants before it has heard the hosts."""

    def _is_everybody_heard(self) -> bool:
        return True


class ForgetsRefusals(Dispatcher):
    """Takes a refused placement for done."""

    def _put_back(self, asked: Asked, now: float) -> None:
        pass


class ServesItself(HostSide):
    """Grants to what waits in its ledger by its own order."""

    def _welcomed(self, candidate: str, welcome: Welcome) -> list[HostEffect]:
        return super()._welcomed(candidate, replace(welcome, serves_hosts=False))


class ForgetsHosts(Dispatcher):
    """What waits in the ledger of a host loses its place with the link of that host."""

    def _leave_waiters(self, host: KnownHost, now: float) -> None:
        for request_id in list(host.waiting):
            self._drop_waiter(self._asked[request_id], now)


def steps_to_find(**options: Any) -> int:
    """How many steps it took until a promise was broken."""
    steps = 0
    for seed in range(200):
        world = World(seed, **options)
        try:
            for _ in range(STEPS):
                world.step()
            world.settle()
        except BrokenPromiseError:
            return steps + world.steps
        steps += world.steps
    raise AssertionError(f"not found in {steps} steps")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"side": NoEpoch}, 20_000),
        ({"dispatcher": LosesThePlace}, 5_000),
        ({"dispatcher": DoesNotListen}, 20_000),
        ({"dispatcher": ForgetsRefusals}, 5_000),
        ({"side": ServesItself}, 20_000),
        ({"dispatcher": ForgetsHosts}, 20_000),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_the_world_finds_defects(
    options: dict[str, Any], most: int, record_property: Callable[[str, object], None]
) -> None:
    steps = steps_to_find(**options)
    record_property("steps", steps)
    assert steps <= most
