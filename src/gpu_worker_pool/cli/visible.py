"""Limits a command to the GPUs that its `CUDA_VISIBLE_DEVICES` lists."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.hardware.leasable import readings_of, within_visible
from gpu_worker_pool.hardware.visibility import VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.hardware.samples import GPUReading

logger = logging.getLogger(__name__)


def within_visible_devices(requirements: Requirements, gpus: Sequence[GPUReading]) -> Requirements:
    """Raises `ImpossibleRequestError` if no GPU is visible. Unknown GPUs are reported and ignored."""
    visible_devices = _filter()
    visible = visible_devices.apply(gpus)
    if visible.missing:
        instead = "ignoring them" if visible.is_filtering else "using all GPUs"
        logger.error(
            "CUDA_VISIBLE_DEVICES lists GPUs that this host does not have (%s): %s",
            ", ".join(visible.missing[:5]),
            instead,
        )
    return within_visible(requirements, gpus, visible_devices)


def visible_names(gpus: Sequence[GPUReading]) -> tuple[str, ...] | None:
    """The ids of the visible GPUs; None if all are."""
    visible = _filter().apply(gpus)
    return tuple(reading.gpu_id for reading in readings_of(visible.gpus)) if visible.is_filtering else None


def _filter() -> VisibilityFilter:
    # Inside a lease the variable lists the leased GPUs.
    return VisibilityFilter(None if os.environ.get("GPU_POOL_LEASE_ID") else os.environ.get("CUDA_VISIBLE_DEVICES"))
