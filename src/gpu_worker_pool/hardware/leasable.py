"""Lists what this host can lease: each GPU, or, if a GPU is split, each of its MIG devices."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.readings import Reading
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import ImpossibleRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.hardware.samples import GPUReading, MIGReading
    from gpu_worker_pool.hardware.visibility import VisibilityFilter

logger: logging.Logger = logging.getLogger(__name__)

NO_UUID: Final = "does not report its UUID, which a lease needs"


def readings_of(gpus: Iterable[GPUReading]) -> tuple[Reading, ...]:
    """GPUs are identified by UUID, because indices change; a split GPU is never leased as a whole."""
    readings: list[Reading] = []
    for gpu in gpus:
        if gpu.mig_enabled or gpu.mig_devices:
            readings += [_of_device(gpu, device) for device in gpu.mig_devices]
        else:
            readings.append(
                Reading(
                    gpu.identity,
                    gpu.index,
                    gpu.name,
                    gpu.uuid,
                    gpu.memory_total_mb,
                    gpu.memory_used_mb,
                    gpu.memory_usage_percent,
                    gpu.utilization_percent,
                    gpu.reports_utilization,
                    # It may already be leased under the UUID that it reported a moment ago.
                    gpu.fault or (NO_UUID if gpu.uuid is None else None),
                    gpu.processes,
                    gpu.graphics,
                    reports_processes=gpu.reports_processes,
                    has_unified_memory=gpu.unified_memory,
                    distances=gpu.distances,
                )
            )
    return tuple(readings)


def _of_device(gpu: GPUReading, device: MIGReading) -> Reading:
    return Reading(
        device.uuid,
        gpu.index,
        f"{gpu.name} MIG {device.name}",
        device.uuid,
        device.memory_total_mb,
        device.memory_used_mb,
        device.memory_usage_percent,
        None,
        reports_utilization=False,
        fault=device.fault or gpu.fault,
        processes=device.processes,
        graphics=device.graphics,
        is_mig_device=True,
    )


def vanished_devices(before: Iterable[GPUReading], now: Iterable[GPUReading]) -> tuple[str, ...]:
    """MIG devices that no longer exist, although their GPU is present and healthy."""
    well = {gpu.identity: gpu for gpu in now if gpu.fault is None}
    return tuple(
        device.uuid
        for gpu in before
        if gpu.identity in well
        for device in gpu.mig_devices
        if device.uuid not in {known.uuid for known in well[gpu.identity].mig_devices}
    )


def within_visible(requirements: Requirements, gpus: Sequence[GPUReading], visible: VisibilityFilter) -> Requirements:
    """Add `CUDA_VISIBLE_DEVICES` to the requirements; `ImpossibleRequestError` if no GPU is left.

    It goes into `only`, not `exclude`: a GPU that appears later is not visible either.
    """
    visibility = visible.apply(gpus)
    if visibility.missing:
        instead = "ignoring them" if visibility.is_filtering else "using all GPUs"
        names = ", ".join(visibility.missing[:5])
        logger.error("CUDA_VISIBLE_DEVICES lists GPUs that this host does not have (%s): %s", names, instead)
    if not visibility.is_filtering:
        return requirements
    shown, only = readings_of(visibility.gpus), requirements.only
    left = tuple(reading.gpu_id for reading in shown if only is None or any(names_gpu(name, reading) for name in only))
    if left:
        return replace(requirements, only=left)
    hidden = "every requested GPU" if shown else "every GPU: unset it"
    raise ImpossibleRequestError(reasons=(f"CUDA_VISIBLE_DEVICES={visible.value!r} hides {hidden}",))
