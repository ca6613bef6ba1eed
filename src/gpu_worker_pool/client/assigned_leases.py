"""The leases that workers of a client have: from the moment they are handed over until they are released or lost.

In the client's event loop, except where it says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from gpu_worker_pool.client import pool_events
from gpu_worker_pool.client.holders import Holders
from gpu_worker_pool.client.loss_callback import LossCallback
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import InvalidAssignmentError, StaleAssignmentError
from gpu_worker_pool.models import leased_assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import CodeType

    from gpu_worker_pool.client.endpoint_view import EndpointView
    from gpu_worker_pool.core import Lease, Waiter
    from gpu_worker_pool.leases.endpoint import LeaseEndpoint
    from gpu_worker_pool.leases.values import HeldLease
    from gpu_worker_pool.models import GPUAssignment

logger = logging.getLogger("gpu_worker_pool.leases.assigned")

#: Leases that were lost are remembered for whoever releases them late.
REMEMBERED_LOSSES = 1000


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a worker has."""

    held: HeldLease
    endpoint: LeaseEndpoint
    #: The same in the books.
    lease: Lease


class AssignedLeases:
    """`asking`: see `Holders`. `want_reading` is called with an endpoint whose GPUs are worth another look."""

    def __init__(
        self,
        view: EndpointView,
        *,
        now: Callable[[], float],
        pool_id: Callable[[str], str],
        asking: Collection[CodeType],
        want_reading: Callable[[str], object],
        on_lease_lost: Callable[[GPUAssignment], object] | None,
    ) -> None:
        self._view = view
        self._now = now
        self._pool_id = pool_id
        self._want_reading = want_reading
        self._callback = None if on_lease_lost is None else LossCallback(on_lease_lost)
        self._loop = asyncio.get_running_loop()
        #: By worker id.
        self._kept: dict[str, _Kept] = {}
        self._losses: OrderedDict[str, str] = OrderedDict()
        self._holders = Holders(self._loop, asking, self._is_forgotten, self._asker_finished, self._let_expire)
        # Names that no other pool gives, so that its assignments are not mistaken for ours.
        self._prefix = f"worker-{secrets.token_hex(3)}-"
        self._serial = 0

    def new_worker_id(self) -> str:
        self._serial += 1
        return f"{self._prefix}{self._serial}"

    def stop(self) -> None:
        """Whoever keeps the leases gives them back next."""
        if self._kept:
            held = ", ".join(f"{name} ({kept.held.shown})" for name, kept in self._kept.items())
            logger.warning("stopped while GPUs were still assigned; they are given back: %s", held)
        self.forget()
        self._kept.clear()

    def forget(self) -> None:
        """Nobody is left who could be told that an assignment was dropped."""
        self._holders.clear()

    # --- having ---

    def hand_over(
        self, held: HeldLease, endpoint: LeaseEndpoint, waiter: Waiter, *, was_blocked: bool
    ) -> GPUAssignment:
        assignment = self._assignment(held)
        lease = self._view.granted(held, self._pool_id(held.endpoint_id), waiter, self._now())
        self._kept[held.ask.worker_id] = _Kept(held, endpoint, lease)
        self._holders.watch(assignment, lease)
        if pool_events.is_wanted():
            pool_events.assigned(lease, was_blocked=was_blocked)
        return assignment

    def _assignment(self, held: HeldLease) -> GPUAssignment:
        now, left_seconds = datetime.now(), max(held.life.held_until - boot_time(), 0.0)
        return leased_assignment(held, self._pool_id(held.endpoint_id), now, now + timedelta(seconds=left_seconds))

    # --- giving back ---

    async def release(self, assignment: GPUAssignment) -> None:
        """Twice is harmless; `StaleAssignmentError` if it was lost before."""
        kept = self._kept.get(assignment.worker_id)
        if kept is None:
            self._check_already_released(assignment)
            return
        held = kept.held
        if (assignment.lease_id, assignment.fence) != (held.lease_id, held.fence):
            raise InvalidAssignmentError(f"{assignment.worker_id} holds {held.shown}, not {assignment.lease_id}")
        self._drop(kept)
        if pool_events.is_wanted():
            pool_events.released(kept.lease, self._now() - kept.lease.granted_at)
        thread = kept.endpoint.thread
        try:
            await asyncio.wrap_future(thread.do(partial(thread.release, kept.endpoint.service, held)))
        except StaleAssignmentError as error:
            self._remember_loss(assignment.worker_id, str(error))
            raise

    def _check_already_released(self, assignment: GPUAssignment) -> None:
        worker_id = assignment.worker_id
        if (why := self._losses.get(worker_id)) is not None:
            raise StaleAssignmentError(why)
        if assignment.lost:
            raise StaleAssignmentError(f"{worker_id} lost {assignment.lease_id}: {assignment.lost_reason}")
        serial = worker_id.removeprefix(self._prefix)
        if serial == worker_id or not serial.isdecimal() or not 0 < int(serial) <= self._serial:
            raise InvalidAssignmentError(f"{worker_id} holds no GPU of this pool; was it assigned by another one?")

    def _drop(self, kept: _Kept) -> None:
        worker_id = kept.lease.request.worker_id
        del self._kept[worker_id]
        self._holders.pop(worker_id, None)
        if not self._view.ended(kept.lease, self._now()):
            self._want_reading(kept.lease.endpoint_id)

    # --- losing ---

    def lost_in_thread(self, held: HeldLease) -> None:
        """Called in the keeper's thread, since the loop may be blocked for minutes."""
        holder = self._holders.get(held.ask.worker_id)
        assignment = holder() if holder is not None else None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lost, held)
        if self._callback is not None:
            self._callback.tell(self._assignment(held) if assignment is None else assignment)

    async def no_more_losses(self) -> None:
        """The last that is awaited in the keeper's thread."""
        if self._callback is not None:
            self._callback.end()

    def _lost(self, held: HeldLease) -> None:
        kept = self._kept.get(held.ask.worker_id)
        if kept is not None and kept.held is held:
            self._remember_loss(held.ask.worker_id, f"{held.ask.worker_id} lost {held.shown}: {held.life.reason}")
            self._drop(kept)

    def _remember_loss(self, worker_id: str, why: str) -> None:
        self._losses[worker_id] = why
        if len(self._losses) > REMEMBERED_LOSSES:
            self._losses.popitem(last=False)

    # --- forgetting ---

    def _is_forgotten(self, lease: Lease, *, is_asker_known: bool) -> bool:
        """Nothing refers to an assignment any more: say so, and whether its lease ends once its asker is done."""
        kept = self._kept.get(lease.request.worker_id)
        if kept is None or kept.lease is not lease:
            return False
        until = "when the task that asked for it has finished, and its server sees nothing of it any more"
        if not is_asker_known:
            until = "when the pool stops: which task uses it cannot be known"
        dropped = "%s dropped its assignment of %s without release_gpu(); it is taken back %s"
        logger.warning(dropped, lease.request.worker_id, kept.held.shown, until)
        return is_asker_known

    def _asker_finished(self, lease: Lease) -> None:
        kept = self._kept.get(lease.request.worker_id)
        if kept is not None and kept.lease is lease:
            self._let_expire(lease)
            self._drop(kept)

    def _let_expire(self, lease: Lease) -> None:
        """In any thread."""
        kept = self._kept.get(lease.request.worker_id)
        if kept is not None:
            kept.endpoint.thread.call(kept.endpoint.thread.let_expire, kept.held)
