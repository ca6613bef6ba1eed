"""Context managers of the client: a GPU, or a started client, for as long as a block runs."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from gpu_worker_pool.client.client import GPUWorkerPoolClient
from gpu_worker_pool.errors import NotStartedError, StaleAssignmentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from gpu_worker_pool.models import GPUAssignment, GPUId

#: What the block gets: the id of its GPU, or a tuple of several ids.
Got = TypeVar("Got")


class GPUContextManager(Generic[Got]):
    """`async with GPUContextManager(client) as gpu_id:`: a GPU for as long as the block runs.

    Yields the GPU's number, with many endpoints its global id; for `count=` above 1 the tuple of all.
    """

    @overload
    def __init__(
        self: GPUContextManager[GPUId],
        client: GPUWorkerPoolClient,
        timeout: float | None = None,
        *,
        count: Literal[1] = 1,
        **requirements: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: GPUContextManager[GPUId | tuple[GPUId, ...]],
        client: GPUWorkerPoolClient,
        timeout: float | None = None,
        *,
        count: int,
        **requirements: Any,
    ) -> None: ...
    def __init__(self, client: GPUWorkerPoolClient, timeout: float | None = None, **requirements: Any) -> None:
        self._client = client
        self._timeout = timeout
        self._requirements = requirements
        self.assignment: GPUAssignment | None = None
        self._is_used = False

    async def __aenter__(self) -> Got:
        # The first of two to leave would give back the other one's GPU.
        if self._is_used:
            raise RuntimeError("this GPUContextManager is in use: make one for each block")
        self._is_used = True
        try:
            assignment = self.assignment = await self._client.request_gpu(self._timeout, **self._requirements)
        except BaseException:
            self._is_used = False
            raise
        ids: tuple[GPUId, ...] = assignment.gpu_ids
        got: Any = ids if len(ids) > 1 else assignment.gpu_id
        return cast("Got", got)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assignment, self.assignment = self.assignment, None
        self._is_used = False
        if assignment is not None:
            # A client that was stopped meanwhile has said so; what the block raised matters more.
            with suppress(NotStartedError, *((StaleAssignmentError,) if kind else ())):
                await self._client.release_gpu(assignment)


@asynccontextmanager
async def gpu_worker_pool_client(**kwargs: Any) -> AsyncIterator[GPUWorkerPoolClient]:
    """A started client, stopped at the end of the block."""
    async with GPUWorkerPoolClient(**kwargs) as client:
        yield client
