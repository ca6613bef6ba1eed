"""The checks of `gpu-pool doctor` for servers: whether they answer, their health, leases and clock."""

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
#: A larger difference makes log times hard to compare; leases do not depend on it.
CLOCK_SECONDS: Final = 5.0


async def check_servers(endpoints: Sequence[EndpointConfig]) -> list[Finding]:
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
        root, state = parse_json(home.body or b""), parse_json(health.body or b"")
    except GPUWorkerPoolError as error:
        return [Finding("wrong", name, str(error), f"on that host: gpu-pool serve; test: curl {endpoint.url}/")]
    if not (isinstance(root, dict) and isinstance(state, dict)):
        return [Finding("wrong", name, f"{endpoint.url} is not a GPU server", "check the URL and its path")]
    findings = [_health_of(name, state)]
    if "leases" not in (root.get("features") or ()):
        advice = "update it" if is_loopback_url(endpoint.url) else "set GPU_POOL_API_KEYS there, GPU_POOL_API_KEY here"
        findings.append(Finding("wrong", name, "it grants no leases to this host", advice))
    findings += _clock(name, home.headers.get("Date"), sent_at, took_seconds)
    return findings


def _health_of(name: str, state: dict[str, Any]) -> Finding:
    status = state.get("status")
    if status == "healthy":
        return Finding("ok", name, f"{state.get('gpu_count')} GPUs, read by {state.get('backend')}")
    worse: Literal["warning", "wrong"] = "warning" if status == "degraded" else "wrong"
    return Finding(worse, name, f"{status}: {state.get('error')}", "run gpu-pool doctor on that host")


def _clock(name: str, date: str | None, sent_at: float, took_seconds: float) -> Iterator[Finding]:
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return
    # It is in whole seconds, from some moment while we waited.
    off_seconds = there + 0.5 - (sent_at + took_seconds / 2)
    if abs(off_seconds) > CLOCK_SECONDS + took_seconds:
        yield Finding(
            "warning",
            f"{name}, clock",
            f"{abs(off_seconds):.0f} s {'ahead of' if off_seconds > 0 else 'behind'} this host's clock",
            "synchronise both with NTP; this affects log times, not leases",
        )
    else:
        yield Finding("ok", f"{name}, clock", "matches this host's clock")
