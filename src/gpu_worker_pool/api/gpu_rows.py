"""Builds the documented bodies of the GPU routes. Unknown values are null; totals count known values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.holder_rows import shown_holder
from gpu_worker_pool.core.obstacles import lasting_obstacles, reading_obstacles
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.samples import DriverAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpu_worker_pool.core.readings import ProcessReading, Reading
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample, MIGReading
    from gpu_worker_pool.models import GPUInfo

    #: The leases by GPU or MIG device; None if the ledger cannot be read.
    Promises = Mapping[str, Sequence[dict[str, Any]]] | None

_DEFAULTS: Final = PoolSettings()
_IDLE_GPU: Final = Requirements(policy="idle")


def stats_body(sample: HostSample, gpus: Sequence[GPUReading], promises: Promises) -> dict[str, Any]:
    return {
        "gpu_count": len(gpus),
        "gpus": [_stats_row(gpu, promises, sample.begun_at) for gpu in gpus],
        "timestamp": sample.timestamp,
        **driver_facts(sample),
    }


def driver_facts(sample: HostSample | None) -> dict[str, Any]:
    if sample is None or not isinstance(sample.answer, DriverAnswer):
        return {"backend": None, "driver_version": None}
    return {"backend": sample.answer.backend, "driver_version": sample.answer.driver_version}


def summary_body(sample: HostSample, gpus: Sequence[GPUReading], promises: Promises) -> dict[str, Any]:
    rows = [_summary_row(gpu, promises) for gpu in gpus]
    return {**summary_totals(gpus), "gpus_summary": rows, "timestamp": sample.timestamp}


def summary_totals(gpus: Sequence[GPUReading | GPUInfo]) -> dict[str, Any]:
    # Used memory of a GPU whose total is unknown would make the host look fuller than it is.
    both = [gpu for gpu in gpus if gpu.memory_total_mb is not None and gpu.memory_used_mb is not None]
    total_of_both = _sum(gpu.memory_total_mb for gpu in both)
    used = _sum(gpu.memory_used_mb for gpu in both)
    utilizations = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    return {
        "gpu_count": len(gpus),
        "total_memory_mb": _sum(gpu.memory_total_mb for gpu in gpus) if gpus else 0,
        "total_used_memory_mb": used if gpus else 0,
        "total_memory_usage_percent": round(100.0 * used / total_of_both, 2)
        if total_of_both and used is not None
        else None,
        "average_utilization_percent": round(sum(utilizations) / len(utilizations), 2) if utilizations else None,
    }


def count_body(sample: HostSample, gpus: Sequence[GPUReading], _promises: Promises) -> dict[str, Any]:
    return {"gpu_count": len(gpus), "timestamp": sample.timestamp}


def history_row(sample: HostSample, gpu: GPUReading) -> dict[str, Any]:
    return {
        "timestamp": sample.timestamp,
        "memory_used_mb": gpu.memory_used_mb,
        "memory_usage_percent": _rounded(gpu.memory_usage_percent),
        "utilization_percent": gpu.utilization_percent,
        "temperature_c": gpu.temperature_c,
        "power_draw_w": gpu.power_draw_w,
        "fault": gpu.fault,
    }


def _leases_on(gpu: GPUReading, promises: Promises) -> list[dict[str, Any]] | None:
    """Including those on its MIG devices: they use the same card."""
    if promises is None:
        return None
    names = [gpu.identity, *(mig.uuid for mig in gpu.mig_devices)]
    # One lease may hold several of its MIG devices.
    return list({lease["lease_id"]: lease for name in names for lease in promises.get(name, ())}.values())


def _obstacles(
    gpu: GPUReading, promises: Promises, requirements: Requirements = ANY_GPU, now: float | None = None
) -> list[str] | None:
    """Why a request cannot have the GPU; for a GPU in MIG mode, the best of its devices.

    Uses the allocator's rules, but ignores reservations and the short delay after a release, which are temporary.
    """
    if promises is None:
        return None
    found = [
        _obstacles_of(reading, promises.get(reading.gpu_id, ()), requirements, now) for reading in readings_of((gpu,))
    ]
    return min(found, key=len, default=["MIG is enabled, but there is no MIG device"])


def _obstacles_of(
    reading: Reading, leases: Sequence[dict[str, Any]], requirements: Requirements, now: float | None
) -> list[str]:
    if leases:  # the load is that of the holder
        return [f"{lease['state']}: {shown_holder(lease)}" for lease in leases]
    lasting = lasting_obstacles(reading, requirements, _DEFAULTS)
    return [str(each) for each in (*lasting, *reading_obstacles(reading, requirements, _DEFAULTS, now=now))]


def _stats_row(gpu: GPUReading, promises: Promises, now: float) -> dict[str, Any]:
    """`now`: when the sample began, in seconds since the host booted."""
    return {
        "gpu_id": gpu.index,
        "name": gpu.name,
        "memory": _memory(gpu),
        "utilization_percent": gpu.utilization_percent,
        "temperature_c": gpu.temperature_c,
        "power": {"draw_w": gpu.power_draw_w, "limit_w": gpu.power_limit_w},
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "fault": gpu.fault,
        "reports_utilization": gpu.reports_utilization,
        "ecc_uncorrected_errors": gpu.ecc_uncorrected_errors,
        "recovery_action": gpu.recovery_action,
        "processes": _processes(gpu.processes, now),
        "graphics_processes": _processes(gpu.graphics, now),
        "unified_memory": gpu.unified_memory,
        "mig_enabled": gpu.mig_enabled,
        "mig_devices": [
            {
                "uuid": mig.uuid,
                "name": mig.name,
                "gpu_instance_id": mig.gpu_instance_id,
                "compute_instance_id": mig.compute_instance_id,
                "memory": _memory(mig),
                "fault": mig.fault,
                "processes": _processes(mig.processes, now),
            }
            for mig in gpu.mig_devices
        ],
        "leases": _leases_on(gpu, promises),
        "obstacles": _obstacles(gpu, promises, now=now),
        "idle_obstacles": _obstacles(gpu, promises, _IDLE_GPU, now),
    }


def _summary_row(gpu: GPUReading, promises: Promises) -> dict[str, Any]:
    return {
        "gpu_id": gpu.index,
        "name": gpu.name,
        "memory_usage_percent": _rounded(gpu.memory_usage_percent),
        "utilization_percent": gpu.utilization_percent,
        "uuid": gpu.uuid,
        "memory_total_mb": gpu.memory_total_mb,
        "memory_used_mb": gpu.memory_used_mb,
        "fault": gpu.fault,
        "reports_utilization": gpu.reports_utilization,
        # A client needs it for GPUs that cannot report utilization.
        "process_count": None if gpu.processes is None else len(gpu.processes),
        # Clients that assign without the ledger leave leased GPUs alone.
        "leased": bool(_leases_on(gpu, promises)),
        "unified_memory": gpu.unified_memory,
    }


def _memory(device: GPUReading | MIGReading) -> dict[str, Any]:
    return {
        "total_mb": device.memory_total_mb,
        "used_mb": device.memory_used_mb,
        "free_mb": device.memory_free_mb,
        "usage_percent": _rounded(device.memory_usage_percent),
    }


def _processes(processes: tuple[ProcessReading, ...] | None, now: float) -> list[dict[str, Any]] | None:
    if processes is None:
        return None
    return [
        {
            "pid": process.pid,
            "name": process.name,
            "user": process.user,
            "memory_used_mb": process.memory_used_mb,
            "running_seconds": None if process.started_at is None else round(max(now - process.started_at, 0.0), 3),
        }
        for process in processes
    ]


def _rounded(percent: float | None) -> float | None:
    return None if percent is None else round(percent, 2)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
