"""The broker, on readings made by hand and on simulated GPUs: who waits, who is woken, and how requests end."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import itertools
import json
import os
import pwd
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.fakes.memory_ledger import MemoryLedger
from tests.waiting import eventually

from gpu_worker_pool.broker.broker import Change, LeaseBroker, Waiting, owner_of
from gpu_worker_pool.broker.simulated_load import SimulatedLoad
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import (
    Effect,
    Event,
    Granted,
    Lease,
    LeaseState,
    PoolSettings,
    ProcessReading,
    Request,
    Requirements,
)
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LeaseEndedError,
    LedgerUnavailableError,
    NotYourLeaseError,
    PoolStoppedError,
    RequestEndedError,
    RequestMismatchError,
    TooManyWaitingError,
    UnknownLeaseError,
)
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample, MIGReading
from gpu_worker_pool.ledger.policy_file import PolicyFile
from gpu_worker_pool.ledger.sqlite import SQLiteLedger

ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count(1)


def card(index: int, **what: Any) -> GPUReading:
    idle: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{index}",
        "memory_total_mb": 80_000.0,
        "memory_used_mb": 0.0,
        "utilization_percent": 0.0,
        "processes": (),
    }
    return GPUReading(index, **{**idle, **what})


def sample(*gpus: GPUReading) -> HostSample:
    return HostSample(next(NUMBERS), 0, boot_time(), 0.0, "now", DriverAnswer(gpus))


def request_for(name: str, *, ttl: float = 60.0, account: str = "", process: str = "", **requirements: Any) -> Request:
    return Request(
        name,
        Requirements(**requirements),
        worker_id=name,
        owner="me",
        ttl_seconds=ttl,
        account=account,
        process=process,
    )


class ReadByHand(LeaseBroker):
    """On a file, with GPUs that show what they are told to."""

    def __init__(
        self, folder: Path, *gpus: GPUReading, settings: PoolSettings | None = None, policy: str = "", **more: Any
    ) -> None:
        self.gpus = list(gpus)
        host_file = folder / "policy.toml"
        host_file.write_text(policy)
        policy_file = PolicyFile(folder, host_file=host_file, clock=boot_time)
        self.changes: list[Change] = []
        settings = settings or PoolSettings(offer_ttl_seconds=0.3)
        self.load = SimulatedLoad()
        super().__init__(
            lambda on_commit: SQLiteLedger(
                folder / "ledger.db", settings, on_commit, first_fence=0, policy_file=policy_file
            ),
            self.wanted,
            on_leases=self.load.take,
            **more,
        )
        self.on_change = self.changes.append

    def wanted(self, _begun_after: float) -> None:
        asyncio.get_running_loop().call_soon(self.read)

    def read(self) -> None:
        self.take(sample(*self.gpus))

    async def holds(self, name: str, **how: Any) -> Lease:
        found = await self.acquire(request_for(name, **how), wait_seconds=5.0)
        assert isinstance(found, Lease), found
        assert found.state is LeaseState.HELD
        return found


@contextlib.asynccontextmanager
async def opened(folder: Path, *gpus: GPUReading, **more: Any) -> AsyncIterator[ReadByHand]:
    broker = ReadByHand(folder, *gpus, **more)
    await broker.start()
    broker.read()
    try:
        yield broker
    finally:
        await broker.stop()


async def soon(is_so: Callable[[], object], within_seconds: float = 5.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not is_so():
            await asyncio.sleep(0.005)


# ---- asking and waiting


async def test_who_does_not_want_to_wait_holds_what_it_gets(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        await soon(lambda: broker.problem is None)
        await broker.holds("warms up")
        await broker.release("lease-1", "me")
        await asyncio.sleep(0.01)
        broker.read()
        await broker.queue()
        found = await broker.acquire(request_for("one"), wait_seconds=0)
        assert isinstance(found, Lease)
        assert (found.state, found.gpu_ids) == (LeaseState.HELD, ("GPU-0",))
        renewed = await broker.renew(found.lease_id, "me")
        assert renewed.expires_at is not None
        assert found.expires_at is not None
        assert renewed.expires_at >= found.expires_at
        assert broker.leases == {found.lease_id: renewed}


async def test_who_waits_is_told_its_place_and_why_and_keeps_it(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        await broker.holds("holder")
        first = await broker.acquire(request_for("first"), wait_seconds=0.05)
        second = await broker.acquire(request_for("second"), wait_seconds=0)
        assert isinstance(first, Waiting)
        assert isinstance(second, Waiting)
        assert (first.position, second.position) == (1, 2)
        assert first.waiting_seconds >= 0.05
        assert "next in line" in first.reasons[0]
        assert "GPU 0: held by holder" in first.reasons[1]
        again = await broker.acquire(request_for("first"), wait_seconds=0)
        assert isinstance(again, Waiting)
        assert again.position == 1
        queue = await broker.queue()
        assert [waiting.request.request_id for waiting in queue] == ["first", "second"]
        # They ask for the same, and wait for the same, each at its own place.
        assert [waiting.reasons[0].partition(";")[0] for waiting in queue] == [
            "one GPU: next in line",
            "one GPU: number 2 in line",
        ]
        assert queue[1].reasons[0] == second.reasons[0]
        explanation = await broker.explain("second")
        assert explanation is not None
        assert explanation.position == 2
        assert await broker.explain("nobody") is None


async def test_limits_of_groups_are_explained_before_a_request_is_made(tmp_path: Path) -> None:
    """By the name of the user, who is known; and without a group the account is not limited."""
    user = pwd.getpwuid(os.getuid())
    policy = f"[group.{grp.getgrgid(user.pw_gid).gr_name}]\nmost_gpus = 1\n"
    async with opened(tmp_path, card(0), card(1), policy=policy) as broker:
        await broker.holds("first", account=f"user:{user.pw_uid}")
        found = await broker.explain_requirements(Requirements(), account=f"user:{user.pw_uid}")
        assert found.verdict == f"kept back by the policy: account {user.pw_name} holds one GPU, its limit"
        assert (await broker.explain_requirements(Requirements(), account="key:ada")).verdict == "could be granted now"


async def test_a_release_wakes_the_next_in_line(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        lease = await broker.holds("holder")
        waiting = [asyncio.ensure_future(broker.holds(f"w{number}")) for number in range(3)]
        await soon(lambda: len(broker.waiting) == 3)
        for number in range(3):
            await broker.release(lease.lease_id, "me")
            lease = await waiting[number]
            assert sum(future.done() for future in waiting) == number + 1
        assert lease.fence == 4


async def test_what_a_request_may_end_with(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0), settings=PoolSettings(most_waiting_of_an_account=1)) as broker:
        lease = await broker.holds("holder")
        with pytest.raises(ImpossibleRequestError) as impossible:
            await broker.acquire(request_for("impossible", count=2), wait_seconds=1)
        assert "1 of 1 could ever serve it" in impossible.value.reasons[0]
        with pytest.raises(RequestMismatchError):
            await broker.acquire(request_for("holder", memory_mb=5), wait_seconds=0)
        await broker.acquire(request_for("waits", account="a"), wait_seconds=0)
        with pytest.raises(TooManyWaitingError):
            await broker.acquire(request_for("one too many", account="a"), wait_seconds=0)
        listening = asyncio.ensure_future(broker.acquire(request_for("waits", account="a"), wait_seconds=5))
        await asyncio.sleep(0.05)
        assert await broker.cancel("waits", "me")
        with pytest.raises(RequestEndedError, match="cancelled"):
            await listening
        assert not await broker.cancel("waits", "me")
        assert not await broker.cancel("nobody", "me")
        with pytest.raises(NotYourLeaseError):
            await broker.cancel("holder", "a stranger")
        with pytest.raises(NotYourLeaseError):
            await broker.release(lease.lease_id, "a stranger")
        with pytest.raises(UnknownLeaseError):
            await broker.renew("lease-99", "me")
        await broker.release(lease.lease_id, "me")
        await broker.release(lease.lease_id, "me")
        with pytest.raises(RequestEndedError) as ended:
            await broker.acquire(request_for("holder"), wait_seconds=0)
        assert ended.value.state == "granted"


async def test_every_change_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        lease = await broker.holds("one")
        await broker.acquire(request_for("two"), wait_seconds=0)
        await broker.cancel("two", "me")
        await broker.release(lease.lease_id, "me")
    told = [(type(change.before).__name__, type(change.after).__name__) for change in broker.changes]
    assert told == [
        *([("NoneType", "Waiter"), ("Waiter", "Lease")] if told[0][1] == "Waiter" else [("NoneType", "Lease")]),
        ("NoneType", "Waiter"),
        ("Waiter", "Outcome"),
        ("Lease", "Outcome"),
    ]
    assert broker.tally[LeaseState.RELEASED] == 1
    assert broker.grants == 1


# ---- stopping


async def test_stopping_tells_those_who_wait_and_keeps_their_places(tmp_path: Path) -> None:
    """Fault 8; fault 11."""
    async with opened(tmp_path, card(0)) as broker:
        await broker.holds("holder")
        waiting = [asyncio.ensure_future(broker.acquire(request_for(f"w{n}"), wait_seconds=30)) for n in range(3)]
        await soon(lambda: len(broker.waiting) == 3)
        begun = time.monotonic()
        await broker.stop()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [PoolStoppedError] * 3
        assert time.monotonic() - begun < 2.0
        with pytest.raises(LedgerUnavailableError, match="closed"):
            await broker.acquire(request_for("late"), wait_seconds=0)
    async with opened(tmp_path, card(0)) as broker:
        assert [waiting.request.request_id for waiting in await broker.queue()] == ["w0", "w1", "w2"]
        assert [lease.worker for lease in broker.leases.values()] == ["holder"]


async def test_who_was_granted_in_the_moment_of_the_stop_has_its_lease(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        lease = await broker.holds("holder")
        waiting = asyncio.ensure_future(broker.acquire(request_for("next"), wait_seconds=30))
        await soon(lambda: "next" in broker.waiting)
        await broker.release(lease.lease_id, "me")
        await soon(lambda: len(broker.leases) == 1)
        broker.stop_listening()
        found = await waiting
        assert isinstance(found, Lease)


# ---- rule 9: between two polls


async def test_who_stopped_listening_is_only_offered_what_it_is_granted(tmp_path: Path) -> None:
    """Fault 35: the place is kept for a while; a GPU is given back within seconds."""
    async with opened(tmp_path, card(0)) as broker:
        lease = await broker.holds("holder")
        listening = asyncio.ensure_future(broker.acquire(request_for("dead"), wait_seconds=30))
        await soon(lambda: "dead" in broker.waiting)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await broker.acquire(request_for("dead"), wait_seconds=0)  # as the server does on its behalf
        other = asyncio.ensure_future(broker.holds("next"))
        await soon(lambda: "next" in broker.waiting)
        await broker.release(lease.lease_id, "me")
        await soon(lambda: any(lease.worker == "dead" for lease in broker.leases.values()))
        (offered,) = broker.leases.values()
        assert offered.state is LeaseState.OFFERED
        begun = time.monotonic()
        assert (await other).gpu_ids == ("GPU-0",)
        assert time.monotonic() - begun < 2.0  # the claim is 0.3 s here
        with pytest.raises(RequestEndedError, match="it was not claimed in time"):
            await broker.acquire(request_for("dead"), wait_seconds=0)


async def test_who_comes_back_in_time_claims_what_it_was_offered(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0), settings=PoolSettings(offer_ttl_seconds=5.0)) as broker:
        lease = await broker.holds("holder")
        await broker.acquire(request_for("polls"), wait_seconds=0)
        await broker.release(lease.lease_id, "me")
        await soon(lambda: any(lease.worker == "polls" for lease in broker.leases.values()))
        (offered,) = broker.leases.values()
        assert offered.state is LeaseState.OFFERED
        claimed = await broker.holds("polls")
        assert claimed.lease_id == offered.lease_id
        assert (await broker.renew(claimed.lease_id, "me")).state is LeaseState.HELD


async def test_news_that_could_not_be_delivered_give_the_gpu_back(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        lease = await broker.acquire(request_for("one"), wait_seconds=5.0, poll_id="first")
        assert isinstance(lease, Lease)
        await broker.poll_abandoned("one", "another")
        assert broker.leases[lease.lease_id].state is LeaseState.HELD
        await broker.poll_abandoned("one", "first")
        assert broker.leases[lease.lease_id].state is LeaseState.OFFERED
        with pytest.raises(GPUWorkerPoolError, match="not claimed yet"):
            await broker.renew(lease.lease_id, "me")
        other = await broker.holds("two")
        assert other.gpu_ids == lease.gpu_ids
        await broker.poll_abandoned("one", "first")  # it is nobody's any more
        assert broker.leases == {other.lease_id: other}


async def test_whoever_renews_is_told_of_its_own_lease(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0), card(1)) as broker:
        first, second = await broker.holds("first"), await broker.holds("second")

    class GrantsBoth(MemoryLedger):
        """Somebody else is granted a GPU in the same moment."""

        async def submit(self, _event: Event) -> tuple[Effect, ...]:
            return Granted(first), Granted(second)

    both = LeaseBroker(lambda on_commit: GrantsBoth(PoolSettings(), on_commit), lambda _: None)
    await both.start()
    assert await both.renew(second.lease_id, "me") == second
    await both.stop()


# ---- the hardware


@pytest.mark.fault(30)
async def test_a_lease_stays_with_its_gpu_when_the_numbers_change(tmp_path: Path) -> None:
    """Fault 30."""
    async with opened(tmp_path, card(0), card(1)) as broker:
        lease = await broker.holds("one")
        assert (lease.gpu_ids, broker.index_of("GPU-0")) == (("GPU-0",), 0)
        broker.gpus = [card(0, uuid="GPU-1"), card(1, uuid="GPU-0")]
        broker.read()
        await asyncio.sleep(0.05)
        other = await broker.holds("two")
        assert (other.gpu_ids, other.held[0].index) == (("GPU-1",), 0)
        assert broker.leases[lease.lease_id] == lease
        assert (broker.index_of("GPU-0"), broker.index_of("GPU-1"), broker.index_of("GPU-9")) == (1, 0, None)
        assert lease.held[0].uuid == "GPU-0"


def split(*devices: str, **what: Any) -> GPUReading:
    """A GPU that is split into MIG devices."""
    migs = tuple(
        MIGReading(uuid, "3g.40gb", memory_total_mb=40_000.0, memory_used_mb=0.0, processes=()) for uuid in devices
    )
    return card(0, mig_enabled=True, mig_devices=migs, utilization_percent=None, reports_utilization=False, **what)


async def test_devices_of_one_gpu_are_told_apart_in_the_reasons(tmp_path: Path) -> None:
    older = "MIG-GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5/1/0"
    async with opened(tmp_path, split("MIG-41b36874-2f5c-5e0b", older)) as broker:
        await broker.holds("a", only=("MIG-41b36874-2f5c-5e0b",))
        await broker.holds("b", only=(older,))
        waiting = await broker.acquire(request_for("c"), wait_seconds=0)
        assert isinstance(waiting, Waiting)
        named = [reason.partition(": ")[0] for reason in waiting.reasons[1:]]
        assert sorted(named) == ["GPU 0 MIG-41b36874", f"GPU 0 {older}"]


@pytest.mark.fault(31)
async def test_leases_on_devices_that_vanish_are_lost(tmp_path: Path) -> None:
    """Fault 31."""
    async with opened(tmp_path, split("MIG-a", "MIG-b"), card(1)) as broker:
        on_a = await broker.holds("a", only=("MIG-a",))
        on_b = await broker.holds("b", only=("MIG-b",))
        assert broker.index_of("MIG-b") == 0
        with pytest.raises(ImpossibleRequestError, match="MIG device"):
            await broker.acquire(request_for("both", count=2, only=("MIG-a", "MIG-b")), wait_seconds=0)
        broker.gpus[0] = split("MIG-b", "MIG-c")
        broker.read()
        await soon(lambda: on_a.lease_id not in broker.leases)
        with pytest.raises(LeaseEndedError, match="MIG-a is gone"):
            await broker.renew(on_a.lease_id, "me")
        assert broker.tally[LeaseState.LOST] == 1
        await broker.renew(on_b.lease_id, "me")
        assert (await broker.holds("c", only=("MIG-c",))).gpu_ids == ("MIG-c",)
        # One that is only sick, or missing as a whole, takes nobody's lease away.
        broker.gpus[0] = broker.gpus[0].lost("fallen off the bus")
        broker.read()
        broker.gpus = [card(1)]
        broker.read()
        broker.gpus = [replace(split(), fault="needs a reset"), card(1)]
        broker.read()
        await broker.queue()
        await asyncio.sleep(0.05)
        await broker.renew(on_b.lease_id, "me")


async def test_a_device_that_vanished_while_the_ledger_was_away_is_reported_later(tmp_path: Path) -> None:
    async with opened(tmp_path, split("MIG-a")) as broker:
        lease = await broker.holds("a")
        path = tmp_path / "ledger.db"
        with unwritable(path):
            broker.gpus[0] = split("MIG-c")
            broker.read()
            await asyncio.sleep(0.1)
        assert lease.lease_id in broker.leases
        await soon(lambda: broker.read() or lease.lease_id not in broker.leases)
        assert broker.tally[LeaseState.LOST] == 1


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Another process's transaction that will not do: it breaks what ours writes, at once."""
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TRIGGER broken BEFORE UPDATE ON meta BEGIN SELECT RAISE(ABORT, 'not now'); END")
    try:
        yield
    finally:
        connection.execute("DROP TRIGGER broken")
        connection.close()


@pytest.mark.fault(34)
async def test_a_program_that_sees_few_gpus_takes_nobodys_away(tmp_path: Path) -> None:
    """Fault 34: a container that was given one of three GPUs, numbered anew."""
    async with opened(tmp_path, card(0), card(1), card(2)) as host:
        held = await host.holds("holder", only=("GPU-2",))
        all_three = asyncio.ensure_future(host.acquire(request_for("all", count=3), wait_seconds=20))
        await soon(lambda: "all" in host.waiting)
        async with opened(tmp_path, card(0, uuid="GPU-1")) as container:
            await soon(lambda: "all" in container.waiting)
            assert set(container.leases) == {held.lease_id}
            with pytest.raises(ImpossibleRequestError):
                await container.acquire(request_for("two", count=2), wait_seconds=0)
            own = await container.acquire(request_for("own"), wait_seconds=0)
            assert isinstance(own, Lease)
            assert own.gpu_ids == ("GPU-1",)
            for _ in range(3):
                container.read()
                host.read()
                await asyncio.sleep(0.02)
            assert "all" in host.waiting, "rejected by one who cannot see what it asked for"
            await container.release(own.lease_id, "me")
            await host.release(held.lease_id, "me")
            await soon(lambda: host.read() or all_three.done())
        lease = await all_three
        assert isinstance(lease, Lease)
        assert set(lease.gpu_ids) == {"GPU-0", "GPU-1", "GPU-2"}


async def test_gpus_that_cannot_be_read_are_given_to_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        failed = HostSample(next(NUMBERS), 1, boot_time(), 0.0, "now", DriverFailure("no driver", "driver_error"))
        broker.take(failed)
        found = await broker.acquire(request_for("one"), wait_seconds=0.05)
        assert isinstance(found, Waiting)
        broker.gpus = [card(0, fault="lost")]
        broker.read()
        assert isinstance(await broker.acquire(request_for("one"), wait_seconds=0.05), Waiting)
        broker.gpus = [card(0)]
        broker.read()
        await broker.holds("one")


# ---- sharing, and what holders make of it


async def test_those_who_declare_memory_may_share(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        share = {"memory_mb": 30_000, "share": True}
        one, two = await broker.holds("one", **share), await broker.holds("two", **share)
        assert one.gpu_ids == two.gpu_ids == ("GPU-0",)
        third = await broker.acquire(request_for("three", **share), wait_seconds=0.05)
        assert isinstance(third, Waiting)
        assert "20000 MB left, 30000 MB wanted" in third.reasons[1]
        alone = await broker.acquire(request_for("alone"), wait_seconds=0.05)
        assert isinstance(alone, Waiting)
        await broker.release(one.lease_id, "me")
        assert (await broker.holds("three", **share)).gpu_ids == ("GPU-0",)
        assert isinstance(await broker.acquire(request_for("alone"), wait_seconds=0), Waiting)


async def test_what_a_holder_uses_and_since_when_it_does_nothing(tmp_path: Path) -> None:
    now = boot_time()
    async with opened(tmp_path, card(0, memory_used_mb=500.0), idle_after_seconds=100.0, clock=lambda: now) as broker:
        lease = await broker.holds("one")
        assert broker.usage_of(lease).memory_used_mb is None
        worker = ProcessReading(7, 1.0, memory_used_mb=2000.0)
        broker.gpus[0] = card(0, memory_used_mb=2500.0, utilization_percent=80.0, processes=(worker,))
        broker.read()
        usage = broker.usage_of(lease)
        assert usage.memory_used_mb == 2000.0
        assert usage.idle_seconds == pytest.approx(0.0, abs=1.0)
        broker.gpus[0] = replace(broker.gpus[0], utilization_percent=0.0)
        broker.read()
        now += 99.0
        assert not broker.usage_of(lease).is_idle
        now += 2.0
        assert broker.usage_of(lease).is_idle
        assert broker.usage_of(lease).idle_seconds == pytest.approx(101.0, abs=1.0)
        broker.gpus[0] = replace(broker.gpus[0], utilization_percent=None)
        broker.read()
        assert broker.usage_of(lease).idle_seconds is None


# ---- the ledger


async def test_a_ledger_that_cannot_be_opened_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ledger.db").write_text("this is no ledger at all, but a shopping list" * 20)
    async with opened(tmp_path, card(0), reopen_seconds=0.1) as broker:
        assert broker.problem is not None
        assert "damaged" in broker.problem
        with pytest.raises(LedgerUnavailableError, match="damaged"):
            await broker.acquire(request_for("one"), wait_seconds=1)
        await asyncio.sleep(0.5)
        (tmp_path / "ledger.db").unlink()
        await soon(lambda: broker.problem is None)
        broker.read()
        await broker.holds("one")
    assert caplog.text.count("no leases") == 1


async def test_tokens_are_the_same_after_a_restart_and_others_for_other_requests(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        token = broker.token_for("one")
        assert token == broker.token_for("one") != broker.token_for("two")
    async with opened(tmp_path) as broker:
        assert broker.token_for("one") == token
    assert owner_of(token) != owner_of(token + "x")
    assert token not in owner_of(token)


async def test_what_ended_while_the_ledger_could_not_be_read_is_noticed(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0), card(1)) as broker, opened(tmp_path) as other:
        lease = await broker.holds("one")
        waiting = asyncio.ensure_future(broker.acquire(request_for("both", count=2), wait_seconds=20))
        await soon(lambda: "both" in broker.waiting and "both" in other.waiting)
        with unwritable(tmp_path / "ledger.db"), pytest.raises(LedgerUnavailableError, match="not now"):
            await broker.acquire(request_for("two"), wait_seconds=0)
        await other.release(lease.lease_id, "me")
        await other.cancel("both", "me")
        with pytest.raises(RequestEndedError, match="cancelled"):
            await waiting
        await soon(lambda: not broker.leases)
        holders = await asyncio.to_thread(broker.load.holders)
        assert holders == () or all(holder.until is not None for holder in holders)


async def test_whoever_just_came_reads_simulated_gpus_no_sooner_than_it_knows_who_holds_them(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0)) as broker:
        await broker.holds("one")
        newcomer = ReadByHand(tmp_path)
        reading = asyncio.create_task(asyncio.to_thread(newcomer.load.holders))
        await asyncio.sleep(0.05)
        await newcomer.start()
        try:
            assert [holder.uuid for holder in await reading] == ["GPU-0"]
        finally:
            await newcomer.stop()


async def test_a_ledger_that_cannot_be_opened_delays_no_reading(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").mkdir()
    broker = ReadByHand(tmp_path)
    await broker.start()
    try:
        assert await asyncio.to_thread(broker.load.holders) == ()
        assert broker.load._is_known.is_set()
    finally:
        await broker.stop()


async def test_simulated_gpus_are_loaded_by_those_who_hold_them_until_they_give_them_back(tmp_path: Path) -> None:
    async with opened(tmp_path, card(0), settings=PoolSettings(offer_ttl_seconds=60.0)) as broker:
        lease = await broker.acquire(request_for("one"), wait_seconds=5.0, poll_id="only")
        assert isinstance(lease, Lease)
        (holder,) = broker.load.holders()
        assert (holder.uuid, holder.since, holder.until) == ("GPU-0", lease.granted_at, None)
        await broker.poll_abandoned("one", "only")
        (ended,) = broker.load.holders()
        assert ended.until is not None, "who was only offered it has not used it"


# ---- rule 10: processes that are gone


@contextlib.contextmanager
def sleeping() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that does nothing, and its name."""
    script = """
        import sys
        from gpu_worker_pool.hardware.processes import name_of_this_process
        print(name_of_this_process(), flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
        child.kill()


async def test_what_a_gone_process_held_and_waited_for_ends_at_once(tmp_path: Path) -> None:
    """Fault 1, under `local://`; fault 35."""
    async with opened(tmp_path, card(0)) as broker:
        with sleeping() as (child, process):
            held = await broker.holds("holder", process=process)
            await broker.acquire(request_for("waits", process=process), wait_seconds=0)
            mine = asyncio.ensure_future(broker.holds("mine", process=name_of_this_process()))
            await asyncio.sleep(0.5)
            assert set(broker.leases) == {held.lease_id}, "its process is there"
            child.kill()
            begun = time.monotonic()
            assert (await mine).gpu_ids == ("GPU-0",)  # also while nobody has looked at the dead: it is a zombie
            assert time.monotonic() - begun < 2.0
        assert "waits" not in broker.waiting
        with pytest.raises(LeaseEndedError, match="its holder is gone"):
            await broker.renew(held.lease_id, "me")


async def test_of_very_many_who_wait_each_has_its_turn_to_be_looked_at(tmp_path: Path) -> None:
    gone = "/".join(["another-boot", *name_of_this_process().split("/")[1:]])
    async with opened(tmp_path) as broker:
        await asyncio.gather(
            *(broker.acquire(request_for(f"w{n}", process=gone if n > 95 else ""), wait_seconds=0) for n in range(100))
        )
        await soon(lambda: len(broker.waiting) == 96)


# ---- real processes, simulated GPUs


class DeskProcess:
    """`with DeskProcess(folder) as program: program.does("acquire one 5")["lease"]`."""

    def __init__(self, folder: Path, backend: str = "simulated:1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.broker_process", str(folder), backend],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer()["started"]

    def __enter__(self) -> DeskProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was told and did not read
                    pipe.close()

    def begin(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        request_class = self.process.stdout.readline()
        assert request_class, "it ended"
        answer: dict[str, Any] = json.loads(request_class)
        return answer

    def does(self, command: str) -> dict[str, Any]:
        self.begin(command)
        return self.answer()


def test_a_waiter_in_another_process_is_woken_while_it_waits(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with DeskProcess(tmp_path) as one, DeskProcess(tmp_path) as two, DeskProcess(tmp_path):
        holder, waiter = one, two
        lease = holder.does("acquire r0 5")["lease"]
        took = []
        for number in range(1, 16):
            waiter.begin(f"acquire r{number} 20")
            time.sleep(0.15)  # so that it waits, and readings show the holder's load
            begun = time.clock_gettime(time.CLOCK_BOOTTIME)
            holder.does(f"release {lease}")
            got = waiter.answer()
            took.append(got["at"] - begun)
            lease = got["lease"]
            holder, waiter = waiter, holder
        record_property("handed over after seconds, median and worst", (statistics.median(took), max(took)))


@pytest.mark.fault(1)
def test_a_holder_that_is_killed_holds_nothing_any_more(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with DeskProcess(tmp_path) as waiter:
        with DeskProcess(tmp_path) as holder:
            victim = holder.does("acquire victim 5")["lease"]
            waiter.begin("acquire heir 20")
            time.sleep(0.5)
            holder.process.kill()
            begun = time.clock_gettime(time.CLOCK_BOOTTIME)
            got = waiter.answer()
        assert int(got["lease"].removeprefix("lease-")) == int(victim.removeprefix("lease-")) + 1
        # Long before its lease would have expired.
        record_property("seconds after the kill", got["at"] - begun)


def test_a_waiter_that_is_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    with DeskProcess(tmp_path) as holder, DeskProcess(tmp_path) as heir:
        lease = holder.does("acquire holder 5")["lease"]
        with DeskProcess(tmp_path) as dead:
            dead.begin("acquire dead 30")
            time.sleep(0.3)
        heir.begin("acquire heir 20")
        holder.does(f"release {lease}")
        assert heir.answer()["name"] == "heir"


@pytest.mark.fault(13)
@pytest.mark.timeout(120)
def test_four_processes_on_one_ledger_never_hold_a_gpu_twice(tmp_path: Path) -> None:
    """Fault 13: the same as four workers of one server, or two servers."""
    cycles = 25
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(DeskProcess(tmp_path, "simulated:2")) for _ in range(4)]
        for number, program in enumerate(programs):
            program.begin(f"cycles p{number} {cycles}")
        held: list[tuple[float, float, str, int]] = []
        for program in programs:
            while "done" not in (answer := program.answer()):
                assert "held" in answer, answer
                held.append((*answer["held"], answer["gpus"][0], answer["fence"]))
    assert len(held) == 4 * cycles
    fences = sorted(fence for *_, fence in held)
    assert fences == list(range(fences[0], fences[0] + 4 * cycles))
    for uuid in {each[2] for each in held}:
        in_time = sorted(each for each in held if each[2] == uuid)
        for before, after in itertools.pairwise(in_time):
            assert before[1] <= after[0], f"{uuid} was held twice at once: {before}, {after}"
            assert before[3] < after[3], "a fence went back"
    (path,) = tmp_path.glob("ledger-*.db")
    connection = apsw.Connection(str(path))
    try:
        assert connection.execute("SELECT count(*) FROM promised").get == 0
        assert connection.execute("SELECT fence FROM meta").get == fences[-1]
        assert connection.execute("PRAGMA integrity_check").get == "ok"
    finally:
        connection.close()


def test_a_program_ends_quickly_while_it_waits(tmp_path: Path) -> None:
    with DeskProcess(tmp_path) as holder, DeskProcess(tmp_path) as waiter:
        holder.does("acquire holder 5")
        waiter.begin("acquire waits 30")
        time.sleep(0.3)
        assert waiter.process.stdin is not None
        waiter.process.stdin.close()
        begun = time.monotonic()
        eventually(lambda: waiter.process.poll() is not None, within_seconds=5.0)
        assert time.monotonic() - begun < 5.0
        assert waiter.process.returncode == 0
