"""The nvidia-smi reader against recordings of real machines, as `../shared/tools/nvidia-smi-replay` replays them.

What is expected is read from the recordings here, by other means than the reader's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_worker_pool.core import ObstacleKind, PoolSettings, Requirements
from gpu_worker_pool.core.obstacles import reading_obstacles
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading, MIGReading

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
REPLAY = SHARED / "tools" / "nvidia-smi-replay"
CAPTURES = sorted((SHARED / "captures").glob("*.txt"))
MIG_CAPTURES = [path for path in CAPTURES if "-mig__" in path.name]

pytestmark = pytest.mark.skipif(
    not (CAPTURES and REPLAY.exists()), reason=f"no recordings: {SHARED} is not part of the project"
)
STATES = ("idle", "load")


class Recorded(NamedTuple):
    """One recording in one state: its GPU's cells by title, and its processes as (pid, name, memory)."""

    gpu: dict[str, str]
    processes: list[tuple[int, str, int | None]]
    mig: list[tuple[str, str]]
    mig_table: list[tuple[int, int, int, int]]


def recorded(path: Path, state: str) -> Recorded:
    lines = path.read_text().splitlines()

    def section(title: str) -> list[str]:
        start = next(number for number, line in enumerate(lines) if line.startswith(f"# {title}")) + 3
        end = next((number for number in range(start, len(lines)) if lines[number].startswith("####")), len(lines))
        return [line for line in lines[start:end] if line]

    titles, row = (line.split(", ") for line in section(f"{state} :: query-gpu"))
    assert len(titles) == len(row)
    processes = []
    for line in section(f"{state} :: query-compute-apps")[1:]:
        *_, pid, name, memory = line.split(", ", 7)
        processes.append((int(pid), name, None if memory == "[N/A]" else int(memory.removesuffix(" MiB"))))
    listed = re.findall(r"MIG (\S+) +Device +\d+: \(UUID: (\S+)\)", "\n".join(section("capabilities :: list")))
    rows = re.findall(
        r"^\| +0 +(\d+) +(\d+) +\d+ +\| +(\d+)MiB / +(\d+)MiB", "\n".join(section(f"{state} :: nvidia-smi")), re.M
    )
    return Recorded(
        {title.partition(" [")[0]: cell for title, cell in zip(titles, row, strict=True)},
        processes,
        listed,
        [(int(gpu), int(compute), int(used), int(total)) for gpu, compute, used, total in rows],
    )


def expected(recording: Recorded, index: int, *, table_is_shown: bool = True) -> GPUReading:
    """Without processes, which depend on who else has their pids here."""
    cells = recording.gpu

    def number(field: str, unit: str) -> float | None:
        cell = cells[field]
        return None if cell == "[N/A]" else float(cell.removesuffix(unit))

    is_split = cells["mig.mode.current"] == "Enabled"
    devices = []
    for position, (profile, uuid) in enumerate(recording.mig):
        gpu, compute, used, total = recording.mig_table[position] if table_is_shown else (None, None, None, None)
        uuid = re.sub("^MIG-0000", f"MIG-{index:04x}", uuid)
        devices.append(MIGReading(uuid, profile, gpu, compute, total, used, processes=None))
    errors = number("ecc.errors.uncorrected.volatile.total", "")
    return GPUReading(
        index=index,
        name=cells["name"],
        uuid=cells["uuid"].replace("GPU-00000000", f"GPU-{index:08x}"),
        pci_bus_id=cells["pci.bus_id"],
        memory_total_mb=number("memory.total", " MiB"),
        memory_used_mb=number("memory.used", " MiB"),
        memory_free_mb=number("memory.free", " MiB"),
        utilization_percent=number("utilization.gpu", " %"),
        reports_utilization=not is_split,
        temperature_c=number("temperature.gpu", ""),
        power_draw_w=number("power.draw", " W"),
        power_limit_w=number("power.limit", " W"),
        ecc_uncorrected_errors=None if errors is None else int(errors),
        mig_enabled=is_split,
        mig_devices=tuple(devices),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nvidia-smi").symlink_to(REPLAY)
    return tmp_path


def read(folder: Path, captures: list[Path], states: str, **more: str) -> DriverAnswer:
    environment = {**os.environ, "NVSMI_CAPTURES": ":".join(map(str, captures)), "NVSMI_STATE": states, **more}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    reader = NvidiaSMIReader(environment=environment, timeout_seconds=float(more.get("TIMEOUT", "30")))
    try:
        return reader.read()
    finally:
        reader.close()


def without_processes(gpu: GPUReading) -> GPUReading:
    values = {name: getattr(gpu, name) for name in GPUReading.__slots__} | {"processes": None}
    for device in gpu.mig_devices:
        assert device.processes == (() if gpu.processes == () else None)
    values["mig_devices"] = tuple(
        MIGReading(**({name: getattr(device, name) for name in MIGReading.__slots__} | {"processes": None}))
        for device in gpu.mig_devices
    )
    return GPUReading(**values)


def processes_of(gpu: GPUReading) -> list[tuple[int, str | None, float | None]]:
    assert gpu.processes is not None
    return [(process.pid, process.name, process.memory_used_mb) for process in gpu.processes]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_a_recording(folder: Path, capture: Path, state: str) -> None:
    recording = recorded(capture, state)
    answer = read(folder, [capture], state)
    assert (answer.backend, answer.driver_version) == ("nvidia-smi", recording.gpu["driver_version"])
    (gpu,) = answer.gpus
    assert without_processes(gpu) == expected(recording, 0)
    assert processes_of(gpu) == recording.processes


def test_the_recordings_hold_what_this_is_about() -> None:
    """A test that finds nothing to compare passes too."""
    assert len(CAPTURES) >= 4
    assert len(MIG_CAPTURES) == 1
    loaded = [recorded(capture, "load") for capture in CAPTURES]
    assert all(recording.processes for recording in loaded)
    assert [len(recording.mig_table) for recording in loaded if recording.mig] == [4]
    assert any(memory is None for recording in loaded for _, _, memory in recording.processes)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mig_first", [True, False])
def test_all_recordings_as_one_host(folder: Path, state: str, mig_first: bool) -> None:
    captures = sorted(CAPTURES, key=lambda path: (path in MIG_CAPTURES) != mig_first)
    gpus = read(folder, captures, state).gpus
    # The replayed table is the first recording's alone: without it the memory of MIG devices is unknown, not 0.
    assert [without_processes(gpu) for gpu in gpus] == [
        expected(recorded(capture, state), index, table_is_shown=mig_first) for index, capture in enumerate(captures)
    ]
    found = [process for gpu in gpus for process in processes_of(gpu)]
    assert found == [process for capture in captures for process in recorded(capture, state).processes]


def test_idle_beside_loaded(folder: Path) -> None:
    gpus = read(folder, CAPTURES[:2], "idle:load").gpus
    assert [gpu.memory_used_mb for gpu in gpus] == [
        expected(recorded(capture, state), 0).memory_used_mb
        for capture, state in zip(CAPTURES[:2], STATES, strict=True)
    ]


def test_a_replayed_host_without_gpus(folder: Path) -> None:
    assert read(folder, [], "idle").gpus == ()


def test_a_replayed_driver_that_is_not_loaded(folder: Path) -> None:
    with pytest.raises(DriverError) as caught:
        read(folder, CAPTURES, "idle", NVSMI_EXIT="9")
    assert caught.value.code == "driver_not_loaded"


def test_a_replayed_driver_that_hangs(folder: Path) -> None:
    with pytest.raises(DriverError) as caught:
        read(folder, CAPTURES, "idle", NVSMI_HANG="60", TIMEOUT="0.5")
    assert caught.value.code == "driver_hangs"


@pytest.mark.parametrize(
    "capture", [path for path in CAPTURES if path.stem.startswith("linux")], ids=lambda path: path.stem
)
def test_really_free_by_what_real_gpus_show(folder: Path, capture: Path) -> None:
    """Idle, even with a desktop on one of them; and not while something computes."""

    def why_not(state: str) -> list[list[ObstacleKind]]:
        readings = readings_of(read(folder, [capture], state).gpus)
        idle = Requirements(policy="idle")
        return [[each.kind for each in reading_obstacles(reading, idle, PoolSettings())] for reading in readings]

    assert all(kinds == [] for kinds in why_not("idle"))
    in_use = {ObstacleKind.FOREIGN_PROCESS, ObstacleKind.PROCESSES_UNKNOWN}  # of which MIG device is not told
    assert all(in_use & set(kinds) for kinds in why_not("load"))
