"""The checks of `gpu-pool doctor` for servers: whether they answer, their health, leases and clock."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_worker_pool.cli.checking import Finding
from gpu_worker_pool.cli.checking.sharing import SHARING, listed
from gpu_worker_pool.config import EndpointConfig, is_loopback_url
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.endpoint_choice import is_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import aiohttp

ENDPOINT_SECONDS: Final = 5.0
#: A larger difference makes log times hard to compare; leases do not depend on it.
CLOCK_SECONDS: Final = 5.0


async def check_servers(endpoints: Sequence[EndpointConfig]) -> list[Finding]:
    servers = [endpoint for endpoint in endpoints if not is_local(endpoint)]
    path = socket_path() if any(map(is_local, endpoints)) else None
    if not servers and path is None:
        return [Finding("ok", "endpoints", "local://: this host without a server")]
    from gpu_worker_pool.api.transport import make_session
    from gpu_worker_pool.api.unix_socket import SOCKET_URL

    findings = []
    if path is not None:
        async with make_session(unix_socket=path) as session:
            advice = f"start the GPU service of this host; test: curl --unix-socket {shlex.quote(path)} {SOCKET_URL}/"
            findings.append(Finding("ok", "endpoints", f"local://: the server of this host, on {path}"))
            findings += await _server(session, EndpointConfig("local", SOCKET_URL), advice)
            findings.append(await _sharing(session, path))
    async with make_session() as session:
        found = await asyncio.gather(*(_server(session, endpoint) for endpoint in servers))
    return [*findings, *(finding for findings in found for finding in findings)]


async def _server(session: aiohttp.ClientSession, endpoint: EndpointConfig, advice: str = "") -> list[Finding]:
    """`advice`: what to do if it does not answer."""
    from gpu_worker_pool.api.client import ON_COMMAND_LINE, APIClient

    name = endpoint.endpoint_id
    advice = advice or f"on that host: gpu-pool serve; test: curl {endpoint.url}/"
    client = APIClient(endpoint.url, lambda: session, timeout_seconds=ENDPOINT_SECONDS, advice=ON_COMMAND_LINE)
    try:
        sent_at = time.time()
        home = await client.home()
        took_seconds = time.time() - sent_at
        health = await client.health()
    except GPUWorkerPoolError as error:
        return [Finding("wrong", name, str(error), advice)]
    findings = [_health_of(name, health)]
    if "leases" not in (home.features or ()):
        advice = "update it" if is_loopback_url(endpoint.url) else "set GPU_POOL_API_KEYS there, GPU_POOL_API_KEY here"
        findings.append(Finding("wrong", name, "it grants no leases to this host", advice))
    findings += _clock(name, home.date, sent_at, took_seconds)
    return findings


async def _sharing(session: aiohttp.ClientSession, path: str) -> Finding:
    """With whom this user shares the GPUs by the server of this host."""
    from gpu_worker_pool.api.client import APIClient
    from gpu_worker_pool.api.unix_socket import SOCKET_URL

    client = APIClient(SOCKET_URL, lambda: session, timeout_seconds=ENDPOINT_SECONDS)
    try:
        rows = (await client.leases())["leases"] + (await client.queue())["queue"]
        owner = _owner_of(path)
    except (GPUWorkerPoolError, OSError):
        return Finding("wrong", SHARING, "with no one while the server of this host does not answer")
    users = {(row.get("holder") or {}).get("user") for row in rows}
    others = [user for user in users if user and user != user_name(os.getuid())]
    text = f"every user of this host, by the ledger of its server, which runs as {owner}"
    return Finding("ok", SHARING, f"{text}; users seen beside you: {listed(others)}")


def _owner_of(path: str) -> str:
    return user_name(Path(path).stat().st_uid)


def _health_of(name: str, health: dict[str, Any]) -> Finding:
    status = health["status"]
    if status == "healthy":
        return Finding("ok", name, f"{health['gpu_count']} GPUs, read by {health['backend']}")
    worse: Literal["warning", "wrong"] = "warning" if status == "degraded" else "wrong"
    return Finding(worse, name, f"{status}: {health['error']}", "run gpu-pool doctor on that host")


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
