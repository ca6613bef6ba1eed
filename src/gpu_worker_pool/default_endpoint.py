"""Where nothing is configured: the client's documented default is tried, then the server's, on this host."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.errors import NetworkRetryableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.http_client import AsyncGPUStatsHTTPClient, Fetched

logger = logging.getLogger(__name__)

#: Documents disagree: a client looks at port 8080, and a server listens on 8000.
SERVER_DEFAULT = EndpointConfig("localhost_8000", "http://localhost:8000")


class FirstThatAnswers:
    """Asks one after the other until one answers, and from then on only that one."""

    def __init__(self, clients: Sequence[AsyncGPUStatsHTTPClient]) -> None:
        self._clients = tuple(clients)

    async def fetch(self) -> Fetched:
        *others, last = self._clients
        for client in others:
            try:
                fetched = await client.fetch()
            except NetworkRetryableError as error:
                logger.debug("%s", error)
            else:
                self._clients = (client,)
                return fetched
        fetched = await last.fetch()
        if others:
            logger.warning("nothing is configured, and nothing answers at %s: using %s", others[0].url, last.url)
            self._clients = (last,)
        return fetched
