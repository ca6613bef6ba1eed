"""What a server says of leases, checked as hostile input; and wishes as one of several endpoints understands them."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core import ANY_GPU, Requirements
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.leases.replies import read_lease, read_problem, read_waiting
from gpu_worker_pool.leases.values import LeaseAsk, LeasedGPU, requirements_at

ASK = LeaseAsk.new("worker-1", ANY_GPU, None, 30.0)
GOOD: dict[str, Any] = {
    "lease_id": "lease-1",
    "request_id": ASK.request_id,
    "fence": 4,
    "gpus": [{"gpu_id": 2, "uuid": "GPU-6ec5", "name": "H100"}],
    "env": {"LD_PRELOAD": "evil.so", "CUDA_VISIBLE_DEVICES": "0"},
}


def test_a_lease() -> None:
    lease = read_lease(GOOD, "server", ASK, 5.0)
    assert (lease.endpoint_id, lease.lease_id, lease.fence) == ("server", "lease-1", 4)
    assert lease.gpus == (LeasedGPU(2, "GPU-6ec5", "H100"),)
    assert lease.life.held_until == 35.0
    assert lease.shown == "GPU 2 of server (lease-1)"


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_id": None},
        {"lease_id": "../../admin"},
        {"lease_id": "x" * 65},
        {"fence": -1},
        {"fence": "4"},
        {"fence": True},
        {"fence": 10**30},
        {"request_id": "somebody-else-s"},
        {"gpus": None},
        {"gpus": []},
        {"gpus": [None]},
        {"gpus": GOOD["gpus"] * 2},
        {"gpus": [{"gpu_id": -1}]},
        {"gpus": [{"gpu_id": 0, "uuid": "0,1,2"}]},
        {"gpus": [{"gpu_id": 0, "uuid": 7}]},
    ],
)
def test_what_cannot_be_a_lease_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ServiceRetryableError):
        read_lease(GOOD | wrong, "server", ASK, 5.0)


@pytest.mark.parametrize("reply", [None, [], "lease", 3])
def test_what_is_no_object_is_refused(reply: object) -> None:
    with pytest.raises(ServiceRetryableError):
        read_lease(reply, "server", ASK, 5.0)


def test_what_a_waiter_is_told() -> None:
    waiting = read_waiting({"position": 3, "reasons": ["busy", 7, "very\x1b[31m busy"]})
    assert waiting.position == 3
    assert waiting.reasons == ("busy", "very[31m busy")
    assert read_waiting({"position": -1, "reasons": "many"}).position is None
    assert read_waiting(None).reasons == ()


def test_what_an_error_says() -> None:
    problem = read_problem(
        {"error": "impossible", "detail": "no\nnever", "reasons": ["too large"], "state": "cancelled"}
    )
    assert (problem.error, problem.detail, problem.reasons) == ("impossible", "nonever", ("too large",))
    assert problem.state == "cancelled"
    assert read_problem("<html>").error == ""


def test_no_secret_is_shown() -> None:
    assert ASK.token not in repr(ASK)
    assert ASK.token not in repr(read_lease(GOOD, "server", ASK, 5.0))


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
