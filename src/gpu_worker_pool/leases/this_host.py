"""Decides whether an endpoint is on this host: whether its addresses are addresses of this network namespace.

A program must run where its GPU is, so this is decided before anything is asked, and by nothing that a server says.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from gpu_worker_pool.leases.own_addresses import Address

#: A name server that takes longer is treated like one that does not know the name.
RESOLVE_SECONDS: Final = 5.0


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
        from gpu_worker_pool.leases.own_addresses import addresses_of_this_host

        own_addresses = addresses_of_this_host
    return set(others) <= set(own_addresses())


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])  # without the interface of a link-local address
    return getattr(address, "ipv4_mapped", None) or address
