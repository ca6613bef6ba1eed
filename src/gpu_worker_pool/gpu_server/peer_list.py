"""Reads `GPU_POOL_PEERS`, the servers of other hosts that the live page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.config import LOCAL_ENDPOINT, EndpointConfig, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

#: More would not fit on the page.
MOST_PEERS: Final = 64


def read_peers(name: str, text: str, complain: Callable[[str], object]) -> tuple[EndpointConfig, ...]:
    """The usable ones, written like a client's endpoints: a typo in one of them does not hide the others."""
    if "@" in text:
        # No part of it is shown, as any part may be the password.
        complain(f"{name}: a URL in it holds a user name or password, which is not supported: ignoring all peers")
        return ()
    entries: list[str] = []
    peers: tuple[EndpointConfig, ...] = ()
    for entry in filter(None, map(str.strip, text.split(","))):
        try:
            found = parse_endpoints([*entries, entry], name)
        except ValueError as reason:
            complain(f"{str(reason)[:300]}: ignoring it")
            continue
        if any(peer.url == LOCAL_ENDPOINT for peer in found):
            complain(f"{name}: {LOCAL_ENDPOINT} is not a server: ignoring it")
            continue
        entries.append(entry)
        peers = found
    if len(peers) > MOST_PEERS:
        complain(f"{name} names {len(peers)} servers: showing the first {MOST_PEERS}")
    return peers[:MOST_PEERS]
