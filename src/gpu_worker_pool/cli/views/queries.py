"""Queries the endpoints that a command names, at the same time, and collects their answers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from gpu_worker_pool.cli.exits import CommandError, Status, status_of
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints, is_local

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.core.requirements import Requirements

T = TypeVar("T")

Body = dict[str, Any]


class Host(Protocol):
    """One endpoint. Every method may raise a `GPUWorkerPoolError`."""

    @property
    def endpoint(self) -> EndpointConfig: ...

    async def stats(self) -> Body:
        """The body of `GET /gpu/stats`."""

    async def leases(self) -> Body:
        """The body of `GET /leases`."""

    async def queue(self) -> Body:
        """The body of `GET /queue`."""

    async def explain_request(self, request_id: str) -> Body | None:
        """The body of `GET /queue/{request_id}`; None if no such request waits."""

    async def explain_requirements(self, requirements: Requirements) -> Body:
        """The body of `POST /explain`: the same for a request that would be made now."""

    async def end_lease(self, lease_id: str) -> bool:
        """False if there is no such lease."""

    async def ask_holder(self, lease_id: str, reason: str | None) -> bool:
        """Ask its holder to give it back; False if there is no such lease."""

    async def keep_lease(self, lease_id: str) -> bool:
        """Say that this user's lease is not idle; False if there is no such lease."""

    async def end_request(self, request_id: str) -> bool:
        """Take a request out of the queue; False if there is no such request."""


class Unopened(NamedTuple):
    """An endpoint that cannot be queried; the others can."""

    endpoint: EndpointConfig
    error: GPUWorkerPoolError


class HostAnswer(NamedTuple):
    """The answer of one endpoint, or its error."""

    endpoint: EndpointConfig
    body: Any
    error: str | None
    #: The exit status for that error.
    status: Status = Status.FAILED


@asynccontextmanager
async def open_hosts(given: Sequence[str], *, is_every_host: bool = False) -> AsyncIterator[list[Host | Unopened]]:
    """Several servers of one fleet count as one endpoint; `is_every_host`: one entry for each host of their fleet."""
    async with AsyncExitStack() as stack:
        hosts: list[Host | Unopened] = []
        for endpoint in _endpoints(given):
            try:
                hosts.append(await stack.enter_async_context(_open(endpoint)))
            except GPUWorkerPoolError as error:
                hosts.append(Unopened(endpoint, error))
        if any(not isinstance(host, Unopened) and not is_local(host.endpoint) for host in hosts):
            from gpu_worker_pool.cli.views.fleet_hosts import one_per_fleet

            hosts = await one_per_fleet(hosts, stack, is_every_host=is_every_host)
        yield hosts


def _open(endpoint: EndpointConfig) -> AbstractAsyncContextManager[Host]:
    if is_local(endpoint):
        if (path := socket_path()) is not None:
            from gpu_worker_pool.cli.views.socket_host import open_socket_host

            return open_socket_host(endpoint, path)
        from gpu_worker_pool.cli.views.local_host import open_local_host

        return open_local_host(endpoint)
    from gpu_worker_pool.cli.views.http_host import open_http_host

    return open_http_host(endpoint)


def opened(host: Host | Unopened) -> Host:
    """Raises the error that kept it from being opened."""
    if isinstance(host, Unopened):
        raise host.error
    return host


def _endpoints(given: Sequence[str]) -> tuple[EndpointConfig, ...]:
    try:
        return chosen_endpoints(given)
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None


async def query_hosts(hosts: Sequence[Host | Unopened], query: Callable[[Host], Awaitable[T]]) -> list[HostAnswer]:
    """All at the same time."""

    async def one(host: Host | Unopened) -> HostAnswer:
        try:
            return HostAnswer(host.endpoint, await query(opened(host)), None)
        except GPUWorkerPoolError as error:
            return HostAnswer(host.endpoint, None, str(error), status_of(error))

    return await asyncio.gather(*(one(host) for host in hosts))


def check_answers(answers: Sequence[HostAnswer]) -> None:
    """Raises a `CommandError` if every endpoint failed."""
    if all(each.error is not None for each in answers):
        errors = "; ".join(
            f"{each.endpoint.endpoint_id}: {each.error}" if len(answers) > 1 else str(each.error) for each in answers
        )
        raise CommandError(errors, answers[0].status)


def query(given: Sequence[str], query: Callable[[Host], Awaitable[T]]) -> list[HostAnswer]:
    """Raises a `CommandError` if every endpoint failed."""
    answers = query_any(given, query)
    check_answers(answers)
    return answers


def query_any(
    given: Sequence[str], query: Callable[[Host], Awaitable[T]], *, is_every_host: bool = False
) -> list[HostAnswer]:
    """Open the endpoints, query them, close them."""

    async def run() -> list[HostAnswer]:
        async with open_hosts(given, is_every_host=is_every_host) as hosts:
            return await query_hosts(hosts, query)

    return asyncio.run(run())
