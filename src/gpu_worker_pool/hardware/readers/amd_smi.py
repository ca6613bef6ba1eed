"""The reader that runs amd-smi, for AMD GPUs. It does not trust the output."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers import amd_text as text
from gpu_worker_pool.hardware.readers.tool import Tool
from gpu_worker_pool.hardware.samples import DriverAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_worker_pool.hardware.readers.amd_text import Row

NOT_FOUND: Final = "amd_smi_not_found"
_METRICS: Final = ("metric", "--usage", "--mem-usage", "--power", "--temperature")


class AMDSMIReader:
    """All calls for one sample share one deadline."""

    def __init__(
        self, command: str = "amd-smi", timeout_seconds: float = 10.0, *, environment: Mapping[str, str] | None = None
    ) -> None:
        environment = os.environ if environment is None else environment
        self._tool = Tool(command, timeout_seconds, environment, os.killpg, not_found=NOT_FOUND, driver="AMD")
        self._timeout_seconds = timeout_seconds
        #: What does not change while the same GPUs are listed.
        self._listed: dict[int, Row] = {}
        self._static: dict[int, Row] = {}

    def read(self) -> DriverAnswer:
        deadline = time.monotonic() + self._timeout_seconds
        metrics = self._rows(_METRICS, deadline)
        if not self._listed or not metrics.keys() <= self._listed.keys():
            # `-e` adds how HIP numbers and names them; ROCm before 6.4 does not have it.
            self._listed = self._optional(("list", "-e"), deadline) or self._rows(("list",), deadline)
            self._static = self._optional(("static", "--asic", "--bus", "--vram", "--driver"), deadline) or {}
        # A process that cannot be seen may be anywhere.
        processes = self._optional(("process",), deadline)
        numbers = sorted(self._listed.keys() | metrics.keys())
        gpus = [
            text.reading_of(
                number,
                self._listed.get(number, {}),
                self._static.get(number, {}),
                metrics.get(number),
                None if processes is None else processes.get(number),
            )
            for number in numbers
        ]
        if len({gpu.index for gpu in gpus}) < len(gpus):
            raise DriverError("amd-smi gives the same HIP_ID to several GPUs: see `amd-smi list -e`")
        gpus.sort(key=lambda gpu: gpu.index)
        return DriverAnswer(tuple(gpus), self._driver_version(), "amd-smi")

    def interrupt(self) -> None:
        self._tool.interrupt()

    def close(self) -> None:
        """Nothing to do: each read ends its own process."""

    def _rows(self, arguments: Sequence[str], deadline: float) -> dict[int, Row]:
        output = self._tool.run([*arguments, "--json"], deadline)
        if output.exit_status != 0:
            raise _failure(output.exit_status, output.everything)
        return text.rows_of(output.stdout)

    def _optional(self, arguments: Sequence[str], deadline: float) -> dict[int, Row] | None:
        try:
            return self._rows(arguments, deadline)
        except DriverError as error:
            if error.code != "driver_error":  # it hangs, or is gone
                raise
            return None

    def _driver_version(self) -> str | None:
        for row in self._static.values():
            driver = row.get("driver")
            if isinstance(driver, dict) and isinstance(version := driver.get("version"), str) and version != "N/A":
                return version
        return None


def _failure(status: int, everything: str) -> DriverError:
    said = next((line.strip() for line in everything.splitlines() if line.strip()), "nothing")
    advice = ": is the amdgpu driver loaded, and are you in the groups render and video?"
    return DriverError(f"amd-smi failed with status {status}, and said: {said[:200]}{advice}")
