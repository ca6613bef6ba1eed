"""A GPU server as a `Host` of the views: the API client, with this user's keys and lease tokens."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.client import ON_COMMAND_LINE, APIClient
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.cli.keys import admin_key
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.errors import NotYourLeaseError, UnknownLeaseError
from gpu_worker_pool.leases.tokens import Tokens, allows_insecure_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import aiohttp

    from gpu_worker_pool.config import EndpointConfig

TIMEOUT_SECONDS: Final = 5.0


@asynccontextmanager
async def open_http_host(endpoint: EndpointConfig) -> AsyncIterator[HTTPHost]:
    async with make_session() as session:
        yield HTTPHost(endpoint, session)


class ServerHost(APIClient):
    """The views of a server, over TCP or its Unix socket."""

    endpoint: EndpointConfig

    def token_of(self, request_id: str) -> str | None:  # noqa: ARG002  # the server knows by itself who asks
        """The headers that prove that a request is this user's."""
        return None

    async def end_lease(self, lease_id: str) -> bool:
        row = await self._row(lease_id)
        if row is None:
            return False
        try:
            await self.release(lease_id, self.token_of(row["request_id"] or ""))
        except UnknownLeaseError:
            return False
        return True

    async def ask_holder(self, lease_id: str, reason: str | None) -> bool:
        try:
            await self.ask_to_leave(lease_id, reason)
        except UnknownLeaseError:
            return False
        return True

    async def keep_lease(self, lease_id: str) -> bool:
        row = await self._row(lease_id)
        if row is None:
            return False
        token = self.token_of(row["request_id"] or "")
        try:
            await self.renew(lease_id, token, timeout_seconds=TIMEOUT_SECONDS, is_busy=True)
        except UnknownLeaseError:
            return False
        return True

    async def end_request(self, request_id: str) -> bool:
        return await self.cancel(request_id, self.token_of(request_id))

    async def _row(self, lease_id: str) -> dict[str, Any] | None:
        return next((row for row in (await self.leases())["leases"] if row["lease_id"] == lease_id), None)


class HTTPHost(ServerHost):
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

    def token_of(self, request_id: str) -> str | None:
        return Tokens().of(request_id)

    async def end_lease(self, lease_id: str) -> bool:
        with _explained(f"lease {lease_id}"):
            return await super().end_lease(lease_id)

    async def keep_lease(self, lease_id: str) -> bool:
        with _explained(f"lease {lease_id}"):
            return await super().keep_lease(lease_id)

    async def end_request(self, request_id: str) -> bool:
        with _explained(f"request {request_id}"):
            return await super().end_request(request_id)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Adds who may do it, where the server only says that this user may not."""
    try:
        yield
    except NotYourLeaseError:
        raise NotYourLeaseError(
            f"{what} was not requested by you with gpu-pool on this host: its holder can release it, or an "
            "administrator, with one of the server's GPU_POOL_ADMIN_KEYS in GPU_POOL_ADMIN_KEY"
        ) from None
