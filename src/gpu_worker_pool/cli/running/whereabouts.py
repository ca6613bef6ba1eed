"""Decides whether an endpoint is on this host: whether its addresses are addresses of this network namespace.

A command must run where its GPU is, so this is decided before anything is asked, and by nothing that a server says.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.cli.endpoints import is_local
from gpu_worker_pool.config import host_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.own_addresses import Address
    from gpu_worker_pool.config import EndpointConfig

#: A name server that takes longer is treated like one that does not know the name.
RESOLVE_SECONDS: Final = 5.0


class Place(NamedTuple):
    """Where the command of a lease runs."""

    #: For `GPU_POOL_HOST`.
    host: str
    #: What `ssh` connects to; None: the command runs here.
    ssh_target: str | None = None


async def check_places(endpoints: Sequence[EndpointConfig], spec: LeaseSpec) -> None:
    """Raises a `ValueError` that says what to do, if an endpoint is another host.

    A name that cannot be resolved yet is decided when it has granted something (`place_of`).
    """
    if spec.ssh_target:
        _check_one_target(endpoints, spec.ssh_target)
        return
    if spec.is_here:
        return
    elsewhere = [each for each in endpoints if not is_local(each) and await is_this_host(host_of(each.url)) is False]
    if spec.ssh_target is None and elsewhere:
        raise ValueError(refusal([each.url for each in elsewhere], is_wait=spec.for_pid is not None))
    for each in elsewhere:
        ssh_target_of(each.url)


async def place_of(endpoint: EndpointConfig, spec: LeaseSpec) -> Place:
    """Of the endpoint that granted the lease. Raises a `ValueError` as `check_places` does."""
    here = Place(os.uname().nodename)
    if is_local(endpoint) or spec.is_here:
        return here
    if spec.ssh_target:
        return Place(spec.ssh_target.rpartition("@")[2], spec.ssh_target)
    if await is_this_host(host_of(endpoint.url)):
        return here
    if spec.ssh_target is None:
        raise ValueError(refusal([endpoint.url], is_wait=spec.for_pid is not None))
    return Place(host_of(endpoint.url), ssh_target_of(endpoint.url))


def refusal(urls: Sequence[str], *, is_wait: bool) -> str:
    are = "is another host" if len(urls) == 1 else "are other hosts"
    here = "--here if those GPUs are this host's, as behind a tunnel"
    if is_wait:
        return f"{', '.join(urls)} {are}, and this shell could not use a GPU there: add {here}"
    return f"{', '.join(urls)} {are}, and a command runs where its GPU is: add --ssh to start it there, or {here}"


def _check_one_target(endpoints: Sequence[EndpointConfig], target: str) -> None:
    if len(endpoints) > 1:
        raise ValueError(f"--ssh={target} is one host, but there are several endpoints: give --ssh without a host")
    if is_local(endpoints[0]):
        raise ValueError(f"--ssh={target} needs the GPU server of that host: -e URL; local:// is this host")


# --- names and addresses ---


def ssh_target_of(url: str) -> str:
    from gpu_worker_pool.cli.running.ssh import check_target

    return check_target(host_of(url), f"the host of {url}")


async def _resolve(host: str) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await asyncio.wait_for(loop.getaddrinfo(host, None, type=socket.SOCK_STREAM), RESOLVE_SECONDS)
    return [str(address[0]) for *_, address in found]


async def is_this_host(
    host: str,
    *,
    resolve: Callable[[str], Awaitable[list[str]]] = _resolve,
    own_addresses: Callable[[], Collection[Address]] | None = None,
) -> bool | None:
    """Whether all addresses of the name are this host's; None if it has none now."""
    try:
        addresses = [_address(text) for text in await resolve(host)]
    except (OSError, TimeoutError, UnicodeError):
        return None
    if not addresses:
        return None
    # Loopback also where an interface does not have it, such as ::1 on a host without IPv6.
    others = [address for address in addresses if not (address.is_loopback or address.is_unspecified)]
    if not others:
        return True
    if own_addresses is None:
        # Only here: it needs ctypes, which takes a while to load.
        from gpu_worker_pool.cli.running.own_addresses import addresses_of_this_host

        own_addresses = addresses_of_this_host
    return set(others) <= set(own_addresses())


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])  # without the interface of a link-local address
    return getattr(address, "ipv4_mapped", None) or address
