"""How GPUs are named to a program: numbers by default, UUIDs on request, for MIG devices and for containers."""

from __future__ import annotations

import pytest

from gpu_worker_pool.lease_variables import GPUNaming, VisibleGPU, lease_variables, visible_devices

CARD, OTHER = VisibleGPU(3, "GPU-c"), VisibleGPU(1, "GPU-a")
MIG = VisibleGPU(0, "MIG-1")


def test_numbers_in_the_drivers_order_and_uuids_for_containers() -> None:
    assert lease_variables([CARD, OTHER], "lease-7") == {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "GPU-c,GPU-a",
        "GPU_POOL_LEASE_ID": "lease-7",
    }


def test_uuids_on_request() -> None:
    found = lease_variables([CARD, OTHER], "lease-7", "uuid")
    assert found["CUDA_VISIBLE_DEVICES"] == found["NVIDIA_VISIBLE_DEVICES"] == "GPU-c,GPU-a"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_without_a_lease_nothing_is_said_about_containers() -> None:
    assert lease_variables([CARD], None) == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("gpus", "naming", "shown"),
    [
        ([MIG], "index", "MIG-1"),
        # CUDA does not take numbers and UUIDs in one list.
        ([CARD, MIG], "index", "GPU-c,MIG-1"),
        # The driver does not report it now; its number at the grant may be another card's by now.
        ([VisibleGPU(None, "GPU-x"), CARD], "index", "GPU-x,GPU-c"),
        ([VisibleGPU(2, None)], "index", "2"),
        ([VisibleGPU(2, None)], "uuid", "2"),
    ],
)
def test_who_has_no_number_and_who_has_no_uuid(gpus: list[VisibleGPU], naming: GPUNaming, shown: str) -> None:
    assert visible_devices(gpus, naming) == shown
