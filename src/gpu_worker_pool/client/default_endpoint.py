"""Without configuration, a client tries two defaults on this host: its documented port, then the server's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.errors import NetworkRetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.api.replies import Fetched

logger: logging.Logger = logging.getLogger("gpu_worker_pool.default_endpoint")

#: The documents disagree: the client's default is port 8080, the server's is 8000.
SERVER_DEFAULT = EndpointConfig("localhost_8000", "http://localhost:8000")


class StatsClientWithURL(Protocol):
    @property
    def url(self) -> str: ...

    async def fetch(self) -> Fetched: ...


class FirstThatAnswers:
    """Tries one client after the other until one gets an answer, then uses only that one; `chosen` gets its URL."""

    def __init__(self, clients: Sequence[StatsClientWithURL], chosen: Callable[[str], object]) -> None:
        self._clients = tuple(clients)
        self._chosen = chosen

    async def fetch(self) -> Fetched:
        errors: list[NetworkRetryableError] = []
        for client in self._clients:
            try:
                fetched = await client.fetch()
            except NetworkRetryableError as error:
                errors.append(error)
                continue
            if errors:
                logger.warning("no endpoint is configured, and the default does not answer: using %s", client.url)
            if len(self._clients) > 1:
                self._clients = (client,)
                self._chosen(client.url)
            return fetched
        raise errors[0] if len(errors) == 1 else NetworkRetryableError("; ".join(map(str, errors)))
