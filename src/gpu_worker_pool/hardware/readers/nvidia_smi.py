"""The reader that runs nvidia-smi. It does not trust the output."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.host_memory import read_host_memory
from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.readers import nvidia_smi_text as text
from gpu_worker_pool.hardware.readers.tool import Tool, find_tool
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, DriverAnswer, GPUReading, MIGReading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_worker_pool.hardware.readers.tool import ToolOutput


def nvidia_smi_available(command: str = "nvidia-smi", *, environment: Mapping[str, str] | None = None) -> bool:
    """Whether the tool is on PATH and executable; the driver may still not answer."""
    try:
        find_tool(command, os.environ if environment is None else environment)
    except DriverError:
        return False
    return True


class NvidiaSMIReader:
    """All calls for one sample share one deadline.

    A lost GPU keeps its reading with index, name, UUID, and the reason.
    """

    def __init__(
        self,
        command: str = "nvidia-smi",
        timeout_seconds: float = 10.0,
        *,
        environment: Mapping[str, str] | None = None,
        kill_group: Callable[[int, int], None] = os.killpg,
    ) -> None:
        self._tool = Tool(command, timeout_seconds, os.environ if environment is None else environment, kill_group)
        self._timeout_seconds = timeout_seconds
        #: By bus id if known, else by index.
        self._seen: dict[str | int, GPUReading] = {}
        #: Fields that this version of the driver does not know.
        self._unknown_fields: set[str] = set()
        self._driver_version: str | None = None
        #: UUIDs of GPUs that have reported memory of their own.
        self._reported_memory: set[str] = set()

    def read(self) -> DriverAnswer:
        deadline = time.monotonic() + self._timeout_seconds
        fields, output = self._query_gpus(deadline)
        if output.exit_status < 0:  # the output may end in the middle of a number
            raise text.failure(output.exit_status, output.everything)
        parsed = text.parse_gpus(output.everything, fields)
        gpus = self._with_lost_gpus(parsed, has_failed=output.exit_status != 0)
        if not gpus:
            if not text.says_no_devices(output.exit_status, output.everything):
                raise text.failure(output.exit_status, output.everything)
            return DriverAnswer((), backend="nvidia-smi")
        if parsed.driver_version not in (None, self._driver_version):
            if self._driver_version is not None:
                self._unknown_fields.clear()
            self._driver_version = parsed.driver_version
        gpus = [self._with_memory(gpu) for gpu in self._with_processes(gpus, deadline)]
        if any(gpu.mig_enabled and not gpu.mig_devices for gpu in gpus):
            gpus = self._with_mig_devices(gpus, deadline)
        self._seen = {gpu.pci_bus_id or gpu.index: gpu for gpu in gpus}
        return DriverAnswer(tuple(gpus), driver_version=self._driver_version, backend="nvidia-smi")

    def interrupt(self) -> None:
        self._tool.interrupt()

    def close(self) -> None:
        """Nothing to do: each read ends its own process."""

    # --- GPUs ---

    def _query_gpus(self, deadline: float) -> tuple[tuple[str, ...], ToolOutput]:
        while True:
            fields = tuple(field for field in text.GPU_FIELDS if field not in self._unknown_fields)
            output = self._tool.run([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], deadline)
            unknown = text.unknown_field(output.everything) if output.exit_status else None
            if unknown is None:
                return fields, output
            if unknown not in fields or unknown in text.MANDATORY_FIELDS:
                raise text.failure(output.exit_status, output.everything)
            self._unknown_fields.add(unknown)

    def _with_lost_gpus(self, parsed: text.ParsedGPUs, *, has_failed: bool) -> list[GPUReading]:
        gpus = {gpu.index: self._completed(gpu) for gpu in parsed.rows}
        index_by_bus_id = {gpu.pci_bus_id: gpu.index for gpu in gpus.values() if gpu.pci_bus_id is not None}
        unplaced: list[text.Complaint] = []
        for complaint in parsed.complaints:
            known = self._seen_as(complaint.index, complaint.bus_id)
            index = complaint.index if known is None else known.index
            index = index_by_bus_id.get(complaint.bus_id or "", index)
            if index is None:
                unplaced.append(complaint)
            elif (gpu := gpus.get(index)) is None:
                gpus[index] = _lost(index, complaint.reason, complaint.bus_id, known)
            elif None in (gpu.pci_bus_id, complaint.bus_id) or gpu.pci_bus_id == complaint.bus_id:
                gpus[index] = replace(gpu, fault=gpu.fault or complaint.reason)
            else:
                unplaced.append(complaint)
        # Some versions stop at the first GPU that they cannot read; the GPUs after it still exist.
        if has_failed and (gpus or unplaced):
            uuids = {gpu.uuid for gpu in gpus.values()} - {None}
            for gpu in self._seen.values():
                if gpu.index not in gpus and gpu.uuid not in uuids and gpu.pci_bus_id not in index_by_bus_id:
                    gpus[gpu.index] = _lost(gpu.index, "nvidia-smi failed before it reported this GPU", None, gpu)
        # The driver numbers GPUs by bus id without gaps: unreadable GPUs have the missing indices.
        # Without any GPU there is nothing to count from, and the complaint becomes the error.
        if gpus:
            for complaint in sorted(unplaced, key=lambda complaint: complaint.bus_id or ""):
                index = next(number for number in range(len(gpus) + 1) if number not in gpus)
                known = self._seen_as(None, complaint.bus_id)
                gpus[index] = _lost(index, complaint.reason, complaint.bus_id, known)
        return [gpus[index] for index in sorted(gpus)]

    def _completed(self, gpu: GPUReading) -> GPUReading:
        """A failing GPU may not even report its name.

        A GPU that had a UUID must not appear without one: it would look like a new, free GPU.
        """
        known = self._seen_as(gpu.index, gpu.pci_bus_id) if gpu.fault or gpu.uuid is None else None
        if known is None or gpu.uuid not in (None, known.uuid):
            return gpu
        if gpu.name == UNKNOWN_NAME:
            return _lost(gpu.index, gpu.fault or "its name cannot be read", None, known)
        fault = gpu.fault or (None if known.uuid is None else "its UUID cannot be read")
        return replace(gpu, uuid=known.uuid, pci_bus_id=known.pci_bus_id, fault=fault)

    def _with_memory(self, gpu: GPUReading) -> GPUReading:
        """Host memory stands in for unified memory; a GPU that reported memory before has its own, and a fault."""
        if not gpu.unified_memory:
            if gpu.uuid is not None and gpu.memory_total_mb is not None:
                self._reported_memory.add(gpu.uuid)
            return gpu
        if gpu.fault is not None or gpu.uuid in self._reported_memory:
            fault = gpu.fault or "it no longer reports its memory: see `dmesg`"
            return replace(gpu, unified_memory=False, reports_utilization=True, fault=fault)
        memory = read_host_memory()
        return replace(
            gpu, memory_total_mb=memory.total_mb, memory_used_mb=memory.used_mb, memory_free_mb=memory.free_mb
        )

    def _seen_as(self, index: int | None, bus_id: str | None) -> GPUReading | None:
        if bus_id is not None:
            return self._seen.get(bus_id)
        return next((gpu for gpu in self._seen.values() if gpu.index == index), None)

    # --- optional parts of a sample ---

    def _with_processes(self, gpus: list[GPUReading], deadline: float) -> list[GPUReading]:
        query = [f"--query-compute-apps={','.join(text.PROCESS_FIELDS)}", "--format=csv,noheader,nounits"]
        output = self._optional(query, deadline)
        found = None if output is None or output.exit_status != 0 else text.parse_processes(output.stdout)
        if found is None:
            return gpus
        # A process on an unknown GPU may be on any GPU without listed processes.
        others = () if found.keys() <= {gpu.uuid for gpu in gpus} else None
        described = []
        for gpu in gpus:
            processes = found.get(gpu.uuid, others) if gpu.uuid is not None else None
            if gpu.uuid in found and processes is None:  # it lists them without their pids
                gpu = replace(gpu, reports_processes=False)
            if processes is not None and not (gpu.fault and not processes):
                readings = (
                    describe_process(process.pid, name=process.name, memory_used_mb=process.memory_used_mb)
                    for process in processes
                )
                gpu = replace(gpu, processes=tuple(readings))
            described.append(gpu)
        return described

    def _with_mig_devices(self, gpus: list[GPUReading], deadline: float) -> list[GPUReading]:
        listed = self._optional(["-L"], deadline)
        shown = None if listed is None else self._optional([], deadline)
        devices = {} if listed is None else text.parse_mig_list(listed.stdout)
        memory = {} if shown is None else text.parse_mig_table(shown.stdout)
        return [
            _with_devices(gpu, devices.get(gpu.index), memory) if gpu.mig_enabled and not gpu.mig_devices else gpu
            for gpu in gpus
        ]

    def _optional(self, arguments: Sequence[str], deadline: float) -> ToolOutput | None:
        try:
            output = self._tool.run(arguments, deadline)
        except DriverError:
            return None
        return output if output.exit_status >= 0 else None


def _lost(index: int, fault: str, bus_id: str | None, known: GPUReading | None) -> GPUReading:
    if known is None:
        return GPUReading(index, UNKNOWN_NAME, pci_bus_id=bus_id, fault=fault)
    return replace(known.lost(fault), index=index)


def _with_devices(
    gpu: GPUReading, devices: Mapping[int, MIGReading] | None, memory: Mapping[tuple[int, int], text.MIGMemory]
) -> GPUReading:
    if devices is None:
        return replace(gpu, fault=gpu.fault or "its MIG devices could not be listed")
    readings = []
    for number, device in sorted(devices.items()):
        # The process query names the GPU, not the MIG device.
        device = replace(device, processes=() if gpu.processes == () else None, fault=gpu.fault)
        if (shown := memory.get((gpu.index, number))) is not None:
            device = replace(
                device,
                gpu_instance_id=shown.gpu_instance_id if device.gpu_instance_id is None else device.gpu_instance_id,
                compute_instance_id=(
                    shown.compute_instance_id if device.compute_instance_id is None else device.compute_instance_id
                ),
                memory_total_mb=shown.total_mb,
                memory_used_mb=shown.used_mb,
                fault=gpu.fault or shown.fault,
            )
        readings.append(device)
    return replace(gpu, mig_devices=tuple(readings))
