"""Requests for leases as values, and requirements as one of several endpoints understands them."""

from __future__ import annotations

from tests.fakes.lease_service import FakeLeaseService, new_request

from gpu_worker_pool.core import ANY_GPU, Requirements
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, requirements_at, with_new_id


def test_no_secret_is_shown() -> None:
    request = new_request(30.0)
    assert request.owner not in repr(request)
    lease = HeldLease(FakeLeaseService("server"), request, "lease-1", 4, (LeasedGPU(2, "GPU-6ec5", "H100"),), 5.0)
    assert request.owner not in repr(lease)
    assert lease.shown == "GPU 2 of server (lease-1)"


def test_a_request_is_sent_under_an_id_and_a_token_of_its_own() -> None:
    requests = [new_request(), new_request()]
    requests.append(with_new_id(requests[0]))
    assert len({request.request_id for request in requests}) == len({request.owner for request in requests}) == 3
    assert requests[2].requirements is requests[0].requirements
    assert all(16 <= len(request.owner) <= 200 for request in requests)


def test_requirements_at_one_of_several_endpoints() -> None:
    requirements = Requirements(only=("a:0", "b:1", "GPU-6ec5", "3"), exclude=("a:2", "b:5"))
    assert requirements_at("a", requirements) == Requirements(only=("0", "GPU-6ec5", "3"), exclude=("2",))
    assert requirements_at("b", requirements) == Requirements(only=("1", "GPU-6ec5", "3"), exclude=("5",))
    assert requirements_at("c", Requirements(only=("a:0",))) is None
    assert requirements_at("a", ANY_GPU) is ANY_GPU
