"""Leases of a GPU server whose tokens are remembered, so that another `gpu-pool` of the same user can end them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.cli.keys import Tokens, allows_insecure_key
from gpu_worker_pool.cli.views.http_host import HTTPHost
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.lease import LeaseService, StillWaiting

_sessions: list[aiohttp.ClientSession] = []


def server_leases(endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager) -> RememberedLeases:
    api = APIClient(
        endpoint.url,
        _session,
        timeout_seconds=environment.get_endpoint_timeout(),
        api_key=environment.get_api_key(),
        allow_insecure_key=allows_insecure_key(),
    )
    service = HTTPLeaseService(endpoint.endpoint_id, api)
    return RememberedLeases(endpoint, service, Tokens(), Environment().text("GPU_POOL_LEASE_ID"))


class RememberedLeases:
    longest_silence_seconds = math.inf

    def __init__(
        self, endpoint: EndpointConfig, service: LeaseService, tokens: Tokens, inherited_lease_id: str = ""
    ) -> None:
        self.endpoint_id = endpoint.endpoint_id
        self._service = service
        self._endpoint = endpoint
        self._inherited_lease_id = inherited_lease_id
        self._inherited: InheritedLease | None = None
        self._tokens = tokens

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        if (inherited := await self._inherit()) is not None:
            return await inherited.take(request, wait_seconds)
        if self._tokens.of(request.request_id) is None:
            self._tokens.remember(request)
        async with self._forgetting(request):
            answer = await self._service.acquire(request, wait_seconds=wait_seconds, may_reserve=may_reserve)
        if isinstance(answer, HeldLease):
            answer.service = self
        return answer

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        if lease.is_inherited:
            return  # a `gpu-pool` around this one renews it
        async with self._forgetting(lease.request):
            await self._service.renew(lease, timeout_seconds=timeout_seconds)
        self._tokens.refresh(lease.request)

    async def release(self, lease: HeldLease) -> None:
        if not lease.is_inherited:
            async with self._forgetting(lease.request):
                await self._service.release(lease)
            self._tokens.forget(lease.request)

    async def cancel(self, request: Request) -> None:
        async with self._forgetting(request):
            await self._service.cancel(request)
        self._tokens.forget(request)

    @asynccontextmanager
    async def _forgetting(self, request: Request) -> AsyncIterator[None]:
        """Forget the token once the server says that there is nothing left to end."""
        try:
            yield
        except GPUWorkerPoolError as error:
            if not error.retryable:
                self._tokens.forget(request)
            raise

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        await self._service.close()

    async def _inherit(self) -> InheritedLease | None:
        """A program that runs inside a lease has it already, and must not wait for itself."""
        if self._inherited is None and self._inherited_lease_id:
            row = await HTTPHost(self._endpoint, _session()).lease(self._inherited_lease_id)
            # Ids belong to one ledger: a lease without a token of ours is another one with the same id.
            if row is not None and row.state == "held" and self._tokens.of(row.request_id) is not None:
                gpus = [LeasedGPU(*gpu) for gpu in row.gpus]
                self._inherited = InheritedLease(self, row.lease_id, row.fence, gpus)
            self._inherited_lease_id = ""
        return self._inherited


def _session() -> aiohttp.ClientSession:
    """One per process; it ends with the process."""
    if not _sessions:
        _sessions.append(make_session())
    return _sessions[0]
