"""`CUDA_VISIBLE_DEVICES` as a wish: which of this host's GPUs a program may have. It hides none from anybody else."""

from __future__ import annotations

import logging
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
    from gpu_worker_pool.hardware.visibility import Visibility

logger = logging.getLogger(__name__)


def within_visible_devices(wishes: Wishes, gpus: Sequence[GPUSample]) -> Wishes:
    """Raises `ImpossibleRequestError` where none is visible. What is named and not there is told, and skipped."""
    value, visible = _visible(gpus)
    if visible.missing:
        instead = "it is skipped" if visible.is_filtering else "every GPU may be given"
        logger.error(
            "CUDA_VISIBLE_DEVICES names what this host has not (%s): %s", ", ".join(visible.missing[:5]), instead
        )
    if not visible.is_filtering:
        return wishes
    names = _names(visible)
    if not names:
        raise ImpossibleRequestError(reasons=(f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU: unset it",))
    if wishes.only is None:
        return replace(wishes, only=names)
    hidden = tuple(reading.gpu_id for reading in readings_of(gpus) if reading.gpu_id not in names)
    return replace(wishes, exclude=(*wishes.exclude, *hidden))


def visible_names(gpus: Sequence[GPUSample]) -> tuple[str, ...] | None:
    """The ids of the GPUs it allows; None where it does not limit anything."""
    _, visible = _visible(gpus)
    return _names(visible) if visible.is_filtering else None


def _visible(gpus: Sequence[GPUSample]) -> tuple[str | None, Visibility]:
    # Inside a lease that variable says what was leased.
    value = None if os.environ.get("GPU_POOL_LEASE_ID") else os.environ.get("CUDA_VISIBLE_DEVICES")
    return value, VisibilityFilter(value).apply(gpus)


def _names(visible: Visibility) -> tuple[str, ...]:
    return tuple(reading.gpu_id for reading in readings_of(visible.gpus))
