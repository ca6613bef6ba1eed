"""Chooses the reader: `GPU_BACKEND=auto|nvml|nvidia-smi|amd|simulated[:N]`, or one that another package brings."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.environment import refused
from gpu_worker_pool.hardware.readers.package import PackageReader, readers_of_packages
from gpu_worker_pool.hardware.readers.simulated import (
    OUTSIDERS_VARIABLE,
    SimulatedHolder,
    SimulatedHost,
    SimulatedReader,
    with_outsiders,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.environment import Environment
    from gpu_worker_pool.hardware.readers import Reader


_OWN: Final = ("auto", "nvml", "nvidia-smi", "amd")


def check_backend(text: str, name: str = "backend") -> str:
    """Returns it in lower case, or raises a `ValueError` that says what was expected."""
    backend = text.lower()
    if _is_simulated(backend):
        SimulatedHost.parse(backend, name)
    elif backend not in _OWN and backend not in (others := readers_of_packages()):
        raise refused(name, f"{', '.join((*_OWN, *others))} or simulated:N", text)
    return backend


def _is_simulated(backend: str) -> bool:
    return backend.startswith("simulated")


def read_outsiders(backend: str, environment: Environment) -> str | None:
    """The variable, if it is set and fits this backend; real GPUs have real outsiders."""

    def parse(text: str, name: str) -> str:
        with_outsiders(backend, text, name)
        return text

    return None if not _is_simulated(backend) else environment.get(OUTSIDERS_VARIABLE, None, parse)


def complete_backend(backend: str, outsiders: str | None) -> str:
    """The backend with the simulated outsiders that `read_outsiders` found."""
    return backend if outsiders is None or not _is_simulated(backend) else with_outsiders(backend, outsiders)


def hardware_name(backend: str) -> str:
    """Backends with the same name read the same GPUs."""
    return "real" if not _is_simulated(backend) else SimulatedHost.parse(backend).name


def readings_name(backend: str, devices: Path = Path("/dev")) -> str:
    """Processes with the same name see the same GPUs and can share samples.

    A container may see two of eight: its samples must not hide the other six from the rest of the host.
    """
    name = hardware_name(backend)
    if _is_simulated(backend):
        return name
    numbers = sorted(int(node.name[6:]) for node in devices.glob("nvidia[0-9]*") if node.name[6:].isdecimal())
    if (devices / "kfd").exists():  # of AMD's driver for computing
        numbers += sorted(int(node.name[7:]) for node in devices.glob("dri/renderD*") if node.name[7:].isdecimal())
    return f"{name}-{zlib.crc32(repr(numbers).encode()):08x}" if numbers else name


def make_reader(
    backend: str, clock: Callable[[], float], holders: Callable[[], Iterable[SimulatedHolder]] = tuple
) -> Reader:
    """`holders`: the holders of simulated GPUs. Loads the reader that is used, and no other."""
    if backend == "auto":
        from gpu_worker_pool.hardware.readers.auto import AutoReader

        return AutoReader()
    if backend == "nvml":
        from gpu_worker_pool.hardware.readers.nvml import NVMLReader

        return NVMLReader()
    if backend == "nvidia-smi":
        from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader

        return NvidiaSMIReader()
    if backend == "amd":
        from gpu_worker_pool.hardware.readers.amd import AMDReader

        return AMDReader()
    if not _is_simulated(backend):
        return PackageReader(backend)
    return SimulatedReader(SimulatedHost.parse(backend), clock=clock, holders=holders)
