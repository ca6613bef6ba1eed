"""Leases of GPU servers, as one `gpu-pool` asks for them: another one of the same user may end what it has begun."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.api.http_client import make_session
from gpu_worker_pool.cli.keys import Tokens, allows_insecure_key
from gpu_worker_pool.cli.views.http_host import HTTPHost
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.suitable import check_suitable
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU

if TYPE_CHECKING:
    import aiohttp

    from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
    from gpu_worker_pool.leases.values import LeaseAsk, LeaseService, StillWaiting

_sessions: list[aiohttp.ClientSession] = []


def http_leases(endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager) -> HTTPLeases:
    service = HTTPLeaseService(
        endpoint.endpoint_id,
        endpoint.url,
        _session,
        timeout_seconds=environment.get_endpoint_timeout(),
        api_key=environment.get_api_key(),
        allow_insecure_key=allows_insecure_key(),
    )
    return HTTPLeases(endpoint, service, Tokens(), os.environ.get("GPU_POOL_LEASE_ID", "").strip())


class HTTPLeases:
    """The client's own way to leases of a server, and beside it the secrets that another `gpu-pool` may need."""

    longest_silence_seconds = math.inf

    def __init__(
        self, endpoint: EndpointConfig, service: LeaseService, tokens: Tokens, inherited_lease_id: str = ""
    ) -> None:
        self.endpoint_id = endpoint.endpoint_id
        self._service = service
        self._endpoint = endpoint
        self._inherited_lease_id = inherited_lease_id
        self._tokens = tokens
        #: The one request whose token is kept; an earlier one has ended.
        self._kept: LeaseAsk | None = None

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        if self._inherited_lease_id and (inherited := await self._inherited(ask)) is not None:
            return inherited
        if self._kept != ask:
            self.forget()
            self._kept = ask
            self._tokens.keep(ask)
        return await self._service.acquire(ask, wait_seconds=wait_seconds, may_reserve=may_reserve)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        await self._service.renew(lease, timeout_seconds=timeout_seconds)
        self._tokens.refresh(lease.ask)

    async def release(self, lease: HeldLease) -> None:
        await self._service.release(lease)

    async def cancel(self, ask: LeaseAsk) -> None:
        await self._service.cancel(ask)

    async def close(self) -> None:
        await self._service.close()

    async def rest(self) -> None:
        pass

    def forget(self) -> None:
        if self._kept is not None:
            self._tokens.forget(self._kept)
            self._kept = None

    async def _inherited(self, ask: LeaseAsk) -> HeldLease | None:
        """Whoever runs inside a lease has it already, and must not wait for itself."""
        row = await HTTPHost(self._endpoint, _session()).lease(self._inherited_lease_id)
        # Ids are those of one ledger: what we have no secret of is somebody else's, of the same name.
        if row is None or row.state != "held" or self._tokens.of(row.request_id) is None:
            self._inherited_lease_id = ""
            return None
        leased = tuple(LeasedGPU(*gpu) for gpu in row.gpus)
        gpus = tuple(check_suitable(row.lease_id, leased, ask.requirements)[: ask.requirements.count])
        life = LeaseLife(ask.ttl_seconds, boot_time())
        return HeldLease(self.endpoint_id, row.lease_id, row.fence, gpus, ask, life, is_inherited=True)


def _session() -> aiohttp.ClientSession:
    """The one of this process; its end closes it."""
    if not _sessions:
        _sessions.append(make_session())
    return _sessions[0]
