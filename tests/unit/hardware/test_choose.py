"""Which processes share readings, and which share a ledger: those who see the same GPUs, and those who use the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.hardware.readers.choose import hardware_name, readings_name


def devices(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("backend", ["auto", "nvml", "nvidia-smi"])
def test_all_ways_to_the_real_gpus_share_one_ledger(backend: str) -> None:
    assert hardware_name(backend) == "real"


def test_simulated_gpus_never_share_anything_with_real_ones() -> None:
    names = {hardware_name(backend) for backend in ("auto", "simulated:4", "simulated:8", "simulated:4,seed=7")}
    assert len(names) == 4
    assert hardware_name("simulated") == hardware_name("simulated:4") == readings_name("simulated:4")


def test_who_sees_only_some_gpus_has_readings_of_its_own(tmp_path: Path) -> None:
    """Fault 34: a container that was given two of four must not make the others vanish for those who see all."""
    host = devices(tmp_path / "host", "nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm")
    same = devices(tmp_path / "same", "nvidia3", "nvidia2", "nvidia1", "nvidia0")
    container = devices(tmp_path / "container", "nvidia2", "nvidia3", "nvidiactl")
    names = [readings_name("auto", folder) for folder in (host, same, container)]
    assert names[0] == names[1] != names[2]
    assert readings_name("nvml", host) == names[0]
    assert hardware_name("auto") == "real", "and yet they share the ledger, or a GPU would be promised twice"
    assert readings_name("auto", devices(tmp_path / "none")) == "real"
