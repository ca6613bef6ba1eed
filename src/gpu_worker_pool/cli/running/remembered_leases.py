"""Leases of a GPU server whose tokens are remembered, so that another `gpu-pool` of the same user can end them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.api.client import INNER_LEASES, ON_COMMAND_LINE, APIClient
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
        advice=ON_COMMAND_LINE,
    )
    enclosing_tokens: dict[str, str] = {}
    service = HTTPLeaseService(endpoint.endpoint_id, api, enclosing_tokens)
    return RememberedLeases(endpoint, service, Tokens(), Environment().text("GPU_POOL_LEASE_ID"), enclosing_tokens)


class RememberedLeases:
    longest_silence_seconds = math.inf

    def __init__(
        self,
        endpoint: EndpointConfig,
        service: LeaseService,
        tokens: Tokens,
        lease_id_around: str = "",
        enclosing_tokens: dict[str, str] | None = None,
    ) -> None:
        """`lease_id_around`: the lease inside which this program runs, perhaps one of this server.

        If it is, its token is put into `enclosing_tokens`, and `service` sends it with requests inside the lease.
        """
        self.endpoint_id = endpoint.endpoint_id
        self._service = service
        self._endpoint = endpoint
        self._lease_id_around = lease_id_around
        self._enclosing_tokens = {} if enclosing_tokens is None else enclosing_tokens
        self._inherited: InheritedLease | None = None
        self._tokens = tokens

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        await self._look_around()
        if self._inherited is not None:
            return await self._inherited.take(request, wait_seconds)
        for lease_id in self._enclosing_tokens:
            request = replace(request, within=lease_id)
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

    async def _look_around(self) -> None:
        """Find out once whether this program runs inside a lease of this server, which it then divides with others."""
        if self._inherited is not None or not self._lease_id_around:
            return
        host = HTTPHost(self._endpoint, _session())
        row = await host.lease(self._lease_id_around)
        # Ids belong to one ledger: a lease without a token of ours is another one with the same id.
        token = None if row is None or row.state != "held" else self._tokens.of(row.request_id)
        if row is not None and token is not None:
            if INNER_LEASES in (await host.features() or ()):
                self._enclosing_tokens[row.lease_id] = token
            else:  # an older server: all programs inside the lease use it
                gpus = [LeasedGPU(*gpu) for gpu in row.gpus]
                self._inherited = InheritedLease(self, row.lease_id, row.fence, gpus)
        self._lease_id_around = ""


def _session() -> aiohttp.ClientSession:
    """One per process; it ends with the process."""
    if not _sessions:
        _sessions.append(make_session())
    return _sessions[0]
