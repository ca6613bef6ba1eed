"""Who was given GPUs, and whether anybody still can release them. Notices what is forgotten; decides nothing."""

from __future__ import annotations

import weakref
from asyncio import current_task
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from gpu_worker_pool.errors import InvalidAssignmentError
from gpu_worker_pool.models import GPUAssignment, make_assignment

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection
    from types import CodeType

    from gpu_worker_pool.core import Lease
    from gpu_worker_pool.models import WorkerInfo


class Holder(weakref.ref[GPUAssignment]):
    """Somebody who was given GPUs: a reference that tells when nothing else refers to the assignment any more."""

    __slots__ = ("lease", "task", "worker")

    lease: Lease
    #: Who asked, where that can be known. Weak: a task that failed keeps everything alive that it knew.
    task: weakref.ref[asyncio.Task[Any]] | None
    #: For a worker that is called back. It keeps its own assignment, so that it never looks forgotten.
    worker: tuple[WorkerInfo, GPUAssignment] | None


class Forgotten(Protocol):
    def __call__(self, lease: Lease, *, is_asker_known: bool) -> bool: ...


class Holders(dict[str, Holder]):
    """By worker id.

    `is_forgotten` is called when an assignment object is gone unreleased; if it returns True, `asker_finished` is
    called as soon as the task that asked has finished too. `is_outlived` is called instead, in whatever thread, for one
    that outlived the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        asking: Collection[CodeType],
        is_forgotten: Forgotten,
        asker_finished: Callable[[Lease], object],
        is_outlived: Callable[[Lease], object] = lambda _: None,
    ) -> None:
        self._loop = loop
        #: What a task runs that only asks, as `gather` and `wait_for` make them: it ends with the answer, and who is
        #: behind it is not known.
        self._asking = asking
        self._is_forgotten = is_forgotten
        self._asker_finished = asker_finished
        self._is_outlived = is_outlived
        self._on_dropped = self._dropped

    def hand_over(self, lease: Lease, worker: WorkerInfo | None = None) -> GPUAssignment:
        """Make the assignment that the worker gets, and keep an eye on it."""
        assignment = assignment_of(lease)
        # As `watch` does it: a call more would cost every request.
        holder = Holder(assignment, self._on_dropped)
        holder.lease = lease
        holder.task = holder.worker = None
        if worker is not None:
            holder.worker = (worker, assignment)
        else:
            task = current_task(self._loop)
            if task is not None and getattr(task.get_coro(), "cr_code", None) not in self._asking:
                holder.task = weakref.ref(task)
        self[lease.request.worker_id] = holder
        return assignment

    def watch(self, assignment: GPUAssignment, lease: Lease) -> None:
        """Keep an eye on an assignment that was made elsewhere, and stands for this lease."""
        holder = Holder(assignment, self._on_dropped)
        holder.lease = lease
        holder.task = holder.worker = None
        task = current_task(self._loop)
        if task is not None and getattr(task.get_coro(), "cr_code", None) not in self._asking:
            holder.task = weakref.ref(task)
        self[lease.request.worker_id] = holder

    def lease_of(self, assignment: GPUAssignment) -> Lease | None:
        """What is held by it, or None if nothing is any more. A copy will do; another assignment will not."""
        try:
            holder = self.get(assignment.worker_id)
        except AttributeError:
            raise InvalidAssignmentError(
                f"release_gpu takes the GPUAssignment that request_gpu returned, not {assignment!r}"
            ) from None
        if holder is None:
            return None
        lease = holder.lease
        if holder() is not assignment:
            mine = assignment_of(lease)
            if assignment.gpu_ids != mine.gpu_ids or assignment.fence not in (None, mine.fence):
                raise InvalidAssignmentError(
                    f"{assignment.worker_id} holds {shown(lease)}, not GPU {assignment.gpu_id}"
                )
        return lease

    def _dropped(self, holder: Holder) -> None:
        if self.get(holder.lease.request.worker_id) is not holder:
            return  # it was released
        # Garbage is collected at any moment and in any thread; what it means is looked at in the loop's own time.
        try:
            self._loop.call_soon_threadsafe(self._look_after, holder)
        except RuntimeError:  # the loop is closed, and with it the pool
            self._is_outlived(holder.lease)

    def _look_after(self, holder: Holder) -> None:
        """Its worker may still use the GPU, knowing only its number; so it counts until the task has finished."""
        lease = holder.lease
        if self.get(lease.request.worker_id) is not holder:
            return
        if not self._is_forgotten(lease, is_asker_known=holder.task is not None):
            return
        task = holder.task() if holder.task is not None else None
        if task is None or task.done():
            self._finished(holder)
        else:
            task.add_done_callback(lambda _: self._finished(holder))

    def _finished(self, holder: Holder) -> None:
        if self.get(holder.lease.request.worker_id) is holder:  # and the pool has not stopped meanwhile
            self._asker_finished(holder.lease)


def assignment_of(lease: Lease) -> GPUAssignment:
    return make_assignment(lease.endpoint_id, lease.held, lease.request.worker_id, datetime.now(), fence=lease.fence)


def shown(lease: Lease) -> str:
    return f"GPU{'s' if len(lease.gpu_ids) > 1 else ''} {', '.join(lease.gpu_ids)}"
