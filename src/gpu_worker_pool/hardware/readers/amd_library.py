"""The reader that uses `amdsmi`, AMD's Python library, where ROCm has installed it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.readers.amd_text import identity_of, number_of, size_mb
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, DriverAnswer, GPUReading

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.readings import ProcessReading

NOT_FOUND: Final = "amdsmi_not_found"


class AMDLibraryReader:
    """Starts the library again for a read after a failed one."""

    def __init__(self) -> None:
        self._library: Any = None

    def read(self) -> DriverAnswer:
        library = self._library or self._started()
        try:
            handles = library.amdsmi_get_processor_handles()
            gpus = tuple(_reading(library, number, handle) for number, handle in enumerate(handles))
            driver = _asked(lambda: library.amdsmi_get_gpu_driver_info(handles[0])["driver_version"])
        except Exception as error:
            self.close()
            raise DriverError(f"amdsmi failed ({type(error).__name__}: {error}): see `dmesg`") from error
        return DriverAnswer(gpus, driver if isinstance(driver, str) else None, "amdsmi")

    def interrupt(self) -> None:
        """It cannot be interrupted."""

    def close(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            with suppress(Exception):
                library.amdsmi_shut_down()

    def _started(self) -> Any:
        try:
            library = import_module("amdsmi")
        except Exception as error:  # it raises many kinds where ROCm's own library is missing
            raise DriverError(f"the Python library amdsmi cannot be loaded: {error}", code=NOT_FOUND) from error
        try:
            library.amdsmi_init()
        except Exception as error:
            raise DriverError(f"amdsmi cannot be started ({error}): is the amdgpu driver loaded?") from error
        self._library = library
        return library


def _reading(library: Any, number: int, handle: Any) -> GPUReading:
    asic = _asked(lambda: library.amdsmi_get_gpu_asic_info(handle)) or {}
    enumeration = _asked(lambda: library.amdsmi_get_gpu_enumeration_info(handle)) or {}
    bus_id = _asked(lambda: library.amdsmi_get_gpu_device_bdf(handle))
    hip_id = enumeration.get("hip_id")
    name = asic.get("market_name")
    vram = library.AmdSmiMemoryType.VRAM
    total = _asked(lambda: library.amdsmi_get_gpu_memory_total(handle, vram))
    used = _asked(lambda: library.amdsmi_get_gpu_memory_usage(handle, vram))
    activity = _asked(lambda: library.amdsmi_get_gpu_activity(handle)) or {}
    power = _asked(lambda: library.amdsmi_get_power_info(handle)) or {}
    return GPUReading(
        hip_id if isinstance(hip_id, int) else number,
        name if isinstance(name, str) and name not in ("", "N/A") else UNKNOWN_NAME,
        identity_of(enumeration.get("hip_uuid"), asic.get("asic_serial"), bus_id if isinstance(bus_id, str) else None),
        bus_id if isinstance(bus_id, str) else None,
        memory_total_mb=size_mb(total, "B"),
        memory_used_mb=size_mb(used, "B"),
        utilization_percent=number_of(activity.get("gfx_activity")),
        temperature_c=number_of(
            _asked(
                lambda: library.amdsmi_get_temp_metric(
                    handle, library.AmdSmiTemperatureType.HOTSPOT, library.AmdSmiTemperatureMetric.CURRENT
                )
            )
        ),
        power_draw_w=number_of(power.get("current_socket_power")) or number_of(power.get("average_socket_power")),
        processes=_processes(library, handle),
        fault=None if total is not None or used is not None else "amdsmi reports nothing about it: see `dmesg`",
    )


def _processes(library: Any, handle: Any) -> tuple[ProcessReading, ...] | None:
    found = _asked(lambda: library.amdsmi_get_gpu_process_list(handle))
    if not isinstance(found, list) or not all(isinstance(each, dict) and _is_pid(each.get("pid")) for each in found):
        return None
    return tuple(
        describe_process(
            each["pid"],
            name=None if each.get("name") in (None, "", "N/A") else str(each["name"]),
            memory_used_mb=size_mb((each.get("memory_usage") or {}).get("vram_mem"), "B"),
        )
        for each in found
    )


def _is_pid(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _asked(ask: Callable[[], Any]) -> Any:
    """None where this GPU or this version does not support it."""
    try:
        return ask()
    except Exception:
        return None
