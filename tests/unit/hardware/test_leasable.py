"""What of a host can be promised, and what of it ceased to exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.hardware.leasable import NO_UUID, readings_of, vanished_devices, within_visible
from gpu_worker_pool.hardware.samples import GPUReading, MIGReading
from gpu_worker_pool.hardware.visibility import VisibilityFilter

OUTSIDER = ProcessReading(7, 1.0, "notebook")
WHOLE = GPUReading(
    2,
    "NVIDIA H100",
    uuid="GPU-whole",
    memory_total_mb=80_000.0,
    memory_used_mb=8_000.0,
    utilization_percent=30.0,
    processes=(OUTSIDER,),
)
DEVICE = MIGReading("MIG-a", "3g.40gb", memory_total_mb=40_000.0, memory_used_mb=100.0, processes=())
SPLIT = GPUReading(
    3,
    "NVIDIA A100",
    uuid="GPU-split",
    memory_total_mb=80_000.0,
    reports_utilization=False,
    mig_enabled=True,
    mig_devices=(DEVICE, replace(DEVICE, uuid="MIG-b", fault="lost")),
)


def test_a_whole_gpu_is_known_by_its_uuid_and_reads_as_it_is() -> None:
    (reading,) = readings_of([WHOLE])
    assert (reading.gpu_id, reading.uuid, reading.index, reading.name) == ("GPU-whole", "GPU-whole", 2, "NVIDIA H100")
    assert (reading.memory_used_mb, reading.memory_usage_percent, reading.utilization_percent) == (8_000.0, 10.0, 30.0)
    assert reading.processes == (OUTSIDER,)
    assert not reading.is_mig_device


def test_a_gpu_that_does_not_tell_its_uuid_is_known_by_its_number_and_promised_to_nobody() -> None:
    (reading,) = readings_of([replace(WHOLE, uuid=None)])
    assert (reading.gpu_id, reading.uuid, reading.fault) == ("gpu-2", None, NO_UUID)
    (lost,) = readings_of([replace(WHOLE, uuid=None, fault="lost")])
    assert lost.fault == "lost"


def test_of_a_split_gpu_its_devices_can_be_had_and_never_the_whole() -> None:
    first, second = readings_of([SPLIT])
    assert (first.gpu_id, first.uuid, first.index, first.name) == ("MIG-a", "MIG-a", 3, "NVIDIA A100 MIG 3g.40gb")
    assert (first.memory_total_mb, first.memory_used_mb, first.utilization_percent) == (40_000.0, 100.0, None)
    assert not first.reports_utilization
    assert first.is_mig_device
    assert (first.fault, second.fault) == (None, "lost")
    assert readings_of([replace(SPLIT, mig_devices=())]) == (), "one that is split into nothing yet is nobody's"
    assert [reading.fault for reading in readings_of([replace(SPLIT, fault="needs a reset")])] == [
        "needs a reset",
        "lost",
    ]


def test_a_device_ceased_to_exist_if_its_gpu_is_there_and_well_and_does_not_have_it() -> None:
    without_a = replace(SPLIT, mig_devices=SPLIT.mig_devices[1:])
    assert vanished_devices([SPLIT], [without_a]) == ("MIG-a",)
    assert vanished_devices([SPLIT], [replace(SPLIT, mig_devices=(), mig_enabled=False)]) == ("MIG-a", "MIG-b")
    assert vanished_devices([SPLIT], [SPLIT]) == ()
    assert vanished_devices([SPLIT], []) == (), "a GPU that is only missing has lost nothing"
    assert vanished_devices([SPLIT], [SPLIT.lost("fallen off the bus")]) == ()
    assert vanished_devices([SPLIT], [replace(without_a, fault="needs a reset")]) == ()
    assert vanished_devices([], [SPLIT]) == ()
    renumbered = replace(without_a, index=0)
    assert vanished_devices([SPLIT], [WHOLE, renumbered]) == ("MIG-a",)


# --- CUDA_VISIBLE_DEVICES as a wish ---

NAMELESS = replace(WHOLE, index=5, uuid=None)
HOST = (WHOLE, SPLIT, NAMELESS)


@pytest.mark.parametrize(
    ("value", "only", "left"),
    [
        (None, None, None),
        (None, ("2",), ("2",)),
        ("2,5", None, ("GPU-whole", "gpu-5")),
        ("3", None, ("MIG-a", "MIG-b")),
        ("MIG-b", None, ("MIG-b",)),
        ("2,3", ("3", "5"), ("MIG-a", "MIG-b")),
        ("2,3", ("GPU-wh",), ("GPU-whole",)),
        ("7", None, None),
    ],
)
def test_what_is_visible_is_asked_for_by_the_names_that_it_is_leased_by(
    value: str | None, only: tuple[str, ...] | None, left: tuple[str, ...] | None
) -> None:
    requirements = within_visible(Requirements(only=only, exclude=("4",)), HOST, VisibilityFilter(value))
    assert (requirements.only, requirements.exclude) == (left, ("4",))


def test_a_split_gpu_is_never_named_as_a_whole_also_if_it_does_not_say_that_it_is_split() -> None:
    host = (WHOLE, replace(SPLIT, mig_enabled=None))
    assert within_visible(ANY_GPU, host, VisibilityFilter("3")).only == ("MIG-a", "MIG-b")


@pytest.mark.parametrize(
    ("value", "only", "reason"),
    [
        ("-1", None, "CUDA_VISIBLE_DEVICES='-1' hides every GPU: unset it"),
        ("2", ("3",), "CUDA_VISIBLE_DEVICES='2' hides every requested GPU"),
    ],
)
def test_where_nothing_is_left_it_can_never_be_granted(value: str, only: tuple[str, ...] | None, reason: str) -> None:
    with pytest.raises(ImpossibleRequestError) as caught:
        within_visible(Requirements(only=only), HOST, VisibilityFilter(value))
    assert caught.value.reasons == (reason,)
