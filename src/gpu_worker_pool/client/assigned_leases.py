"""The leases that workers of a client hold: from the moment they are handed over until they are released or lost.

In the client's event loop, except where it says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from gpu_worker_pool.client import pool_events
from gpu_worker_pool.client.holders import AssignmentHolder, Holders, shown
from gpu_worker_pool.client.loss_callback import LeaseCallback
from gpu_worker_pool.core import HeldGPU
from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.leases.handed_over import assignment_of
from gpu_worker_pool.models import gpu_id_in_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core import Request
    from gpu_worker_pool.core.mirror import MirrorPool
    from gpu_worker_pool.lease_variables import GPUNaming
    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.leases.lease_thread import LeaseThread
    from gpu_worker_pool.models import GPUAssignment

logger: logging.Logger = logging.getLogger("gpu_worker_pool.leases.assigned")

#: How many lost leases are remembered for workers that release them late.
REMEMBERED_LOSSES = 1000


class AssignedLeases:
    """`want_reading` is called with an endpoint whose GPUs are worth another look."""

    def __init__(
        self,
        view: MirrorPool,
        *,
        now: Callable[[], float],
        pool_id: Callable[[str], str],
        want_reading: Callable[[str], object],
        gpu_names: GPUNaming,
        on_lease_lost: Callable[[GPUAssignment], object] | None,
        on_yield_asked: Callable[[GPUAssignment], object] | None,
    ) -> None:
        self._view = view
        self._now = now
        self._pool_id = pool_id
        self._want_reading = want_reading
        self._gpu_names: GPUNaming = gpu_names
        #: Leases whose holders know already that they will end.
        self._told: WeakSet[HeldLease] = WeakSet()
        self._callback = None if on_lease_lost is None else LeaseCallback(on_lease_lost)
        self._asked = None if on_yield_asked is None else LeaseCallback(on_yield_asked, "on_yield_asked")
        self._loop = asyncio.get_running_loop()
        #: In which the leases are renewed and released; there from the first endpoint on that gives leases.
        self.thread: LeaseThread | None = None
        self._losses: OrderedDict[str, str] = OrderedDict()
        self._holders = Holders(self._loop, self._is_held, self._holder_gone, self._let_expire)
        self.new_worker_id: Callable[[], str] = self._holders.new_worker_id

    def stop(self) -> None:
        """The lease thread gives them back next."""
        if self._holders:
            leases = ", ".join(f"{name} ({shown(holder)})" for name, holder in self._holders.items())
            logger.warning("stopped while GPUs were still assigned; they are given back: %s", leases)
        self.forget()

    def forget(self) -> None:
        """Watch no assignment any more."""
        self._holders.clear()

    def hand_over(self, held: HeldLease, request: Request, requested_at: float, *, was_blocked: bool) -> GPUAssignment:
        """`request`: as its worker made it, before it was adapted to the endpoint."""
        pool_id = held.host or self._pool_id(held.endpoint_id)
        gpus = [HeldGPU(gpu_id_in_pool(pool_id, gpu.index), gpu.index, gpu.uuid, gpu.name) for gpu in held.gpus]
        # Not the server's id: several servers use the same ones, and several waiters may have parts of one lease.
        lease = self._view.granted(
            held.request.request_id, request, pool_id, tuple(gpus), requested_at=requested_at, now=self._now()
        )
        assignment = self._holders.hand_over(lease, self._make_assignment(held), held=held)
        if pool_events.is_wanted():
            pool_events.assigned(lease, was_blocked=was_blocked)
        return assignment

    def _make_assignment(self, held: HeldLease) -> GPUAssignment:
        return assignment_of(held, held.host or self._pool_id(held.endpoint_id), self._gpu_names)

    # --- giving back ---

    async def release(self, assignment: GPUAssignment) -> None:
        """Twice is harmless; `StaleAssignmentError` if it was lost before."""
        holder = self._holders.holder_of(assignment)
        if holder is None:
            self._check_already_released(assignment)
            return
        held, thread = holder.held, self.thread
        assert held is not None  # as for all of them
        assert thread is not None  # which gave it
        self._drop(holder)
        if pool_events.is_wanted():
            pool_events.released(holder.lease, self._now() - holder.lease.granted_at)
        try:
            await asyncio.wrap_future(thread.do(partial(thread.engine.release, held)))
        except StaleAssignmentError as error:
            self._remember_loss(assignment.worker_id, str(error))
            raise

    def _check_already_released(self, assignment: GPUAssignment) -> None:
        worker_id = assignment.worker_id
        if (why := self._losses.get(worker_id)) is not None:
            raise StaleAssignmentError(why)
        if assignment.lost:
            raise StaleAssignmentError(f"{worker_id} lost {assignment.lease_id}: {assignment.lost_reason}")
        self._holders.check_ours(worker_id)

    def _drop(self, holder: AssignmentHolder) -> None:
        lease = holder.lease
        self._holders.remove(holder)
        if not self._view.ended(lease, self._now()):
            self._want_reading(lease.endpoint_id)

    # --- losing ---

    def lost_in_thread(self, held: HeldLease) -> None:
        """Called in the lease thread, since the client's loop may be blocked for minutes."""
        assignment = self._assignment_of(held)  # before the loop drops its holder
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lost, held)
        if held not in self._told and self._callback is not None:
            self._callback.tell(assignment)
        self._told.discard(held)

    def ending_in_thread(self, held: HeldLease) -> None:
        """The same, shortly before its time limit: the callback is called now, and not once more at its end."""
        self._told.add(held)
        if self._callback is not None:
            self._callback.tell(self._assignment_of(held))

    def asked_in_thread(self, held: HeldLease) -> None:
        """Its holder is asked to give it back."""
        if self._asked is not None:
            self._asked.tell(self._assignment_of(held))

    def _assignment_of(self, held: HeldLease) -> GPUAssignment:
        """The one that its worker has, or, if that is gone, one like it."""
        holder = self._holders.get(held.request.worker_id)
        assignment = holder() if holder is not None and holder.held is held else None
        return self._make_assignment(held) if assignment is None else assignment

    async def stop_reporting_losses(self) -> None:
        """The last that is awaited in the lease thread."""
        if self._callback is not None:
            self._callback.end()

    def _lost(self, held: HeldLease) -> None:
        worker_id = held.request.worker_id
        holder = self._holders.get(worker_id)
        if holder is not None and holder.held is held:
            self._remember_loss(worker_id, f"{worker_id} lost {held.shown}: {held.reason}")
            self._drop(holder)

    def _remember_loss(self, worker_id: str, why: str) -> None:
        self._losses[worker_id] = why
        if len(self._losses) > REMEMBERED_LOSSES:
            self._losses.popitem(last=False)

    # --- forgotten assignments ---

    def _is_held(self, holder: AssignmentHolder) -> bool:
        return holder.held is not None and not holder.held.has_ended

    def _holder_gone(self, holder: AssignmentHolder) -> None:
        self._let_expire(holder)
        self._drop(holder)

    def _let_expire(self, holder: AssignmentHolder) -> None:
        """In any thread."""
        if self.thread is not None and holder.held is not None:
            self.thread.call(self.thread.engine.let_expire, holder.held)
