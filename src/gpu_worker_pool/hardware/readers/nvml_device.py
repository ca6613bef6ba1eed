"""Reads one GPU through NVML; unknown values are None."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.hardware.host_memory import read_host_memory
from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.readers.nvml_library import (
    FUNCTION_NOT_FOUND,
    LIBRARY_FAILED,
    NOT_SUPPORTED,
    LoadedNVML,
)
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, GPUReading, MIGReading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.readings import ProcessReading

#: The distance of two GPUs with a link of their own, nearer than any that NVML counts.
NVLINK: Final = 0
#: As nvidia-smi prints them; 0 means none.
_RECOVERY_ACTIONS: Final = {
    1: "Reset",
    2: "Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The constant properties of a GPU."""

    name: str = UNKNOWN_NAME
    uuid: str | None = None
    pci_bus_id: str | None = None
    #: As `GPUReading` has it.
    distances: tuple[int | None, ...] = ()


def read_facts(nvml: LoadedNVML, handle: Any, known: DeviceFacts | None) -> DeviceFacts:
    """`known` is the last GPU at this index; the UUID shows whether it is still the same."""
    module, ask = nvml.module, nvml.ask
    try:
        uuid: str | None = module.nvmlDeviceGetUUID(handle)
    except nvml.error as error:
        # A GPU that had a UUID must not appear without one: it would look like a new, free GPU.
        is_without_uuid = error.value in (NOT_SUPPORTED, FUNCTION_NOT_FOUND)
        if not is_without_uuid or (known is not None and known.uuid is not None):
            raise
        uuid = None
    if known is not None and uuid is not None and known.uuid == uuid and known.name != UNKNOWN_NAME:
        return known
    pci = ask(module.nvmlDeviceGetPciInfo, handle)
    return DeviceFacts(ask(module.nvmlDeviceGetName, handle) or UNKNOWN_NAME, uuid, pci and pci.busId)


def read_gpu(
    nvml: LoadedNVML, handle: Any, index: int, facts: DeviceFacts, *, has_reported_memory: bool = False
) -> GPUReading:
    """`has_reported_memory`: it did before, so that it has memory of its own."""
    module, ask = nvml.module, nvml.ask
    memory = _read_memory(nvml, handle)
    # Its MIG mode is decisive: if that is unknown, its devices would seem to be gone.
    mig_mode, mig_fault, *_ = nvml.ask_decisive("MIG mode", module.nvmlDeviceGetMigMode, handle)
    is_mig_enabled = mig_mode is not None and mig_mode[0] == 1
    is_unified = memory.is_unsupported and not has_reported_memory and not is_mig_enabled
    if is_unified:
        memory = _Memory(*read_host_memory())
    fault = memory.fault
    if memory.is_unsupported and has_reported_memory:
        fault = "it no longer reports its memory: see `dmesg`"
    # With MIG there is no utilization of the whole GPU.
    utilization, reports_utilization = None, False
    if not is_mig_enabled:
        utilization, _, is_unsupported, _ = nvml.ask_decisive(
            "utilization", module.nvmlDeviceGetUtilizationRates, handle
        )
        reports_utilization = not (is_unified and is_unsupported)
    processes, reports_processes = _read_processes(nvml, handle)
    power_draw_mw = ask(module.nvmlDeviceGetPowerUsage, handle)
    power_limit_mw = ask(module.nvmlDeviceGetEnforcedPowerLimit, handle)
    recovery_action = _read_recovery_action(nvml, handle)
    if recovery_action is not None:
        fault = f"the driver asks for a recovery action: {recovery_action}"
    fault = fault or mig_fault
    return GPUReading(
        index,
        facts.name,
        facts.uuid,
        facts.pci_bus_id,
        memory_total_mb=memory.total_mb,
        memory_used_mb=memory.used_mb,
        memory_free_mb=memory.free_mb,
        utilization_percent=None if utilization is None else utilization.gpu,
        reports_utilization=reports_utilization,
        temperature_c=ask(module.nvmlDeviceGetTemperature, handle, module.NVML_TEMPERATURE_GPU),
        power_draw_w=None if power_draw_mw is None else power_draw_mw / 1000,
        power_limit_w=None if power_limit_mw is None else power_limit_mw / 1000,
        ecc_uncorrected_errors=ask(
            module.nvmlDeviceGetTotalEccErrors,
            handle,
            module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            module.NVML_VOLATILE_ECC,
        ),
        recovery_action=recovery_action,
        fault=fault,
        processes=processes,
        graphics=_read_graphics(nvml, handle, processes),
        reports_processes=reports_processes,
        unified_memory=is_unified,
        mig_devices=_read_mig_devices(nvml, handle) if is_mig_enabled else (),
        mig_enabled=is_mig_enabled,
        distances=facts.distances,
    )


def read_distances(nvml: LoadedNVML, handles: Mapping[int, Any]) -> dict[int, tuple[int | None, ...]]:
    """By index, how far each GPU is from the others; nothing where all are equally far."""
    found: dict[tuple[int, int], int | None] = {}
    for first, second in combinations(handles, 2):
        found[first, second] = found[second, first] = _read_distance(nvml, handles[first], handles[second])
    if len(set(found.values())) < 2:
        return {}
    size = max(handles) + 1
    return {
        index: tuple(0 if index == other else found.get((index, other)) for other in range(size)) for index in handles
    }


def _read_distance(nvml: LoadedNVML, first: Any, second: Any) -> int | None:
    module = nvml.module
    try:
        if nvml.ask(module.nvmlDeviceGetP2PStatus, first, second, module.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
            return NVLINK
        distance: int | None = nvml.ask(module.nvmlDeviceGetTopologyCommonAncestor, first, second)
    except nvml.error as error:
        if error.value in LIBRARY_FAILED:
            raise
        return None  # one of them was lost just now
    return distance


def _read_mig_devices(nvml: LoadedNVML, handle: Any) -> tuple[MIGReading, ...]:
    module, ask = nvml.module, nvml.ask
    devices = []
    for slot in range(ask(module.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = ask(module.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        uuid: str | None = device and ask(module.nvmlDeviceGetUUID, device)
        if uuid is None:  # an empty slot, or a device without a name
            continue
        memory = _read_memory(nvml, device)
        processes, _ = _read_processes(nvml, device)
        # Not cached: a recreated device may have the same UUID and another profile.
        name: str | None = ask(module.nvmlDeviceGetName, device)
        devices.append(
            MIGReading(
                uuid,
                "unknown profile" if name is None else name.rpartition("MIG ")[2],
                ask(module.nvmlDeviceGetGpuInstanceId, device),
                ask(module.nvmlDeviceGetComputeInstanceId, device),
                memory_total_mb=memory.total_mb,
                memory_used_mb=memory.used_mb,
                memory_free_mb=memory.free_mb,
                processes=processes,
                graphics=_read_graphics(nvml, device, processes),
                fault=memory.fault,
            )
        )
    return tuple(devices)


class _Memory(NamedTuple):
    total_mb: int | None = None
    used_mb: int | None = None
    free_mb: int | None = None
    #: If they should be known but are not.
    fault: str | None = None
    #: The driver says that the device has no memory that it could report.
    is_unsupported: bool = False


def _read_memory(nvml: LoadedNVML, handle: Any) -> _Memory:
    memory, fault, is_unsupported, _ = nvml.ask_decisive("memory", nvml.memory, handle)
    if memory is None:
        return _Memory(fault=fault, is_unsupported=is_unsupported)
    total: int = memory.total
    if total == 0:
        return _Memory(fault="it reports a memory of 0 bytes: see `dmesg`")
    return _Memory(total >> 20, memory.used >> 20, memory.free >> 20)


def _read_processes(nvml: LoadedNVML, handle: Any) -> tuple[tuple[ProcessReading, ...] | None, bool]:
    """The processes that compute, and whether the driver can list them at all."""
    answer = nvml.ask_decisive("processes", nvml.processes, handle)
    return _described(answer.value), not answer.is_unavailable


def _read_graphics(
    nvml: LoadedNVML, handle: Any, computing: tuple[ProcessReading, ...] | None
) -> tuple[ProcessReading, ...] | None:
    """The processes that only draw: one that is in both lists computes."""
    found = _described(nvml.ask(nvml.graphics, handle))
    if not found or not computing:
        return found
    pids = {process.pid for process in computing}
    return tuple(process for process in found if process.pid not in pids)


def _described(found: Any) -> tuple[ProcessReading, ...] | None:
    if not found:
        return None if found is None else ()
    return tuple(
        describe_process(
            process.pid, memory_used_mb=None if process.usedGpuMemory is None else process.usedGpuMemory >> 20
        )
        for process in found
    )


def _read_recovery_action(nvml: LoadedNVML, handle: Any) -> str | None:
    module = nvml.module
    field = getattr(module, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # older versions of pynvml lack it
    values = None if field is None else nvml.ask(module.nvmlDeviceGetFieldValues, handle, (field,))
    if values is None:
        return None
    (answer,) = values
    number: int = answer.value.uiVal if answer.nvmlReturn == 0 else 0
    return None if number == 0 else _RECOVERY_ACTIONS.get(number, f"action {number}")
