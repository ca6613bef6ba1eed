"""What nvidia-smi prints: every shape seen on real machines, and no text at all that crashes or invents a number."""

from __future__ import annotations

import math
import re
from dataclasses import fields as dataclass_fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.nvidia_smi import healthy_gpu

from gpu_worker_pool.hardware.readers.nvidia_smi_text import (
    GPU_FIELDS,
    UNKNOWN_NAME,
    Complaint,
    MIGMemory,
    ParsedProcess,
    bus_id,
    failure,
    parse_complaint,
    parse_gpus,
    parse_mig_list,
    parse_mig_table,
    parse_processes,
    quote,
    says_no_devices,
    unknown_field,
)
from gpu_worker_pool.hardware.samples import GPUReading, MIGReading

UUID = "GPU-00000000-1111-2222-3333-444444444444"
LOST = "Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU"


def line(index: int = 0, **cells: str) -> str:
    gpu = healthy_gpu(index, **cells)
    return ", ".join(gpu[field] for field in GPU_FIELDS) + "\n"


def only(text: str) -> GPUReading:
    parsed = parse_gpus(text, GPU_FIELDS)
    assert parsed.complaints == ()
    (gpu,) = parsed.rows
    return gpu


# --- rows ---


def test_a_healthy_row() -> None:
    parsed = parse_gpus(line(ecc_errors_uncorrected_volatile_total="0"), GPU_FIELDS)
    expected = GPUReading(
        index=0,
        name="NVIDIA Test 24GB",
        uuid=UUID,
        pci_bus_id="00000000:01:00.0",
        memory_total_mb=24576,
        memory_used_mb=512,
        memory_free_mb=23800,
        utilization_percent=7,
        temperature_c=35,
        power_draw_w=60.25,
        power_limit_w=350.0,
        ecc_uncorrected_errors=0,
    )
    assert (parsed.rows, parsed.complaints, parsed.driver_version) == ((expected,), (), "570.10.20")
    assert isinstance(parsed.rows[0].memory_used_mb, int)


@pytest.mark.parametrize(
    "cell",
    [
        "[N/A]",
        "N/A",
        "[Not Supported]",
        "[Insufficient Permissions]",
        "[Requested functionality has been deprecated]",
        "",
        "nan",
        "inf",
        "-inf",
        "1e3",
        "0x10",
        "12abc",
        "7 8",
        "٣",  # a digit, but none that nvidia-smi writes
        "9" * 5000,
        "12 parsecs",
    ],
)
def test_what_is_no_number_is_unknown_and_no_fault(cell: str) -> None:
    gpu = only(
        line(
            memory_total=cell,
            memory_used=cell,
            memory_free=cell,
            utilization_gpu=cell,
            temperature_gpu=cell,
            power_draw=cell,
            power_limit=cell,
            ecc_errors_uncorrected_volatile_total=cell,
        )
    )
    is_unified = cell in ("[N/A]", "N/A", "[Not Supported]")  # the driver says that there is none
    assert gpu == GPUReading(
        0,
        "NVIDIA Test 24GB",
        UUID,
        "00000000:01:00.0",
        unified_memory=is_unified,
        reports_utilization=not is_unified,
    )


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("8192 MiB", 8192), ("8 GiB", 8192), ("1.5 GiB", 1536.0), ("8192MiB", 8192), ("8 TiB", None), ("8192 W", None)],
)
def test_memory_brings_its_unit_along(cell: str, expected: float | None) -> None:
    gpu = only(line(memory_total=cell, memory_used="0", memory_free="0"))
    assert (gpu.memory_total_mb, gpu.fault) == (expected, None)
    assert type(gpu.memory_total_mb) is type(expected)


def test_other_units() -> None:
    gpu = only(line(utilization_gpu="7 %", temperature_gpu="-3 C", power_draw="60.25 W", power_limit="60 MiB"))
    assert (gpu.utilization_percent, gpu.temperature_c, gpu.power_draw_w, gpu.power_limit_w) == (7, -3, 60.25, None)


@pytest.mark.parametrize("cell", ["[GPU is lost]", "[GPU requires reset]", "GPU requires a reset"])
@pytest.mark.parametrize("field", ["temperature_gpu", "memory_used", "name", "uuid"])
def test_a_cell_that_tells_of_loss_is_the_fault(cell: str, field: str) -> None:
    assert only(line(**{field: cell})).fault == cell.strip("[]")


def test_a_lost_gpu_does_not_even_tell_its_name() -> None:
    cells = {field.replace(".", "_"): "[GPU is lost]" for field in GPU_FIELDS if field != "index"}
    assert only(line(3, **cells)) == GPUReading(3, UNKNOWN_NAME, fault="GPU is lost", recovery_action=None)


@pytest.mark.parametrize("cell", ["ERR!", "[Unknown Error]", "[ERR!]"])
@pytest.mark.parametrize("field", ["memory_total", "memory_used", "utilization_gpu"])
def test_an_error_in_a_decisive_cell_is_the_fault(cell: str, field: str) -> None:
    fault = only(line(**{field: cell})).fault
    assert fault == f"{field.replace('_', '.')} cannot be read: {cell.strip('[]')}"


@pytest.mark.parametrize("cell", ["ERR!", "[Unknown Error]"])
def test_an_error_elsewhere_is_just_unknown(cell: str) -> None:
    gpu = only(line(temperature_gpu=cell, power_draw=cell, power_limit=cell, memory_free=cell))
    assert (gpu.fault, gpu.temperature_c, gpu.power_draw_w, gpu.power_limit_w) == (None, None, None, None)


@pytest.mark.parametrize(
    ("cell", "action"),
    [("None", None), ("[N/A]", None), ("ERR!", None), ("Reset", "Reset"), ("Drain and Reset", "Drain and Reset")],
)
def test_recovery_action(cell: str, action: str | None) -> None:
    gpu = only(line(gpu_recovery_action=cell))
    fault = None if action is None else f"the driver asks for a recovery action: {action}"
    assert (gpu.recovery_action, gpu.fault) == (action, fault)


def test_mig_cannot_tell_utilization() -> None:
    gpu = only(line(mig_mode_current="Enabled", utilization_gpu="[Unknown Error]"))
    assert (gpu.mig_enabled, gpu.reports_utilization, gpu.utilization_percent, gpu.fault) == (True, False, None, None)
    gpu = only(line(mig_mode_current="Disabled", utilization_gpu="[N/A]"))
    assert (gpu.mig_enabled, gpu.reports_utilization, gpu.utilization_percent, gpu.fault) == (False, True, None, None)


def test_impossible_numbers_make_the_gpu_unusable() -> None:
    assert only(line(memory_used="30000")).fault == "impossible reading: 30000 MB of 24576 MB used"
    assert only(line(utilization_gpu="250")).fault == "impossible reading: utilization_percent is 250"


def test_each_gpu_counts_once() -> None:
    same_uuid = line(2, uuid=UUID)
    same_index = line(0, uuid="GPU-other")
    parsed = parse_gpus(line(0) + same_uuid + same_index + line(1) + line(1), GPU_FIELDS)
    assert [gpu.index for gpu in parsed.rows] == [0, 1]


def test_rows_without_uuid_are_all_different() -> None:
    parsed = parse_gpus(line(0, uuid="[N/A]") + line(1, uuid="[N/A]"), GPU_FIELDS)
    assert [(gpu.index, gpu.uuid) for gpu in parsed.rows] == [(0, None), (1, None)]


def test_any_row_tells_the_version_of_the_driver() -> None:
    for versions in (("[N/A]", "570.1"), ("570.1", "[N/A]")):
        rows = [line(index, driver_version=version) for index, version in enumerate(versions)]
        assert parse_gpus("".join(rows), GPU_FIELDS).driver_version == "570.1"


def test_fewer_fields() -> None:
    (gpu,) = parse_gpus("1, Old GPU, 2048, 10\n", ("index", "name", "memory.total", "memory.used")).rows
    assert gpu == GPUReading(1, "Old GPU", memory_total_mb=2048, memory_used_mb=10)


def test_windows_line_ends_headers_and_warnings() -> None:
    header = ", ".join(GPU_FIELDS)
    text = f"{header}\r\n{line().strip()}\r\nWARNING: infoROM is corrupted at gpu 0000:01:00.0\r\n"
    assert only(text).memory_used_mb == 512


def test_a_line_with_missing_cells_is_its_gpus_complaint_not_a_shifted_reading() -> None:
    broken = line(1).strip().replace(", 512", "")
    parsed = parse_gpus(line(0) + broken, GPU_FIELDS)
    assert [gpu.index for gpu in parsed.rows] == [0]
    reason = f"its line from nvidia-smi cannot be read: {quote(broken)}"
    assert parsed.complaints == (Complaint(reason, 1, "00000000:02:00.0"),)


def test_a_row_without_index_is_known_by_its_bus_id() -> None:
    parsed = parse_gpus(line(0) + line(1).replace("1,", "[N/A],", 1), GPU_FIELDS)
    assert [(complaint.index, complaint.bus_id) for complaint in parsed.complaints] == [(None, "00000000:02:00.0")]


def test_numbers_with_commas_are_no_rows_of_their_own() -> None:
    assert parse_gpus("1, 2, 3\n", GPU_FIELDS).complaints == ()


# --- complaints ---


@pytest.mark.parametrize(
    ("said", "index", "bus"),
    [
        (LOST, None, "00000000:0A:00.0"),
        ("Unable to determine the device handle for GPU 0000:0A:00.0: GPU is lost.", None, "00000000:0A:00.0"),
        ("Unable to determine the device handle for GPU 00000000:0a:00.0: Unknown Error", None, "00000000:0A:00.0"),
        ("Unable to determine the device handle for gpu 0001:0A:00.0: Not Found", None, "00000001:0A:00.0"),
        ("Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error", 3, "00000000:5F:00.0"),
        ("Unable to determine the device handle for GPU2: Unknown Error", 2, None),
        ("GPU 00000000:0A:00.0 is lost? The GPU requires reset", None, "00000000:0A:00.0"),
    ],
)
def test_complaints_in_their_historic_spellings(said: str, index: int | None, bus: str | None) -> None:
    assert parse_complaint(said) == Complaint(quote(said), index, bus)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Unable to determine the device handle for something else",
        "WARNING: infoROM is corrupted at gpu 0000:0A:00.0",
        "GPU is lost",
    ],
)
def test_what_is_no_complaint_about_one_gpu(said: str) -> None:
    assert parse_complaint(said) is None


def test_complaints_beside_rows_and_said_twice() -> None:
    parsed = parse_gpus(f"{LOST}\n{line(0)}\n{LOST}\n", GPU_FIELDS)
    assert [gpu.index for gpu in parsed.rows] == [0]
    assert parsed.complaints == (Complaint(quote(LOST), None, "00000000:0A:00.0"),)


def test_bus_ids_are_written_in_one_way() -> None:
    assert bus_id("0000:0a:00.0") == bus_id("00000000:0A:00.0") == bus_id("GPU0000:0A:00.0") == "00000000:0A:00.0"
    assert bus_id("[N/A]") is None
    assert bus_id("10:20:30.456") is None


# --- processes ---


def test_processes_by_gpu() -> None:
    text = f"{UUID}, 11, python3, 2566\nGPU-b, 12, ./burn, [N/A]\n{UUID}, 13, /opt/a b/c, 1 MiB\n"
    assert parse_processes(text) == {
        UUID: (ParsedProcess(11, "python3", 2566), ParsedProcess(13, "/opt/a b/c", 1)),
        "GPU-b": (ParsedProcess(12, "./burn", None),),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (r"C:\Program Files (x86)\Some, Inc\tool, v2.exe", r"C:\Program Files (x86)\Some, Inc\tool, v2.exe"),
        ("python train.py --lr 0.1, 0.2", "python train.py --lr 0.1, 0.2"),
        ("two\nlines", "two lines"),
        ("\x1b[31mred", "[31mred"),
        ("[Not Found]", None),
        ("[Insufficient Permissions]", None),
        ("", None),
        ("-", "-"),
    ],
)
def test_process_names(name: str, expected: str | None) -> None:
    assert parse_processes(f"{UUID}, 7, {name}, 100\nGPU-b, 8, x, 1\n") == {
        UUID: (ParsedProcess(7, expected, 100),),
        "GPU-b": (ParsedProcess(8, "x", 1),),
    }


@pytest.mark.parametrize("pid", ["[N/A]", "[Insufficient Permissions]", "-", "0", "-5", ""])
def test_a_gpu_whose_processes_may_not_be_seen(pid: str) -> None:
    text = f"{UUID}, 5, a, 1\n{UUID}, {pid}, b, 1\n{UUID}, 6, c, 1\nGPU-b, 7, d, 1\n"
    assert parse_processes(text) == {UUID: None, "GPU-b": (ParsedProcess(7, "d", 1),)}


@pytest.mark.parametrize("text", ["", "\n\n", "No running processes found\n", f"{LOST}\n", "WARNING: infoROM\n"])
def test_no_processes(text: str) -> None:
    assert parse_processes(text) == {}


@pytest.mark.parametrize("text", ["[Not Supported]\n", "garbage", "gpu_uuid, pid, process_name\n"])
def test_an_answer_that_is_not_understood_is_not_an_empty_one(text: str) -> None:
    assert parse_processes(text) is None


@pytest.mark.parametrize("memory", ["-5", "9999999999999", "nan", "", "5 W"])
def test_memory_of_a_process_that_cannot_be_true(memory: str) -> None:
    assert parse_processes(f"{UUID}, 5, a, {memory}\n") == {UUID: (ParsedProcess(5, "a", None),)}


def test_a_process_counts_once() -> None:
    assert parse_processes(f"{UUID}, 5, a, 1\n{UUID}, 5, a, 1\n") == {UUID: (ParsedProcess(5, "a", 1),)}


# --- MIG ---

MIG_LIST = """\
GPU 0: NVIDIA Small (UUID: GPU-a)
GPU 1: NVIDIA Large 80GB (UUID: GPU-b)
  MIG 4g.40gb     Device  0: (UUID: MIG-aaaa)
  MIG 1c.2g.20gb  Device  1: (UUID: MIG-bbbb)
  MIG 1g.10gb+me  Device 10: (UUID: MIG-cccc)
GPU 2: NVIDIA Old (UUID: GPU-c)
  MIG 1g.5gb Device 0: (UUID: MIG-GPU-c/7/0)
"""
MIG_TABLE = """\
Tue Jan  1 00:00:00 2030
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.10.20              Driver Version: 570.10.20      CUDA Version: 12.8     |
|   1  NVIDIA Large 80GB              On  |   00000000:02:00.0 Off |                   On |
| N/A   33C    P0             66W /  500W |     321MiB /  81920MiB |     N/A      Default |
+-----------------------------------------------------------------------------------------+
| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |
|      ID  ID  Dev |                Shared BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |
|==================+==================================+===========+=======================|
|  1    2   0   0  |              31MiB / 40192MiB    | 56      0 |  4   0    2    0    0 |
|                  |               0MiB / 65535MiB    |           |                       |
+------------------+----------------------------------+-----------+-----------------------+
|  1  N/A   1   1  |             N/A / 19968MiB       | 28      0 |  2   0    1    0    0 |
+------------------+----------------------------------+-----------+-----------------------+
|  1   13   0  10  |      ERR! /  9984MiB | 14      0 |  1   0    0    0    0 |
+------------------+----------------------------------+-----------+-----------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|    1    2    0            4242      C   python                                  300MiB |
"""


def test_mig_devices_are_listed() -> None:
    assert parse_mig_list(MIG_LIST) == {
        0: {},
        1: {
            0: MIGReading("MIG-aaaa", "4g.40gb"),
            1: MIGReading("MIG-bbbb", "1c.2g.20gb"),
            10: MIGReading("MIG-cccc", "1g.10gb+me"),
        },
        2: {0: MIGReading("MIG-GPU-c/7/0", "1g.5gb", 7, 0)},
    }


def test_mig_memory_is_read_from_the_table() -> None:
    assert parse_mig_table(MIG_TABLE) == {
        (1, 0): MIGMemory(2, 0, 31, 40192, None),
        (1, 1): MIGMemory(None, 1, None, 19968, None),
        (1, 10): MIGMemory(13, 0, None, 9984, "its memory cannot be read: ERR! / 9984MiB"),
    }


def test_a_table_without_mig_devices() -> None:
    assert parse_mig_table(MIG_TABLE.partition("| MIG devices:")[0]) == {}
    assert parse_mig_table("| MIG devices: |\n|  No MIG devices found   |\n") == {}


# --- failures ---


@pytest.mark.parametrize(
    ("exit_status", "said", "code"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "driver_not_loaded"),
        (1, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "driver_not_loaded"),
        (9, "", "driver_not_loaded"),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "driver_version_mismatch"),
        (18, "", "driver_version_mismatch"),
        (1, "Failed to initialize NVML: Driver/library version mismatch", "driver_version_mismatch"),
        (4, "", "permission_denied"),
        (1, "Failed to initialize NVML: Insufficient Permissions", "permission_denied"),
        (255, "Failed to initialize NVML: Unknown Error", "driver_error"),
        (0, "hello", "driver_error"),
    ],
)
def test_failures(exit_status: int, said: str, code: str) -> None:
    assert failure(exit_status, said).code == code


def test_a_failure_quotes_the_first_line_and_nothing_a_terminal_would_obey() -> None:
    assert str(failure(3, "\n\n  \x1b[2Jbad\x07 thing\nmore\n")) == (
        "nvidia-smi ended with status 3 and said '[2Jbad thing': run it by hand to see what is wrong."
    )
    assert len(str(failure(3, "x" * 10_000))) < 300
    assert "said nothing" in str(failure(3, " \n"))
    assert "ended by signal 11" in str(failure(-11, ""))


def test_no_devices_is_no_failure() -> None:
    assert says_no_devices(6, "No devices were found\n")
    assert says_no_devices(6, "")
    assert not says_no_devices(6, "something else")
    assert not says_no_devices(0, "")


def test_unknown_field() -> None:
    assert unknown_field('Field "gpu_recovery_action" is not a valid field to query.\n\n') == "gpu_recovery_action"
    assert unknown_field(line()) is None


# --- any text ---

# No cell of the rows is 0: an invented one has nothing to hide behind.
REAL_LOOKING = [
    line(1) + line(3, mig_mode_current="Enabled", utilization_gpu="[N/A]") + LOST + "\n",
    line(2, memory_total="24 GiB", utilization_gpu="[Unknown Error]", gpu_recovery_action="Reset"),
    f"{UUID}, 11, python3, 2566\nGPU-b, 12, C:\\a, b.exe, [N/A]\n",
    MIG_LIST,
    MIG_TABLE,
]
PIECES = st.sampled_from(
    [
        "[N/A]",
        "ERR!",
        "[GPU is lost]",
        ", ",
        ",",
        "\n",
        "\r",
        " ",
        "|",
        "-",
        "NaN",
        "inf",
        "1e400",
        "0",
        "-1",
        "GiB",
        "½",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(REAL_LOOKING))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(PIECES | st.text(max_size=3)) + text[end:]
    return text


def numbers_in(text: str) -> set[float]:
    """Those that stand for themselves, with or without a unit; digits inside a UUID or a bus id are none."""
    words = (word.strip(":()") for word in re.split(r"[,|/\s]+", text))
    matches = (re.fullmatch(r"(-?[0-9]{1,15}(?:\.[0-9]{1,15})?)(?:%|W|C|MiB|GiB)?", word) for word in words)
    found = {float(match[1]) for match in matches if match is not None}
    return found | {number * 1024 for number in found if "GiB" in text}


def numbers_of(sample: object) -> list[float]:
    if isinstance(sample, tuple):
        return [number for part in sample for number in numbers_of(part)]
    if isinstance(sample, int | float) and not isinstance(sample, bool):
        return [sample]
    if isinstance(sample, GPUReading | MIGReading):
        return [number for field in dataclass_fields(sample) for number in numbers_of(getattr(sample, field.name))]
    return []


@given(text=st.text() | mutated() | st.lists(PIECES).map("".join))
def test_any_text_is_survived_and_no_number_invented(text: str) -> None:
    parsed = parse_gpus(text, GPU_FIELDS)
    for gpu in parsed.rows:
        assert gpu.utilization_percent is None or 0 <= gpu.utilization_percent <= 100
        for total, used in ((gpu.memory_total_mb, gpu.memory_used_mb), (gpu.memory_total_mb, gpu.memory_free_mb)):
            assert total is None or used is None or 0 <= used <= total
    processes = parse_processes(text) or {}
    assert all(process.pid > 0 for rows in processes.values() for process in rows or ())
    listed = tuple(device for devices in parse_mig_list(text).values() for device in devices.values())
    table = parse_mig_table(text)
    read = numbers_of((parsed.rows, tuple(rows or () for rows in processes.values()), listed, tuple(table.values())))
    assert all(map(math.isfinite, read))
    assert set(map(float, read)) <= numbers_in(text)
    indices = {complaint.index for complaint in parsed.complaints} - {None}
    assert indices <= {int(digits) for digits in re.findall(r"[0-9]{1,15}", text)}
    said = [str(failure(2, text)), *(complaint.reason for complaint in parsed.complaints)]
    assert all(message.isprintable() and len(message) < 400 for message in said)
    unknown_field(text)
    says_no_devices(6, text)
