"""The servers of a fleet among the endpoints of a command: any of them answers for all, so only one is asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.cli.views.http_host import HTTPHost
from gpu_worker_pool.cli.views.queries import Unopened
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.errors import GPUWorkerPoolError, ServiceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    import aiohttp

    from gpu_worker_pool.cli.views.queries import Body, Host

#: A server that takes longer is asked as if it were in no fleet.
FLEET_SECONDS: Final = 1.5


async def one_per_fleet(
    hosts: Sequence[Host | Unopened], stack: AsyncExitStack, *, is_every_host: bool
) -> list[Host | Unopened]:
    """`is_every_host`: instead of one server, all hosts of its fleet."""
    fleets = await asyncio.gather(*map(_fleet_of, hosts))
    of_fleets = {row["url"] for fleet in fleets if fleet is not None for row in fleet["hosts"]}
    found: list[Host | Unopened] = []
    seen: set[str] = set()
    for host, fleet in zip(hosts, fleets, strict=True):
        if fleet is None:
            # A server that does not answer, but that another one listed as a host of its fleet.
            if host.endpoint.url.rstrip("/") not in of_fleets:
                found.append(host)
        elif fleet["fleet_id"] not in seen:
            seen.add(fleet["fleet_id"])
            if is_every_host and isinstance(host, HTTPHost):
                found += await _members(host, fleet, stack)
            else:
                found.append(host)
    return found


async def _fleet_of(host: Host | Unopened) -> Body | None:
    if isinstance(host, Unopened) or not isinstance(host, HTTPHost):
        return None
    try:
        async with asyncio.timeout(FLEET_SECONDS):
            found = await host.fleet()
    except (GPUWorkerPoolError, TimeoutError):
        return None
    return found if found["fleet_id"] else None


async def _members(asked: HTTPHost, fleet: Body, stack: AsyncExitStack) -> list[Host | Unopened]:
    members: list[Host | Unopened] = []
    for row in fleet["hosts"]:
        endpoint = EndpointConfig(row["host"], row["url"] or "")
        if row["state"] in ("unreachable", "incompatible"):
            ago = row["seen_seconds_ago"]
            since = "" if ago is None else f", last heard {ago:.0f} s ago"
            error = ServiceUnavailableError(f"{row['state']}{since} ({row['gpus'] or 0} GPUs)")
            members.append(Unopened(endpoint, error))
            continue
        session = await stack.enter_async_context(make_session())
        has_queue = not any(isinstance(each, _Member) for each in members)
        members.append(_Member(endpoint, session, asked, has_queue=has_queue))
    return members or [asked]


class _Member(HTTPHost):
    """One host of a fleet: its GPUs from itself, its leases and the queue from the server that was asked."""

    def __init__(
        self, endpoint: EndpointConfig, session: aiohttp.ClientSession, asked: HTTPHost, *, has_queue: bool
    ) -> None:
        super().__init__(endpoint, session)
        self._asked, self._has_queue = asked, has_queue

    async def leases(self) -> Body:
        rows = (await self._asked.leases())["leases"]
        return {"leases": [row for row in rows if row.get("host") == self.endpoint.endpoint_id]}

    async def queue(self) -> Body:
        """The fleet has one queue, which is shown with the first host."""
        return await self._asked.queue() if self._has_queue else {"queue": []}
