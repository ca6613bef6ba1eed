"""GPU servers, as a doctor looks at them: do they answer, are they well, do they give leases, is their clock right."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_worker_pool.cli.checking.findings import Finding
from gpu_worker_pool.cli.endpoints import is_local
from gpu_worker_pool.config import is_loopback_url
from gpu_worker_pool.errors import GPUWorkerPoolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import aiohttp

    from gpu_worker_pool.config import EndpointConfig

ENDPOINT_SECONDS: Final = 5.0
#: A clock that is further off makes times in logs hard to compare; leases do not depend on it.
CLOCK_SECONDS: Final = 5.0


async def look_at_servers(endpoints: Sequence[EndpointConfig]) -> list[Finding]:
    servers = [endpoint for endpoint in endpoints if not is_local(endpoint)]
    if not servers:
        return [Finding("ok", "endpoints", "local://: this host without a server")]
    from gpu_worker_pool.api.http_client import make_session

    async with make_session() as session:
        found = await asyncio.gather(*(_server(session, endpoint) for endpoint in servers))
    return [finding for findings in found for finding in findings]


async def _server(session: aiohttp.ClientSession, endpoint: EndpointConfig) -> list[Finding]:
    from gpu_worker_pool.api.http_client import exchange, status_error, under
    from gpu_worker_pool.api.replies import parse_json

    name, url = endpoint.endpoint_id, under(endpoint.url, "/")
    try:
        sent_at = time.time()
        home = await exchange(session, "GET", url, timeout_seconds=ENDPOINT_SECONDS)
        took_seconds = time.time() - sent_at
        if home.status != 200:
            raise status_error("GET", url, home, "is this a GPU server?")
        health = await exchange(session, "GET", under(endpoint.url, "/health"), timeout_seconds=ENDPOINT_SECONDS)
        said, told = parse_json(home.body or b""), parse_json(health.body or b"")
    except GPUWorkerPoolError as error:
        return [Finding("wrong", name, str(error), f"on that host: gpu-pool serve; from here: curl {endpoint.url}/")]
    if not (isinstance(said, dict) and isinstance(told, dict)):
        return [Finding("wrong", name, f"{endpoint.url} is no GPU server", "is the URL, with its path, the right one?")]
    findings = [_health_of(name, told)]
    if "leases" not in (said.get("features") or ()):
        advice = "update it" if is_loopback_url(endpoint.url) else "set GPU_POOL_API_KEYS there, GPU_POOL_API_KEY here"
        findings.append(Finding("wrong", name, "it gives no leases to this host", advice))
    findings += _clock(name, home.headers.get("Date"), sent_at, took_seconds)
    return findings


def _health_of(name: str, told: dict[str, Any]) -> Finding:
    status = told.get("status")
    if status == "healthy":
        return Finding("ok", name, f"{told.get('gpu_count')} GPUs, read by {told.get('backend')}")
    worse: Literal["warning", "wrong"] = "warning" if status == "degraded" else "wrong"
    return Finding(worse, name, f"{status}: {told.get('error')}", "run gpu-pool doctor on that host")


def _clock(name: str, date: str | None, sent_at: float, took_seconds: float) -> Iterator[Finding]:
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return
    # It tells whole seconds, of some moment while we waited.
    off_seconds = there + 0.5 - (sent_at + took_seconds / 2)
    if abs(off_seconds) > CLOCK_SECONDS + took_seconds:
        yield Finding(
            "warning",
            f"{name}, clock",
            f"{abs(off_seconds):.0f} s {'ahead of' if off_seconds > 0 else 'behind'} this host's",
            "set both by NTP; leases do not depend on it, the times in logs do",
        )
    else:
        yield Finding("ok", f"{name}, clock", "agrees with this host's")
