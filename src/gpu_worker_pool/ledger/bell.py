"""Wakes the processes that a commit concerns, so that they need not wait for their next check.

A ring is an empty datagram to an abstract Unix socket, so a killed process leaves nothing behind. Nothing depends on
it: a process that it does not reach, because it is in another network namespace or its waker died, finds the commit at
its next check.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core import Lease, Outcome, Waiter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from gpu_worker_pool.core import Pool

#: How many of those that could be next are woken when a GPU is given back.
MOST_RUNG: Final = 16
#: How many rings are taken at once: one is as good as many.
_MOST_TAKEN: Final = 32


class Bell:
    """Of one process and one ledger file. `on_ring` is called in the thread of the event loop."""

    def __init__(
        self, path: Path, process: str, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], object]
    ) -> None:
        """`process`: the name of this process, as its requests say it."""
        self._loop = loop
        self._on_ring = on_ring
        self._file = path.stat().st_ino
        self._socket: socket.socket | None = None
        self._is_heard = False
        with suppress(OSError, AttributeError, NotImplementedError):  # not on this system
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            # It fails for the second ledger of a process on one file: that one looks by itself.
            self._socket.bind(self._address(process))
            loop.add_reader(self._socket.fileno(), self._take)
            self._is_heard = True

    def _address(self, process: str) -> bytes:
        return f"\0gpu-pool/{self._file}/{process}".encode()

    def _take(self) -> None:
        assert self._socket is not None
        with suppress(OSError):
            for _ in range(_MOST_TAKEN):
                self._socket.recv(1)
        self._on_ring()

    def ring(self, processes: Iterable[str]) -> None:
        """In any thread; never waits."""
        if self._socket is not None:
            for process in processes:
                with suppress(OSError):  # it does not listen, or has been rung often enough
                    self._socket.sendto(b"", self._address(process))

    def close(self) -> None:
        """In the thread of the event loop, when nobody rings any more."""
        if self._socket is not None:
            if self._is_heard and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None


def processes_concerned(pool: Pool, changes: Iterable[Waiter | Lease | Outcome]) -> set[str]:
    """Those whose requests were granted and, where GPUs were given back, those that could be next.

    On a host of a fleet also its server, which tells the dispatcher who waits.
    """
    found, is_given_back = {""}, False
    for change in changes:
        if isinstance(change, Lease):
            found.add(change.request.process)
        is_given_back |= isinstance(change, Outcome) and change.lease is not None
        if pool.fleet_order is not None and isinstance(change, Waiter):
            found.add(pool.fleet_order.process)
    if is_given_back:
        found.update(head.request.process for _, head in islice(pool.queue.heads(), MOST_RUNG))
    return found - {""}
