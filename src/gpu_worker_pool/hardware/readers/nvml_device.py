"""Reads one GPU through NVML; unknown values are None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.readers.nvml_library import FUNCTION_NOT_FOUND, NOT_SUPPORTED, LoadedNVML
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, GPUReading, MIGReading

if TYPE_CHECKING:
    from gpu_worker_pool.core.readings import ProcessReading

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


def read_gpu(nvml: LoadedNVML, handle: Any, index: int, facts: DeviceFacts) -> GPUReading:
    module, ask = nvml.module, nvml.ask
    total_mb, used_mb, free_mb, fault = _read_memory(nvml, handle)
    # Its MIG mode is decisive: if that is unknown, its devices would seem to be gone.
    mig_mode, mig_fault = nvml.ask_decisive("MIG mode", module.nvmlDeviceGetMigMode, handle)
    is_mig_enabled = mig_mode is not None and mig_mode[0] == 1
    # With MIG there is no utilization of the whole GPU.
    utilization = None if is_mig_enabled else ask(module.nvmlDeviceGetUtilizationRates, handle)
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
        memory_total_mb=total_mb,
        memory_used_mb=used_mb,
        memory_free_mb=free_mb,
        utilization_percent=None if utilization is None else utilization.gpu,
        reports_utilization=not is_mig_enabled,
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
        processes=_read_processes(nvml, handle),
        mig_devices=_read_mig_devices(nvml, handle) if is_mig_enabled else (),
        mig_enabled=is_mig_enabled,
    )


def _read_mig_devices(nvml: LoadedNVML, handle: Any) -> tuple[MIGReading, ...]:
    module, ask = nvml.module, nvml.ask
    devices = []
    for slot in range(ask(module.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = ask(module.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        uuid: str | None = device and ask(module.nvmlDeviceGetUUID, device)
        if uuid is None:  # an empty slot, or a device without a name
            continue
        total_mb, used_mb, free_mb, fault = _read_memory(nvml, device)
        # Not cached: a recreated device may have the same UUID and another profile.
        name: str | None = ask(module.nvmlDeviceGetName, device)
        devices.append(
            MIGReading(
                uuid,
                "unknown profile" if name is None else name.rpartition("MIG ")[2],
                ask(module.nvmlDeviceGetGpuInstanceId, device),
                ask(module.nvmlDeviceGetComputeInstanceId, device),
                memory_total_mb=total_mb,
                memory_used_mb=used_mb,
                memory_free_mb=free_mb,
                processes=_read_processes(nvml, device),
                fault=fault,
            )
        )
    return tuple(devices)


def _read_memory(nvml: LoadedNVML, handle: Any) -> tuple[int | None, int | None, int | None, str | None]:
    """Total, used and free MiB, and a fault if they should be known but are not."""
    memory, fault = nvml.ask_decisive("memory", nvml.memory, handle)
    if memory is None:
        return None, None, None, fault
    total: int = memory.total
    if total == 0:
        return None, None, None, "it reports a memory of 0 bytes: see `dmesg`"
    return total >> 20, memory.used >> 20, memory.free >> 20, None


def _read_processes(nvml: LoadedNVML, handle: Any) -> tuple[ProcessReading, ...] | None:
    found = nvml.ask(nvml.processes, handle)
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
    values = nvml.ask(module.nvmlDeviceGetFieldValues, handle, (module.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,))
    if values is None:
        return None
    (answer,) = values
    number: int = answer.value.uiVal if answer.nvmlReturn == 0 else 0
    return None if number == 0 else _RECOVERY_ACTIONS.get(number, f"action {number}")
