"""The holders of assignments, and whether anything can still release them. Notices forgotten ones; decides nothing."""

from __future__ import annotations

import logging
import secrets
import weakref
from asyncio import current_task
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.errors import InvalidAssignmentError
from gpu_worker_pool.models import GPUAssignment, make_assignment

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gpu_worker_pool.core import Lease
    from gpu_worker_pool.lease_variables import GPUNaming
    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.models import WorkerInfo

logger: logging.Logger = logging.getLogger(__name__)


class AssignmentHolder(weakref.ref[GPUAssignment]):
    """A worker that was given GPUs: notices when nothing else refers to the assignment any more."""

    __slots__ = ("held", "lease", "task", "worker")

    lease: Lease
    #: What a server gave; None for what this process assigned.
    held: HeldLease | None
    #: The task that asked, unless it only passed the assignment on. Weak: a failed task keeps alive all it refers to.
    task: weakref.ref[asyncio.Task[Any]] | None
    #: For a worker that is called back. It keeps its own assignment, so that it never looks forgotten.
    worker: tuple[WorkerInfo, GPUAssignment] | None

    def requesting_task_done(self, task: asyncio.Task[Any]) -> None:
        """A task whose result is the assignment, as `gather` makes them, passed it on: who uses it is not known."""
        assignment = self()
        # Not `exception()`, after which asyncio would not log an error that nothing else retrieves.
        has_failed = task.cancelled() or task._exception is not None  # noqa: SLF001
        if assignment is not None and not has_failed and task.result() is assignment:
            self.task = None


class Holders(dict[str, AssignmentHolder]):
    """By worker id.

    `on_holder_gone` is called when an assignment object is gone unreleased and the task that asked has finished too;
    `is_outlived` instead, in whatever thread, for one that outlived the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_held: Callable[[AssignmentHolder], bool],
        on_holder_gone: Callable[[AssignmentHolder], object],
        is_outlived: Callable[[AssignmentHolder], object] = lambda _: None,
        *,
        gpu_names: GPUNaming = "index",
    ) -> None:
        self._loop = loop
        self._is_held = is_held
        self._holder_gone = on_holder_gone
        self._is_outlived = is_outlived
        self._gpu_names: GPUNaming = gpu_names
        self._on_dropped = self._dropped
        # Ids that no other pool gives, so that its assignments are not mistaken for ours.
        self._prefix = f"worker-{secrets.token_hex(3)}-"
        self._serial = 0

    def new_worker_id(self) -> str:
        self._serial = serial = self._serial + 1
        return f"{self._prefix}{serial}"

    def check_ours(self, worker_id: str) -> None:
        """Raise `InvalidAssignmentError` for an id that was never given here."""
        serial = worker_id.removeprefix(self._prefix)
        if serial == worker_id or not serial.isdecimal() or not 0 < int(serial) <= self._serial:
            raise InvalidAssignmentError(f"{worker_id} holds no GPU of this pool; was it assigned by another one?")

    def hand_over(
        self,
        lease: Lease,
        assignment: GPUAssignment | None = None,
        *,
        held: HeldLease | None = None,
        worker: WorkerInfo | None = None,
    ) -> GPUAssignment:
        """What the worker gets, watched from now on; by default made from `lease`."""
        if assignment is None:
            assignment = self._assignment_of(lease)
        holder = AssignmentHolder(assignment, self._on_dropped)
        holder.lease = lease
        holder.held = held
        holder.task = holder.worker = None
        if worker is not None:
            holder.worker = (worker, assignment)
        else:
            self._watch_current_task(holder)
        self[lease.request.worker_id] = holder
        return assignment

    def passed_on(self, assignment: GPUAssignment) -> None:
        """The task that asked did so for the current one."""
        holder = self.get(assignment.worker_id)
        if holder is not None:
            self._watch_current_task(holder)

    def _watch_current_task(self, holder: AssignmentHolder) -> None:
        if (task := current_task(self._loop)) is not None:
            holder.task = weakref.ref(task)
            task.add_done_callback(holder.requesting_task_done)

    def remove(self, holder: AssignmentHolder) -> None:
        """It was released, or lost."""
        del self[holder.lease.request.worker_id]
        if holder.task is not None and (task := holder.task()) is not None:
            task.remove_done_callback(holder.requesting_task_done)  # a task may ask any number of times

    def clear(self) -> None:
        """Watch nothing any more."""
        for holder in list(self.values()):
            self.remove(holder)

    def holder_of(self, assignment: GPUAssignment) -> AssignmentHolder | None:
        """Its holder, or None if it has none any more. A copy of the assignment will do; another one will not."""
        try:
            holder = self.get(assignment.worker_id)
        except AttributeError:
            raise InvalidAssignmentError(
                f"release_gpu takes the GPUAssignment that request_gpu returned, not {assignment!r}"
            ) from None
        if holder is None or holder() is assignment:
            return holder
        lease, held = holder.lease, holder.held
        if held is not None:
            if (assignment.lease_id, assignment.fence) != (held.lease_id, held.fence):
                raise InvalidAssignmentError(f"{assignment.worker_id} holds {held.shown}, not {assignment.lease_id}")
            return holder
        mine = self._assignment_of(lease)
        if assignment.gpu_ids != mine.gpu_ids or assignment.fence not in (None, mine.fence):
            raise InvalidAssignmentError(f"{assignment.worker_id} holds {shown(holder)}, not GPU {assignment.gpu_id}")
        return holder

    def _assignment_of(self, lease: Lease) -> GPUAssignment:
        endpoint_id, worker_id = lease.endpoint_id, lease.request.worker_id
        return make_assignment(
            endpoint_id, lease.held, worker_id, datetime.now(), fence=lease.fence, gpu_names=self._gpu_names
        )

    def _dropped(self, holder: AssignmentHolder) -> None:
        if self.get(holder.lease.request.worker_id) is not holder:
            return  # it was released
        # Garbage is collected at any moment and in any thread; what it means is decided in the loop.
        try:
            self._loop.call_soon_threadsafe(self._look_after, holder)
        except RuntimeError:  # the loop is closed, and with it the pool
            self._is_outlived(holder)

    def _look_after(self, holder: AssignmentHolder) -> None:
        """Its worker may still use the GPU, knowing only its number; so it counts until the task has finished."""
        worker_id = holder.lease.request.worker_id
        if self.get(worker_id) is not holder or not self._is_held(holder):
            return
        until = "the task that asked for it has finished and readings show the GPU empty"
        if holder.task is None:
            until = "the pool stops: which task uses it cannot be known"
        logger.warning(
            "%s dropped its assignment of %s without release_gpu(); it is taken back when %s",
            worker_id,
            shown(holder),
            until,
        )
        if holder.task is None:
            return
        task = holder.task()
        if task is None or task.done():
            self._finished(holder)
        else:
            task.add_done_callback(lambda _: self._finished(holder))

    def _finished(self, holder: AssignmentHolder) -> None:
        if self.get(holder.lease.request.worker_id) is holder:  # and the pool has not stopped meanwhile
            self._holder_gone(holder)


def shown(holder: AssignmentHolder) -> str:
    return shown_gpus(holder.lease) if holder.held is None else holder.held.shown


def shown_gpus(lease: Lease) -> str:
    return f"GPU{'s' if len(lease.gpu_ids) > 1 else ''} {', '.join(lease.gpu_ids)}"
