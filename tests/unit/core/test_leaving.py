"""Holders that are asked to leave: nobody must go, but idle ones lose their lease where the policy says so."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    LeaseUse,
    LeaveRequested,
    PolicyRead,
    Released,
    Renewed,
    Request,
    Requested,
    Requirements,
    Resumed,
    Ticked,
    UseSeen,
)
from gpu_worker_pool.core.policy import IdleRule, Limits, Policy
from gpu_worker_pool.errors import UnknownLeaseError
from tests.unit.core.test_limits import SETTINGS, Table

ASKING = Policy(everyone=Limits(idle_may_be_asked=True), idle=IdleRule(after_seconds=60.0, grace_seconds=30.0))


class Lab(Table):
    def asked(self, lease_id: str = "lease-1") -> str | None:
        lease = self.pool.leases.lookup(lease_id)
        return None if lease is None or lease.asked is None else lease.asked.reason

    def state(self, lease_id: str = "lease-1") -> str:
        lease = self.pool.leases.lookup(lease_id)
        return "ended" if lease is None else str(lease.state.value)

    def used(self, *, idle: float, lease_id: str = "lease-1") -> None:
        """Seen now, idle for so long."""
        self.apply(UseSeen({lease_id: LeaseUse(self.now, 0.0, idle, self.now - idle, None)}))
        self.read()

    def is_told(self) -> None:
        """Its holder renews, and learns that it is asked."""
        self.apply(Renewed("lease-1"))


def idle_lab(policy: Policy = ASKING) -> Lab:
    """A holder that has been idle for long, and nobody who waits."""
    lab = Lab(1, policy)
    lab.ask("a")
    lab.now += 100.0
    lab.used(idle=100.0)
    return lab


def test_anybody_may_ask_and_nothing_is_forced() -> None:
    lab = Lab(1)
    lab.ask("a")
    lab.apply(LeaveRequested("lease-1", "ada needs it for a demo"))
    assert (lab.asked(), lab.state()) == ("ada needs it for a demo", "held")
    with pytest.raises(UnknownLeaseError):
        lab.apply(LeaveRequested("lease-9", ""))


def test_asking_for_what_ends_in_the_same_moment_is_no_error() -> None:
    lab = Lab(1)
    lab.apply(Requested(Request("a", ttl_seconds=10.0)))
    lab.now += 100.0
    lab.apply(LeaveRequested("lease-1", "a demo"))
    assert (lab.state(), lab.asked()) == ("quarantined", None)


def test_a_request_asks_those_who_have_held_longest_and_withdraws_it_when_it_is_served() -> None:
    lab = Lab(3)
    for name in ("a", "b", "c"):
        lab.ask(name, f"key:{name}")
        lab.now += 1.0
    asking = Request("two", Requirements(count=2), "w", ttl_seconds=1e6, account="key:d", asks=True)
    lab.apply(Requested(asking))
    lab.read()
    assert [lab.asked(f"lease-{number}") for number in (1, 2, 3)] == ["d's w waits for it", "d's w waits for it", None]
    lab.release("lease-3")
    lab.release("lease-1")
    assert lab.state("lease-4") == "held"
    assert lab.asked("lease-2") is None


def test_an_idle_holder_is_told_first_and_ends_after_the_grace() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    assert lab.asked() == "it has been idle for 1 min 40 s, and bob waits"
    assert lab.state() == "held"
    lab.is_told()
    lab.now += 15.0
    lab.used(idle=116.0)
    assert lab.state() == "held"
    lab.now += 16.0
    lab.used(idle=132.0)
    assert lab.state() == "quarantined"
    assert lab.pool.leases.lookup("lease-1").quarantine.reason.startswith("it was idle for 1 min 56 s")
    lab.now += SETTINGS.quarantine_seconds
    assert lab.read() == ["b: 0"]


def test_the_grace_counts_from_when_the_holder_is_told() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    for _ in range(4):  # it renews seldom
        lab.now += 60.0
        lab.used(idle=lab.now)
        assert lab.state() == "held"
    lab.is_told()
    ends_at = lab.pool.leases.lookup("lease-1").asked.ends_at
    assert ends_at == lab.now + 30.0
    lab.now += 20.0
    lab.is_told()
    assert lab.pool.leases.lookup("lease-1").asked.ends_at == ends_at, "told twice, it ends no later"
    lab.now += 11.0
    lab.used(idle=lab.now)
    assert lab.state() == "quarantined"


def test_one_that_does_not_renew_when_it_should_ends_all_the_same() -> None:
    lab = Lab(1, ASKING)
    lab.apply(Requested(Request("a", ttl_seconds=3000.0, account="key:ada")))
    lab.now += 100.0
    lab.used(idle=100.0)
    lab.ask("b", "key:bob")
    lab.read()
    ends_at = lab.now + 3000.0 / 3 + 30.0
    while lab.now < ends_at:
        assert lab.state() == "held"
        lab.now += 50.0
        lab.used(idle=lab.now)
    assert lab.state() == "quarantined"


def test_after_an_outage_it_is_told_anew() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    lab.is_told()
    lab.now += 1000.0
    lab.apply(Resumed(1000.0))
    assert (lab.asked(), lab.state()) == (None, "held"), "nobody could tell it meanwhile"
    lab.used(idle=200.0)
    assert lab.asked() is not None


def test_nobody_is_asked_unless_the_policy_says_so_and_somebody_waits() -> None:
    lab = idle_lab()
    lab.read()
    assert lab.asked() is None, "nobody waits"
    for policy in (
        Policy(),
        Policy(everyone=Limits(most_gpus=5)),
        Policy(accounts={"key:bob": Limits(idle_may_be_asked=True)}),
    ):
        lab = idle_lab(policy)
        lab.ask("b", "key:bob")
        lab.read()
        assert lab.asked() is None, policy
    lab = idle_lab()
    lab.ask("other", "key:bob", gpu_model="H100")
    lab.ask("h200", "key:bob", gpu_model="H200")
    lab.read()
    assert lab.asked() is not None
    lab = idle_lab(Policy(everyone=Limits(most_gpus=1, idle_may_be_asked=True), idle=ASKING.idle))
    lab.ask("own")
    lab.read()
    assert lab.asked() is None, "the one who waits could not use it anyway: a limit keeps it back"


def test_a_holder_that_computes_again_stays() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    lab.is_told()
    lab.now += 10.0
    lab.used(idle=0.0)
    assert lab.asked() is None
    lab.now += 40.0
    lab.used(idle=40.0)
    assert lab.state() == "held"


def test_a_holder_may_ask_for_patience() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    lab.apply(Renewed("lease-1", is_busy=True))
    assert lab.asked() is None
    lab.now += 40.0
    lab.apply(Ticked())
    lab.read()
    assert (lab.asked(), lab.state()) == (None, "held")


def test_it_stays_if_nobody_waits_any_more_when_the_grace_is_over() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    assert lab.asked() is not None
    lab.is_told()
    lab.apply(Cancelled("b"))
    lab.now += 31.0
    lab.apply(Ticked())
    assert (lab.asked(), lab.state()) == (None, "held")


def test_a_policy_that_no_longer_allows_it_withdraws_it() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    lab.is_told()
    lab.apply(PolicyRead(Policy(everyone=Limits(most_gpus=9))))
    lab.now += 31.0
    lab.apply(Ticked())
    lab.read()
    assert (lab.asked(), lab.state()) == (None, "held")


def test_giving_it_back_in_time_is_a_plain_release() -> None:
    lab = idle_lab()
    lab.ask("b", "key:bob")
    lab.read()
    lab.apply(Released("lease-1"))
    assert lab.read() == ["b: 0"]
    assert lab.state() == "ended"
