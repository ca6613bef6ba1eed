"""Leases that were renewed through other servers, while their host has no link to its fleet."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core import Lease, LeaseState, Request
from gpu_worker_pool.fleet.bridging import LONGEST_SECONDS, Bridge

TTL_SECONDS = 20.0


def lease(name: str, expires_at: float | None = 20.0, state: LeaseState = LeaseState.HELD) -> Lease:
    return Lease(name, Request(name), "", ("gpu",), (), 1, state, 0.0, 0.0, expires_at)


def test_only_what_was_renewed_over_a_link_is_renewed_for_its_holder() -> None:
    bridge = Bridge()
    for name in ("far", "quarantined", "ended", "early", "endless"):
        bridge.renewed(name, 0.0)
    bridge.ended("ended")
    leases = [
        lease("far"),
        lease("near"),
        lease("quarantined", state=LeaseState.QUARANTINED),
        lease("ended"),
        lease("early", 30.0),
        lease("endless", None),
    ]
    assert bridge.due(leases, 19.0) == []  # it has a link
    bridge.lost(10.0)
    assert bridge.due(leases, 19.0) == ["far"]
    bridge.linked()
    assert bridge.due(leases, 19.0) == []


@pytest.mark.fault(47)
def test_a_lease_ends_at_most_a_minute_later_than_it_would() -> None:
    bridge = Bridge()
    renewed_at, now, expires_at = 0.0, 0.0, TTL_SECONDS
    bridge.renewed("far", renewed_at)
    bridge.lost(5.0)
    while now < expires_at:
        now += 0.5
        if bridge.due([lease("far", expires_at)], now):
            expires_at = now + TTL_SECONDS
    assert TTL_SECONDS + LONGEST_SECONDS / 2 < expires_at <= renewed_at + TTL_SECONDS + LONGEST_SECONDS
    assert not bridge.is_needed(now)
