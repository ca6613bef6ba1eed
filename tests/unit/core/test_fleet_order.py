"""A host of a fleet: what waits is granted when the dispatcher says so, and by the host itself once it is not heard."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    FleetOrder,
    FleetOrdered,
    Granted,
    LeaseState,
    Pool,
    PoolSettings,
    Released,
    Request,
    Requested,
    RequestState,
    Requirements,
    Ticked,
    TurnCame,
    explain,
    explain_requirements,
)
from gpu_worker_pool.core.fleet_order import follows_fleet
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.testing import gpus, snapshot

UNTIL = 15.0


def following(number: int = 1, **order: object) -> Pool:
    pool = Pool(PoolSettings())
    pool.apply(snapshot(gpus(number), at=0.0), 0.0)
    pool.apply(FleetOrdered(FleetOrder(UNTIL, **order)), 0.0)  # type: ignore[arg-type]
    return pool


def requested(pool: Pool, name: str, now: float = 1.0, *, within: str | None = None, **requirements: object) -> None:
    request = Request(name, Requirements(**requirements), within=within)  # type: ignore[arg-type]
    pool.apply(Requested(request, poll_deadline=now + 60.0), now)
    check_invariants(pool)


def granted(pool: Pool, event: object, now: float = 2.0) -> list[str]:
    effects = pool.apply(event, now)  # type: ignore[arg-type]
    check_invariants(pool)
    return [effect.lease.request.request_id for effect in effects if isinstance(effect, Granted)]


def test_a_free_gpu_waits_for_the_word_of_the_dispatcher() -> None:
    pool = following(2)
    requested(pool, "first")
    requested(pool, "second", count=2)
    assert granted(pool, snapshot(gpus(2), at=2.0)) == []
    assert granted(pool, TurnCame("second", ("0", "1"))) == ["second"]
    lease = pool.leases.lookup(pool.requests["second"].lease_id)  # type: ignore[union-attr]
    assert lease is not None
    assert lease.state is LeaseState.HELD  # its client is polling
    # What cannot be granted waits on, as does what the dispatcher got wrong.
    assert granted(pool, TurnCame("first", ("0",))) == []
    assert granted(pool, TurnCame("nobody", ("0",))) == []
    assert granted(pool, Released(lease.lease_id)) == []
    assert granted(pool, TurnCame("first", ("7",))) == []
    assert granted(pool, TurnCame("first", ("1",))) == ["first"]


def test_the_policy_of_the_fleet_limits_the_lease() -> None:
    pool = following()
    pool.apply(Requested(Request("a", ttl_seconds=30.0)), 1.0)
    pool.apply(TurnCame("a", ("0",), max_seconds=20.0), 1.0)
    (lease,) = pool.leases
    assert (lease.longest_seconds, lease.ends_at, lease.expires_at) == (20.0, 21.0, 21.0)


def test_once_the_dispatcher_is_not_heard_the_host_serves_its_requests_itself() -> None:
    pool = following()
    requested(pool, "first")
    requested(pool, "second")
    assert granted(pool, FleetOrdered(FleetOrder(20.0)), 10.0) == []
    assert granted(pool, snapshot(gpus(1), at=UNTIL + 1.0), UNTIL + 1.0) == []
    assert granted(pool, Ticked(), 20.0) == ["first"]
    assert granted(pool, FleetOrdered(FleetOrder(40.0)), 21.0) == []
    (lease,) = pool.leases
    assert granted(pool, Released(lease.lease_id), 22.0) == []
    # A dispatcher that does not serve what waits here: at once.
    assert granted(pool, FleetOrdered(FleetOrder(23.0)), 23.0) == ["second"]


def test_what_runs_inside_a_lease_does_not_concern_the_fleet() -> None:
    pool = following(2)
    requested(pool, "around", count=2)
    granted(pool, TurnCame("around", ("0", "1")))
    (around,) = pool.leases
    requested(pool, "outside")
    request = Request("inside", within=around.lease_id)
    assert granted(pool, Requested(request)) == ["inside"]
    assert granted(pool, TurnCame("outside", ("0",))) == []


def test_the_host_reserves_nothing_itself() -> None:
    pool = Pool(PoolSettings(max_bypass_seconds=5.0))
    pool.apply(snapshot(gpus(2), at=0.0), 0.0)
    requested(pool, "holds", 0.0)
    requested(pool, "large", 0.0, count=2)
    requested(pool, "small", 6.0)
    assert pool.reserved_for is not None
    pool.apply(FleetOrdered(FleetOrder(30.0)), 7.0)
    check_invariants(pool)
    # Else what the fleet places here would be refused.
    assert granted(pool, Requested(Request("of the fleet"), may_wait=False), 8.0) == ["of the fleet"]
    assert pool.reserved_for is None
    pool.apply(Ticked(), 30.0)
    pool.apply(snapshot(gpus(2), at=31.0), 31.0)
    check_invariants(pool)


def test_who_waits_is_told_the_place_in_the_fleet_and_what_is_reserved_there() -> None:
    pool = following(2, positions={"b": 7}, reserved=("1",), reserved_for="big", reserved_name="ada's train.py")
    requested(pool, "a")
    requested(pool, "b")
    first, second = explain(pool, "a", 1.0), explain(pool, "b", 1.0)
    assert first is not None
    assert second is not None
    assert second.summary == "one GPU: number 7 in line; its turn comes in the order of this host's fleet"
    assert first.position == 1  # not said yet: among those of this host
    assert [tuple(map(str, gpu.obstacles)) for gpu in second.gpus] == [
        (),
        ("reserved for ada's train.py, which has waited longer in the fleet",),
    ]
    assert "order of this host's fleet" in explain_requirements(pool, Requirements(), 1.0).summary
    pool.apply(FleetOrdered(FleetOrder(UNTIL, {"b": 2}, ("1",), "b", "b", "gpu-1 is being drained")), 2.0)
    drained = explain(pool, "b", 2.0)
    assert drained is not None
    assert drained.summary == "one GPU: number 2 in line; gpu-1 is being drained"
    assert [gpu.obstacles for gpu in drained.gpus] == [(), ()]  # it is reserved for this very one
    after = explain(pool, "b", UNTIL)
    assert after is not None
    assert "fleet" not in after.summary


def test_what_the_fleet_refuses_is_rejected_with_the_reason() -> None:
    pool = following()
    requested(pool, "a")
    effects = pool.apply(Cancelled("a", refused=("the policy allows 2 GPUs",)), 2.0)
    assert Ended("a", RequestState.REJECTED, ("the policy allows 2 GPUs",)) in effects


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["request", "large", "inside", "release", "turn", "order", "leave", "read", "cancel"]),
        st.integers(min_value=0, max_value=30),
        st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    ),
    max_size=40,
)


@given(steps=STEPS)
@example(steps=[("order", 0, 20.0), ("large", 0, 0.5), ("cancel", 0, 20.0)])
@settings(max_examples=150, deadline=None)
def test_whatever_happens_nothing_is_granted_out_of_the_order(steps: list[tuple[str, int, float]]) -> None:
    """And once the fleet is not heard, nobody waits who could be served (`check_invariants`)."""
    pool, now = Pool(PoolSettings(max_bypass_seconds=5.0)), 0.0
    pool.apply(snapshot(gpus(3), at=0.0), 0.0)
    for number, (what, which, seconds) in enumerate(steps):
        now += seconds
        leases = [lease for lease in pool.leases if lease.within is None]
        waiters = [waiter.request.request_id for waiter in pool.queue.in_order()]
        event: Any = Ticked()
        if what in ("request", "large"):
            event = Requested(Request(f"r{number}", Requirements(count=2 if what == "large" else 1)))
        elif what == "inside" and leases:
            event = Requested(Request(f"r{number}", within=leases[which % len(leases)].lease_id))
        elif what == "release" and leases:
            event = Released(leases[which % len(leases)].lease_id)
        elif what == "turn" and waiters:
            event = TurnCame(waiters[which % len(waiters)], ("0", "1", "2"))
        elif what == "cancel" and waiters:
            event = Cancelled(waiters[which % len(waiters)])
        elif what in ("order", "leave"):
            event = FleetOrdered(FleetOrder(now + (UNTIL if what == "order" else 0.0)))
        elif what == "read":
            event = snapshot(gpus(3), at=now)
        effects = pool.apply(event, now)
        check_invariants(pool)
        if follows_fleet(pool, now) and not isinstance(event, TurnCame):
            assert not [each for each in effects if isinstance(each, Granted) and each.lease.within is None]
