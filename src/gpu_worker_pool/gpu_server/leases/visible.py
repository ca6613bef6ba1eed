"""The server's own `CUDA_VISIBLE_DEVICES` as a wish: what it does not show it does not promise either.

As a wish, and not as fewer GPUs: for other programs that share the ledger the hidden ones are still there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.gpu_server.answers import RETRY_AFTER
from gpu_worker_pool.gpu_server.security import Refusal
from gpu_worker_pool.hardware.leasable import readings_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.gpu_server.view import HostView


async def within_what_is_shown(
    requirements: Requirements, view: HostView, known: Callable[[], Awaitable[Requirements | None]]
) -> Requirements | Refusal:
    """`known`: what the request was when it was first asked with."""
    if view.filter.value is None:
        return requirements
    first = await known()
    if first is not None and replace(first, only=None) == replace(requirements, only=None):
        # GPUs come and go between two askings, and the request must stay the same.
        return first
    if view.shown is None:
        return Refusal(503, "no_sample_yet", "which GPUs may be had here is not known yet", headers=RETRY_AFTER)
    visibility = view.shown.visibility
    if not visibility.is_filtering:
        return requirements
    readings = readings_of(visibility.gpus)
    only = requirements.only
    allowed = sorted(
        reading.gpu_id for reading in readings if only is None or any(names_gpu(name, reading) for name in only)
    )
    if not allowed:
        reason = "none of the GPUs wanted is among those that this server's CUDA_VISIBLE_DEVICES lets it give away"
        return Refusal(409, "impossible", f"the request can never be granted: {reason}", (reason,))
    return replace(requirements, only=tuple(allowed))
