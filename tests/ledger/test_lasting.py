"""Ledgers that outlive a process, and that several share: restarts, reboots, silence, and what others have done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    Event,
    Granted,
    HolderGone,
    Lease,
    LeaseEnded,
    LeaseState,
    PollAbandoned,
    PoolSettings,
    ProcessReading,
    Released,
    Renewed,
    Requested,
    RequestState,
    Ticked,
    Waiter,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.core.saved import to_json
from gpu_worker_pool.errors import LeaseEndedError, LedgerUnavailableError, RequestMismatchError, UnknownLeaseError
from gpu_worker_pool.ledger import Ledger, tables, transactions
from gpu_worker_pool.ledger.policy_file import PolicyFile
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from tests.ledger.conftest import Opened
from tests.ledger.places import TTL, InSQLite, Told, read, request
from tests.ledger.test_any_ledger import check, granted


async def leases_of(ledger: Ledger) -> dict[str, Lease]:
    return await ledger.look(lambda pool, now: {lease.request.request_id: lease for lease in pool.leases})


async def waiting_in(ledger: Ledger) -> list[str]:
    return await ledger.look(lambda pool, now: [waiter.request.request_id for waiter in pool.queue.in_order()])


async def waiters_of(ledger: Ledger) -> dict[str, Waiter]:
    return await ledger.look(lambda pool, now: {waiter.request.request_id: waiter for waiter in pool.queue.in_order()})


async def in_one_moment(ledger: Ledger, events: Iterable[Event]) -> list[object]:
    """All of them wait before the first is looked at."""
    may_go_on = threading.Event()
    asked = asyncio.ensure_future(ledger.look(lambda pool, now: may_go_on.wait(10)))
    await asyncio.sleep(0.02)
    submitted = [asyncio.ensure_future(ledger.submit(event)) for event in events]
    await asyncio.sleep(0)
    may_go_on.set()
    await asked
    return list(await asyncio.gather(*submitted, return_exceptions=True))


def sqlite_place(opened: Opened) -> InSQLite:
    assert isinstance(opened.place, InSQLite)
    return opened.place


# ---- fault 11: restarts


@pytest.mark.fault(11)
async def test_leases_fences_and_the_order_of_waiters_survive_a_restart(lasting: Opened) -> None:
    before = lasting()
    await before.submit(read(lasting.place, 2))
    one, two = await granted(before, "one"), await granted(before, "two", memory_mb=100, share=True)
    for name, priority in (("w1", 0), ("w2", 1), ("w3", 0), ("w4", 1)):
        lasting.clock.advance(0.5)
        await before.submit(Requested(request(name, priority=priority), may_reserve=name != "w3"))
    waiters = await before.look(lambda pool, now: [to_json(waiter) for waiter in pool.queue.in_order()])
    secret = before.secret
    await before.close()

    after = lasting()
    assert after.secret == secret
    assert await leases_of(after) == {"one": one, "two": two}
    assert await waiting_in(after) == ["w2", "w4", "w1", "w3"]
    assert await after.look(lambda pool, now: [to_json(waiter) for waiter in pool.queue.in_order()]) == waiters
    (everything,) = [committed for committed in lasting.told.all if committed.is_everything]
    assert set(everything.changes) == {"one", "two", "w1", "w2", "w3", "w4"}
    lasting.clock.advance(1.0)
    await after.submit(Released(one.lease_id, by="me"))
    lasting.clock.advance(0.01)
    (grant,) = await after.submit(read(lasting.place, 2))
    assert isinstance(grant, Granted)
    assert (grant.lease.request.request_id, grant.lease.fence) == ("w2", 3)
    await check(after)


async def test_a_holder_renews_releases_and_asks_again_after_a_restart(lasting: Opened) -> None:
    before = lasting()
    await before.submit(read(lasting.place, 3))
    renewed, released, asked = [await granted(before, name) for name in ("renewed", "released", "asked")]
    await before.close()
    after = lasting()
    lasting.clock.advance(3.0)
    assert await after.submit(Renewed(renewed.lease_id, "me")) == (
        Granted(renewed.extended(lasting.clock.now() + TTL)),
    )
    assert await after.submit(Released(released.lease_id, "me")) == ()
    assert await after.submit(Requested(request("asked"))) == (Granted(asked.extended(lasting.clock.now() + TTL)),)
    with pytest.raises(RequestMismatchError):
        await after.submit(Requested(request("asked", count=2)))
    await after.close()
    again = lasting()
    assert set(await leases_of(again)) == {"renewed", "asked"}
    assert await again.submit(Released(released.lease_id, "me")) == ()
    await check(again)


async def test_how_something_ended_is_remembered_across_a_restart(lasting: Opened) -> None:
    before = lasting(PoolSettings(offer_ttl_seconds=5.0))
    await before.submit(read(lasting.place, 2))
    lost, released = await granted(before, "lost", ttl=3.0), await granted(before, "released")
    await before.submit(Requested(request("cancelled")))
    await before.submit(Cancelled("cancelled"))
    await before.submit(Released(released.lease_id))
    await lasting.serves(before, 6.0)
    await before.close()
    after = lasting()
    with pytest.raises(LeaseEndedError, match="not renewed in time"):
        await after.submit(Renewed(lost.lease_id, "me"))
    with pytest.raises(LeaseEndedError, match="lost"):
        await after.submit(Released(lost.lease_id, "me"))
    assert await after.submit(Released(released.lease_id, "me")) == ()
    with pytest.raises(LeaseEndedError, match="released"):
        await after.submit(Renewed(released.lease_id, "me"))
    assert await after.submit(Requested(request("cancelled"))) == (Ended("cancelled", RequestState.CANCELLED),)
    assert await after.submit(Cancelled("released")) == ()
    assert await after.submit(Requested(request("released"))) == (Ended("released", RequestState.GRANTED),)
    with pytest.raises(UnknownLeaseError):
        await after.submit(Released("lease-77"))
    await check(after)


async def test_a_quarantine_goes_on_after_a_restart(lasting: Opened) -> None:
    before = lasting()
    await before.submit(read(lasting.place, 1))
    lease = await granted(before, "expires", ttl=3.0)
    await lasting.serves(before, 6.0)
    await before.close()
    after = lasting()
    assert (await leases_of(after))["expires"].state is LeaseState.QUARANTINED
    lasting.clock.advance(6.0)
    busy = ProcessReading(7, 1.0, memory_used_mb=50_000.0)
    assert await after.submit(read(lasting.place, 1, memory_used_mb=50_000.0, processes=(busy,))) == ()
    lasting.clock.advance(1.0)
    (ended,) = await after.submit(read(lasting.place, 1))
    assert isinstance(ended, LeaseEnded)
    assert (ended.lease.lease_id, ended.state) == (lease.lease_id, LeaseState.RECLAIMED)
    await check(after)


# ---- rule 9: what is not in memory any more is in the file


async def test_what_memory_forgot_the_file_still_knows(lasting: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MOST_OUTCOMES", 2)
    ledger = lasting()
    await ledger.submit(read(lasting.place, 8))
    leases = [await granted(ledger, f"r{number}") for number in range(6)]
    for lease in leases:
        await ledger.submit(Released(lease.lease_id))
    assert await ledger.look(lambda pool, now: len(pool.outcomes)) == 2
    for lease in leases:
        assert await ledger.submit(Released(lease.lease_id, "me")) == ()
        name = lease.request.request_id
        assert await ledger.submit(Requested(request(name))) == (Ended(name, RequestState.GRANTED),)
        with pytest.raises(LeaseEndedError):
            await ledger.submit(Renewed(lease.lease_id))
        with pytest.raises(RequestMismatchError):
            await ledger.submit(Requested(request(name, count=2)))
        await check(ledger)
    assert await ledger.look(lambda pool, now: len(pool.outcomes)) == 2
    assert await ledger.look(lambda pool, now: pool.fence) == 6


async def test_what_ends_with_many_others_in_one_moment_is_still_known_in_that_moment(
    lasting: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "MOST_OUTCOMES", 2)
    ledger = lasting()
    await ledger.submit(read(lasting.place, 1))
    lease = await granted(ledger, "holds")
    for number in range(5):
        await ledger.submit(Requested(request(f"w{number}")))
    answers = await in_one_moment(
        ledger,
        [
            Released(lease.lease_id, "me"),
            *(Cancelled(f"w{number}") for number in range(5)),
            Released(lease.lease_id, "me"),
            Requested(request("w0")),
            Requested(request("holds")),
            Renewed(lease.lease_id),
        ],
    )
    assert answers[-4:-1] == [(), (Ended("w0", RequestState.CANCELLED),), (Ended("holds", RequestState.GRANTED),)]
    assert isinstance(answers[-1], LeaseEndedError)
    assert await ledger.look(lambda pool, now: (pool.ticket, pool.fence, len(pool.outcomes))) == (6, 1, 2)
    await check(ledger)


async def test_the_file_forgets_after_a_day(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 1))
    lease = await granted(ledger, "one")
    await ledger.submit(Released(lease.lease_id))
    lasting.clock.advance(24 * 3600.0 - 1.0)
    await ledger.submit(read(place, 1))
    second = await granted(ledger, "second")
    assert place.read("SELECT request_id FROM requests ORDER BY request_id") == ["one", "second"]
    lasting.clock.advance(120.0)
    await ledger.submit(Renewed(second.lease_id))
    await ledger.submit(Released(second.lease_id))
    assert place.read("SELECT request_id FROM requests") == ["second"]
    with pytest.raises(UnknownLeaseError):
        await ledger.submit(Released(lease.lease_id))
    await check(ledger)


async def test_the_file_forgets_the_oldest_of_too_many_and_nothing_that_is_not_over(
    lasting: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_REMEMBERED", 10)
    monkeypatch.setattr(transactions, "MOST_OUTCOMES", 1)
    monkeypatch.setattr(transactions, "FORGET_SECONDS", 1.0)
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 2))
    await granted(ledger, "stays", ttl=3000.0)
    for number in range(40):
        lasting.clock.advance(2.0)
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, f"r{number}")
        await ledger.submit(Released(lease.lease_id))
    left = place.read("SELECT request_id FROM requests")
    assert "stays" in left
    assert "r39" in left
    assert len(left) <= 12
    assert place.read("SELECT gpu_id, lease_id FROM promised") == [("0", "lease-1")]
    with pytest.raises(UnknownLeaseError):
        await ledger.submit(Released("lease-2"))
    await check(ledger)


async def test_the_file_forgets_the_oldest_of_what_needs_too_much_space(
    lasting: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few requests with long lists of GPUs are as large as many others, and who sends them could fill the disk."""
    monkeypatch.setattr(tables, "MOST_BYTES", 300_000)
    monkeypatch.setattr(transactions, "FORGET_CHANGES", 20)
    monkeypatch.setattr(transactions, "FORGET_CHANGES_SOON", 4)
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 2))
    await granted(ledger, "stays", ttl=3000.0)
    names = tuple(f"{'n' * 70}{number}" for number in range(128))
    for number in range(150):
        lasting.clock.advance(0.01)
        lease = await granted(ledger, f"r{number}", only=("0", "1", *names))
        await ledger.submit(Released(lease.lease_id))
        lasting.clock.advance(0.01)
        await ledger.submit(read(place, 2))
    left = place.read("SELECT request_id FROM requests")
    assert "stays" in left
    assert "r149" in left
    assert "r0" not in left
    assert place.path.stat().st_size < 900_000
    await check(ledger)


async def test_what_was_held_for_long_is_remembered_like_what_has_just_ended(
    lasting: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_REMEMBERED", 3)
    monkeypatch.setattr(transactions, "MOST_OUTCOMES", 0)
    monkeypatch.setattr(transactions, "FORGET_SECONDS", 0.0)
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 2))
    long = await granted(ledger, "long", ttl=3000.0)
    for number in range(10):
        lasting.clock.advance(2.0)
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, f"r{number}")
        await ledger.submit(Released(lease.lease_id))
    lasting.clock.advance(2.0)
    await ledger.submit(HolderGone(long.lease_id, is_proven=True))
    lasting.clock.advance(1.0)
    await ledger.submit(read(place, 2))
    assert place.read("SELECT request_id FROM requests ORDER BY ended_at") == ["r8", "r9", "long"]
    with pytest.raises(LeaseEndedError, match="was lost before it was released: its holder is gone"):
        await ledger.submit(Released(long.lease_id))


# ---- rule 10: time in which nobody served does not count


async def test_after_a_silence_everybody_has_a_full_ttl(lasting: Opened) -> None:
    before = lasting(PoolSettings(queue_ttl_seconds=5.0))
    await before.submit(read(lasting.place, 1))
    lease = await granted(before, "holds", ttl=20.0)
    now = lasting.clock.now()
    await before.submit(Requested(request("polls", ttl=30.0), poll_deadline=now + 1.0))
    await before.submit(Requested(request("waits", ttl=30.0), deadline=now + 40.0))
    await before.close()
    lasting.clock.advance(1000.0)
    now = lasting.clock.now()
    after = lasting(PoolSettings(queue_ttl_seconds=5.0))
    held = (await leases_of(after))["holds"]
    assert (held.state, held.expires_at) == (LeaseState.HELD, now + 20.0)
    waiters = await waiters_of(after)
    assert waiters["polls"].gives_up_at == now + 30.0
    assert waiters["waits"].deadline == now + 40.0
    # It is written, so that those who look next know it too.
    await after.close()
    lasting.clock.advance(1.0)
    third = lasting(PoolSettings(queue_ttl_seconds=5.0))
    assert (await leases_of(third))["holds"].expires_at == now + 20.0
    assert await waiting_in(third) == ["polls", "waits"]
    assert await third.submit(Renewed(lease.lease_id)) != ()
    await check(third)


async def test_a_policy_takes_nothing_from_what_a_silence_gives(lasting: Opened, tmp_path: Path) -> None:
    place, settings = sqlite_place(lasting), PoolSettings(fair_share_half_life_seconds=86_400.0)
    host_file = tmp_path / "policy.toml"
    host_file.write_text('["*"]\nmost_gpus = 1\n')

    def opened_with_policy() -> SQLiteLedger:
        policy_file = PolicyFile(tmp_path, host_file=host_file, clock=place.clock.now)
        return SQLiteLedger(
            place.path, settings, Told(), clock=place.clock.now, boot_id="boot", first_fence=0, policy_file=policy_file
        )

    before = opened_with_policy()
    await before.submit(read(place, 2))
    await before.submit(Requested(request("holds", ttl=20.0, account="key:ada")))
    await before.submit(Requested(request("waits", ttl=20.0, account="key:ada"), poll_deadline=place.clock.now()))
    await before.close()
    place.clock.advance(1000.0)
    after = opened_with_policy()
    try:
        held = (await leases_of(after))["holds"]
        assert (held.state, held.expires_at) == (LeaseState.HELD, place.clock.now() + 20.0)
        assert await waiting_in(after) == ["waits"]
        used = await after.look(lambda pool, now: pool.fair_share.used("key:ada", now))  # type: ignore[union-attr]
        assert used < 10.0, "it was not served, so it used nothing"
    finally:
        await after.close()


async def test_a_process_that_comes_late_sees_what_was_given_after_a_silence(lasting: Opened) -> None:
    first = lasting()
    await first.submit(read(lasting.place, 1))
    lease = await granted(first, "holds", ttl=20.0)
    await first.close()
    lasting.clock.advance(100.0)
    second, third = lasting(), lasting()
    now = lasting.clock.now()
    await second.submit(Ticked())
    await third.submit(Ticked())
    assert await leases_of(third) == await leases_of(second) == {"holds": lease.extended(now + 20.0)}


async def test_a_silence_that_the_grace_makes_up_for_is_none(lasting: Opened) -> None:
    before = lasting()
    await before.submit(read(lasting.place, 1))
    lease = await granted(before, "holds", ttl=60.0)
    await before.close()
    lasting.clock.advance(1.0)
    after = lasting()
    assert (await leases_of(after))["holds"] == lease


@pytest.mark.parametrize("ttl", [2.0, 3.0, 6.0, 20.0])
@pytest.mark.parametrize("served_before", [0.0, 0.9])
async def test_a_lease_has_its_whole_ttl_of_service_whatever_the_ttl_and_the_outage(
    lasting: Opened, ttl: float, served_before: float
) -> None:
    """A server is away for 0.5 to 30 s. Before and after it, its holder has a TTL to renew, and a part of the grace."""
    lost = []
    for outage in (0.5, 1.5, 2.5, 3.0, 4.0, 5.0, 7.0, 9.0, 13.0, 15.0, 16.0, 23.0, 30.0):
        before = lasting()
        await before.submit(read(lasting.place, 1))
        lease = await granted(before, f"holds-{outage}", ttl=ttl)
        lasting.clock.advance(served_before)
        await before.submit(Ticked())
        await before.close()
        lasting.clock.advance(outage)
        after = lasting()
        await after.submit(Ticked())
        await lasting.serves(after, ttl - served_before + (0.9 if outage > 1.0 else 0.5))
        try:
            await after.submit(Renewed(lease.lease_id, "me"))
            await after.submit(Released(lease.lease_id, "me"))
        except LeaseEndedError:
            lost.append(outage)
        lasting.clock.advance(0.01)
        await after.close()
    assert lost == []


async def test_what_was_decided_after_a_silence_is_told_and_written(lasting: Opened) -> None:
    """Whoever serves again may be able to grant at once: that too must be in the ledger before anybody knows."""
    place = sqlite_place(lasting)
    ledger = lasting()
    other = lasting()
    await ledger.submit(read(place, 1))
    lease = await granted(ledger, "holds")
    await ledger.submit(Requested(request("waits")))
    lasting.clock.advance(1.0)
    await other.submit(Released(lease.lease_id))  # it has no readings, and can grant nothing
    lasting.clock.advance(16.0)
    answers = await in_one_moment(ledger, [read(place, 1)])
    (grant,) = [effect for effect in answers[0] if isinstance(effect, Granted)]  # type: ignore[attr-defined]
    assert place.read("SELECT gpu_id, lease_id FROM promised") == [("0", grant.lease.lease_id)]
    assert place.read("SELECT kind FROM requests WHERE request_id = 'waits'") == ["lease"]


async def test_somebody_leaves_a_stamp_twice_a_second_while_anybody_holds_or_waits(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    ledger = lasting()

    async def stamp_after(seconds: float) -> float | None:
        lasting.clock.advance(seconds)
        await ledger.look(lambda pool, now: None)
        found: list[float | None] = place.read("SELECT now FROM meta")
        return found[0]

    first = await stamp_after(0.0)
    assert await stamp_after(100.0) == first, "nobody's time runs, and yet it was written"
    await ledger.submit(Requested(request("waits")))
    waits_since = lasting.clock.now()
    assert await stamp_after(0.4) == waits_since
    assert await stamp_after(0.2) == lasting.clock.now()
    assert await stamp_after(0.5) == lasting.clock.now()
    await ledger.submit(Cancelled("waits"))
    ended_at = await stamp_after(100.0)  # the record of its end is written, once
    assert await stamp_after(100.0) == ended_at


async def test_one_stamp_is_enough_for_all_processes(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    first, second = lasting(), lasting()
    await first.submit(Requested(request("waits")))
    await second.look(lambda pool, now: None)
    stamps: list[str] = []
    for ledger in (first, second):
        assert isinstance(ledger, SQLiteLedger)
        ledger._file.connection.exec_trace = lambda _, statement, __: stamps.append(statement) or True
    (before,) = place.read("SELECT revision FROM meta")
    lasting.clock.advance(0.5)
    for _ in range(3):
        await first.look(lambda pool, now: None)
        await second.look(lambda pool, now: None)
    assert [statement for statement in stamps if "UPDATE" in statement] == ["UPDATE meta SET now = ?"]
    assert place.read("SELECT revision, now FROM meta") == [(before, lasting.clock.now())], "nothing to read again"


# ---- reboots


async def test_after_a_reboot_times_are_those_of_the_new_clock(lasting: Opened) -> None:
    before = lasting()
    stranger = ProcessReading(7, 1.0)
    await before.submit(read(lasting.place, 2, processes=(stranger,)))
    lease = await granted(before, "holds", ttl=50.0)
    ended = await granted(before, "ended")
    lasting.clock.advance(10.0)
    await before.submit(Released(ended.lease_id))
    now = lasting.clock.now()
    await before.submit(Requested(request("waits", count=2), deadline=now + 40.0))
    await before.submit(Requested(request("polls", count=2), poll_deadline=now + 1.0))
    assert lease.held[0].processes == {stranger.identity}
    await before.close()

    lasting.place.boot_id = "second-boot"
    lasting.clock._now = 5.0
    after = lasting()
    held = (await leases_of(after))["holds"]
    assert (held.granted_at, held.expires_at, held.fence) == (5.0 - 10.0, 5.0 + 50.0, 1)
    assert held.held[0].processes is None, "a pid of before the reboot means somebody else now"
    waiters = await waiters_of(after)
    assert (waiters["waits"].enqueued_at, waiters["waits"].deadline) == (5.0, 45.0)
    assert waiters["polls"].gives_up_at == 5.0 + TTL
    assert await after.submit(Released(ended.lease_id)) == ()
    place = sqlite_place(lasting)
    assert place.read("SELECT boot_id, now FROM meta") == [("second-boot", 5.0)]
    assert place.read("SELECT freed_at, read_after FROM gpus WHERE gpu_id = '1'") == [(5.0, 5.0)]
    assert place.read("SELECT ended_at FROM requests WHERE request_id = 'ended'") == [5.0]
    await after.close()
    again = lasting()
    assert (await leases_of(again))["holds"] == held
    await check(again)


async def test_a_ledger_that_another_kernel_uses_is_left_to_it(lasting: Opened) -> None:
    """Two hosts, or a container with a clock of its own: each would move all times to its own clock, in turn."""
    ours, told = lasting(), lasting.told
    await ours.submit(read(lasting.place, 2))
    await granted(ours, "ours")
    lasting.place.boot_id = "another kernel"
    theirs = lasting()
    await theirs.submit(Requested(request("theirs")))
    (revision,) = sqlite_place(lasting).read("SELECT revision FROM meta")
    told.all.clear()
    with pytest.raises(LedgerUnavailableError, match="another host"):
        await ours.submit(Requested(request("more")))
    await asyncio.sleep(0.2)
    assert told.all == []
    assert sqlite_place(lasting).read("SELECT revision FROM meta") == [revision]
    await theirs.submit(Cancelled("theirs"))
    await check(theirs)


# ---- the clock


async def test_time_never_goes_back(lasting: Opened) -> None:
    first, second = lasting(), lasting()
    await first.submit(read(lasting.place, 2))
    earlier = await granted(first, "one")
    lasting.clock._now -= 500.0
    later = await granted(first, "two")
    assert later.granted_at >= earlier.granted_at
    assert await second.submit(Renewed(later.lease_id)) == (Granted(later.extended(earlier.granted_at + TTL)),)
    assert await second.look(lambda pool, now: pool.now) == earlier.granted_at
    await check(second)


# ---- several processes, one ledger


async def test_grants_of_one_moment_share_one_commit(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 32))
    (before,) = place.read("SELECT revision FROM meta")
    answers = await in_one_moment(ledger, [Requested(request(f"r{number}")) for number in range(40)])
    assert sum(bool(answer) for answer in answers) == 32
    assert place.read("SELECT revision FROM meta") == [before + 1]
    assert place.read("SELECT count(*) FROM promised") == [32]


async def test_a_gpu_may_go_from_one_to_the_next_within_one_commit(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    ledger = lasting()
    await ledger.submit(read(place, 1))
    await granted(ledger, "first", poll_id="only")
    await ledger.submit(PollAbandoned("first", "only"))  # so nobody has used it
    await ledger.submit(Requested(request("second")))
    (before,) = place.read("SELECT revision FROM meta")
    answers = await in_one_moment(ledger, [Requested(request("second")), Cancelled("first")])
    assert [len(answer) for answer in answers] == [0, 1]  # type: ignore[arg-type]
    assert place.read("SELECT revision FROM meta") == [before + 1]
    assert place.read("SELECT lease_id FROM promised") == ["lease-2"]


async def test_whoever_came_first_is_before_the_others_wherever_that_is_read(lasting: Opened) -> None:
    first = lasting()
    late = lasting()
    await late.look(lambda pool, now: None)
    may_go_on = threading.Event()
    busy = asyncio.ensure_future(late.look(lambda pool, now: may_go_on.wait(10)))
    await asyncio.sleep(0.02)
    for name in ("one", "two", "three"):
        await first.submit(Requested(request(name)))
    await first.submit(Requested(request("one")))  # so that its row is the last that was written
    may_go_on.set()
    await busy
    assert await waiting_in(late) == ["one", "two", "three"]
    await check(late)
    await first.submit(Requested(request("one")))
    await late.look(lambda pool, now: None)
    await check(late)
    newcomer = lasting()
    assert await waiting_in(newcomer) == ["one", "two", "three"]
    await check(newcomer)


async def test_news_are_looked_at_also_with_an_event_that_is_refused(lasting: Opened) -> None:
    ledger, told = lasting(), lasting.told
    other = lasting()
    await ledger.submit(read(lasting.place, 1))
    await ledger.look(lambda pool, now: None)
    may_go_on = threading.Event()
    busy = asyncio.ensure_future(ledger.look(lambda pool, now: may_go_on.wait(10)))
    await asyncio.sleep(0.02)
    await other.submit(Requested(request("waits")))
    refused = asyncio.ensure_future(ledger.submit(Released("lease-77")))
    await asyncio.sleep(0)
    may_go_on.set()
    await busy
    with pytest.raises(UnknownLeaseError):
        await refused
    async with asyncio.timeout(5):
        while not isinstance(told.changes.get("waits"), Lease):
            await asyncio.sleep(0.005)


async def test_what_another_process_committed_is_noticed_without_being_asked(lasting: Opened) -> None:
    first = lasting()
    told_first = lasting.told
    second = lasting()
    await first.submit(read(lasting.place, 1))
    await second.look(lambda pool, now: None)
    lease = await granted(first, "one")
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(5):
        while "one" not in lasting.told.changes:
            await asyncio.sleep(0.002)
    took = asyncio.get_running_loop().time() - begun
    assert lasting.told.changes["one"] == lease
    assert took < 0.5, f"noticed after {took:.3f} s"
    await second.submit(Released(lease.lease_id))
    async with asyncio.timeout(5):
        while isinstance(told_first.changes["one"], Lease):
            await asyncio.sleep(0.002)


async def test_what_another_process_commits_right_after_ones_own_commit_is_noticed(lasting: Opened) -> None:
    ledger = sqlite_place(lasting).open(told := Told())
    other = lasting()
    await ledger.look(lambda pool, now: None)
    loop = asyncio.get_running_loop()
    statements: list[str] = []

    def between(_cursor: object, statement: str, _values: object) -> bool:
        statements.append(statement)
        if statements[-2:-1] == ["COMMIT"]:
            ledger._file.connection.exec_trace = None
            asyncio.run_coroutine_threadsafe(other.submit(Requested(request("theirs"))), loop).result()
        return True

    ledger._file.connection.exec_trace = between
    await ledger.submit(Requested(request("ours")))
    async with asyncio.timeout(5):
        while "theirs" not in told.changes:
            await asyncio.sleep(0.005)
    await ledger.close()


async def test_two_who_commit_all_the_time_know_the_same_in_the_end(lasting: Opened) -> None:
    first, second = lasting(), lasting()
    await first.submit(read(lasting.place, 1))
    lease = await granted(first, "holds", ttl=1000.0)

    async def hammer(ledger: Ledger, name: str) -> None:
        for number in range(60):
            await ledger.submit(Requested(request(f"{name}{number}")))

    await asyncio.gather(hammer(first, "a"), hammer(second, "b"))
    async with asyncio.timeout(5):
        for ledger in (first, second):
            while len(await ledger.look(lambda pool, now: list(pool.queue.in_order()))) < 120:
                await asyncio.sleep(0.01)
    assert await waiting_in(first) == await waiting_in(second)
    assert await leases_of(first) == await leases_of(second) == {"holds": lease}
    await check(first)
    await check(second)


async def test_a_waiter_here_a_release_there_and_a_grant_elsewhere(lasting: Opened) -> None:
    here, told_here = lasting(), lasting.told
    there, elsewhere = lasting(), lasting()
    await here.submit(Requested(request("waits"), poll_deadline=lasting.clock.now() + 30.0))
    await elsewhere.submit(read(lasting.place, 1))
    async with asyncio.timeout(5):
        while not isinstance(told_here.changes.get("waits"), Lease):
            await asyncio.sleep(0.002)
    lease = told_here.changes["waits"]
    assert isinstance(lease, Lease)
    assert lease.state is LeaseState.HELD
    await here.submit(Requested(request("next"), poll_deadline=lasting.clock.now() + 30.0))
    lasting.clock.advance(1.0)
    await there.submit(Released(lease.lease_id, "me"))
    lasting.clock.advance(0.1)
    await elsewhere.submit(read(lasting.place, 1))
    async with asyncio.timeout(5):
        while not isinstance(told_here.changes.get("next"), Lease):
            await asyncio.sleep(0.002)
    for ledger in (here, there, elsewhere):
        await check(ledger)


async def test_whoever_waits_here_wants_a_reading_of_what_was_released_there(lasting: Opened) -> None:
    here = lasting()
    told_here = lasting.told
    there = lasting()
    await here.submit(read(lasting.place, 1))
    lease = await granted(here, "holds")
    lasting.clock.advance(1.0)
    await there.submit(Released(lease.lease_id))
    await here.look(lambda pool, now: None)
    await here.submit(Requested(request("late")))  # nobody waited when it was released
    assert "ReadingWanted" in [type(effect).__name__ for effect in told_here.effects]


async def test_two_that_decide_by_the_same_readings_decide_once(lasting: Opened) -> None:
    place = sqlite_place(lasting)
    first, second = lasting(), lasting()
    for number in range(6):
        await (first, second)[number % 2].submit(Requested(request(f"w{number}")))
    grants = [
        effect
        for ledger in (first, second)
        for effect in await ledger.submit(read(place, 4))
        if isinstance(effect, Granted)
    ]
    assert [grant.lease.request.request_id for grant in grants] == ["w0", "w1", "w2", "w3"]
    assert await leases_of(first) == await leases_of(second)
    assert place.read("SELECT count(DISTINCT gpu_id), count(*) FROM promised") == [(4, 4)]
    await check(first)
    await check(second)


async def test_an_id_that_was_forgotten_and_used_anew_elsewhere(lasting: Opened) -> None:
    first = lasting(PoolSettings(remember_seconds=100.0))
    second = lasting(PoolSettings(remember_seconds=100.0))
    await first.submit(Requested(request("one", count=2)))
    await first.submit(Cancelled("one"))
    await second.look(lambda pool, now: None)
    lasting.clock.advance(100.0)
    await second.submit(Requested(request("one")))  # another request under the old id
    await first.look(lambda pool, now: None)
    assert isinstance(await first.look(lambda pool, now: pool.requests["one"]), Waiter)
    await check(first)
    await check(second)
    await second.submit(Cancelled("one"))
    await first.look(lambda pool, now: None)
    await check(first)
    await second.close()
    assert await first.submit(Requested(request("one"))) == (Ended("one", RequestState.CANCELLED),)
    await check(first)


async def test_a_process_that_slept_until_all_was_forgotten_begins_anew(lasting: Opened) -> None:
    """Stopped on Friday, let go on on Monday: how what it knew of has ended is not in the ledger any more."""
    awake = lasting(PoolSettings(remember_seconds=100.0))
    await awake.submit(read(lasting.place, 2))
    lease = await granted(awake, "one", ttl=30.0)
    asleep = lasting(PoolSettings(remember_seconds=100.0))
    assert set(await leases_of(asleep)) == {"one"}
    may_wake_up = threading.Event()
    sleeping = asyncio.ensure_future(asleep.look(lambda pool, now: may_wake_up.wait(10)))
    await asyncio.sleep(0.02)
    await awake.submit(Released(lease.lease_id))
    for number in range(4):
        lasting.clock.advance(100.0)
        await awake.submit(Requested(request(f"r{number}")))
        await awake.submit(Cancelled(f"r{number}"))
    assert sqlite_place(lasting).read("SELECT count(*) FROM requests WHERE request_id = 'one'") == [0]
    may_wake_up.set()
    await sleeping
    assert await asleep.submit(Ticked()) == ()
    assert await leases_of(asleep) == {}
    assert lasting.told.all[0].is_everything
    assert any(committed.is_everything for committed in lasting.told.all[1:])
    await check(asleep)


async def test_a_holder_whose_end_another_process_noticed(lasting: Opened) -> None:
    first, second = lasting(), lasting()
    await first.submit(read(lasting.place, 1))
    lease = await granted(first, "gone")
    await second.submit(HolderGone(lease.lease_id, is_proven=True))
    with pytest.raises(LeaseEndedError, match="its holder is gone"):
        await first.submit(Renewed(lease.lease_id))
    lasting.clock.advance(0.1)
    await first.submit(Requested(request("next")))
    effects = await first.submit(read(lasting.place, 1))
    assert [type(effect) for effect in effects] == [LeaseEnded, Granted]
    await check(first)
    await check(second)


async def test_a_ledger_at_rest_is_left_alone(lasting: Opened) -> None:
    """Two processes must not keep each other busy: what one notices of the other gives it nothing to write."""
    place = sqlite_place(lasting)
    ledgers = [lasting(PoolSettings(max_bypass_seconds=1.0)) for _ in range(3)]
    for ledger in ledgers:
        await ledger.submit(read(place, 3))
    await granted(ledgers[0], "one")
    await granted(ledgers[1], "two")
    await ledgers[2].submit(Requested(request("both", count=3)))
    lasting.clock.advance(2.0)
    for ledger in ledgers:
        await ledger.submit(read(place, 3))
        await ledger.submit(Requested(request("small")))
    (before,) = place.read("SELECT revision FROM meta")
    await asyncio.sleep(0.4)
    assert place.read("SELECT revision FROM meta") == [before]
    for ledger in ledgers:
        await ledger.look(lambda pool, now: check_invariants(pool))
    assert len({str(await ledger.look(lambda pool, now: pool.reserved_for)) for ledger in ledgers}) == 1
