"""Which reader: `GPU_BACKEND=auto|nvml|nvidia-smi|simulated[:N]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader
from gpu_worker_pool.hardware.readers.nvml import NVMLReader
from gpu_worker_pool.hardware.readers.simulated import Holder, SimulatedHost, SimulatedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import DriverAnswer


class AutoReader:
    """NVML, and `nvidia-smi` where NVML cannot be loaded; looked for anew each time until one of them is there."""

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
                    "GPU_BACKEND=simulated:4 tries things out without one",
                    code=error.code,
                ) from nvml_error

    def interrupt(self) -> None:
        self._nvidia_smi.interrupt()

    def close(self) -> None:
        self._nvml.close()
        self._nvidia_smi.close()


_REAL: Final[dict[str, Callable[[], Reader]]] = {
    "auto": AutoReader,
    "nvml": NVMLReader,
    "nvidia-smi": NvidiaSMIReader,
}


def check_backend(text: str) -> str:
    """The same in lower case, or a `ValueError` that says what was expected."""
    text = text.lower()
    if text not in _REAL:
        if not text.startswith("simulated"):
            raise ValueError(f"expected {', '.join(_REAL)} or simulated:N")
        SimulatedHost.parse(text)
    return text


def hardware_name(backend: str) -> str:
    """Processes whose backends have the same name see the same GPUs, by whatever way."""
    return "real" if backend in _REAL else SimulatedHost.parse(backend).name


def make_reader(backend: str, clock: Callable[[], float], holders: Callable[[], Iterable[Holder]] = tuple) -> Reader:
    """`holders`: who has simulated GPUs; real ones show it themselves."""
    if backend in _REAL:
        return _REAL[backend]()
    return SimulatedReader(SimulatedHost.parse(backend), clock=clock, holders=holders)
