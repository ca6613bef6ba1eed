"""The leases of one GPU server, over its HTTP API, as a `LeaseService`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.api.client import APIClient, requirements_body
from gpu_worker_pool.api.decoder import QueuePosition
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU, StillWaiting

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from gpu_worker_pool.leases.values import LeaseAsk


class HTTPLeaseService:
    """`session` returns the session of the event loop in use, which is shared with others and not closed here."""

    def __init__(
        self,
        endpoint_id: str,
        url: str,
        session: Callable[[], aiohttp.ClientSession],
        *,
        timeout_seconds: float,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        now: Callable[[], float] = boot_time,
    ) -> None:
        self.endpoint_id = endpoint_id
        self._api = APIClient(
            url, session, timeout_seconds=timeout_seconds, api_key=api_key, allow_insecure_key=allow_insecure_key
        )
        self._now = now

    def __repr__(self) -> str:
        return f"<HTTPLeaseService {self.endpoint_id} {self._api.url}>"

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        sent_at = self._now()
        found = await self._api.acquire(_body_of(ask), ask.token, wait_seconds=wait_seconds, may_reserve=may_reserve)
        if isinstance(found, QueuePosition):
            return StillWaiting(*found)
        gpus = tuple(LeasedGPU(*gpu) for gpu in found.gpus)
        life = LeaseLife(ask.ttl_seconds, sent_at, self._now)
        return HeldLease(self.endpoint_id, found.lease_id, found.fence, gpus, ask, life)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        await self._api.renew(lease.lease_id, lease.ask.token, timeout_seconds=timeout_seconds)

    async def release(self, lease: HeldLease) -> None:
        await self._api.release(lease.lease_id, lease.ask.token)

    async def cancel(self, ask: LeaseAsk) -> None:
        await self._api.cancel(ask.request_id, ask.token)

    async def close(self) -> None:
        pass


def _body_of(ask: LeaseAsk) -> dict[str, Any]:
    """The request: the same every time it is sent."""
    body = {"request_id": ask.request_id, "worker_id": ask.worker_id, "ttl_seconds": ask.ttl_seconds}
    return body | requirements_body(ask.requirements) | ({} if ask.label is None else {"label": ask.label})
