"""The default reader: NVML, or `nvidia-smi` if NVML cannot be loaded; for AMD where there is neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers.nvml import NVMLReader

if TYPE_CHECKING:
    from gpu_worker_pool.hardware.readers.amd import AMDReader
    from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader
    from gpu_worker_pool.hardware.samples import DriverAnswer


class AutoReader:
    """Each read looks again until one is found."""

    def __init__(self) -> None:
        self._nvml = NVMLReader()
        #: Loaded only where there is no NVML.
        self._nvidia_smi: NvidiaSMIReader | None = None
        #: Loaded only where there is nothing of NVIDIA's.
        self._amd: AMDReader | None = None

    def read(self) -> DriverAnswer:
        try:
            return self._nvml.read()
        except DriverError as nvml_error:
            if nvml_error.code != "nvml_not_found":
                raise
            try:
                return self._instead().read()
            except DriverError as error:
                if error.code != "nvidia_smi_not_found":
                    raise
                try:
                    return self._of_amd().read()
                except DriverError as amd_error:
                    if amd_error.code != "amd_smi_not_found":
                        raise
                raise DriverError(
                    "nvidia-smi not found, and no NVML library: is the NVIDIA driver installed? "
                    "GPU_BACKEND=simulated:4 simulates four GPUs",
                    code=error.code,
                ) from nvml_error

    def interrupt(self) -> None:
        for reader in (self._nvidia_smi, self._amd):
            if reader is not None:
                reader.interrupt()

    def close(self) -> None:
        self._nvml.close()
        for reader in (self._nvidia_smi, self._amd):
            if reader is not None:
                reader.close()

    def _instead(self) -> NvidiaSMIReader:
        if self._nvidia_smi is None:
            from gpu_worker_pool.hardware.readers.nvidia_smi import NvidiaSMIReader

            self._nvidia_smi = NvidiaSMIReader()
        return self._nvidia_smi

    def _of_amd(self) -> AMDReader:
        if self._amd is None:
            from gpu_worker_pool.hardware.readers.amd import AMDReader

            self._amd = AMDReader()
        return self._amd
