"""Leases of GPU servers, as one `gpu-pool` asks for them: another one of the same user may end what it has begun."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.keys import Tokens, allows_insecure_key
from gpu_worker_pool.cli.running.values import Held, HeldGPU, Waiting
from gpu_worker_pool.cli.showing.http_host import HTTPHost
from gpu_worker_pool.clocks import awake_or_not
from gpu_worker_pool.http_client import make_session
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.suitable import check_suitable
from gpu_worker_pool.leases.values import HeldLease, LeaseAsk

if TYPE_CHECKING:
    import aiohttp

    from gpu_worker_pool.cli.running.values import Ask
    from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
    from gpu_worker_pool.leases.values import LeaseService

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
    """The client's own way to leases of a server, in this package's few words."""

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
        self._kept: Ask | None = None
        #: By lease id, as the client knows them.
        self._leases: dict[str, HeldLease] = {}

    async def acquire(self, ask: Ask, *, wait_seconds: float, may_keep: bool) -> Held | Waiting:
        if self._inherited_lease_id and (inherited := await self._inherited(ask)) is not None:
            return inherited
        if self._kept != ask:
            self.forget()
            self._kept = ask
            self._tokens.keep(ask)
        sent_at = awake_or_not()
        answer = await self._service.acquire(_as_client_asks(ask), wait_seconds=wait_seconds, may_keep=may_keep)
        if not isinstance(answer, HeldLease):
            return Waiting(answer.position, answer.reasons)
        self._leases[answer.lease_id] = answer
        gpus = tuple(HeldGPU(gpu.index, gpu.uuid, gpu.name) for gpu in answer.gpus)
        return Held(self.endpoint_id, answer.lease_id, gpus, ask, sent_at)

    async def rest(self) -> None:
        pass

    async def renew(self, lease: Held, *, timeout_seconds: float) -> None:
        await self._service.renew(self._leases[lease.lease_id], timeout_seconds=timeout_seconds)
        self._tokens.refresh(lease.ask)

    async def release(self, lease: Held) -> None:
        await self._service.release(self._leases[lease.lease_id])

    async def cancel(self, ask: Ask) -> None:
        await self._service.cancel(_as_client_asks(ask))

    def forget(self) -> None:
        if self._kept is not None:
            self._tokens.forget(self._kept)
            self._kept = None

    async def _inherited(self, ask: Ask) -> Held | None:
        """Whoever runs inside a lease has it already, and must not wait for itself."""
        rows = (await HTTPHost(self._endpoint, _session()).leases())["leases"]
        row = next((row for row in rows if row.get("lease_id") == self._inherited_lease_id), None)
        # Ids are those of one ledger: what we have no secret of is somebody else's, of the same name.
        if row is None or row.get("state") != "held" or self._tokens.of(str(row.get("request_id"))) is None:
            self._inherited_lease_id = ""
            return None
        every = [HeldGPU(int(gpu["gpu_id"]), gpu["uuid"], str(gpu["name"])) for gpu in row["gpus"]]
        gpus = tuple(check_suitable(self._inherited_lease_id, every, ask.wishes)[: ask.wishes.count])
        return Held(self.endpoint_id, self._inherited_lease_id, gpus, ask, awake_or_not(), is_inherited=True)


def _as_client_asks(ask: Ask) -> LeaseAsk:
    return LeaseAsk(
        request_id=ask.request_id,
        token=ask.token,
        worker_id=ask.worker_id,
        wishes=ask.wishes,
        label=ask.label,
        ttl_seconds=ask.ttl_seconds,
    )


def _session() -> aiohttp.ClientSession:
    """The one of this process; its end closes it."""
    if not _sessions:
        _sessions.append(make_session())
    return _sessions[0]
