"""What endpoints show of their GPUs, leases and queues, whether over HTTP or of this host: the same bodies for both."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from gpu_worker_pool.cli.endpoints import chosen_endpoints, is_local
from gpu_worker_pool.cli.failures import CommandError
from gpu_worker_pool.cli.statuses import Status, status_of
from gpu_worker_pool.errors import GPUWorkerPoolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.core.requirements import Requirements

T = TypeVar("T")

Body = dict[str, Any]


class Host(Protocol):
    """One endpoint, to be looked at. Every method may raise a `GPUWorkerPoolError`."""

    @property
    def endpoint(self) -> EndpointConfig: ...

    async def stats(self) -> Body:
        """As `GET /gpu/stats`."""

    async def leases(self) -> Body:
        """As `GET /leases`."""

    async def queue(self) -> Body:
        """As `GET /queue`."""

    async def explain_request(self, request_id: str) -> Body | None:
        """As `GET /queue/{request_id}`; None if nobody of that id waits here."""

    async def explain_requirements(self, requirements: Requirements) -> Body:
        """The same for one who would ask now."""

    async def release(self, lease_id: str) -> bool:
        """End a lease; False if there is none of that id."""

    async def cancel(self, request_id: str) -> bool:
        """Take a request out of the queue; False if there is none of that id."""


class Unopened(NamedTuple):
    """An endpoint that cannot even be asked: the others can."""

    endpoint: EndpointConfig
    error: GPUWorkerPoolError


class Seen(NamedTuple):
    """What one endpoint said, or why it did not."""

    endpoint: EndpointConfig
    body: Any
    error: str | None
    #: What that error means to a script.
    status: Status = Status.FAILED


@asynccontextmanager
async def open_hosts(given: Sequence[str]) -> AsyncIterator[list[Host | Unopened]]:
    async with AsyncExitStack() as stack:
        hosts: list[Host | Unopened] = []
        for endpoint in _endpoints(given):
            try:
                hosts.append(await stack.enter_async_context(_open(endpoint)))
            except GPUWorkerPoolError as error:
                hosts.append(Unopened(endpoint, error))
        yield hosts


def _open(endpoint: EndpointConfig) -> AbstractAsyncContextManager[Host]:
    if is_local(endpoint):
        from gpu_worker_pool.cli.views.local_host import open_local_host

        return open_local_host(endpoint)
    from gpu_worker_pool.cli.views.http_host import open_http_host

    return open_http_host(endpoint)


def opened(host: Host | Unopened) -> Host:
    """Raises what kept it from being opened."""
    if isinstance(host, Unopened):
        raise host.error
    return host


def _endpoints(given: Sequence[str]) -> tuple[EndpointConfig, ...]:
    try:
        return chosen_endpoints(given)
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None


async def ask_all(hosts: Sequence[Host | Unopened], ask: Callable[[Host], Awaitable[T]]) -> list[Seen]:
    """What each says, at the same time, or why it does not."""

    async def one(host: Host | Unopened) -> Seen:
        try:
            return Seen(host.endpoint, await ask(opened(host)), None)
        except GPUWorkerPoolError as error:
            return Seen(host.endpoint, None, str(error), status_of(error))

    return await asyncio.gather(*(one(host) for host in hosts))


def check_any(seen: Sequence[Seen]) -> None:
    """Raises a `CommandError` if none of them says anything."""
    if all(each.error is not None for each in seen):
        told = "; ".join(
            f"{each.endpoint.endpoint_id}: {each.error}" if len(seen) > 1 else str(each.error) for each in seen
        )
        raise CommandError(told, seen[0].status)


def look(given: Sequence[str], ask: Callable[[Host], Awaitable[T]]) -> list[Seen]:
    """`look_at_any`, for commands that must see something."""
    seen = look_at_any(given, ask)
    check_any(seen)
    return seen


def look_at_any(given: Sequence[str], ask: Callable[[Host], Awaitable[T]]) -> list[Seen]:
    """Open, ask all, close."""

    async def look_once() -> list[Seen]:
        async with open_hosts(given) as hosts:
            return await ask_all(hosts, ask)

    return asyncio.run(look_once())


def merged(seen: Sequence[Seen], name: str) -> Body:
    """One body of the same shape; rows of several endpoints say which they are of."""
    if len(seen) == 1:
        body: Body = seen[0].body
        return body
    rows = [
        {**row, "endpoint": each.endpoint.endpoint_id} for each in seen if each.error is None for row in each.body[name]
    ]
    failed = {each.endpoint.endpoint_id: each.error for each in seen if each.error is not None}
    return {name: rows, **({"errors": failed} if failed else {})}
