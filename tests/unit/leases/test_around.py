"""Which lease a program runs inside of: the id in its environment alone proves nothing."""

from __future__ import annotations

import os

import pytest

from gpu_worker_pool.hardware.samples import GPUReading
from gpu_worker_pool.leases.around import LiveLease, lease_around
from gpu_worker_pool.leases.lease import LeasedGPU

GPUS = [GPUReading(index, "Card", f"GPU-{index}") for index in range(3)]


def lease(*indices: int, is_ours: bool | None = True, pid: int | None = None) -> LiveLease:
    gpus = tuple(LeasedGPU(index, f"GPU-{index}", "Card") for index in indices)
    return LiveLease("lease-1", 1, "worker", gpus, is_ours, pid)


@pytest.mark.parametrize(
    ("found", "visible", "is_inside"),
    [
        (lease(0, 1), "0,1", True),
        (lease(0, 1), "1", True),  # a launcher has chosen one of them
        (lease(0, 1), None, True),
        (lease(0), "1", False),  # another lease with this id
        (lease(0), "0,1", False),
        (lease(0, is_ours=False), "0", False),
        (lease(0, is_ours=None, pid=os.getppid()), "0", True),
        (lease(0, is_ours=None, pid=os.getpid()), "0", True),
        (lease(0, is_ours=None, pid=1), "0", False),  # no process around this one holds it
        (lease(0, is_ours=None), "0", True),  # of an older client, which does not say who it is
        (lease(0, is_ours=None), None, False),
    ],
)
def test_the_environment_must_agree(found: LiveLease, visible: str | None, is_inside: bool) -> None:
    assert (lease_around([found], "lease-1", visible, GPUS) is found) == is_inside


def test_an_id_that_no_lease_has() -> None:
    assert lease_around([lease(0)], "lease-2", "0", GPUS) is None
