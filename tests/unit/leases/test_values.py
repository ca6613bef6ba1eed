"""Requests for leases as values, and requirements as one of several endpoints understands them."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core import ANY_GPU, Requirements
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeaseAsk, LeasedGPU, requirements_at

ASK = LeaseAsk.new("worker-1", ANY_GPU, None, 30.0)


def test_no_secret_is_shown() -> None:
    assert ASK.token not in repr(ASK)
    lease = HeldLease("server", "lease-1", 4, (LeasedGPU(2, "GPU-6ec5", "H100"),), ASK, LeaseLife(30.0, 5.0))
    assert ASK.token not in repr(lease)
    assert lease.shown == "GPU 2 of server (lease-1)"


def test_an_ask_is_like_no_other_and_can_be_made_anew() -> None:
    asks = [LeaseAsk.new("worker-1", ANY_GPU, None, 30.0), ASK, ASK.anew()]
    assert len({ask.request_id for ask in asks}) == len({ask.token for ask in asks}) == 3
    assert asks[2].requirements is ASK.requirements
    assert all(16 <= len(ask.token) <= 200 for ask in asks)


@pytest.mark.parametrize(("ttl_seconds", "poll_seconds"), [(2.0, 2 / 3), (60.0, 20.0), (3600.0, 30.0)])
def test_a_grant_that_a_poll_brings_has_most_of_its_life_before_it(ttl_seconds: float, poll_seconds: float) -> None:
    assert LeaseAsk.new("worker-1", ANY_GPU, None, ttl_seconds).poll_seconds == pytest.approx(poll_seconds)


def test_wishes_at_one_of_several_endpoints() -> None:
    requirements = Requirements(only=("a:0", "b:1", "GPU-6ec5", "3"), exclude=("a:2", "b:5"))
    assert requirements_at("a", requirements) == Requirements(only=("0", "GPU-6ec5", "3"), exclude=("2",))
    assert requirements_at("b", requirements) == Requirements(only=("1", "GPU-6ec5", "3"), exclude=("5",))
    assert requirements_at("c", Requirements(only=("a:0",))) is None
    assert requirements_at("a", ANY_GPU) is ANY_GPU
