"""Ends leases and requests at whichever endpoint has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_worker_pool.cli.exits import Status, status_of
from gpu_worker_pool.cli.views.queries import open_hosts, opened
from gpu_worker_pool.errors import GPUWorkerPoolError, LedgerUnusableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.views.queries import Host, Unopened


class ReleaseResult(NamedTuple):
    identifier: str
    #: Where it was found; None if it was not.
    endpoint: str | None = None
    #: `lease` or `request`.
    kind: str | None = None
    #: Why it was not ended.
    error: str | None = None
    #: The exit status for that error.
    status: Status = Status.FAILED

    @property
    def is_done(self) -> bool:
        return self.error is None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "released": self.is_done,
            "endpoint": self.endpoint,
            "kind": self.kind,
            "error": self.error,
        }

    def __str__(self) -> str:
        if self.error is not None:
            return f"gpu-pool: {self.error}"
        return f"{self.kind} {self.identifier} is {'released' if self.kind == 'lease' else 'taken out of the queue'}"


def release_all(endpoints: Sequence[str], identifiers: Sequence[str]) -> list[ReleaseResult]:
    async def release() -> list[ReleaseResult]:
        async with open_hosts(endpoints) as hosts:
            return [await _release(hosts, identifier) for identifier in identifiers]

    return asyncio.run(release())


async def _release(hosts: Sequence[Host | Unopened], identifier: str) -> ReleaseResult:
    errors, status = [], Status.FAILED
    for host in hosts:
        endpoint_id = host.endpoint.endpoint_id
        try:
            if await opened(host).end_lease(identifier):
                return ReleaseResult(identifier, endpoint_id, "lease")
            if await opened(host).end_request(identifier):
                return ReleaseResult(identifier, endpoint_id, "request")
        except GPUWorkerPoolError as error:
            errors.append(f"{endpoint_id}: {error}" if len(hosts) > 1 else str(error))
            # It did not answer, or cannot be opened; a refusal is an answer.
            if error.retryable or isinstance(error, LedgerUnusableError):
                status = status_of(error)
    not_found = (
        f"there is no lease and no request {identifier!r}; gpu-pool leases and gpu-pool queue list what there is"
    )
    return ReleaseResult(identifier, error="; ".join(errors) or not_found, status=status)
