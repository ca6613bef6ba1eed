"""Effects: what a pool wants done. Its driver (a ledger, or `WorkerPoolManager`) performs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.moves import LeaseState, RequestState


@record
class Granted:
    """The client has these GPUs now."""

    lease: Lease


@record
class Ended:
    """The request ended without a grant, and why; for a repeated request also how its grant ended."""

    request_id: str
    state: RequestState
    reasons: tuple[str, ...] = ()


@record
class LeaseEnded:
    """The holder has lost these GPUs."""

    lease: Lease
    state: LeaseState
    reason: str


@record
class ReadingWanted:
    """Take a fresh reading of this endpoint now."""

    endpoint_id: str


@record
class WakeAt:
    """Send `Ticked` at this moment."""

    at: float


Effect = Granted | Ended | LeaseEnded | ReadingWanted | WakeAt
