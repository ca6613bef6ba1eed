"""Leases and explanations as JSON rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gpu_worker_pool.api.lease_rows import explanation_body, lease_body, lease_env, lease_row, user_of
from gpu_worker_pool.broker.usage import LeaseUsage
from gpu_worker_pool.core.assignments import HeldGPU, Lease
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.explanation import Explanation, GPUExplanation
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.obstacles import Obstacle, ObstacleKind
from gpu_worker_pool.core.requirements import ANY_GPU

HELD = (HeldGPU("GPU-1", 0, "GPU-1", "A"), HeldGPU("gpu-3", 3, None, "B"))
LEASE = Lease("lease-7", Request("r"), "", ("GPU-1", "gpu-3"), HELD, 7, LeaseState.HELD, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("account", "user"),
    [
        ("loopback", None),
        ("key-0123456789ab", None),
        ("", None),
        ("user:0", "root"),
        ("user:4294967294", "4294967294"),
        ("user:99999999999999999999", "99999999999999999999"),
        ("user:x", None),
    ],
)
def test_whose_it_is(account: str, user: str | None) -> None:
    assert user_of(replace(LEASE, request=Request("r", account=account))) == user


def test_gpus_have_the_numbers_of_now_and_not_of_the_grant() -> None:
    """After a reboot the driver may count the GPUs in another order."""
    after_reboot = {"GPU-1": 5}.get
    assert lease_env(LEASE, after_reboot) == {
        "CUDA_VISIBLE_DEVICES": "5,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "GPU-1,3",
        "GPU_POOL_LEASE_ID": "lease-7",
    }
    assert lease_env(LEASE, after_reboot, "uuid")["CUDA_VISIBLE_DEVICES"] == "GPU-1,3"
    assert lease_env(LEASE, lambda _: None)["CUDA_VISIBLE_DEVICES"] == "GPU-1,3", "not the number of the grant"


def test_one_that_never_expires() -> None:
    for body in (lease_body(LEASE, lambda _: 0, "index"), lease_row(LEASE, LeaseUsage())):
        assert (body["expires_at"], body["expires_in_seconds"], body["ttl_seconds"]) == (None, None, None)
        assert json.dumps(body, allow_nan=False)


def test_an_explanation_has_no_number_that_json_has_not() -> None:
    obstacle = Obstacle(ObstacleKind.TOO_LITTLE_LEFT, "0 MB left", -math.inf, 100.0)
    gpus = (GPUExplanation("GPU-1", "", "A", (obstacle,)), GPUExplanation("gpu-3", "", None, ()))
    body = explanation_body("r", Explanation(ANY_GPU, 1, 2.0, gpus, (), "why", is_queued=False), {"GPU-1": 0}.get)
    assert json.dumps(body, allow_nan=False)
    assert body["gpus"] == [
        {
            "gpu_id": 0,
            "uuid": "GPU-1",
            "name": "A",
            "obstacles": [{"kind": "too_little_left", "text": "0 MB left", "actual": None, "limit": 100.0}],
        },
        {"gpu_id": None, "uuid": None, "name": None, "obstacles": []},
    ]
