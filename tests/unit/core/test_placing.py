"""Grants that two pools agree on: of a fleet's dispatcher, which chooses, and of the host, which promises."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    Granted,
    GrantRefused,
    Lease,
    LeaseState,
    Pool,
    PoolSettings,
    Released,
    Request,
    Requested,
    RequestState,
    Requirements,
    Waiter,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.errors import UnknownLeaseError
from gpu_worker_pool.testing import gpus, snapshot


def pool_of(number: int, **settings: float) -> Pool:
    pool = Pool(PoolSettings(**settings))  # type: ignore[arg-type]
    pool.apply(snapshot(gpus(number), at=0.0), 0.0)
    return pool


def granted(pool: Pool, name: str, now: float = 1.0, count: int = 1) -> Lease:
    effects = pool.apply(Requested(Request(name, Requirements(count=count))), now)
    leases = [effect.lease for effect in effects if isinstance(effect, Granted)]
    return leases[0]


def waiting(pool: Pool) -> list[str]:
    return [waiter.request.request_id for waiter in pool.queue.in_order()]


def test_what_may_not_wait_is_granted_at_once_or_refused_and_forgotten() -> None:
    pool = pool_of(1)
    request = Request("placed", Requirements(only=("0",)), ttl_seconds=30.0)
    lease = granted(pool, "first")
    effects = pool.apply(Requested(request, may_wait=False), 2.0)
    assert [type(effect) for effect in effects] == [Ended]
    assert effects[0] == Ended("placed", RequestState.REJECTED, ("GPU 0: held by first for 1 s",))
    assert "placed" not in pool.requests
    check_invariants(pool)

    pool.apply(Released(lease.lease_id), 3.0)
    (found,) = pool.apply(Requested(request, may_wait=False), 3.0)[:1]
    assert isinstance(found, Granted)
    assert found.lease.state is LeaseState.HELD
    # Repeated, it is the same lease.
    (again,) = pool.apply(Requested(request, may_wait=False), 4.0)[:1]
    assert isinstance(again, Granted)
    assert again.lease.lease_id == found.lease.lease_id
    check_invariants(pool)


def test_what_may_not_wait_goes_before_those_who_wait() -> None:
    pool = pool_of(2)
    lease = granted(pool, "first")
    pool.apply(Requested(Request("large", Requirements(count=2))), 2.0)
    effects = pool.apply(Requested(Request("placed"), may_wait=False), 3.0)
    assert [type(effect) for effect in effects] == [Granted]
    pool.apply(Released(lease.lease_id), 4.0)
    assert waiting(pool) == ["large"]
    check_invariants(pool)


def test_placed_between_two_polls_it_is_offered() -> None:
    pool = pool_of(1)
    request = Request("placed", ttl_seconds=30.0)
    effects = pool.apply(Requested(request, poll_deadline=1.0, may_wait=False), 2.0)
    assert isinstance(effects[0], Granted)
    assert effects[0].lease.state is LeaseState.OFFERED
    assert effects[0].lease.expires_at == 12.0


def test_a_refused_grant_waits_again_in_its_place_and_its_gpus_are_out_until_they_are_read() -> None:
    pool = pool_of(1)
    holder = granted(pool, "holder")
    for name in ("a", "b", "c"):
        pool.apply(Requested(Request(name)), 2.0)
    tickets = {waiter.request.request_id: waiter.ticket for waiter in pool.queue.in_order()}
    (found,) = [each for each in pool.apply(Released(holder.lease_id), 3.0) if isinstance(each, Granted)]
    assert found.lease.request.request_id == "a"

    effects = pool.apply(GrantRefused(found.lease.lease_id, tickets["a"]), 4.0)
    assert not any(isinstance(effect, Granted) for effect in effects)
    assert waiting(pool) == ["a", "b", "c"]
    assert isinstance(pool.requests["a"], Waiter)
    check_invariants(pool)

    effects = pool.apply(snapshot(gpus(1), at=5.0), 5.0)
    (found,) = [each for each in effects if isinstance(each, Granted)]
    assert found.lease.request.request_id == "a"
    check_invariants(pool)


def test_refusals_that_come_in_another_order_do_not_change_the_order() -> None:
    pool = pool_of(3)
    leases = [granted(pool, name, now) for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    pool.apply(Requested(Request("d")), 4.0)
    for number, lease in reversed(list(enumerate(leases, 1))):
        pool.apply(GrantRefused(lease.lease_id, number), 5.0)
    assert waiting(pool) == ["a", "b", "c", "d"]
    check_invariants(pool)
    pool.apply(GrantRefused(granted_to(pool, "a", 6.0).lease_id, 1), 6.0)
    assert waiting(pool)[0] == "a"
    check_invariants(pool)


def granted_to(pool: Pool, name: str, now: float) -> Lease:
    pool.apply(snapshot(gpus(3), at=now), now)
    lease = pool.requests[name]
    assert isinstance(lease, Lease)
    return lease


def test_a_refused_grant_whose_client_is_gone_is_given_up() -> None:
    pool = pool_of(1)
    lease = granted(pool, "gone")
    effects = pool.apply(GrantRefused(lease.lease_id, 1, poll_deadline=1.0, gives_up_at=3.0), 4.0)
    assert Ended("gone", RequestState.GIVEN_UP, ()) in effects
    check_invariants(pool)


def test_only_a_grant_can_be_refused() -> None:
    pool = pool_of(1)
    with pytest.raises(UnknownLeaseError):
        pool.apply(GrantRefused("lease-7", 1), 1.0)
    lease = granted(pool, "a")
    pool.apply(Cancelled("a"), 2.0)
    with pytest.raises(UnknownLeaseError):
        pool.apply(GrantRefused(lease.lease_id, 1), 3.0)
