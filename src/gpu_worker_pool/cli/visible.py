"""`CUDA_VISIBLE_DEVICES` as a wish: which of this host's GPUs a program may have. It hides none from anybody else."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.visibility import VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.wishes import Wishes
    from gpu_worker_pool.hardware.samples import GPUSample


def within_visible_devices(wishes: Wishes, gpus: Sequence[GPUSample]) -> Wishes:
    """Raises `ImpossibleRequestError` where none is visible."""
    # Inside a lease that variable says what was leased.
    value = None if os.environ.get("GPU_POOL_LEASE_ID") else os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = VisibilityFilter(value).apply(gpus)
    if not visible.is_filtering:
        return wishes
    names = tuple(reading.gpu_id for reading in readings_of(visible.gpus))
    if not names:
        raise ImpossibleRequestError(reasons=(f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU: unset it",))
    if wishes.only is None:
        return replace(wishes, only=names)
    hidden = tuple(reading.gpu_id for reading in readings_of(gpus) if reading.gpu_id not in names)
    return replace(wishes, exclude=(*wishes.exclude, *hidden))
