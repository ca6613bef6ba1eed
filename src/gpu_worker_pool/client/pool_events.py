"""Logs what happens to workers: a sentence for people, and attributes of the record for programs.

Every record has `event` (assigned, released, blocked, unblocked) and `worker_id`. At level INFO: quiet by default.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpu_worker_pool.client.holders import shown_gpus

if TYPE_CHECKING:
    from gpu_worker_pool.core import Lease, Requirements

logger: logging.Logger = logging.getLogger("gpu_worker_pool.worker_pool_manager")


def is_wanted() -> bool:
    """Check this first to save work: most programs do not log at INFO."""
    return logger.isEnabledFor(logging.INFO)


def blocked(
    worker_id: str,
    requirements: Requirements,
    others_waiting: int,
    free_gpus: int,
    why: str = "",
    level: int = logging.INFO,
) -> None:
    """`why`: the reasons GPU by GPU, if a server sent them."""
    reason = f"{free_gpus} GPUs are free, {others_waiting} others wait" + (f"; {why}" if why else "")
    extra = {"event": "blocked", "worker_id": worker_id, "reason": reason}
    logger.log(level, "%s waits for %s; %s", worker_id, requirements, reason, extra=extra)


def assigned(lease: Lease, *, was_blocked: bool = True) -> None:
    worker_id = lease.request.worker_id
    waited = lease.granted_at - lease.requested_at
    if waited > 0 and was_blocked:
        extra = {"event": "unblocked", "worker_id": worker_id, "waited_seconds": waited}
        logger.info("%s has waited %.3f s", worker_id, waited, extra=extra)
    extra = {"event": "assigned", "worker_id": worker_id, "gpu_ids": lease.gpu_ids, "endpoint_id": lease.endpoint_id}
    logger.info("%s was assigned %s", worker_id, shown_gpus(lease), extra=extra)


def released(lease: Lease, held_seconds: float) -> None:
    worker_id = lease.request.worker_id
    extra = {"event": "released", "worker_id": worker_id, "gpu_ids": lease.gpu_ids, "held_seconds": held_seconds}
    logger.info("%s released %s after %.3f s", worker_id, shown_gpus(lease), held_seconds, extra=extra)
