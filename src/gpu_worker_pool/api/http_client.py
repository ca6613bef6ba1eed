"""The documented clients of GPU statistics: one of an endpoint, and one for several endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.replies import Fetched
from gpu_worker_pool.api.transport import make_session

if TYPE_CHECKING:
    import aiohttp

    from gpu_worker_pool.config import EndpointConfig

__all__ = ["AsyncGPUStatsHTTPClient", "Fetched", "MultiEndpointHTTPClientPool", "make_session"]


class AsyncGPUStatsHTTPClient(APIClient):
    """Fetches the statistics of one endpoint; `session` is shared with others and not closed here."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, timeout_seconds: float) -> None:
        super().__init__(url, lambda: session, timeout_seconds=timeout_seconds)

    async def fetch(self) -> Fetched:
        return await self.summary()


class MultiEndpointHTTPClientPool:
    """A client for each endpoint, over one session that is closed with it."""

    def __init__(self, *, timeout_seconds: float, session: aiohttp.ClientSession | None = None) -> None:
        self.session: aiohttp.ClientSession = make_session() if session is None else session
        self._timeout_seconds = timeout_seconds

    def client_for(self, endpoint: EndpointConfig) -> AsyncGPUStatsHTTPClient:
        return AsyncGPUStatsHTTPClient(endpoint.url, self.session, timeout_seconds=self._timeout_seconds)

    async def close(self) -> None:
        await self.session.close()
