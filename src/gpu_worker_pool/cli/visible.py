"""Which of this host's GPUs a command may have, as its own environment says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpu_worker_pool.hardware.leasable import within_visible
from gpu_worker_pool.hardware.visibility import VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.wishes import Wishes
    from gpu_worker_pool.hardware.samples import GPUSample


def within_visible_devices(wishes: Wishes, gpus: Sequence[GPUSample]) -> Wishes:
    """Raises `ImpossibleRequestError` where none is visible."""
    # Inside a lease that variable says what was leased.
    value = None if os.environ.get("GPU_POOL_LEASE_ID") else os.environ.get("CUDA_VISIBLE_DEVICES")
    return within_visible(wishes, gpus, VisibilityFilter(value))
