"""What of this host can be promised to somebody: each GPU, or, of one that is split, each of its MIG devices."""

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

logger = logging.getLogger(__name__)

NO_UUID: Final = "does not tell its UUID, by which a promise would know it"


def readings_of(gpus: Iterable[GPUReading]) -> tuple[Reading, ...]:
    """A GPU is known by its UUID, since indices change their order; a split one is nobody's as a whole."""
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
                    # By its number it may be promised already, under the UUID that it told a moment ago.
                    gpu.fault or (NO_UUID if gpu.uuid is None else None),
                    gpu.processes,
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
        is_mig_device=True,
    )


def vanished_devices(before: Iterable[GPUReading], now: Iterable[GPUReading]) -> tuple[str, ...]:
    """The MIG devices that ceased to exist: their GPU is there, well, and does not have them any more."""
    well = {gpu.identity: gpu for gpu in now if gpu.fault is None}
    return tuple(
        device.uuid
        for gpu in before
        if gpu.identity in well
        for device in gpu.mig_devices
        if device.uuid not in {known.uuid for known in well[gpu.identity].mig_devices}
    )


def within_visible(requirements: Requirements, gpus: Sequence[GPUReading], visible: VisibilityFilter) -> Requirements:
    """`CUDA_VISIBLE_DEVICES` as a wish, which hides GPUs from nobody else; `ImpossibleRequestError` where none is left.

    What is visible is named, and not what is hidden: a GPU that appears later may not be had either.
    """
    visibility = visible.apply(gpus)
    if visibility.missing:
        instead = "" if visibility.is_filtering else "; any GPU may be granted"
        names = ", ".join(visibility.missing[:5])
        logger.error("ignoring GPUs that CUDA_VISIBLE_DEVICES lists and this host does not have: %s%s", names, instead)
    if not visibility.is_filtering:
        return requirements
    shown, only = readings_of(visibility.gpus), requirements.only
    left = tuple(reading.gpu_id for reading in shown if only is None or any(names_gpu(name, reading) for name in only))
    if left:
        return replace(requirements, only=left)
    hides = f"CUDA_VISIBLE_DEVICES={visible.value!r} hides every GPU"
    raise ImpossibleRequestError(reasons=(f"{hides} that is wanted" if shown else f"{hides}: unset it",))
