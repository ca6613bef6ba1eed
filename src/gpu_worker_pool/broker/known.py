"""What the broker knows of requests from the commits of the ledger, and the callers that wait for news of one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpu_worker_pool.core import Lease, Outcome, Waiter

if TYPE_CHECKING:
    from collections.abc import Mapping


class KnownRequests:
    """The leases and waiters of the last commits. Read-only outside."""

    def __init__(self) -> None:
        #: Offered, held and quarantined leases, by lease id, oldest first.
        self.leases: dict[str, Lease] = {}
        #: The ids of these leases, by request id.
        self._granted: dict[str, str] = {}
        #: Waiters by request id.
        self.waiting: dict[str, Waiter] = {}

    def lease_of(self, request_id: str) -> Lease | None:
        return self.leases.get(self._granted.get(request_id, ""))

    def update(self, request_id: str, after: Waiter | Lease | Outcome) -> Waiter | Lease | None:
        """Returns what was known of the request before."""
        before: Waiter | Lease | None = self.waiting.pop(request_id, None)
        if isinstance(after, Waiter):
            self.waiting[request_id] = after
        elif isinstance(after, Lease):
            before = self.leases.get(after.lease_id, before)
            self.leases[after.lease_id] = after
            self._granted[request_id] = after.lease_id
        elif after.lease is not None:
            before = self.leases.pop(after.lease.lease_id, before)
            self._granted.pop(request_id, None)
        return before

    def forget_all_but(self, known: Mapping[str, Waiter | Lease | Outcome]) -> list[str]:
        """While this process could not read the ledger, others may have ended what it knew of.

        Returns the ids of requests that no longer wait.
        """
        for lease in list(self.leases.values()):
            if lease.request.request_id not in known:
                del self.leases[lease.lease_id]
                self._granted.pop(lease.request.request_id, None)
        gone = [request_id for request_id in self.waiting if request_id not in known]
        for request_id in gone:
            del self.waiting[request_id]
        return gone


class Listeners:
    """Callers that wait for news of a request, each with a future. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[asyncio.Future[None]]] = {}

    def add(self, request_id: str) -> asyncio.Future[None]:
        listener: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._by_request.setdefault(request_id, []).append(listener)
        return listener

    def remove(self, request_id: str, listener: asyncio.Future[None]) -> None:
        listeners = self._by_request.get(request_id, [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._by_request.pop(request_id, None)

    def wake(self, request_id: str) -> None:
        for listener in self._by_request.get(request_id, ()):
            if not listener.done():
                listener.set_result(None)

    def wake_all(self) -> None:
        for request_id in list(self._by_request):
            self.wake(request_id)
