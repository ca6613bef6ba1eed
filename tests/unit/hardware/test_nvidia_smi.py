"""The reader against real processes: a program named nvidia-smi that fails in every way one has failed before."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.host_memory import read_host_memory
from gpu_worker_pool.hardware.readers import Reader, tool
from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader, nvidia_smi_available
from gpu_worker_pool.hardware.readers.nvidia_smi_text import GPU_FIELDS, UNKNOWN_NAME
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading, MIGReading

UUID_0, UUID_1 = healthy_gpu(0)["uuid"], healthy_gpu(1)["uuid"]
LOST_1 = (
    "Unable to determine the device handle for GPU0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU"
)
LOST_1_QUOTED = LOST_1.replace("  ", " ")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvidiaSMI]:
    fake = FakeNvidiaSMI(tmp_path)
    yield fake
    fake.kill_all()


@pytest.fixture
def reader(fake: FakeNvidiaSMI) -> Iterator[NvidiaSMIReader]:
    reader = NvidiaSMIReader(environment={**os.environ, **fake.env})
    yield reader
    reader.close()


#: Long enough for the fake to start on a machine that is busy with other tests.
IMPATIENCE_SECONDS = 1.0


def impatient(fake: FakeNvidiaSMI, kill_group: Callable[[int, int], None] = os.killpg) -> NvidiaSMIReader:
    return NvidiaSMIReader(
        timeout_seconds=IMPATIENCE_SECONDS, environment={**os.environ, **fake.env}, kill_group=kill_group
    )


def failing(reader: Reader) -> DriverError:
    with pytest.raises(DriverError) as caught:
        reader.read()
    return caught.value


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- a healthy host ---


def test_a_sample_is_two_calls(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    assert reader.read() == DriverAnswer(
        (
            GPUReading(
                index=0,
                name="NVIDIA Test 24GB",
                uuid=UUID_0,
                pci_bus_id="00000000:01:00.0",
                memory_total_mb=24576,
                memory_used_mb=512,
                memory_free_mb=23800,
                utilization_percent=7,
                temperature_c=35,
                power_draw_w=60.25,
                power_limit_w=350.0,
                processes=(),
            ),
        ),
        driver_version="570.10.20",
        backend="nvidia-smi",
    )
    assert fake.calls == [
        [f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"],
        ["--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits"],
    ]


def test_it_is_run_in_a_group_of_its_own_and_in_the_c_locale(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    reader.read()
    assert fake.locales_and_groups == [("C", pid) for pid in fake.pids]


def test_it_is_found_by_a_path_too(fake: FakeNvidiaSMI) -> None:
    assert len(NvidiaSMIReader(str(fake.program)).read().gpus) == 1


def test_gpus_come_in_the_order_of_their_indices(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(2), healthy_gpu(0), healthy_gpu(1))
    assert [gpu.index for gpu in reader.read().gpus] == [0, 1, 2]


def test_no_devices(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus()
    assert reader.read() == DriverAnswer((), backend="nvidia-smi")


def test_processes_are_described(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    fake.set_processes((UUID_1, os.getpid(), "[Not Found]", 300), (UUID_1, 4194305, "a, b", "[N/A]"))
    first, second = reader.read().gpus
    assert first.processes == ()
    assert second.processes is not None
    ours, theirs = second.processes
    assert (ours.pid, ours.memory_used_mb) == (os.getpid(), 300)
    assert ours.name is not None
    assert ours.started_at is not None
    assert (theirs.pid, theirs.name, theirs.memory_used_mb, theirs.started_at) == (4194305, "a, b", None, None)


@pytest.mark.parametrize("exit_status", [0, 1, 4])
def test_processes_that_may_not_be_seen_are_not_none_at_all(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, exit_status: int
) -> None:
    fake.answer("[Not Supported]\n", exit_status=exit_status, to="processes")
    (gpu,) = reader.read().gpus
    assert (gpu.processes, gpu.memory_used_mb, gpu.fault) == (None, 512, None)


def test_a_list_of_processes_cut_short_is_no_list(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.answer(f"{UUID_0}, 1, a, 23", dies_of=signal.SIGKILL, to="processes")
    assert reader.read().gpus[0].processes is None
    fake.answer("", exit_status=1, to="processes")
    assert reader.read().gpus[0].processes is None


def test_a_process_on_an_unknown_gpu_may_be_on_any(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    fake.set_processes((UUID_0, 4194305, "a", 1), ("MIG-unheard-of", 4194306, "b", 1))
    first, second = reader.read().gpus
    assert [process.pid for process in first.processes or ()] == [4194305]
    assert second.processes is None


def test_chatter_on_stderr_spoils_no_process(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_processes((UUID_0, 4194305, "a", 17))
    fake.answer(stderr="ERROR: ld.so: object 'x.so' from LD_PRELOAD cannot be preloaded: ignored.\n")
    assert [process.memory_used_mb for process in reader.read().gpus[0].processes or ()] == [17]


def test_a_gpu_without_uuid_cannot_tell_its_processes(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, uuid="[N/A]"))
    assert reader.read().gpus[0].processes is None


# --- old drivers ---


@pytest.mark.parametrize("cell", ["[N/A]", "[Not Supported]"])
def test_where_memory_is_not_supported_the_host_s_stands_in(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, cell: str
) -> None:
    """As on a GB10, and, without utilization too, on a Jetson."""
    cells = {"memory_total": cell, "memory_used": cell, "memory_free": cell}
    fake.set_gpus(healthy_gpu(0, **cells), healthy_gpu(1, **cells, utilization_gpu=cell))
    first, second = reader.read().gpus
    host = read_host_memory()
    for gpu in (first, second):
        assert (gpu.unified_memory, gpu.fault, gpu.processes) == (True, None, ())
        assert gpu.memory_total_mb == host.total_mb
        assert gpu.memory_used_mb is not None
        assert gpu.memory_free_mb is not None
        assert gpu.memory_used_mb + gpu.memory_free_mb == host.total_mb
    assert (first.reports_utilization, second.reports_utilization) == (True, False)
    assert reader.read().gpus[0].unified_memory, "and stays so"


@pytest.mark.parametrize("cell", ["[Unknown Error]", "[Insufficient Permissions]", "ERR!", "[GPU requires reset]", ""])
def test_memory_that_failed_is_not_unified(fake: FakeNvidiaSMI, reader: NvidiaSMIReader, cell: str) -> None:
    fake.set_gpus(healthy_gpu(0, memory_total=cell, memory_used=cell, memory_free=cell), healthy_gpu(1))
    gpu = reader.read().gpus[0]
    assert (gpu.unified_memory, gpu.memory_total_mb) == (False, None)


def test_a_gpu_that_reported_memory_before_is_at_fault(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    reader.read()
    fake.set_gpus(healthy_gpu(0, memory_total="[N/A]", memory_used="[N/A]", memory_free="[N/A]"))
    for _ in range(3):
        (gpu,) = reader.read().gpus
        assert (gpu.unified_memory, gpu.memory_total_mb) == (False, None)
        assert gpu.fault == "it no longer reports its memory: see `dmesg`"
    fake.set_gpus(healthy_gpu())
    assert reader.read().gpus[0].fault is None


def test_a_driver_that_hides_pids_cannot_list_processes(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_processes((UUID_0, "[Not Supported]", "[Not Supported]", "[Not Supported]"))
    (gpu,) = reader.read().gpus
    assert (gpu.processes, gpu.reports_processes) == (None, False)
    fake.answer(exit_status=1, to="processes")
    (gpu,) = reader.read().gpus
    assert (gpu.processes, gpu.reports_processes) == (None, True), "it failed this time"


def test_fields_an_old_driver_does_not_know_are_left_out_and_remembered(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader
) -> None:
    fake.set_unknown_fields("gpu_recovery_action", "mig.mode.current")
    (gpu,) = reader.read().gpus
    assert (gpu.memory_used_mb, gpu.recovery_action, gpu.fault) == (512, None, None)
    assert len(fake.calls) == 4
    reader.read()
    assert len(fake.calls) == 6


def test_a_new_driver_is_asked_for_everything_again(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_unknown_fields("temperature.gpu")
    assert reader.read().gpus[0].temperature_c is None
    fake.set_unknown_fields()
    assert reader.read().gpus[0].temperature_c is None
    fake.set_gpus(healthy_gpu(driver_version="999.1"))
    assert reader.read().driver_version == "999.1"
    assert reader.read().gpus[0].temperature_c == 35


def test_all_optional_fields_unknown(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_unknown_fields(*(set(GPU_FIELDS) - {"index", "name", "memory.total", "memory.used"}))
    expected = GPUReading(0, "NVIDIA Test 24GB", memory_total_mb=24576, memory_used_mb=512)
    assert reader.read() == DriverAnswer((expected,), backend="nvidia-smi")


@pytest.mark.parametrize("field", ["memory.used", "something.never.asked"])
def test_a_driver_that_does_not_know_what_must_be_known(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, field: str
) -> None:
    fake.answer(f'Field "{field}" is not a valid field to query.\n', exit_status=2)
    error = failing(reader)
    assert error.code == "driver_error"
    assert field in str(error)
    assert len(fake.calls) == 1


# --- GPUs that are lost ---


def test_a_lost_gpu_stays_a_row(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1), healthy_gpu(2))
    reader.read()
    fake.set_gpus(healthy_gpu(0), healthy_gpu(2))
    fake.answer(stderr=f"{LOST_1}\n", exit_status=15, to="gpus")
    lost = GPUReading(1, "NVIDIA Test 24GB", UUID_1, "00000000:02:00.0", fault=LOST_1_QUOTED)
    for _ in range(2):
        gpus = reader.read().gpus
        assert gpus[1] == lost
        assert [(gpu.index, gpu.memory_used_mb, gpu.fault) for gpu in (gpus[0], gpus[2])] == [
            (0, 512, None),
            (2, 512, None),
        ]
    fake.recover()
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1), healthy_gpu(2))
    assert [gpu.fault for gpu in reader.read().gpus] == [None, None, None]


@pytest.mark.parametrize("exit_status", [0, 15])
def test_a_lost_gpu_never_seen_before_takes_the_missing_index(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, exit_status: int
) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(2))
    fake.answer(stderr=f"{LOST_1}\n", exit_status=exit_status, to="gpus")
    gpus = reader.read().gpus
    assert [(gpu.index, gpu.name, gpu.fault) for gpu in gpus] == [
        (0, "NVIDIA Test 24GB", None),
        (1, UNKNOWN_NAME, LOST_1_QUOTED),
        (2, "NVIDIA Test 24GB", None),
    ]
    assert gpus[1] == GPUReading(1, UNKNOWN_NAME, pci_bus_id="00000000:02:00.0", fault=LOST_1_QUOTED)


def test_several_lost_gpus_take_the_missing_indices_by_bus_id(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(1))
    said = [f"Unable to determine the device handle for GPU 0000:{bus}:00.0: Unknown Error\n" for bus in ("03", "01")]
    fake.answer(stderr="".join(said), exit_status=15, to="gpus")
    assert [(gpu.index, gpu.pci_bus_id) for gpu in reader.read().gpus] == [
        (0, "00000000:01:00.0"),
        (1, "00000000:02:00.0"),
        (2, "00000000:03:00.0"),
    ]


def test_the_only_gpu_is_lost(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(1))
    fake.answer(f"{LOST_1}\n", exit_status=15)
    error = failing(reader)  # which of the host's GPUs it is cannot be told
    assert error.code == "driver_error"
    assert LOST_1_QUOTED in str(error)
    fake.recover()
    reader.read()
    fake.answer(f"{LOST_1}\n", exit_status=15)
    (gpu,) = reader.read().gpus
    assert (gpu.index, gpu.uuid, gpu.fault, gpu.processes) == (1, UUID_1, LOST_1_QUOTED, None)


def test_a_complaint_that_tells_the_index_is_enough(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    said = "Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error"
    fake.answer(f"{said}\n", exit_status=15)
    assert reader.read().gpus == (GPUReading(3, UNKNOWN_NAME, pci_bus_id="00000000:5F:00.0", fault=said),)


def test_gpus_after_the_one_that_failed_are_not_gone(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1), healthy_gpu(2))
    reader.read()
    fake.answer(f"{LOST_1}\n", exit_status=15)
    why = "nvidia-smi failed before it reported this GPU"
    assert [(gpu.index, gpu.fault, gpu.memory_used_mb) for gpu in reader.read().gpus] == [
        (0, why, None),
        (1, LOST_1_QUOTED, None),
        (2, why, None),
    ]


def test_nor_are_they_when_the_one_that_failed_is_new(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    reader.read()
    fake.answer(f"{LOST_1}\n", exit_status=15)
    assert [(gpu.index, gpu.uuid, gpu.pci_bus_id) for gpu in reader.read().gpus] == [
        (0, UUID_0, "00000000:01:00.0"),
        (1, None, "00000000:02:00.0"),
    ]


def test_a_gpu_that_was_taken_out_is_gone(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    reader.read()
    fake.set_gpus(healthy_gpu(0))
    assert [gpu.index for gpu in reader.read().gpus] == [0]


def test_a_complaint_about_a_gpu_that_still_answers(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    fake.answer(stderr=f"{LOST_1}\n", to="gpus")
    assert [(gpu.index, gpu.fault) for gpu in reader.read().gpus] == [(0, None), (1, LOST_1_QUOTED)]


def test_a_lost_row_keeps_who_it_is(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1))
    reader.read()
    lost = dict.fromkeys(GPU_FIELDS, "[GPU is lost]") | {"index": "1"}
    fake.set_gpus(healthy_gpu(0), lost)
    assert reader.read().gpus[1] == GPUReading(
        1, "NVIDIA Test 24GB", UUID_1, "00000000:02:00.0", fault="GPU is lost", processes=None
    )


def test_a_lost_row_keeps_its_mig_devices(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    fake.answer(MIG_LIST, to="list")
    reader.read()
    fake.set_gpus(dict.fromkeys(GPU_FIELDS, "[GPU is lost]") | {"index": "0"})
    (gpu,) = reader.read().gpus
    assert gpu.mig_enabled
    assert [(device.uuid, device.fault) for device in gpu.mig_devices] == [
        ("MIG-a", "GPU is lost"),
        ("MIG-b", "GPU is lost"),
    ]


def test_a_sick_row_that_tells_less_keeps_who_it_is(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    reader.read()
    fake.set_gpus(healthy_gpu(0, uuid="[Unknown Error]", memory_used="[Unknown Error]"))
    (gpu,) = reader.read().gpus
    assert (gpu.uuid, gpu.memory_used_mb, gpu.memory_total_mb) == (UUID_0, None, 24576)
    assert gpu.fault == "memory.used cannot be read: Unknown Error"


def test_a_lost_gpu_whose_index_went_to_another_is_still_known(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0), healthy_gpu(1), healthy_gpu(2))
    reader.read()
    fake.set_gpus(healthy_gpu(0), healthy_gpu(2) | {"index": "1"})
    fake.answer(stderr=f"{LOST_1}\n", to="gpus")
    assert [(gpu.index, gpu.uuid, gpu.fault) for gpu in reader.read().gpus] == [
        (0, UUID_0, None),
        (1, healthy_gpu(2)["uuid"], None),
        (2, UUID_1, LOST_1_QUOTED),
    ]


def test_another_gpu_in_the_same_place_is_another_gpu(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    reader.read()
    fake.set_gpus(healthy_gpu(0, uuid="GPU-new", memory_used="ERR!"))
    assert reader.read().gpus[0].uuid == "GPU-new"


# --- MIG ---

MIG_LIST = f"""\
GPU 0: NVIDIA Test 24GB (UUID: {UUID_0})
  MIG 1g.6gb      Device  1: (UUID: MIG-b)
  MIG 2g.12gb     Device  0: (UUID: MIG-a)
"""
MIG_TABLE = """\
| MIG devices:                                                                            |
|  0    3   0   0  |              13MiB / 12288MiB    | 32      0 |  2   0    2    0    2 |
|                  |               0MiB / 12369MiB    |           |                       |
"""


def test_mig_devices(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled", utilization_gpu="[N/A]"), healthy_gpu(1))
    fake.answer(MIG_LIST, to="list")
    fake.answer(MIG_TABLE, to="table")
    split, whole = reader.read().gpus
    assert whole.mig_devices == ()
    assert (split.mig_enabled, split.reports_utilization, split.fault) == (True, False, None)
    assert split.mig_devices == (
        MIGReading("MIG-a", "2g.12gb", 3, 0, memory_total_mb=12288, memory_used_mb=13, processes=()),
        MIGReading("MIG-b", "1g.6gb", processes=()),
    )
    fake.set_processes((UUID_0, 4194305, "a", 1))
    split, whole = reader.read().gpus
    assert split.processes is not None
    assert len(split.processes) == 1
    assert [device.processes for device in split.mig_devices] == [None, None]
    assert fake.calls[-2:] == [["-L"], []]


def test_mig_without_memory(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    fake.answer(MIG_LIST, to="list")
    fake.answer("nonsense", exit_status=3, to="table")
    (gpu,) = reader.read().gpus
    assert [(device.name, device.memory_used_mb, device.fault) for device in gpu.mig_devices] == [
        ("2g.12gb", None, None),
        ("1g.6gb", None, None),
    ]


def test_mig_that_cannot_be_listed_is_still_a_row(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    for order in ({"stdout": "nonsense", "exit_status": 3}, {"stdout": MIG_LIST[:99], "dies_of": signal.SIGKILL}):
        fake.answer(**order, to="list")
        (gpu,) = reader.read().gpus
        assert (gpu.memory_used_mb, gpu.mig_devices, gpu.fault) == (512, (), "its MIG devices could not be listed")


def test_mig_without_devices_is_no_fault(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    fake.answer(MIG_LIST.partition("\n")[0], to="list")
    (gpu,) = reader.read().gpus
    assert (gpu.mig_devices, gpu.fault) == ((), None)


def test_devices_of_a_gpu_that_must_not_be_used_must_not_be_used(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    fake.answer(MIG_LIST, to="list")
    fake.answer(MIG_TABLE, to="table")
    healthy = reader.read().gpus[0]
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled", gpu_recovery_action="Reset"))
    (gpu,) = reader.read().gpus
    why = "the driver asks for a recovery action: Reset"
    assert [device.fault for device in gpu.mig_devices] == [why, why]
    said = "Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error"
    fake.answer(f"{said}\n", exit_status=15, to="gpus")
    (gpu,) = reader.read().gpus
    assert gpu.mig_devices == tuple(
        replace(device, memory_total_mb=None, memory_used_mb=None, processes=None, fault=said)
        for device in healthy.mig_devices
    )


# --- failures ---


@pytest.mark.parametrize(
    ("said", "exit_status", "code"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "driver_not_loaded"),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "driver_version_mismatch"),
        ("Insufficient Permissions", 4, "permission_denied"),
        ("Segmentation fault", 139, "driver_error"),
        ("<html>", 0, "driver_error"),
        ("", 0, "driver_error"),
        (b"\xff\xfe\x00 what", 0, "driver_error"),
    ],
)
def test_failures_and_recovery(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, said: str | bytes, exit_status: int, code: str
) -> None:
    fake.answer(said, exit_status=exit_status)
    error = failing(reader)
    assert error.code == code
    assert str(error).isprintable()
    fake.recover()
    assert len(reader.read().gpus) == 1


def test_an_answer_cut_short_by_a_signal_is_no_answer(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.answer(dies_of=signal.SIGKILL, to="gpus")
    assert "ended by signal 9" in str(failing(reader))


def test_bytes_that_are_no_text(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.set_processes((UUID_0, 4194305, "x", 1))
    fake.answer(f"{UUID_0}, 4194305, ".encode() + b"caf\xe9" + b", 5\n", to="processes")
    assert [process.name for process in reader.read().gpus[0].processes or ()] == ["caf\N{REPLACEMENT CHARACTER}"]


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    environment = {"PATH": f"{tmp_path}::{tmp_path / 'absent'}"}
    error = failing(NvidiaSMIReader(environment=environment))
    assert error.code == "nvidia_smi_not_found"
    assert not nvidia_smi_available(environment=environment)
    (tmp_path / "nvidia-smi").mkdir()
    assert failing(NvidiaSMIReader(environment=environment)).code == "nvidia_smi_not_found"
    assert failing(NvidiaSMIReader(str(tmp_path / "nothing"))).code == "nvidia_smi_not_found"


def test_the_present_folder_is_not_searched(fake: FakeNvidiaSMI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fake.folder)
    assert not nvidia_smi_available(environment={"PATH": ""})


def test_a_tool_that_may_not_be_executed(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    environment = {"PATH": str(fake.folder)}
    assert nvidia_smi_available(environment=environment)
    fake.program.chmod(0o644)
    assert not nvidia_smi_available(environment=environment)
    error = failing(NvidiaSMIReader(environment=environment))
    assert error.code == "permission_denied"
    assert str(fake.program) in str(error)


def test_a_tool_whose_interpreter_may_not_be_executed(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.program.unlink()
    fake.program.write_text("#!/etc/passwd\n")
    fake.program.chmod(0o755)
    error = failing(reader)
    assert error.code == "permission_denied"
    assert str(fake.program) in str(error)


@pytest.mark.parametrize("content", ["\x7fELF from elsewhere", "#!/no/such/interpreter\n"])
def test_a_tool_that_cannot_run_here(fake: FakeNvidiaSMI, reader: NvidiaSMIReader, content: str) -> None:
    fake.program.unlink()
    fake.program.write_text(content)
    fake.program.chmod(0o755)
    error = failing(reader)
    assert error.code == "driver_error"
    assert str(fake.program) in str(error)


def test_a_later_folder_may_hold_one_that_may_be_executed(fake: FakeNvidiaSMI, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("")
    assert nvidia_smi_available(environment={"PATH": f"{tmp_path}{os.pathsep}{fake.folder}"})


# --- hanging ---


@pytest.mark.parametrize("closes_output", [False, True])
def test_a_tool_that_hangs_is_killed(fake: FakeNvidiaSMI, closes_output: bool) -> None:
    fake.hang(closes_output=closes_output)
    reader = impatient(fake)
    started = time.monotonic()
    error = failing(reader)
    assert IMPATIENCE_SECONDS <= time.monotonic() - started < 5
    assert error.code == "driver_hangs"
    assert "did not answer within 1 s" in str(error)
    assert len(fake.pids) == 1
    assert not exists(fake.pids[0])
    fake.recover()
    assert len(NvidiaSMIReader(environment={**os.environ, **fake.env}).read().gpus) == 1


def test_all_calls_of_a_sample_share_the_time(fake: FakeNvidiaSMI) -> None:
    fake.set_gpus(healthy_gpu(0, mig_mode_current="Enabled"))
    fake.hang(to="processes")
    started = time.monotonic()
    (gpu,) = impatient(fake).read().gpus
    assert time.monotonic() - started < 5
    assert (gpu.memory_used_mb, gpu.processes, gpu.fault) == (512, None, "its MIG devices could not be listed")
    assert len(fake.calls) == 2


@pytest.mark.parametrize("cell", ["[Unknown Error]", "[N/A]", "", "ERR!"])
def test_a_gpu_keeps_the_uuid_that_it_once_told(fake: FakeNvidiaSMI, reader: NvidiaSMIReader, cell: str) -> None:
    (before,) = reader.read().gpus
    fake.set_gpus(healthy_gpu(uuid=cell))
    (gpu,) = reader.read().gpus
    assert gpu.uuid == before.uuid is not None
    assert gpu.fault == "its UUID cannot be read"
    fake.set_gpus(healthy_gpu())
    assert reader.read().gpus == (before,)


@pytest.mark.parametrize("cell", ["[Unknown Error]", "ERR!"])
def test_a_split_gpu_whose_mode_cannot_be_read_is_not_whole(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, cell: str
) -> None:
    fake.set_gpus(healthy_gpu(mig_mode_current=cell))
    (gpu,) = reader.read().gpus
    assert gpu.fault is not None
    assert gpu.fault.startswith("mig.mode.current cannot be read")


def test_one_that_cannot_be_killed_is_never_joined_by_a_second(fake: FakeNvidiaSMI) -> None:
    killed: list[tuple[int, int]] = []
    reader = impatient(fake, kill_group=lambda group, signum: killed.append((group, signum)))
    fake.hang()
    assert failing(reader).code == "driver_hangs"
    (pid,) = fake.pids
    assert killed == [(pid, signal.SIGKILL)]
    fake.recover()
    for _ in range(3):
        started = time.monotonic()
        error = failing(reader)
        assert time.monotonic() - started < IMPATIENCE_SECONDS / 2
        assert error.code == "driver_hangs"
        assert f"pid {pid}" in str(error)
    assert fake.pids == [pid]
    reader.close()
    os.kill(pid, signal.SIGKILL)
    for thread in threading.enumerate():
        if thread.name == f"reap nvidia-smi {pid}":
            thread.join(10)
    assert len(reader.read().gpus) == 1


def test_one_that_cannot_be_killed_does_not_outlive_its_reader_as_a_zombie(fake: FakeNvidiaSMI) -> None:
    reader = impatient(fake, kill_group=lambda *_: None)
    fake.hang()
    assert failing(reader).code == "driver_hangs"
    (pid,) = fake.pids
    reader.close()
    del reader
    gc.collect()
    os.kill(pid, signal.SIGKILL)
    while exists(pid):
        time.sleep(0.01)


def test_one_that_cannot_be_killed_in_the_second_call_costs_only_the_processes(fake: FakeNvidiaSMI) -> None:
    reader = impatient(fake, kill_group=lambda *_: None)
    fake.hang(to="processes")
    (gpu,) = reader.read().gpus
    assert (gpu.memory_used_mb, gpu.processes) == (512, None)
    assert failing(reader).code == "driver_hangs"
    assert len(fake.calls) == 2


@pytest.mark.parametrize("own_session", [False, True])
def test_a_grandchild_that_keeps_stdout_open_delays_nothing(
    fake: FakeNvidiaSMI, reader: NvidiaSMIReader, own_session: bool
) -> None:
    fake.leave_grandchild(8.0, own_session=own_session)
    started = time.monotonic()
    (gpu,) = reader.read().gpus
    assert time.monotonic() - started < 5
    assert (gpu.memory_used_mb, gpu.processes) == (512, ())


def test_what_the_tool_leaves_behind_is_killed(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.leave_grandchild(3600.0)
    reader.read()
    groups = [pid for pid in fake.pids if _group_exists(pid)]
    while groups:  # whoever adopts them reaps them
        time.sleep(0.01)
        groups = [pid for pid in groups if _group_exists(pid)]


def _group_exists(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def test_endless_output_is_cut_off(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    fake.write_megabytes(1000)
    error = failing(reader)
    assert error.code == "driver_error"
    assert "more than 8 MiB" in str(error)
    assert not exists(fake.pids[0])
    fake.recover()
    fake.write_megabytes(1000, to="processes")
    assert reader.read().gpus[0].processes is None


def test_an_interrupt_leaves_no_process_behind(fake: FakeNvidiaSMI, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        while not fake.pids:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "_collect", interrupted)
    fake.hang()
    with pytest.raises(KeyboardInterrupt):
        impatient(fake).read()
    assert not exists(fake.pids[0])


# --- nothing is left behind ---


def test_no_file_stays_open_and_no_child_unreaped(fake: FakeNvidiaSMI) -> None:
    reader = impatient(fake)
    reader.read()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    for misbehave in (fake.hang, fake.recover, lambda: fake.leave_grandchild(1.0), lambda: fake.write_megabytes(9)):
        misbehave()
        with suppress(DriverError):
            reader.read()
    reader.close()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert [pid for pid in fake.pids if exists(pid)] == []


def test_read_after_close(reader: NvidiaSMIReader) -> None:
    reader.close()
    assert len(reader.read().gpus) == 1


def test_a_program_that_ignores_its_children(fake: FakeNvidiaSMI, reader: NvidiaSMIReader) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(reader.read().gpus) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_it_is_a_reader(reader: NvidiaSMIReader) -> None:
    as_promised: Reader = reader
    assert as_promised.read().backend == "nvidia-smi"
