"""GPUs that this process assigns itself, as one more service of an acquisition.

For clients of which some servers give leases and others only statistics. The pool stays in the client's own loop.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.requirements import Declared
from gpu_worker_pool.errors import PoolStoppedError
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting, YieldNotice

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gpu_worker_pool.client.manager import WorkerPoolManager
    from gpu_worker_pool.core import Request
    from gpu_worker_pool.models import GPUAssignment

NAME = "this process"


class InProcessService:
    """Called in the lease thread; what it does, it does in the client's loop."""

    endpoint_id = NAME
    longest_silence_seconds: float = math.inf

    def __init__(self, manager: WorkerPoolManager, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop
        #: By request id, until the assignment is handed over, given back or no longer wanted.
        self._requests: dict[str, asyncio.Task[GPUAssignment]] = {}

    def is_waiting(self, request_id: str) -> bool:
        """Whether it waits in the queue of this process. For the client's loop, as the next one."""
        task = self._requests.get(request_id)
        return task is not None and not task.done()

    def hand_over(self, lease: HeldLease, assignment: GPUAssignment) -> GPUAssignment:
        """Hand it over to the current task, on whose behalf a task of ours asked."""
        self._requests.pop(lease.request.request_id, None)
        self._manager.passed_on(assignment)
        return assignment

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:  # noqa: ARG002  # it reserves nothing here
        assignment = await self._in_clients_loop(self._poll(request, wait_seconds))
        if assignment is None:
            return StillWaiting(None, ())
        gpus = tuple(LeasedGPU(index, None, "") for index in assignment.local_gpu_ids)
        return HeldLease(self, request, "", assignment.fence or 0, gpus, 0.0, assignment=assignment)

    async def release(self, lease: HeldLease) -> None:
        await self.cancel(lease.request)

    async def cancel(self, request: Request) -> None:
        await self._in_clients_loop(self._take_back(request.request_id))

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:  # noqa: ARG002
        """It lasts until it is released, and is never asked to yield."""
        return None

    async def has_waiting(self) -> bool:
        return any(not task.done() for task in list(self._requests.values()))

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        pass

    # --- in the client's loop ---

    async def _poll(self, request: Request, wait_seconds: float) -> GPUAssignment | None:
        task = self._requests.get(request.request_id)
        if task is None:
            declared = Declared(request.expected_seconds, request.max_seconds)
            acquiring = self._manager.acquire(request.requirements, math.inf, request.label, declared)
            task = self._requests[request.request_id] = self._loop.create_task(acquiring)
        # Its first step is all it needs to take what is free.
        await asyncio.wait([task], timeout=wait_seconds)
        return task.result() if task.done() else None

    async def _take_back(self, request_id: str) -> None:
        task = self._requests.pop(request_id, None)
        if task is not None and not task.cancel() and not task.cancelled() and task.exception() is None:
            await self._manager.release_gpu(task.result())

    async def _in_clients_loop(self, work: Coroutine[None, None, GPUAssignment | None]) -> GPUAssignment | None:
        try:
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise PoolStoppedError from None
        return await asyncio.wrap_future(done)
