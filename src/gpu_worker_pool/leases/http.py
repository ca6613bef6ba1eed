"""The leases of one GPU server, over its HTTP API, as a `LeaseService`."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.api.client import holder_body, requirements_body
from gpu_worker_pool.api.lease_decoder import QueuePosition
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import GPUWorkerPoolError, RetryableError
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting, YieldNotice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpu_worker_pool.api.client import APIClient
    from gpu_worker_pool.core.events import Request


class HTTPLeaseService:
    """A request's `owner` is the token that renewing, releasing and cancelling need."""

    longest_silence_seconds: float = math.inf

    def __init__(
        self,
        endpoint_id: str,
        api: APIClient,
        enclosing_tokens: Mapping[str, str] | None = None,
        *,
        is_bound_to_host: bool = False,
    ) -> None:
        """`enclosing_tokens`: by lease id, the tokens of leases that requests run inside of.

        `is_bound_to_host`: where the server is in a fleet, requests are for GPUs of its host alone.
        """
        self.endpoint_id = endpoint_id
        #: The servers of one fleet, all equivalent: the first is asked, and moves to the end if it does not answer.
        self._servers = [api]
        self._is_bound_to_host = is_bound_to_host
        self._enclosing_tokens = {} if enclosing_tokens is None else enclosing_tokens

    def __repr__(self) -> str:
        return f"<HTTPLeaseService {self.endpoint_id} {self._api.url}>"

    @property
    def _api(self) -> APIClient:
        return self._servers[0]

    def add(self, api: APIClient) -> None:
        """Another server of the same fleet."""
        self._servers.append(api)

    @contextmanager
    def _asking(self) -> Iterator[APIClient]:
        """The server to ask; if it is silent, the next call asks the next one."""
        api = self._api
        try:
            yield api
        except RetryableError:
            if len(self._servers) > 1 and self._servers[0] is api:
                self._servers.append(self._servers.pop(0))
            raise

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        sent_at = boot_time()
        with self._asking() as api:
            found = await api.acquire(
                self._body_of(request), request.owner, wait_seconds=wait_seconds, may_reserve=may_reserve
            )
        if isinstance(found, QueuePosition):
            return StillWaiting(*found)
        # The answer was made this long after the request was sent, at least; how long it was on its way does not count.
        certain_at = sent_at + min(found.waited_seconds or 0.0, boot_time() - sent_at)
        if found.expires_in_seconds is not None and request.ttl_seconds is not None:
            certain_at -= max(request.ttl_seconds - found.expires_in_seconds, 0.0)
        # Of another host the server does not know them; UUIDs of simulated GPUs are the same on every host.
        is_of_the_server = self._is_bound_to_host or not found.host
        totals = await self._memory_totals() if request.requirements.share and is_of_the_server else {}
        gpus = tuple(LeasedGPU(*gpu, totals.get(gpu[1])) for gpu in found.gpus)
        ends_at = None if found.ends_in_seconds is None else sent_at + found.ends_in_seconds
        return HeldLease(
            self,
            request,
            found.lease_id,
            found.fence,
            gpus,
            certain_at,
            within=request.within,
            ends_at=ends_at,
            host=found.host,
        )

    async def _memory_totals(self) -> dict[str | None, float | None]:
        """By UUID; the row of a lease does not have them."""
        try:
            return {gpu.uuid: gpu.memory_total_mb for gpu in (await self._api.summary()).stats.gpus_summary}
        except GPUWorkerPoolError:
            return {}

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        with self._asking() as api:
            found = await api.renew(lease.lease_id, lease.request.owner, timeout_seconds=timeout_seconds)
        if found is None or found.yield_reason is None:
            return None
        return YieldNotice(found.yield_reason, found.leave_in_seconds)

    async def release(self, lease: HeldLease) -> None:
        with self._asking() as api:
            await api.release(lease.lease_id, lease.request.owner)

    async def cancel(self, request: Request) -> None:
        with self._asking() as api:
            await api.cancel(request.request_id, request.owner)

    async def has_waiting(self) -> bool:
        return bool((await self._api.queue())["queue"])

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
        if request.expected_seconds is not None:
            body["expected_seconds"] = request.expected_seconds
        if request.max_seconds is not None:
            body["max_seconds"] = request.max_seconds
        if self._is_bound_to_host:
            body["on_this_host"] = True
        if request.asks:
            body["ask"] = True
        if request.label is not None:
            body["label"] = request.label
        if request.origin is not None:
            body["holder"] = holder_body(request.origin)
        if request.within is not None:
            token = self._enclosing_tokens.get(request.within)
            body["within"] = {"lease_id": request.within} | ({} if token is None else {"token": token})
        return body
