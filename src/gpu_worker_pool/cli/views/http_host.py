"""A GPU server as a `Host` of the views: the API client, with this user's keys and lease tokens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.api.client import ON_COMMAND_LINE, APIClient
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.cli.keys import Tokens, admin_key, allows_insecure_key
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.errors import NotYourLeaseError, UnknownLeaseError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from gpu_worker_pool.config import EndpointConfig

TIMEOUT_SECONDS: Final = 5.0


@asynccontextmanager
async def open_http_host(endpoint: EndpointConfig) -> AsyncIterator[HTTPHost]:
    async with make_session() as session:
        yield HTTPHost(endpoint, session)


class HTTPHost(APIClient):
    def __init__(self, endpoint: EndpointConfig, session: aiohttp.ClientSession) -> None:
        admin = admin_key()
        super().__init__(
            endpoint.url,
            lambda: session,
            timeout_seconds=TIMEOUT_SECONDS,
            api_key=admin or MultiEndpointConfigurationManager().get_api_key(),
            is_admin_key=admin is not None,
            allow_insecure_key=allows_insecure_key(),
            advice=ON_COMMAND_LINE,
        )
        self.endpoint = endpoint

    async def end_lease(self, lease_id: str) -> bool:
        row = next((row for row in (await self.leases())["leases"] if row["lease_id"] == lease_id), None)
        if row is None:
            return False
        try:
            await self.release(lease_id, Tokens().of(row["request_id"] or ""))
        except UnknownLeaseError:
            return False
        except NotYourLeaseError:
            raise _not_yours(f"lease {lease_id}") from None
        return True

    async def end_request(self, request_id: str) -> bool:
        try:
            return await self.cancel(request_id, Tokens().of(request_id))
        except NotYourLeaseError:
            raise _not_yours(f"request {request_id}") from None


def _not_yours(what: str) -> NotYourLeaseError:
    return NotYourLeaseError(
        f"{what} was not requested by you with gpu-pool on this host: its holder can release it, or an administrator, "
        "with one of the server's GPU_POOL_ADMIN_KEYS in GPU_POOL_ADMIN_KEY"
    )
