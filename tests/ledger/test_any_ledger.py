"""What every ledger must do, whatever it is kept in: the same answers, safe before they are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    Granted,
    HolderGone,
    Lease,
    LeaseEnded,
    LeaseState,
    Outcome,
    PollAbandoned,
    PoolSettings,
    QuarantineEnded,
    ReadingWanted,
    Released,
    Renewed,
    Requested,
    RequestState,
    Stopped,
    Ticked,
    Waiter,
    explain,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.errors import (
    IllegalEventError,
    LeaseEndedError,
    LedgerUnavailableError,
    NotYourLeaseError,
    RequestMismatchError,
    TooManyWaitingError,
    UnknownLeaseError,
)
from gpu_worker_pool.ledger import Committed, Ledger
from tests.ledger.conftest import Opened
from tests.ledger.places import TTL, Told, read, request


async def granted(ledger: Ledger, name: str, poll_id: str = "", **how: object) -> Lease:
    """Ask, and be granted at once."""
    effects = await ledger.submit(Requested(request(name, **how), poll_id=poll_id))  # type: ignore[arg-type]
    assert [type(effect) for effect in effects] == [Granted]
    effect = effects[0]
    assert isinstance(effect, Granted)
    return effect.lease


async def check(ledger: Ledger) -> None:
    await ledger.look(lambda pool, now: check_invariants(pool))


# ---- submitting


async def test_whoever_submits_is_told_what_came_of_it_and_of_nothing_else(opened: Opened) -> None:
    ledger = opened()
    assert await ledger.submit(read(opened.place, 2)) == ()
    first = await granted(ledger, "first")
    assert (first.gpu_ids, first.fence, first.state) == (("0",), 1, LeaseState.HELD)
    assert (first.granted_at, first.expires_at) == (opened.clock.now(), opened.clock.now() + TTL)
    second, third = await asyncio.gather(
        ledger.submit(Requested(request("second"))), ledger.submit(Requested(request("third")))
    )
    (grant,) = second
    assert isinstance(grant, Granted)
    assert (grant.lease.request.request_id, grant.lease.gpu_ids, grant.lease.fence) == ("second", ("1",), 2)
    assert third == ()
    await check(ledger)


async def test_the_listener_is_called_before_submit_returns(opened: Opened) -> None:
    order: list[str] = []
    told = Told(lambda committed: order.append("told"))
    ledger = opened(told=told)
    await ledger.submit(read(opened.place))
    order.clear()
    lease = await granted(ledger, "first")
    order.append("answered")
    assert order == ["told", "answered"]
    assert told.all[-1] == Committed(
        (Granted(lease),), {"first": lease}, False, 1, {**dict.fromkeys((*RequestState, *LeaseState), 0)}
    )


async def test_what_it_tells_is_enough_to_know_who_waits_and_who_holds(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "holds")
    await ledger.submit(Requested(request("waits")))
    waiter = opened.told.changes["waits"]
    assert isinstance(waiter, Waiter)
    assert opened.told.changes["holds"] == lease
    opened.clock.advance(1.0)
    await ledger.submit(Released(lease.lease_id))
    ended = opened.told.changes["holds"]
    assert isinstance(ended, Outcome)
    assert (ended.lease_state, ended.lease) == (LeaseState.RELEASED, lease)
    opened.clock.advance(0.1)
    await ledger.submit(read(opened.place, 1))
    now_held = opened.told.changes["waits"]
    assert isinstance(now_held, Lease)
    assert opened.told.all[-1].grants == 2
    assert opened.told.all[-1].tally[LeaseState.RELEASED] == 1


async def test_one_that_may_not_happen_fails_alone(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 3))
    before = await granted(ledger, "before")
    answers = await asyncio.gather(
        ledger.submit(Requested(request("one"))),
        ledger.submit(Released("lease-77")),
        ledger.submit(Requested(request("before", ttl=5.0))),
        ledger.submit(Renewed(before.lease_id, by="a stranger")),
        ledger.submit(Requested(request("two"))),
        ledger.submit(QuarantineEnded(before.lease_id)),
        return_exceptions=True,
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [tuple, UnknownLeaseError, RequestMismatchError, NotYourLeaseError, tuple, IllegalEventError]
    leases = await ledger.look(lambda pool, now: [lease.request.request_id for lease in pool.leases])
    assert leases == ["before", "one", "two"]
    assert (await ledger.look(lambda pool, now: pool.leases.lookup(before.lease_id))) == before
    await check(ledger)


async def test_the_same_id_twice_in_one_moment_is_one_request(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 3))
    same, again, other = await asyncio.gather(
        ledger.submit(Requested(request("one"))),
        ledger.submit(Requested(request("one"))),
        ledger.submit(Requested(request("one", count=2))),
        return_exceptions=True,
    )
    assert same == again
    assert isinstance(other, RequestMismatchError)
    assert await ledger.look(lambda pool, now: (len(pool.leases), pool.fence)) == (1, 1)
    await check(ledger)


async def test_one_who_stops_listening_has_asked_all_the_same(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place))
    asking = asyncio.ensure_future(ledger.submit(Requested(request("gone"))))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await ledger.look(lambda pool, now: pool.fence) == 1


async def test_a_listener_that_fails_keeps_nobody_from_its_answer(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(committed: Committed) -> None:
        raise RuntimeError("what was told is not understood")

    ledger = opened(told=Told(fail))
    async with asyncio.timeout(5):
        await ledger.submit(read(opened.place))
        await granted(ledger, "one")
    assert "what was told is not understood" in caplog.text


# ---- looking


async def test_a_look_sees_what_was_submitted_before_it(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    await granted(ledger, "holds")
    opened.clock.advance(2.0)
    asked = asyncio.ensure_future(ledger.submit(Requested(request("waits"))))
    await asyncio.sleep(0)
    explanation = await ledger.look(lambda pool, now: explain(pool, "waits", now))
    await asked
    assert explanation is not None
    assert explanation.position == 1
    assert await ledger.look(lambda pool, now: now) == opened.clock.now()


async def test_a_question_that_fails_fails_for_its_asker_alone(opened: Opened) -> None:
    ledger = opened()
    with pytest.raises(ZeroDivisionError):
        await ledger.look(lambda pool, now: 1 / 0)
    assert await ledger.look(lambda pool, now: pool.fence) == 0


# ---- closing


async def test_what_was_submitted_before_it_was_closed_is_finished(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 5))
    asking = [asyncio.ensure_future(ledger.submit(Requested(request(f"r{n}")))) for n in range(5)]
    await asyncio.sleep(0)
    await ledger.close()
    answers = [await asked for asked in asking]
    assert all(isinstance(effects[0], Granted) for effects in answers)
    assert len(opened.told.changes) == 5


async def test_a_closed_ledger_says_so(opened: Opened) -> None:
    ledger = opened()
    await ledger.close()
    await ledger.close()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        await ledger.submit(Ticked())
    with pytest.raises(LedgerUnavailableError, match="closed"):
        await ledger.look(lambda pool, now: None)


# ---- time


async def test_what_falls_due_happens_although_nobody_asks(opened: Opened) -> None:
    settings = PoolSettings()
    ledger = opened(settings)
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "expires", ttl=10.0)
    await opened.serves(ledger, 9.0 + settings.expiry_grace_seconds)
    seen = len(opened.told.all)
    opened.clock.advance(1.0)
    async with asyncio.timeout(5):
        while len(opened.told.all) == seen:
            await asyncio.sleep(0.005)
    (ended,) = opened.told.all[-1].effects
    assert isinstance(ended, LeaseEnded)
    assert (ended.lease.lease_id, ended.state) == (lease.lease_id, LeaseState.QUARANTINED)
    with pytest.raises(LeaseEndedError, match="not renewed in time"):
        await ledger.submit(Renewed(lease.lease_id))
    await check(ledger)


async def test_wake_ups_are_its_own_business(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    await granted(ledger, "holds", ttl=10.0)
    assert await ledger.submit(Requested(request("waits"), deadline=opened.clock.now() + 3.0)) == ()
    assert [type(effect) for effect in opened.told.effects] == [Granted]


async def test_a_waiter_that_times_out_or_is_given_up_has_ended(opened: Opened) -> None:
    ledger = opened(PoolSettings(queue_ttl_seconds=3.0))
    now = opened.clock.now()
    await ledger.submit(read(opened.place, 1))
    await granted(ledger, "holds")
    await ledger.submit(Requested(request("impatient"), deadline=now + 1.0))
    await ledger.submit(Requested(request("polls"), poll_deadline=now + 1.0))
    await opened.serves(ledger, 5.0)
    assert await ledger.submit(Requested(request("impatient"))) == (Ended("impatient", RequestState.TIMED_OUT),)
    assert await ledger.submit(Requested(request("polls"))) == (Ended("polls", RequestState.GIVEN_UP),)
    await check(ledger)


# ---- rule 9: ids are remembered


async def test_asking_again_gives_the_same_lease_for_another_ttl(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place))
    lease = await granted(ledger, "one")
    opened.clock.advance(20.0)
    again = await granted(ledger, "one")
    assert again == lease.extended(opened.clock.now() + TTL)
    with pytest.raises(RequestMismatchError):
        await ledger.submit(Requested(request("one", count=2)))
    assert await ledger.look(lambda pool, now: len(pool.leases)) == 1


async def test_after_its_end_the_outcome_is_told(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "one")
    await ledger.submit(Requested(request("two")))
    await ledger.submit(Cancelled("two", by="me"))
    assert await ledger.submit(Requested(request("two"))) == (Ended("two", RequestState.CANCELLED),)
    await ledger.submit(Released(lease.lease_id, by="me"))
    assert await ledger.submit(Released(lease.lease_id, by="me")) == ()
    assert await ledger.submit(Requested(request("one"))) == (Ended("one", RequestState.GRANTED),)
    with pytest.raises(LeaseEndedError, match="released"):
        await ledger.submit(Renewed(lease.lease_id, by="me"))
    with pytest.raises(NotYourLeaseError):
        await ledger.submit(Released(lease.lease_id, by="a stranger"))
    with pytest.raises(UnknownLeaseError):
        await ledger.submit(Renewed("lease-99"))
    await check(ledger)


async def test_what_ended_long_ago_is_forgotten_and_its_id_is_free(opened: Opened) -> None:
    ledger = opened(PoolSettings(remember_seconds=100.0))
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "one")
    await ledger.submit(Released(lease.lease_id))
    opened.clock.advance(50.0)
    young = await granted_after_reading(ledger, opened, "young")
    await ledger.submit(Released(young.lease_id))
    opened.clock.advance(49.0)
    with pytest.raises(RequestMismatchError):
        await ledger.submit(Requested(request("one", count=2)))
    opened.clock.advance(1.0)
    with pytest.raises(UnknownLeaseError):
        await ledger.submit(Released(lease.lease_id))
    await ledger.submit(read(opened.place, 2))
    another = await granted(ledger, "one", count=2)
    assert another.fence == 3
    await ledger.submit(Released(another.lease_id))
    await check(ledger)


async def granted_after_reading(ledger: Ledger, opened: Opened, name: str) -> Lease:
    await ledger.submit(read(opened.place, 1))
    return await granted(ledger, name)


async def test_what_its_holder_knows_of_is_not_undone_by_a_later_asking(opened: Opened) -> None:
    ledger = opened()
    lease = await granted_after_reading(ledger, opened, "one")
    again = await granted(ledger, "one", poll_id="again")  # and nobody waits for the answer
    assert again.lease_id == lease.lease_id
    await ledger.submit(PollAbandoned("one", "again"))
    held = opened.told.changes["one"]
    assert isinstance(held, Lease)
    assert held.state is LeaseState.HELD


async def test_an_asking_that_was_followed_by_another_undoes_nothing(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(Requested(request("one"), poll_deadline=opened.clock.now() + 30, poll_id="first"))
    await ledger.submit(Requested(request("one"), poll_deadline=opened.clock.now() + 30, poll_id="second"))
    (effect,) = await ledger.submit(read(opened.place, 1))
    assert isinstance(effect, Granted)
    await ledger.submit(PollAbandoned("one", "first"))
    assert opened.told.changes["one"] == effect.lease


async def test_a_renewed_lease_is_its_holders_whatever_was_not_delivered(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "one", poll_id="first")
    await ledger.submit(Renewed(lease.lease_id))
    await ledger.submit(PollAbandoned("one", "first"))
    held = opened.told.changes["one"]
    assert isinstance(held, Lease)
    assert held.state is LeaseState.HELD


async def test_an_answer_that_was_not_delivered_is_only_offered(opened: Opened) -> None:
    ledger = opened(PoolSettings(offer_ttl_seconds=10.0))
    await ledger.submit(read(opened.place, 1))
    await granted(ledger, "one", poll_id="first")
    assert await ledger.submit(PollAbandoned("one", "first")) == ()
    offered = opened.told.changes["one"]
    assert isinstance(offered, Lease)
    assert (offered.state, offered.expires_at) == (LeaseState.OFFERED, opened.clock.now() + 10.0)
    opened.clock.advance(9.0)
    claimed = await granted(ledger, "one", poll_id="second")
    assert (claimed.state, claimed.expires_at) == (LeaseState.HELD, opened.clock.now() + TTL)
    await ledger.submit(PollAbandoned("one", "first"))  # an old one: it was told since
    assert opened.told.changes["one"] == claimed
    await ledger.submit(PollAbandoned("one", "second"))
    await opened.serves(ledger, 9.0)
    await ledger.submit(read(opened.place, 1))
    await opened.serves(ledger, 1.0)
    assert [type(effect) for effect in await ledger.submit(Requested(request("two")))] == [Granted]
    assert await ledger.submit(Requested(request("one"))) == (
        Ended("one", RequestState.GRANTED, ("it was not claimed in time",)),
    )
    await check(ledger)


async def test_an_account_may_have_only_so_many_who_wait(opened: Opened) -> None:
    ledger = opened(PoolSettings(most_waiting_of_an_account=2))
    await ledger.submit(read(opened.place, 1))
    await granted(ledger, "holds", account="a")
    await ledger.submit(Requested(request("w1", account="a")))
    await ledger.submit(Requested(request("w2", account="a")))
    with pytest.raises(TooManyWaitingError):
        await ledger.submit(Requested(request("w3", account="a")))
    await ledger.submit(Requested(request("w3", account="b")))
    await ledger.submit(Requested(request("w1", account="a")))  # it waits already
    await ledger.submit(Cancelled("w1"))
    await ledger.submit(Requested(request("w4", account="a")))
    await check(ledger)


# ---- handing on


async def test_a_released_gpu_goes_to_the_next_once_it_was_read_again(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    first = await granted(ledger, "first")
    for name in ("second", "third"):
        await ledger.submit(Requested(request(name)))
    opened.clock.advance(1.0)
    assert await ledger.submit(Released(first.lease_id)) == (ReadingWanted(""),)
    opened.clock.advance(0.01)
    (grant,) = await ledger.submit(read(opened.place, 1))
    assert isinstance(grant, Granted)
    assert grant.lease.request.request_id == "second"
    await check(ledger)


async def test_a_holder_that_is_provably_gone_holds_nothing(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 1))
    lease = await granted(ledger, "gone")
    await ledger.submit(Requested(request("next")))
    effects = await ledger.submit(HolderGone(lease.lease_id, is_proven=True))
    assert [type(effect) for effect in effects] == [LeaseEnded, ReadingWanted]
    opened.clock.advance(0.01)
    effects = await ledger.submit(read(opened.place, 1))
    assert [type(effect) for effect in effects] == [LeaseEnded, Granted]
    await check(ledger)


async def test_stopping_ends_everybody_who_waits(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(Requested(request("one")))
    await ledger.submit(Requested(request("two", priority=1)))
    assert await ledger.submit(Stopped()) == (
        Ended("two", RequestState.STOPPED),
        Ended("one", RequestState.STOPPED),
    )
    await check(ledger)


# ---- inside a lease


async def test_a_lease_is_divided_among_those_inside_it(opened: Opened) -> None:
    ledger = opened()
    await ledger.submit(read(opened.place, 3))
    outer = await granted(ledger, "outer", count=2)
    inside = [replace(request(name), within=outer.lease_id) for name in ("a", "b", "c")]
    for each in inside:
        await ledger.submit(Requested(each))
    a, b, c = await ledger.look(lambda pool, _: [pool.requests[each.request_id] for each in inside])
    assert isinstance(a, Lease)
    assert isinstance(b, Lease)
    assert isinstance(c, Waiter)
    assert (a.gpu_ids, b.gpu_ids) == (("0",), ("1",))
    assert [a.request, b.request, c.request] == inside
    await ledger.submit(Released(outer.lease_id, "me"))
    await ledger.submit(Released(a.lease_id, "me"))
    held = await ledger.look(lambda pool, _: {lease.request.request_id: lease.state for lease in pool.leases})
    assert held == {"outer": LeaseState.QUARANTINED, "b": LeaseState.HELD}
    await check(ledger)
