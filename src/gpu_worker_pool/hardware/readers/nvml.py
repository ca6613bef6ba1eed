"""The reader that uses NVML, NVIDIA's management library."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.hardware.readers.nvml_device import DeviceFacts, read_distances, read_facts, read_gpu
from gpu_worker_pool.hardware.readers.nvml_library import (
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    LIBRARY_FAILED,
    NO_PERMISSION,
    RESET_REQUIRED,
    LoadedNVML,
    NVMLLibrary,
    driver_error,
)
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, DriverAnswer, GPUReading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FAULTS: Final = {
    GPU_IS_LOST: "the GPU is lost, for example off the bus: see `dmesg`, then reboot the host",
    RESET_REQUIRED: "the GPU needs a reset: end the processes on it, then run `nvidia-smi --gpu-reset -i {index}`",
    GPU_NOT_FOUND: "the driver no longer finds the GPU: see `dmesg`, then reboot the host",
    NO_PERMISSION: "this user may not use the GPU: allow it to read and write /dev/nvidia{index}",
}


class NVMLReader:
    """Needs no other process, and sees all GPUs regardless of CUDA_VISIBLE_DEVICES.

    The library is initialized once. After a failure of all GPUs the next read reloads it, to find a driver that was
    loaded or replaced meanwhile.
    """

    def __init__(self) -> None:
        self._library = NVMLLibrary()
        #: By index, the last GPU there: it identifies a GPU that no longer answers.
        self._known: dict[int, DeviceFacts] = {}
        #: By index, its last good reading.
        self._answered: dict[int, GPUReading] = {}
        #: UUIDs of GPUs that have reported memory of their own, so that they are not mistaken for unified memory.
        self._reported_memory: set[str] = set()
        #: The GPUs whose distances are known, by index: they are asked for once.
        self._measured: dict[int, str | None] = {}

    def read(self) -> DriverAnswer:
        with self._library as nvml:
            try:
                gpus = self._read_all(nvml)
            except nvml.error as error:
                self._library.reload_next_time()
                raise driver_error(error) from error
            if gpus and all(gpu.fault is not None and gpu.memory_total_mb is None for gpu in gpus):
                self._library.reload_next_time()
            return DriverAnswer(gpus, driver_version=nvml.driver_version, backend="nvml")

    def interrupt(self) -> None:
        """A call into the driver cannot be aborted; it blocks only its own thread."""

    def close(self) -> None:
        """May be called while another thread hangs in a read: that read then unloads the library when it ends."""
        self._library.close()

    def _read_all(self, nvml: LoadedNVML) -> tuple[GPUReading, ...]:
        count: int = nvml.module.nvmlDeviceGetCount()
        gpus = []
        handles: dict[int, Any] = {}
        named_from_memory = []
        for index in range(count):
            known = self._known.get(index)
            facts = None
            try:
                handle: Any = nvml.module.nvmlDeviceGetHandleByIndex(index)
                facts = self._known[index] = read_facts(nvml, handle, known)
                has_reported = facts.uuid in self._reported_memory
                gpu = read_gpu(nvml, handle, index, facts, has_reported_memory=has_reported)
                self._answered[index] = gpu
                gpus.append(gpu)
                handles[index] = handle
                if gpu.uuid is not None and gpu.memory_total_mb is not None and not gpu.unified_memory:
                    self._reported_memory.add(gpu.uuid)
            except (nvml.error, UnicodeDecodeError) as error:
                value = getattr(error, "value", None)
                if value in LIBRARY_FAILED:
                    raise
                if facts is None:
                    named_from_memory.append(index)
                facts = facts or known or DeviceFacts()
                fault = _FAULTS.get(value or 0, "the GPU does not answer ({error}): see `dmesg`")
                fault = fault.format(index=index, error=error)
                before = self._answered.get(index)
                if before is None or before.uuid != facts.uuid:
                    before = GPUReading(index, facts.name, facts.uuid, facts.pci_bus_id)
                gpus.append(before.lost(fault))
        for index in [index for index in self._known if index >= count]:
            del self._known[index]
            self._answered.pop(index, None)
        if (measured := {index: gpus[index].uuid for index in handles}) != self._measured:
            gpus = self._with_distances(nvml, gpus, handles)
            self._measured = measured
        return self._without_wrong_names(gpus, named_from_memory)

    def _with_distances(
        self, nvml: LoadedNVML, gpus: Sequence[GPUReading], handles: Mapping[int, Any]
    ) -> list[GPUReading]:
        distances = read_distances(nvml, handles)
        for index in handles:
            self._known[index] = replace(self._known[index], distances=distances.get(index, ()))
        return [replace(gpu, distances=distances.get(gpu.index, ())) if gpu.index in handles else gpu for gpu in gpus]

    def _without_wrong_names(
        self, gpus: Sequence[GPUReading], named_from_memory: Sequence[int]
    ) -> tuple[GPUReading, ...]:
        """A GPU that answers at another index is not the silent one at its former index."""
        if not named_from_memory:
            return tuple(gpus)
        answering = {gpu.uuid for gpu in gpus if gpu.index not in named_from_memory}
        return tuple(
            GPUReading(gpu.index, UNKNOWN_NAME, fault=gpu.fault)
            if gpu.index in named_from_memory and gpu.uuid in answering
            else gpu
            for gpu in gpus
        )
