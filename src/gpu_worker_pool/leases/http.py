"""The leases of one GPU server, over its HTTP API, as a `LeaseService`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.api.client import holder_body, requirements_body
from gpu_worker_pool.api.decoder import QueuePosition
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.api.client import APIClient
    from gpu_worker_pool.core.events import Request


class HTTPLeaseService:
    """A request's `owner` is the token that renewing, releasing and cancelling need."""

    longest_silence_seconds = math.inf

    def __init__(self, endpoint_id: str, api: APIClient, enclosing_tokens: Mapping[str, str] | None = None) -> None:
        """`enclosing_tokens`: by lease id, the tokens of leases that requests run inside of."""
        self.endpoint_id = endpoint_id
        self._api = api
        self._enclosing_tokens = {} if enclosing_tokens is None else enclosing_tokens

    def __repr__(self) -> str:
        return f"<HTTPLeaseService {self.endpoint_id} {self._api.url}>"

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        sent_at = boot_time()
        found = await self._api.acquire(
            self._body_of(request), request.owner, wait_seconds=wait_seconds, may_reserve=may_reserve
        )
        if isinstance(found, QueuePosition):
            return StillWaiting(*found)
        gpus = tuple(LeasedGPU(*gpu) for gpu in found.gpus)
        return HeldLease(self, request, found.lease_id, found.fence, gpus, sent_at, within=request.within)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        await self._api.renew(lease.lease_id, lease.request.owner, timeout_seconds=timeout_seconds)

    async def release(self, lease: HeldLease) -> None:
        await self._api.release(lease.lease_id, lease.request.owner)

    async def cancel(self, request: Request) -> None:
        await self._api.cancel(request.request_id, request.owner)

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _body_of(self, request: Request) -> dict[str, Any]:
        """The request: the same every time it is sent."""
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "worker_id": request.worker_id,
            "ttl_seconds": request.ttl_seconds,
        }
        body |= requirements_body(request.requirements)
        if request.label is not None:
            body["label"] = request.label
        if request.origin is not None:
            body["holder"] = holder_body(request.origin)
        if request.within is not None:
            token = self._enclosing_tokens.get(request.within)
            body["within"] = {"lease_id": request.within} | ({} if token is None else {"token": token})
        return body
