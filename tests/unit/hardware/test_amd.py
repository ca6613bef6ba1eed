"""AMD's GPUs: amd-smi as ROCm 6 and 7 write its JSON, the library amdsmi, and readers that other packages bring."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers import amd_text, package
from gpu_worker_pool.hardware.readers.amd_library import AMDLibraryReader
from gpu_worker_pool.hardware.readers.amd_smi import AMDSMIReader
from gpu_worker_pool.hardware.readers.auto import AutoReader
from gpu_worker_pool.hardware.readers.choose import check_backend, make_reader
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading
from gpu_worker_pool.lease_variables import VisibleGPU, lease_variables

GIGABYTE = 1024**3


def value(number: object, unit: str) -> dict[str, object]:
    return {"value": number, "unit": unit}


#: Two MI300X, as amd-smi of ROCm 6.2 reports them.
SIX = {
    "list": [
        {"gpu": 0, "bdf": "0000:05:00.0", "uuid": "15ff74a1-0000-1000-8061-7c5b8a5d3f10", "kfd_id": 5123, "node_id": 2},
        {"gpu": 1, "bdf": "0000:26:00.0", "uuid": "15ff74a1-0000-1000-80ba-0f2c4a1e9d77", "kfd_id": 5124, "node_id": 3},
    ],
    "static": [
        {
            "gpu": gpu,
            "asic": {"market_name": "MI300X-O", "vendor_id": "0x1002", "asic_serial": serial},
            "bus": {"bdf": bdf},
            "vram": {"type": "HBM", "size": value(196592, "MB")},
            "driver": {"name": "amdgpu", "version": "6.8.5"},
        }
        for gpu, serial, bdf in ((0, "0x617C5B8A5D3F10A2", "0000:05:00.0"), (1, "0xBA0F2C4A1E9D7731", "0000:26:00.0"))
    ],
    "metric": [
        {
            "gpu": 0,
            "usage": {"gfx_activity": value(97, "%"), "vcn_activity": ["N/A", "N/A"]},
            "power": {"socket_power": value(610, "W"), "throttle_status": "UNTHROTTLED"},
            "temperature": {"edge": "N/A", "hotspot": value(71, "C"), "mem": value(60, "C")},
            "mem_usage": {"total_vram": value(196592, "MB"), "used_vram": value(90000, "MB")},
        },
        {
            "gpu": 1,
            "usage": {"gfx_activity": value(0, "%")},
            "power": {"socket_power": value(132, "W")},
            "temperature": {"edge": "N/A", "hotspot": value(40, "C")},
            "mem_usage": {"total_vram": value(196592, "MB"), "used_vram": value(285, "MB")},
        },
    ],
    "process": [
        {
            "gpu": 0,
            "process_list": [
                {
                    "process_info": {
                        "name": "N/A",
                        "pid": os.getpid(),
                        "memory_usage": {"gtt_mem": value(0, "B"), "vram_mem": value(8 * GIGABYTE, "B")},
                    }
                }
            ],
        },
        {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
    ],
}


def seven(answers: dict[str, Any]) -> dict[str, Any]:
    """The same from ROCm 7: in an object; and `list -e` says how HIP numbers and names them, here the other way."""
    listed = [
        row | {"hip_id": 1 - row["gpu"], "hip_uuid": f"GPU-{static['asic']['asic_serial'][2:].lower()}"}
        for row, static in zip(answers["list"], answers["static"], strict=True)
    ]
    return {call: {"gpu_data": rows} for call, rows in (answers | {"list": listed}).items()}


class FakeTool:
    def __init__(self, folder: Path) -> None:
        self.path, self._answers = folder / "amd-smi", folder / "answers.json"
        self.path.write_text(
            f"#!{sys.executable} -IS\nimport json, sys\n"
            f"answer = json.load(open({str(self._answers)!r})).get(sys.argv[1])\n"
            "if answer is None or ('-e' in sys.argv and 'hip_id' not in str(answer)):\n"
            "    print('unknown argument'); sys.exit(2)\n"
            "print(answer if isinstance(answer, str) else json.dumps(answer, indent=4))\n"
        )
        self.path.chmod(0o755)

    def say(self, answers: dict[str, Any]) -> None:
        self._answers.write_text(json.dumps(answers))

    def read(self) -> DriverAnswer:
        return AMDSMIReader(str(self.path)).read()


@pytest.fixture
def tool(tmp_path: Path) -> FakeTool:
    made = FakeTool(tmp_path)
    made.say(SIX)
    return made


def test_rocm_6(tool: FakeTool) -> None:
    answer = tool.read()
    assert (answer.backend, answer.driver_version) == ("amd-smi", "6.8.5")
    busy, idle = answer.gpus
    assert busy == GPUReading(
        0,
        "MI300X-O",
        "GPU-617c5b8a5d3f10a2",
        "0000:05:00.0",
        memory_total_mb=196592.0,
        memory_used_mb=90000.0,
        utilization_percent=97.0,
        temperature_c=71.0,
        power_draw_w=610.0,
        processes=busy.processes,
    )
    assert busy.processes is not None
    (process,) = busy.processes
    assert (process.pid, process.memory_used_mb) == (os.getpid(), 8192.0)
    assert idle.processes == ()
    assert idle.uuid == "GPU-ba0f2c4a1e9d7731"


def test_rocm_7_counts_as_hip_does(tool: FakeTool) -> None:
    tool.say(seven(SIX))
    first, second = tool.read().gpus
    assert (first.index, first.uuid, first.memory_used_mb) == (0, "GPU-ba0f2c4a1e9d7731", 285.0)
    assert (second.index, second.uuid, second.memory_used_mb) == (1, "GPU-617c5b8a5d3f10a2", 90000.0)


def test_warnings_before_the_json(tool: FakeTool) -> None:
    warned = "WARNING: User is missing the following required groups: render, video.\n" + json.dumps(SIX["metric"])
    tool.say(SIX | {"metric": warned})
    assert len(tool.read().gpus) == 2


@pytest.mark.parametrize("metric", ["", "no json", "[", '"text"', "[1, 2]", "[" * 5000, "<html>"])
def test_garbage_is_an_error_and_never_an_idle_gpu(tool: FakeTool, metric: str) -> None:
    tool.say(SIX | {"metric": metric})
    try:
        answer = tool.read()
    except DriverError as error:
        assert "amd-smi" in str(error)  # noqa: PT017
    else:
        assert all(gpu.fault is not None for gpu in answer.gpus)


def test_what_is_not_known_is_none(tool: FakeTool) -> None:
    bare = [{"gpu": 0, "usage": "N/A", "mem_usage": {"total_vram": "N/A", "used_vram": value("N/A", "MB")}}]
    tool.say({"list": SIX["list"], "metric": bare})
    first, second = tool.read().gpus
    assert (first.memory_total_mb, first.memory_used_mb, first.utilization_percent) == (None, None, None)
    assert (first.name, first.uuid, first.processes) == ("unknown GPU", "AMD-0000:05:00.0", None)
    assert second.fault is not None


def test_impossible_values_are_a_fault(tool: FakeTool) -> None:
    row = SIX["metric"][1] | {"usage": {"gfx_activity": value(250, "%")}}
    tool.say(SIX | {"metric": [SIX["metric"][0], row]})
    assert "impossible reading" in str(tool.read().gpus[1].fault)


def test_a_process_without_a_pid_may_be_anybodys(tool: FakeTool) -> None:
    rows = [{"gpu": 1, "process_list": [{"process_info": {"name": "x", "pid": "N/A"}}]}]
    tool.say(SIX | {"process": rows})
    assert [gpu.processes for gpu in tool.read().gpus] == [None, None]


def test_without_the_tool_or_the_driver(tool: FakeTool, tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="install the AMD driver") as missing:
        AMDSMIReader("amd-smi", environment={"PATH": str(tmp_path / "none")}).read()
    assert missing.value.code == "amd_smi_not_found"
    tool.say({})
    with pytest.raises(DriverError, match="amd-smi failed with status 2, and said: unknown argument"):
        tool.read()


def test_auto_finds_amd_where_there_is_nothing_of_nvidia(
    tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    try:
        answer = AutoReader().read()
    except DriverError as error:
        pytest.skip(f"this host has NVIDIA's driver: {error}")
    if answer.backend == "nvml":
        pytest.skip("this host has NVIDIA's driver")
    assert (answer.backend, len(answer.gpus)) == ("amd-smi", 2)
    assert make_reader("amd", lambda: 0.0).read() == answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of AMD's Python library as is used, with one GPU."""
    made: Any = ModuleType("amdsmi")
    made.AmdSmiMemoryType = SimpleNamespace(VRAM=0)
    made.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    made.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    made.starts = made.ends = 0

    def start() -> None:
        made.starts += 1

    def end() -> None:
        made.ends += 1

    made.amdsmi_init, made.amdsmi_shut_down = start, end
    made.amdsmi_get_processor_handles = lambda: ["handle"]
    made.amdsmi_get_gpu_driver_info = lambda handle: {"driver_version": "6.8.5"}
    made.amdsmi_get_gpu_asic_info = lambda handle: {"market_name": "AMD Instinct MI210", "asic_serial": "0xAB"}
    made.amdsmi_get_gpu_device_bdf = lambda handle: "0000:43:00.0"
    made.amdsmi_get_gpu_memory_total = lambda handle, kind: 64 * GIGABYTE
    made.amdsmi_get_gpu_memory_usage = lambda handle, kind: GIGABYTE
    made.amdsmi_get_gpu_activity = lambda handle: {"gfx_activity": "N/A"}
    made.amdsmi_get_power_info = lambda handle: {"current_socket_power": "N/A", "average_socket_power": 41}
    made.amdsmi_get_temp_metric = lambda handle, kind, metric: 38
    made.amdsmi_get_gpu_process_list = lambda handle: [
        {"pid": 7, "name": "N/A", "memory_usage": {"vram_mem": GIGABYTE}}
    ]
    monkeypatch.setitem(sys.modules, "amdsmi", made)
    return made


def test_the_library(library: Any) -> None:
    reader = AMDLibraryReader()
    (gpu,) = reader.read().gpus
    assert (gpu.index, gpu.name, gpu.uuid) == (0, "AMD Instinct MI210", "GPU-00000000000000ab")
    assert (gpu.memory_total_mb, gpu.memory_used_mb, gpu.utilization_percent) == (65536.0, 1024.0, None)
    assert (gpu.power_draw_w, gpu.temperature_c) == (41.0, 38.0)
    assert [(each.pid, each.memory_used_mb) for each in gpu.processes or ()] == [(7, 1024.0)]
    assert make_reader("amd", lambda: 0.0).read().backend == "amdsmi"

    def fail() -> None:
        raise RuntimeError("the driver was replaced")

    library.amdsmi_get_processor_handles = fail
    with pytest.raises(DriverError, match="the driver was replaced"):
        reader.read()
    library.amdsmi_get_processor_handles = lambda: ["handle"]
    assert len(reader.read().gpus) == 1
    assert (library.starts, library.ends) == (3, 1)


def test_the_variables_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    gpus = [VisibleGPU(3, "GPU-617c5b8a5d3f10a2"), VisibleGPU(5, "AMD-0000:26:00.0")]
    variables = lease_variables(gpus, "lease-1", "uuid")
    assert (variables["HIP_VISIBLE_DEVICES"], variables["CUDA_VISIBLE_DEVICES"]) == ("3,5", "3,5")
    assert "ROCR_VISIBLE_DEVICES" not in variables
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1,2,3,4,5")
    variables = lease_variables(gpus, "lease-1")
    assert (variables["ROCR_VISIBLE_DEVICES"], variables["HIP_VISIBLE_DEVICES"]) == ("3,5", "0,1")
    of_nvidia = lease_variables([VisibleGPU(0, "GPU-51309a7e-0000-4000-8000-000000000000")], "lease-1")
    assert "HIP_VISIBLE_DEVICES" not in of_nvidia


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [(value(1, "GB"), 1024.0), (value(512, "KB"), 0.5), ("12", 12.0), ("N/A", None), (True, None)],
)
def test_sizes(text: object, megabytes: float | None) -> None:
    assert amd_text.size_mb(text) == megabytes


class OurReader:
    def read(self) -> DriverAnswer:
        return DriverAnswer((GPUReading(0, "Other", "GPU-other"),), backend="other")

    def interrupt(self) -> None: ...
    def close(self) -> None: ...


def test_a_reader_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "other_gpus-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other-gpus\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        f"[{package.GROUP}]\nother = {__name__}:OurReader\nbroken = no_such_module:Reader\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[OurReader.__module__])
    assert check_backend("Other") == "other"
    assert make_reader("other", lambda: 0.0).read().gpus[0].name == "Other"
    with pytest.raises(DriverError, match="the reader 'broken' of no_such_module:Reader cannot be loaded"):
        make_reader("broken", lambda: 0.0).read()
    with pytest.raises(ValueError, match="amd, broken, other or simulated:N, not 'unknown'"):
        check_backend("unknown")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "the reader 'other' returned None instead of a DriverAnswer"),
        (DriverAnswer(("GPU 0",)), "the reader 'other' returned 'GPU 0' among its GPUs instead of a GPUReading"),  # type: ignore[arg-type]
        (
            DriverAnswer((GPUReading(0, "Other", "A"), GPUReading(0, "Other", "B"))),
            "the reader 'other' gives the same index to several GPUs: 0",
        ),
        (
            DriverAnswer((GPUReading(0, "Other", "A"), GPUReading(1, "Other", "A"))),
            "the reader 'other' gives the same UUID to several GPUs: 'A'",
        ),
    ],
)
def test_a_reader_of_another_package_is_not_trusted(
    answer: DriverAnswer, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.PackageReader, "_loaded", lambda _: OurReader())
    monkeypatch.setattr(OurReader, "read", lambda _: answer)
    with pytest.raises(DriverError) as caught:
        package.PackageReader("other").read()
    assert str(caught.value) == expected
