"""The reader of AMD GPUs: the Python library amdsmi, or `amd-smi` where that cannot be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers import amd_library
from gpu_worker_pool.hardware.readers.amd_smi import AMDSMIReader

if TYPE_CHECKING:
    from gpu_worker_pool.hardware.samples import DriverAnswer


class AMDReader:
    def __init__(self) -> None:
        self._library = amd_library.AMDLibraryReader()
        self._tool = AMDSMIReader()

    def read(self) -> DriverAnswer:
        try:
            return self._library.read()
        except DriverError as error:
            if error.code != amd_library.NOT_FOUND:
                raise
        return self._tool.read()

    def interrupt(self) -> None:
        self._tool.interrupt()

    def close(self) -> None:
        self._library.close()
        self._tool.close()
