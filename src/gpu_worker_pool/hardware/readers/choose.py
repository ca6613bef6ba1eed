"""Chooses the reader: `GPU_BACKEND=auto|nvml|nvidia-smi|simulated[:N]`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.environment import refused
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader
from gpu_worker_pool.hardware.readers.nvml import NVMLReader
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
    from gpu_worker_pool.hardware.samples import DriverAnswer


class AutoReader:
    """NVML, or `nvidia-smi` if NVML cannot be loaded; each read looks again until one is found."""

    def __init__(self) -> None:
        self._nvml = NVMLReader()
        self._nvidia_smi = NvidiaSMIReader()

    def read(self) -> DriverAnswer:
        try:
            return self._nvml.read()
        except DriverError as nvml_error:
            if nvml_error.code != "nvml_not_found":
                raise
            try:
                return self._nvidia_smi.read()
            except DriverError as error:
                if error.code != "nvidia_smi_not_found":
                    raise
                raise DriverError(
                    "nvidia-smi not found, and no NVML library: is the NVIDIA driver installed? "
                    "GPU_BACKEND=simulated:4 simulates four GPUs",
                    code=error.code,
                ) from nvml_error

    def interrupt(self) -> None:
        self._nvidia_smi.interrupt()

    def close(self) -> None:
        self._nvml.close()
        self._nvidia_smi.close()


_REAL: Final[dict[str, Callable[[], Reader]]] = {"auto": AutoReader, "nvml": NVMLReader, "nvidia-smi": NvidiaSMIReader}


def check_backend(text: str, name: str = "backend") -> str:
    """Returns it in lower case, or raises a `ValueError` that says what was expected."""
    backend = text.lower()
    if backend not in _REAL:
        if not backend.startswith("simulated"):
            raise refused(name, f"{', '.join(_REAL)} or simulated:N", text)
        SimulatedHost.parse(backend, name)
    return backend


def read_outsiders(backend: str, environment: Environment) -> str | None:
    """The variable, if it is set and fits this backend; real GPUs have real outsiders."""

    def parse(text: str, name: str) -> str:
        with_outsiders(backend, text, name)
        return text

    return None if backend in _REAL else environment.get(OUTSIDERS_VARIABLE, None, parse)


def complete_backend(backend: str, outsiders: str | None) -> str:
    """The backend with the simulated outsiders that `read_outsiders` found."""
    return backend if outsiders is None or backend in _REAL else with_outsiders(backend, outsiders)


def hardware_name(backend: str) -> str:
    """Backends with the same name read the same GPUs."""
    return "real" if backend in _REAL else SimulatedHost.parse(backend).name


def readings_name(backend: str, devices: Path = Path("/dev")) -> str:
    """Processes with the same name see the same GPUs and can share samples.

    A container may see two of eight: its samples must not hide the other six from the rest of the host.
    """
    name = hardware_name(backend)
    if backend not in _REAL:
        return name
    numbers = sorted(int(node.name[6:]) for node in devices.glob("nvidia[0-9]*") if node.name[6:].isdecimal())
    return f"{name}-{zlib.crc32(repr(numbers).encode()):08x}" if numbers else name


def make_reader(
    backend: str, clock: Callable[[], float], holders: Callable[[], Iterable[SimulatedHolder]] = tuple
) -> Reader:
    """`holders`: the holders of simulated GPUs."""
    if backend in _REAL:
        return _REAL[backend]()
    return SimulatedReader(SimulatedHost.parse(backend), clock=clock, holders=holders)
