"""Makes the errors of requests that were not granted: which worker, for what, how long, and why, GPU by GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core import RequestState, explain_requirements
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    PoolStoppedError,
    RequestCancelledError,
    RequestGivenUpError,
    ServiceUnavailableTimeoutError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core import Ended, Pool, Request, Requirements

#: The most GPUs that one error lists.
MOST_GPUS_LISTED = 16


class Refusals:
    """Makes the errors of one pool; `failing_endpoints` lists endpoints that do not answer, with their errors."""

    def __init__(self, failing_endpoints: Callable[[], str]) -> None:
        self._failing_endpoints = failing_endpoints
        #: Explanations by requirements, cached for one state of the pool.
        self._explained_at: object = None
        self._explained: dict[Requirements, str] = {}

    def forget(self) -> None:
        """Clear the cache after a change that its key does not show."""
        self._explained.clear()

    def error_of(
        self, pool: Pool, request: Request, ended: Ended, waited_seconds: float, why_not: str | None = None
    ) -> Exception:
        """`why_not`: the reasons, if a server knows them better than `pool`."""
        who = f"{request.worker_id}, which waited {waited_seconds:.1f} s for {request.requirements}"
        if ended.state is RequestState.REJECTED:
            return ImpossibleRequestError(reasons=ended.reasons)
        if ended.state is RequestState.STOPPED:
            waited = f"{request.worker_id} waited ({waited_seconds:.1f} s) for {request.requirements}"
            return PoolStoppedError(f"the pool was stopped while {waited}")
        if ended.state is RequestState.CANCELLED:
            return RequestCancelledError()
        if ended.state is RequestState.GIVEN_UP:
            return RequestGivenUpError()
        failing = self._failing_endpoints()
        if not any(endpoint.is_answering for endpoint in pool.allocator.endpoints.values()):
            return ServiceUnavailableTimeoutError(
                f"no GPU in time for {who}: no GPU service answered{': ' if failing else ''}{failing}"
            )
        silent = f"\n  no answer from {failing}" if failing else ""
        why_not = self._why_not(pool, request) if why_not is None else why_not
        return WorkerTimeoutError(f"no GPU in time for {who}:{why_not}{silent}")

    def _why_not(self, pool: Pool, request: Request) -> str:
        requirements = request.requirements
        # Very many requests may time out at once; equal ones share one explanation.
        moment = (pool.now, pool.fence, len(pool.leases))
        if self._explained_at != moment:
            self._explained_at, self._explained = moment, {}
        text = self._explained.get(requirements)
        if text is None:
            gpus = explain_requirements(pool, requirements, pool.now, request).gpus
            shown = "".join(f"\n  {gpu}" for gpu in gpus[:MOST_GPUS_LISTED])
            more = f"\n  and {len(gpus) - MOST_GPUS_LISTED} more" if len(gpus) > MOST_GPUS_LISTED else ""
            text = self._explained[requirements] = f"{shown}{more}" if gpus else " there are no GPUs"
        return text
