"""What a program is given for a lease that it holds: a `GPUAssignment`, and environment variables."""

from __future__ import annotations

import math
import os
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.lease_variables import VisibleGPU, lease_environment, outer_leases
from gpu_worker_pool.models import make_assignment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.lease_variables import GPUNaming
    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.leases.places import LeasePlace
    from gpu_worker_pool.models import GPUAssignment


def assignment_of(held: HeldLease, pool_id: str, gpu_names: GPUNaming) -> GPUAssignment:
    """`pool_id`: the endpoint's id in global GPU ids; empty with a single endpoint."""
    now, left_seconds = datetime.now(), max(held.held_until - boot_time(), 0.0)
    return make_assignment(
        pool_id,
        held.gpus,
        held.request.worker_id,
        now,
        fence=held.fence,
        lease_id=held.lease_id,
        expires_at=now + timedelta(seconds=left_seconds) if math.isfinite(left_seconds) else None,
        lease_health=held,
        gpu_names=gpu_names,
        memory_mb=held.share_mb,
        memory_total_mb=() if held.share_mb is None else tuple(gpu.memory_total_mb for gpu in held.gpus),
    )


def variables_of(held: HeldLease, places: Iterable[LeasePlace], gpu_names: GPUNaming) -> dict[str, str]:
    """What shows a program these GPUs and no others; `places`: one of them has granted it."""
    place = next(place for place in places if place.endpoint.endpoint_id == held.endpoint_id)
    return lease_environment(
        [VisibleGPU(gpu.index, gpu.uuid) for gpu in held.gpus],
        held.lease_id,
        gpu_names,
        host=os.uname().nodename,
        endpoint=place.config.url,
        outer_leases=outer_leases(held.within),
    )
