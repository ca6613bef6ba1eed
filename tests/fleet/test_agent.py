"""The host's side of a fleet's links: candidates with several addresses, and hosts that are turned away."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Lease, LeaseState, Outcome, Request, Waiter
from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.fleet.agent import FleetAgent, Seen
from gpu_worker_pool.fleet.epoch_file import EpochFile
from gpu_worker_pool.fleet.host_side import HostSide
from gpu_worker_pool.fleet.links import HandshakeError, Link, pair
from gpu_worker_pool.fleet.message_json import decode, encode
from gpu_worker_pool.fleet.messages import Call, CallAnswer, Query, Report, TurnedAway, Welcome
from gpu_worker_pool.fleet.questions import CallRefusedError
from tests.leasing import until

NAME = "http://gpu-1:8000"
OTHER_NAME = "http://10.0.0.1:8000"


class Leases:
    """The broker of a host that has these leases."""

    def __init__(self, *leases: Lease) -> None:
        self.leases = list(leases)

    async def granted_and_ended(self, _most: int) -> list[Any]:
        return []

    async def held(self) -> list[Lease]:
        return list(self.leases)

    async def held_and_waiting(self) -> tuple[list[Lease], list[Waiter]]:
        return list(self.leases), []


class Candidate:
    """Its ends of the links to it, and what came over them."""

    def __init__(self, answer: Any, name: str = NAME) -> None:
        self.answer, self.name = answer, name
        self.ends: list[Link] = []
        self.came: list[str] = []
        self.reports: list[Report] = []
        #: Whether the host that is asked for has a link to it.
        self.knows_host = True

    async def link(self, _session: object, _url: str, _keys: object) -> Link:
        near, far = pair()
        near.name = self.name
        far.on_message = self._received
        self.ends.append(far)
        await asyncio.sleep(0)
        return near

    def _received(self, link: Link, row: dict[str, Any]) -> None:
        self.came.append(row["type"])
        if isinstance(message := decode(row), Report):
            self.reports.append(message)
        if row["type"] == "Join":
            link.send(encode(self.answer))
        elif isinstance(message, Call):
            error = "" if self.knows_host else "ServiceUnavailableError"
            link.send(encode(CallAnswer(message.call_id, {"by": self.name}, error)))


def agent_of(
    candidate: Candidate,
    tmp_path: Path,
    *,
    connect: Any = None,
    own_url: str = "http://gpu-2:8000",
    broker: Leases | None = None,
    see: Callable[[], Seen | None] = lambda: None,
) -> FleetAgent:
    return FleetAgent(
        HostSide("gpu-2", "ledger", "http://gpu-2:8000", "1"),
        broker or Leases(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        EpochFile(tmp_path / "fleet.json"),
        own_url=own_url,
        join=[OTHER_NAME],
        is_insecure=True,
        see=see,
        want_reading=lambda *_: None,
        connect=connect or candidate.link,
    )


async def test_a_candidate_may_be_joined_by_another_of_its_addresses(tmp_path: Path) -> None:
    candidate = Candidate(Welcome("fleet", 1, "gpu-1", NAME, (NAME,), is_own=True))
    agent = agent_of(candidate, tmp_path)
    await agent.start()
    try:
        # The candidate's own address is linked to as well; the link that there is stays.
        await until(lambda: len(candidate.ends) >= 2)
        asked = asyncio.create_task(agent.call(lambda number: Query(number, "fleet")))
        await until(lambda: "Query" in candidate.came)
        asked.cancel()
    finally:
        await agent.stop()


@pytest.mark.fault(47)
async def test_a_lease_of_a_host_that_the_dispatcher_cannot_reach_is_renewed_through_another_candidate(
    tmp_path: Path,
) -> None:
    names = (NAME, OTHER_NAME)
    dispatcher = Candidate(Welcome("fleet", 1, "gpu-1", NAME, names, is_own=True))
    other = Candidate(Welcome("fleet", 1, "gpu-1", NAME, names), OTHER_NAME)
    dispatcher.knows_host = False

    async def link(session: object, url: str, keys: object) -> Link:
        return await (dispatcher if url == NAME else other).link(session, url, keys)

    agent = agent_of(dispatcher, tmp_path, connect=link)
    await agent.start()
    try:
        await until(lambda: agent.link_count == 2 and agent.dispatcher == NAME)
        found = await agent.call(lambda number: Call(number, "gpu-3", "renew"), may_be_any=True)
        assert found == {"by": OTHER_NAME}
        other.knows_host = False
        with pytest.raises(CallRefusedError):
            await agent.call(lambda number: Call(number, "gpu-3", "renew"), may_be_any=True)
    finally:
        await agent.stop()


async def test_a_host_that_is_turned_away_asks_again_over_a_new_link(tmp_path: Path) -> None:
    candidate = Candidate(TurnedAway("another host is called gpu-2"))
    agent = agent_of(candidate, tmp_path)
    await agent.start()
    try:
        await until(lambda: candidate.came.count("Join") >= 2, 30)
        assert not candidate.ends[0].is_open
    finally:
        await agent.stop()


async def test_each_end_of_a_lease_is_reported_with_the_first_reading_after_it(tmp_path: Path) -> None:
    """Also where leases end all the time: none of them waits for a reading after the last."""

    def lease(name: str) -> Lease:
        return Lease(name, Request(name), "", (name,), (), 1, LeaseState.HELD, 0.0, 0.0, None)

    candidate, broker = Candidate(Welcome("fleet", 1, "gpu-1", NAME, is_own=True)), Leases(lease("a"), lease("b"))
    read_at = boot_time()
    agent = agent_of(candidate, tmp_path, broker=broker, see=lambda: Seen((), read_at))
    await agent.start()
    try:
        await until(lambda: candidate.reports)
        for name, other in (("a", "b"), ("b", "")):
            if name == "a":
                _end(agent, broker, name)
            read_at = boot_time()
            if other:
                _end(agent, broker, other)
            agent.took()
            await until(lambda name=name: candidate.reports[-1].ended)
            assert [each.lease_id for each in candidate.reports[-1].ended] == [name]
            assert candidate.reports[-1].age_seconds is not None
            candidate.reports.append(Report(0))
    finally:
        await agent.stop()


def _end(agent: FleetAgent, broker: Leases, name: str) -> None:
    (ended,) = (each for each in broker.leases if each.lease_id == name)
    broker.leases.remove(ended)
    agent.ended(Outcome(ended.request, RequestState.GRANTED, 0.0, lease=ended, lease_state=LeaseState.RELEASED))


class Immediately(selectors.DefaultSelector):
    """Instead of waiting, lets the clock of its loop go on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (found := super().select(0)) and timeout is not None:
            self.now += max(timeout, 1e-6)
        return found


class LoopWithoutWaiting(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own_selector = Immediately()
        super().__init__(self._own_selector)

    def time(self) -> float:
        return self._own_selector.now


@pytest.mark.fault(55)
def test_a_thousand_hosts_that_lose_the_dispatcher_come_back_within_seconds_and_not_at_once(tmp_path: Path) -> None:
    """Only candidates know the database, so that all that hosts can storm is the next dispatcher."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        candidate = Candidate(Welcome("fleet", 0, "", ""))
        arrived_at: list[float] = []
        is_up = True

        async def link(session: object, url: str, keys: object) -> Link:
            if not is_up:
                raise HandshakeError("connection refused")
            arrived_at.append(loop.time())
            return await candidate.link(session, url, keys)

        agents = [agent_of(candidate, tmp_path, connect=link, own_url=f"http://h{number}") for number in range(1000)]
        for agent in agents:
            await agent.start()
        await until_virtual(lambda: candidate.came.count("Join") >= 1000)
        await asyncio.sleep(60)
        for down_seconds in (0.0, 2.0):
            is_up = False
            for end in candidate.ends:
                end.close("it was killed")
            candidate.ends.clear()
            arrived_at.clear()
            await asyncio.sleep(down_seconds)
            is_up, back_at = True, loop.time()
            await until_virtual(lambda: len(arrived_at) >= 1000)
            assert loop.time() - back_at < 10.0
            most = max(sum(at <= each < at + 0.1 for each in arrived_at) for at in arrived_at)
            assert most < 300, f"{most} of 1,000 came within 0.1 s"
            await asyncio.sleep(60)
        for agent in agents:
            await agent.stop()

    async def until_virtual(is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=LoopWithoutWaiting) as runner:
        runner.run(run())
