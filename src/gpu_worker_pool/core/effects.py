"""Effects: everything a pool can want done. Whoever drives it performs them, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.moves import LeaseState, RequestState


@record
class Granted:
    """Tell the asker that these GPUs are its own now."""

    lease: Lease


@record
class Ended:
    """Tell the asker that its request ended without a grant, and why; or, asked again, how its grant ended."""

    request_id: str
    state: RequestState
    reasons: tuple[str, ...] = ()


@record
class LeaseEnded:
    """Tell the holder, if it can be told, that the GPUs are not its own any more."""

    lease: Lease
    state: LeaseState
    reason: str


@record
class ReadingWanted:
    """Take a fresh reading of this endpoint now."""

    endpoint_id: str


@record
class WakeAt:
    """Send `Ticked` at this moment, if nothing earlier was asked for."""

    at: float


Effect = Granted | Ended | LeaseEnded | ReadingWanted | WakeAt
