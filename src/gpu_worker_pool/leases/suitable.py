"""Which GPUs of a lease suit whoever asks inside it. Wishes beyond that were for the grant of the lease.

Loads next to nothing: the command line waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.readings import Reading
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import ImpossibleRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.leases.values import LeasedGPU


def suitable(gpus: Iterable[LeasedGPU], requirements: Requirements) -> list[LeasedGPU]:
    return [gpu for gpu in gpus if _suits(gpu, requirements)]


def check_suitable(lease_id: str, gpus: Iterable[LeasedGPU], requirements: Requirements) -> list[LeasedGPU]:
    """All that suit of those that the lease has. Raises `ImpossibleRequestError` if they are fewer than asked for."""
    found = suitable(gpus, requirements)
    if len(found) < requirements.count:
        reason = (
            f"this program runs inside {lease_id}, and that has not what is asked for ({requirements}): "
            "ask outside of it, or without GPU_POOL_LEASE_ID in the environment"
        )
        raise ImpossibleRequestError(reasons=(reason,))
    return found


def _suits(gpu: LeasedGPU, requirements: Requirements) -> bool:
    reading = Reading(str(gpu.index), gpu.index, gpu.name, gpu.uuid)
    return (
        (requirements.gpu_model is None or requirements.gpu_model.casefold() in gpu.name.casefold())
        and (requirements.only is None or any(names_gpu(name, reading) for name in requirements.only))
        and not any(names_gpu(name, reading) for name in requirements.exclude)
    )
