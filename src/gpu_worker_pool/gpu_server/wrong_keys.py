"""Counts wrong keys, so that callers that try many are refused with less work; a right key always passes."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many wrong keys an address may send at once, and how many per second in the long run.
BURST: Final = 20
PER_SECOND: Final = 1.0
#: How many addresses are remembered; beyond that, those that were silent longest are forgotten.
MOST_ADDRESSES: Final = 4096


class WrongKeys:
    """Belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By address: how many wrong keys count now, and since when.
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def seconds_to_wait(self, address: str) -> int:
        """Count one more; 0 while there are few, else the seconds until the next one is allowed."""
        now, address = self._clock(), network_of(address)
        count, at = self._counts.pop(address, (0.0, now))
        count = max(count - (now - at) * PER_SECOND, 0.0)
        is_one_of_few = count <= BURST - 1
        self._counts[address] = (count + 1 if is_one_of_few else count, now)
        while len(self._counts) > MOST_ADDRESSES:
            self._counts.popitem(last=False)
        return 0 if is_one_of_few else math.ceil((count - BURST + 1) / PER_SECOND)


def network_of(address: str) -> str:
    """Of IPv6, one host has all of a /64."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return f"{int(found) >> 64:x}::/64" if found.ipv4_mapped is None else str(found.ipv4_mapped)
    return address
