"""The endpoints of a client: configuration, health and statistics of each GPU server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpu_worker_pool.config import EndpointConfig, parse_endpoint, parse_endpoints
from gpu_worker_pool.core.breaker import Breaker, BreakerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_worker_pool.api.replies import Fetched

#: How much the newest response time counts in the average.
_SMOOTHING = 0.2


@dataclass(eq=False)
class Endpoint:
    """One server as this client knows it. Belongs to the client's event loop."""

    config: EndpointConfig
    breaker: Breaker = field(default_factory=Breaker)
    #: Its last answer, which may be old.
    last_fetched: Fetched | None = None
    last_seen: datetime | None = None
    #: The same on the monotonic clock.
    answered_at: float | None = None
    #: Why the last fetch failed; None if it did not.
    last_error: str | None = None
    #: Whether it counts as down: a fetch and its retries failed, or it refuses to answer.
    is_lost: bool = False
    successes: int = 0
    failures: int = 0
    response_time_ms: float | None = None
    slowest_response_ms: float | None = None
    #: Time in which it was healthy, and time in which it was watched.
    _up_seconds: float = 0.0
    _known_seconds: float = 0.0
    _counted_until: float | None = None

    @property
    def endpoint_id(self) -> str:
        return self.config.endpoint_id

    @property
    def is_healthy(self) -> bool:
        """Whether it has answered, and has not been lost since."""
        return self.last_fetched is not None and not self.is_lost

    def answered(self, fetched: Fetched) -> None:
        self._count_time()
        self.last_fetched = fetched
        self.last_seen = datetime.now()
        self.answered_at = time.monotonic()
        self.last_error = None
        self.is_lost = False
        self.successes += 1
        took_ms = fetched.took_seconds * 1000
        known = self.response_time_ms
        self.response_time_ms = took_ms if known is None else known + _SMOOTHING * (took_ms - known)
        self.slowest_response_ms = max(took_ms, self.slowest_response_ms or 0.0)

    def failed(self, error: Exception) -> None:
        self._count_time()
        self.last_error = str(error)
        self.failures += 1

    def moved_to(self, url: str) -> None:
        self.config = replace(self.config, url=url)

    def lost(self) -> None:
        self._count_time()
        self.is_lost = True

    def _count_time(self) -> None:
        now = time.monotonic()
        if self._counted_until is not None:
            self._known_seconds += now - self._counted_until
            if self.is_healthy:
                self._up_seconds += now - self._counted_until
        self._counted_until = now

    def metrics(self) -> dict[str, Any]:
        self._count_time()
        fetches = self.successes + self.failures
        return {
            "success_rate": self.successes / fetches if fetches else None,
            "successes": self.successes,
            "failures": self.failures,
            "response_time_ms": self.response_time_ms,
            "slowest_response_ms": self.slowest_response_ms,
            "availability": self._up_seconds / self._known_seconds if self._known_seconds else None,
            "last_error": self.last_error,
        }

    def breaker_stats(self, now: float) -> dict[str, Any]:
        retry_at = self.breaker.retry_at
        return {
            "state": self.breaker.state(now).value,
            "failure_count": self.breaker.failures,
            "times_opened": self.breaker.times_opened,
            "retry_in_seconds": None if retry_at is None else max(retry_at - now, 0.0),
        }

    def error_text(self) -> str:
        """For an error about an endpoint that does not answer: its name, URL and last error."""
        return f"{self.endpoint_id} ({self.config.url}): {self.last_error or 'has not answered yet'}"


class EndpointManager:
    """All endpoints of a client, in the order in which they were given."""

    def __init__(self, configs: Iterable[EndpointConfig]) -> None:
        self._endpoints = {config.endpoint_id: Endpoint(config) for config in configs}

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def __len__(self) -> int:
        return len(self._endpoints)

    def get(self, endpoint_id: str) -> Endpoint | None:
        return self._endpoints.get(endpoint_id)

    def id_of(self, name: str) -> str | None:
        """The id of the one endpoint with this id, URL or host name; None if there is none, or more than one."""
        if name in self._endpoints:
            return name
        wanted = name.strip().rstrip("/").lower()
        found = []
        for endpoint in self:
            url = urlsplit(endpoint.config.url)
            if wanted in (endpoint.config.url.rstrip("/").lower(), url.netloc.lower(), url.hostname):
                found.append(endpoint.endpoint_id)
        return found[0] if len(found) == 1 else None

    def add(self, entry: str) -> Endpoint:
        """`URL` or `name=URL`; a `ValueError` if the client already has it."""
        known = [f"{endpoint.endpoint_id}={endpoint.config.url}" for endpoint in self]
        # Parsed together, so that duplicate ids and URLs are treated as in a list given at the start.
        if len(parse_endpoints([*known, entry])) == len(known):
            raise ValueError(f"{parse_endpoint(entry).url} is an endpoint of this client already")
        config = parse_endpoints([*known, entry])[-1]
        endpoint = self._endpoints[config.endpoint_id] = Endpoint(config)
        return endpoint

    def remove(self, endpoint_id: str) -> Endpoint:
        return self._endpoints.pop(endpoint_id)

    @property
    def healthy(self) -> list[str]:
        return [endpoint.endpoint_id for endpoint in self if endpoint.is_healthy]

    @property
    def degraded(self) -> list[str]:
        return [endpoint.endpoint_id for endpoint in self if not endpoint.is_healthy]

    def recovery_status(self, now: float, queued_requests: int) -> dict[str, Any]:
        """The documented answer of `get_error_recovery_status`."""
        healthy, degraded = self.healthy, self.degraded
        status = "full" if not healthy else "partial" if degraded else "none"
        recovering = [endpoint for endpoint in self if not endpoint.is_healthy]
        return {
            "degradation_manager": {
                "status": status,
                "healthy_endpoints": healthy,
                "degraded_endpoints": degraded,
                "total_endpoints": len(self),
            },
            "recovery_orchestrator": {
                "recovering_endpoints": [
                    {
                        "endpoint_id": endpoint.endpoint_id,
                        "failed_attempts": endpoint.breaker.failures,
                        "next_attempt_in_seconds": endpoint.breaker_stats(now)["retry_in_seconds"],
                        "last_error": endpoint.last_error,
                    }
                    for endpoint in recovering
                ],
                "queued_requests": queued_requests,
            },
            "circuit_breaker_stats": {endpoint.endpoint_id: endpoint.breaker_stats(now) for endpoint in self},
            "endpoint_health_summary": {
                "total_endpoints": len(self),
                "healthy_endpoints": len(healthy),
                "degraded_endpoints": len(degraded),
                "open_breakers": sum(endpoint.breaker.state(now) is not BreakerState.CLOSED for endpoint in self),
                "health_percentage": 100.0 * len(healthy) / len(self) if len(self) else 0.0,
            },
        }
