"""Leases of a GPU server whose tokens are remembered, so that `gpu-pool release` of the same user can end them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.replies import INNER_LEASES
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU
from gpu_worker_pool.leases.tokens import Tokens, allows_insecure_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import aiohttp

    from gpu_worker_pool.api.client import KeyAdvice
    from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.lease import LeaseService, StillWaiting, YieldNotice


class _Connections:
    """Opened with the first request."""

    def __init__(self) -> None:
        self._opened: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = make_session()
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


def server_leases(
    endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager, advice: KeyAdvice
) -> RememberedLeases:
    connections = _Connections()
    api = APIClient(
        endpoint.url,
        connections.session,
        timeout_seconds=environment.get_endpoint_timeout(),
        api_key=environment.get_api_key(),
        allow_insecure_key=allows_insecure_key(),
        advice=advice,
    )
    enclosing_tokens: dict[str, str] = {}
    # These leases are for processes of this host, so they must have GPUs of this host.
    service = HTTPLeaseService(endpoint.endpoint_id, api, enclosing_tokens, is_bound_to_host=True)
    return RememberedLeases(
        endpoint.endpoint_id,
        service,
        api,
        Tokens(),
        Environment().text("GPU_POOL_LEASE_ID"),
        enclosing_tokens,
        connections.close,
    )


class RememberedLeases:
    longest_silence_seconds: float = math.inf

    def __init__(
        self,
        endpoint_id: str,
        service: LeaseService,
        api: APIClient,
        tokens: Tokens,
        lease_id_around: str = "",
        enclosing_tokens: dict[str, str] | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`lease_id_around`: the lease inside which this program runs, perhaps one of this server.

        If it is, its token is put into `enclosing_tokens`, and `service` sends it with requests inside the lease.
        """
        self.endpoint_id = endpoint_id
        self._service = service
        self._api = api
        self._lease_id_around = lease_id_around
        self._enclosing_tokens = {} if enclosing_tokens is None else enclosing_tokens
        self._inherited: InheritedLease | None = None
        self._tokens = tokens
        self._close = service.close if close is None else close

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

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        if lease.is_inherited:
            return None  # a `gpu-pool` around this one renews it
        async with self._forgetting(lease.request):
            notice = await self._service.renew(lease, timeout_seconds=timeout_seconds)
        self._tokens.refresh(lease.request)
        return notice

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

    async def has_waiting(self) -> bool:
        return await self._service.has_waiting()

    async def rest(self) -> None:
        pass

    async def close(self) -> None:
        await self._close()

    async def _look_around(self) -> None:
        """Find out once whether this program runs inside a lease of this server, which it then divides with others."""
        if self._inherited is not None or not self._lease_id_around:
            return
        row = await self._api.lease(self._lease_id_around)
        # Ids belong to one ledger: a lease without a token of ours is another one with the same id.
        token = None if row is None or row.state != "held" else self._tokens.of(row.request_id)
        if row is not None and token is not None:
            if INNER_LEASES in (await self._api.features() or ()):
                self._enclosing_tokens[row.lease_id] = token
            else:  # an older server: all programs inside the lease use it
                gpus = [LeasedGPU(*gpu) for gpu in row.gpus]
                self._inherited = InheritedLease(self, row.lease_id, row.fence, gpus)
        self._lease_id_around = ""
