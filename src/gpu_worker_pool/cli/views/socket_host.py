"""This host's GPU server, reached over its Unix socket, as a `Host` of the views: the kernel tells it who asks."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.api.unix_socket import SOCKET_URL
from gpu_worker_pool.cli.keys import admin_key
from gpu_worker_pool.cli.views.http_host import TIMEOUT_SECONDS, ServerHost
from gpu_worker_pool.hardware.leasable import within_visible
from gpu_worker_pool.hardware.visibility import VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from gpu_worker_pool.cli.views.queries import Body
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.core.requirements import Requirements


@asynccontextmanager
async def open_socket_host(endpoint: EndpointConfig, path: str) -> AsyncIterator[SocketHost]:
    async with make_session(unix_socket=path) as session:
        yield SocketHost(endpoint, session)


class SocketHost(ServerHost):
    def __init__(self, endpoint: EndpointConfig, session: aiohttp.ClientSession) -> None:
        super().__init__(
            SOCKET_URL,
            lambda: session,
            timeout_seconds=TIMEOUT_SECONDS,
            api_key=admin_key(),
            is_admin_key=True,
            allow_insecure_key=True,  # it does not leave this host
        )
        self.endpoint = endpoint

    async def explain_requirements(self, requirements: Requirements) -> Body:
        # Inside a lease that variable says what was leased.
        visible = None if os.environ.get("GPU_POOL_LEASE_ID") else os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            requirements = within_visible(requirements, await self.devices(), VisibilityFilter(visible))
        return await super().explain_requirements(requirements)
