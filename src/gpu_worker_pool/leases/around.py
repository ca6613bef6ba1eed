"""Finds the lease inside which this program runs, if there is one."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.proc import ancestors_of
from gpu_worker_pool.hardware.visibility import VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_worker_pool.hardware.samples import GPUReading
    from gpu_worker_pool.leases.lease import LeasedGPU

logger: logging.Logger = logging.getLogger(__name__)


class LiveLease(NamedTuple):
    """A lease as the programs of its host see it, whether they read the ledger or ask the server for it."""

    lease_id: str
    fence: int
    worker_id: str
    gpus: tuple[LeasedGPU, ...]
    #: Whether it is this user's, by the kernel's word; None where that is unknown: it was acquired over TCP.
    is_ours: bool | None
    #: The process that holds it, as its client said; None if it did not.
    holder_pid: int | None = None

    @property
    def gpu_ids(self) -> set[str | None]:
        return {gpu.uuid for gpu in self.gpus}


def lease_around(
    leases: Sequence[LiveLease], lease_id: str | None, visible_devices: str | None, gpus: Sequence[GPUReading]
) -> LiveLease | None:
    """`lease_id`, `visible_devices`: what the environment says; `gpus`: those of this host."""
    lease = None
    if lease_id is not None:
        lease = next((each for each in leases if each.lease_id == lease_id), None)
        if lease is None or not _encloses_this_program(lease, visible_devices, gpus):
            lost = "GPU_POOL_LEASE_ID is %s, which is not one of your active leases: requesting GPUs without it"
            logger.warning(lost, lease_id)
            lease = None
    return _lease_of_our_shell(leases, visible_devices, gpus) if lease is None else lease


def _encloses_this_program(lease: LiveLease, visible_devices: str | None, gpus: Sequence[GPUReading]) -> bool:
    """An id alone proves nothing: ids are counters, and a variable is carried to other hosts and other ledgers.

    So the program must see no GPU that the lease does not have. A lease acquired over TCP, of which the kernel does not
    say whose it is, must also be held by a process around this one.
    """
    visible = VisibilityFilter(visible_devices).apply(gpus)
    if lease.is_ours is None:
        is_held_around = lease.holder_pid is None or lease.holder_pid in (os.getpid(), *ancestors_of(os.getpid()))
        if not (visible.is_filtering and is_held_around):
            return False
    elif not lease.is_ours:
        return False
    if not visible.is_filtering:
        return True
    whole = {gpu.uuid: {gpu.identity, *(device.uuid for device in gpu.mig_devices)} for gpu in visible.gpus}
    return all(names & lease.gpu_ids for names in whole.values())


def _lease_of_our_shell(
    leases: Iterable[LiveLease], visible_devices: str | None, gpus: Sequence[GPUReading]
) -> LiveLease | None:
    """`CUDA_VISIBLE_DEVICES=$(gpu-pool wait)` says which GPUs a shell has, but not by which lease."""
    visible = VisibilityFilter(visible_devices).apply(gpus)
    if not visible.is_filtering:
        return None
    names = {reading.gpu_id for reading in readings_of(visible.gpus)}
    ancestors = tuple(f":{pid}" for pid in ancestors_of(os.getpid()))
    # The innermost, if the shell has called `gpu-pool wait` again inside its lease.
    for lease in sorted(leases, key=lambda lease: lease.fence, reverse=True):
        if lease.is_ours and lease.worker_id.endswith(ancestors) and lease.gpu_ids == names:
            return lease
    return None
