"""`GPU_POOL_PEERS`: the servers of other hosts that the live page may ask, and no others, whoever looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.config import LOCAL_ENDPOINT, EndpointConfig, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

#: More do not fit on a page.
MOST_PEERS: Final = 64


def read_peers(name: str, text: str, complain: Callable[[str], object]) -> tuple[EndpointConfig, ...]:
    """Those that can be used: a typo in one of them does not hide the others. They are written as a client's are."""
    if "@" in text:
        # Not even a part of it is shown: which part is the password, nobody knows.
        complain(f"{name}: a URL in it holds a user name or password, which is not supported: doing without peers")
        return ()
    entries: list[str] = []
    peers: tuple[EndpointConfig, ...] = ()
    for entry in filter(None, map(str.strip, text.split(","))):
        try:
            found = parse_endpoints([*entries, entry], name)
        except ValueError as reason:
            complain(f"{str(reason)[:300]}: doing without it")
            continue
        if any(peer.url == LOCAL_ENDPOINT for peer in found):
            complain(f"{name}: {LOCAL_ENDPOINT} is no server: doing without it")
            continue
        entries.append(entry)
        peers = found
    if len(peers) > MOST_PEERS:
        complain(f"{name} names {len(peers)} servers: showing the first {MOST_PEERS}")
    return peers[:MOST_PEERS]
