"""Servers that give leases, asked by their own routes who holds what; and clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from tests.server_process import ServerProcess

ADMIN = "an-administrator-s-own-key"
#: Read often, so that a GPU that was released is soon known to be free.
QUICK = {"REFRESH_INTERVAL": "0.2", "ACCESS_LOG": "false"}


@contextmanager
def some_servers(folder: Path, *gpus: int) -> Iterator[list[ServerProcess]]:
    """Each of so many simulated GPUs."""
    started = [
        ServerProcess(folder / str(number), GPU_BACKEND=f"simulated:{count}", GPU_POOL_ADMIN_KEYS=ADMIN, **QUICK)
        for number, count in enumerate(gpus)
    ]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


def leases(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/leases").json["leases"]
    return found


def queue(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/queue").json["queue"]
    return found


def take_away(server: ServerProcess, lease_id: str) -> None:
    """As an administrator does."""
    reply = server.get(f"/leases/{lease_id}", method="DELETE", Authorization=f"Bearer {ADMIN}")
    assert reply.status == 200, reply


async def is_clean(*servers: ServerProcess) -> None:
    """No lease is left, and nobody waits."""
    await until(lambda: not any(leases(server) or queue(server) for server in servers))


async def until(look: Callable[[], object], within_seconds: float = 40.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not look():
            await asyncio.sleep(0.02)


def client_of(*servers: ServerProcess | str, **settings: Any) -> GPUWorkerPoolClient:
    """Of several they are `a`, `b` and `c`."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    settings = {"polling_interval": 0.5, "environ": {}, **settings}
    if len(urls) == 1:
        return GPUWorkerPoolClient(urls[0], **settings)
    named = [f"{name}={url}" for name, url in zip("abc", urls, strict=False)]
    return GPUWorkerPoolClient(service_endpoints=named, endpoint_max_retries=0, endpoint_timeout=2.0, **settings)
