"""CUDA_VISIBLE_DEVICES: every documented format, and what is said of what was not found."""

from __future__ import annotations

import logging

import pytest

from gpu_worker_pool.hardware.samples import GPUReading, MIGReading
from gpu_worker_pool.hardware.visibility import VisibilityFilter

DEVICES = tuple(MIGReading(uuid=f"MIG-{number}aaa", name="1g.10gb") for number in (2, 1, 3))
HOST = (
    GPUReading(0, "A", uuid="GPU-aaaa1111"),
    GPUReading(1, "B", uuid="GPU-aaaa2222"),
    GPUReading(2, "C", uuid="GPU-bbbb3333", mig_devices=DEVICES, mig_enabled=True),
    GPUReading(3, "D", uuid="GPU-cccc4444"),
)


def shown(value: str | None) -> tuple[list[int], bool]:
    visibility = VisibilityFilter(value).apply(HOST)
    assert visibility.total_gpus == 4
    return [gpu.index for gpu in visibility.gpus], visibility.is_filtering


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("0,1,2", [0, 1, 2]),
        ("0 1 2", [0, 1, 2]),
        ("0,1 2", [0, 1, 2]),
        (" 0 ,\t2 ", [0, 2]),
        ("1", [1]),
        ("2,0", [0, 2]),
        ("1,1,1", [1]),
        ("0,9", [0]),
        ("0,-1", [0]),
        ("GPU-aaaa1111", [0]),
        ("gpu-AAAA2", [1]),
        ("GPU-bbbb,3", [2, 3]),
        ("MIG-1", [2]),
        ("", []),
        ("  ", []),
        ("-1", []),
    ],
)
def test_what_is_named_is_shown_with_its_own_index(value: str, indices: list[int]) -> None:
    assert shown(value) == (indices, True)


def test_all_are_shown_where_nothing_is_set() -> None:
    assert shown(None) == ([0, 1, 2, 3], False)


@pytest.mark.parametrize(
    "value", [",", ",, ,,", "9", "cat", "GPU-", "MIG-", "GPU-dddd", "GPU-aaaa", "0x1", "-2", "\u0661", "9" * 5000]
)
def test_all_are_shown_where_nothing_named_is_found(value: str) -> None:
    assert shown(value) == ([0, 1, 2, 3], False)


def test_a_mig_device_shows_its_gpu_with_no_other_device_on_it() -> None:
    (gpu,) = VisibilityFilter("MIG-3,MIG-2").apply(HOST).gpus
    assert [device.uuid for device in gpu.mig_devices] == ["MIG-2aaa", "MIG-3aaa"]
    (gpu,) = VisibilityFilter("MIG-3,2").apply(HOST).gpus
    assert gpu.mig_devices == DEVICES


def test_an_empty_host_shows_nothing_and_is_no_reason_to_complain_of_everything() -> None:
    visibility = VisibilityFilter("0").apply(())
    assert (visibility.gpus, visibility.total_gpus) == ((), 0)


def test_what_is_not_found_is_said_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    filter_ = VisibilityFilter("0 9")
    for _ in range(3):
        filter_.apply(HOST)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "GPU 9 in CUDA_VISIBLE_DEVICES not found on system"
    ]
    caplog.clear()
    assert filter_.apply(HOST[1:]).gpus == (), "what was never asked for is not shown when what was is gone"
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0 in CUDA_VISIBLE_DEVICES not found on system",
        "GPU 9 in CUDA_VISIBLE_DEVICES not found on system",
    ]


def test_showing_all_because_nothing_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    VisibilityFilter("9").apply(HOST)
    assert "nothing in CUDA_VISIBLE_DEVICES='9' was found: showing all GPUs" in caplog.text


def test_debug_shows_the_reasoning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    VisibilityFilter("0,2").apply(HOST)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "CUDA_VISIBLE_DEVICES='0,2' reads as ['0', '2']; on system: [0, 1, 2, 3]; visible: [0, 2]"


def test_a_line_of_the_log_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    VisibilityFilter("0,\x1b[31mred").apply(HOST)
    assert all("\x1b" not in record.getMessage() for record in caplog.records)
