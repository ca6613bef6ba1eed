"""Numbers that cannot be true do not get in; what decides about a GPU makes it unusable."""

from __future__ import annotations

import math

import pytest

from gpu_worker_pool.hardware.samples import GPUReading, MIGReading


@pytest.mark.parametrize("field", ["memory_total_mb", "memory_used_mb", "utilization_percent"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5, 1e13])
def test_an_impossible_decisive_number_spoils_the_gpu(field: str, value: float) -> None:
    gpu = GPUReading(0, "A", **{field: value})
    assert getattr(gpu, field) is None
    assert gpu.fault is not None
    assert gpu.fault.startswith(f"impossible reading: {field} is ")


def test_250_percent_is_no_utilization() -> None:
    assert GPUReading(0, "A", utilization_percent=250).fault == "impossible reading: utilization_percent is 250"


def test_more_used_than_there_is() -> None:
    gpu = GPUReading(0, "A", memory_total_mb=100, memory_used_mb=101)
    assert (gpu.memory_used_mb, gpu.memory_usage_percent) == (None, None)
    assert gpu.fault == "impossible reading: 101 MB of 100 MB used"


@pytest.mark.parametrize("field", ["temperature_c", "power_draw_w", "power_limit_w", "memory_free_mb"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -200, 1e13])
def test_an_impossible_other_number_is_unknown_and_no_fault(field: str, value: float) -> None:
    gpu = GPUReading(0, "A", **{field: value})
    assert (getattr(gpu, field), gpu.fault) == (None, None)


def test_more_free_than_there_is_is_unknown() -> None:
    assert GPUReading(0, "A", memory_total_mb=100, memory_free_mb=101).memory_free_mb is None


def test_the_first_fault_stays() -> None:
    assert GPUReading(0, "A", fault="lost", utilization_percent=-1).fault == "lost"


def test_a_mig_device_is_judged_the_same() -> None:
    assert MIGReading("MIG-1", "1g", memory_total_mb=math.nan).fault == "impossible reading: memory_total_mb is nan"


def test_usage_is_unknown_where_either_is() -> None:
    assert GPUReading(0, "A", memory_total_mb=0, memory_used_mb=0).memory_usage_percent is None
    assert GPUReading(0, "A", memory_used_mb=5).memory_usage_percent is None
    assert GPUReading(0, "A", memory_total_mb=300, memory_used_mb=100).memory_usage_percent == pytest.approx(100 / 3)


def test_a_lost_gpu_is_still_itself_and_tells_nothing() -> None:
    device = MIGReading("MIG-1", "1g.10gb", 3, 0, memory_total_mb=100, memory_used_mb=1)
    gpu = GPUReading(
        4,
        "A",
        "GPU-1",
        "00000000:01:00.0",
        memory_total_mb=100,
        memory_used_mb=1,
        reports_utilization=False,
        temperature_c=30,
        mig_devices=(device,),
        mig_enabled=True,
    )
    assert gpu.lost("it is gone") == GPUReading(
        4,
        "A",
        "GPU-1",
        "00000000:01:00.0",
        fault="it is gone",
        reports_utilization=False,
        mig_devices=(MIGReading("MIG-1", "1g.10gb", 3, 0, fault="it is gone"),),
        mig_enabled=True,
    )
