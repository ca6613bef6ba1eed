"""Publishes changes of leases and of the queue on `/events`, and collects what the GPU routes show of leases."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.lease_rows import lease_row, promises_of, request_row
from gpu_worker_pool.broker.shared_view import OLDEST_SECONDS, SharedView
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.gpu_server.events import json_event
from gpu_worker_pool.gpu_server.responses import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.api.gpu_rows import Promises
    from gpu_worker_pool.broker.broker import Change, LeaseBroker
    from gpu_worker_pool.gpu_server.events import EventStream
    from gpu_worker_pool.gpu_server.webhooks import Webhooks

#: How many leases are described before others are served.
ROWS_AT_ONCE: Final = 100
#: How many waiting requests the first event lists.
MOST_LISTED: Final = 1000


class LeaseEvents:
    def __init__(self, broker: LeaseBroker, stream: EventStream, webhooks: Webhooks | None = None) -> None:
        self._webhooks = webhooks
        self._broker = broker
        self._stream = stream
        #: The body of `GET /leases`.
        self.listed: SharedView[bytes] = SharedView(self._list)
        #: The first event, while nothing has changed, and when it was made.
        self._first: tuple[float, bytes] | None = None
        #: The leases for which an `idle` event was published.
        self._idle: set[str] = set()

    def follow(self, promises_changed: Callable[[], object], also: Callable[[Change], object] | None = None) -> None:
        """`promises_changed` is called when what the GPU routes show of leases is out of date, `also` always."""

        def on_change(change: Change) -> None:
            self._first = None
            self.listed.outdate()
            if isinstance(change.before, Lease) or isinstance(change.after, Lease):
                promises_changed()
            if self._webhooks is not None:
                self._webhooks.on_change(change)
            if self._stream.has_listeners:
                self._publish(change)
            if also is not None:
                also(change)

        self._broker.on_change = on_change

    def promises(self) -> Promises:
        return promises_of(self._broker.leases.values()) if self._broker.is_informed else None

    def first(self) -> bytes:
        """The present state, for a new listener; made once for all that come before it changes."""
        now = time.monotonic()
        if self._first is None or now - self._first[0] > OLDEST_SECONDS:
            self._first = (now, self._make_first())
        return self._first[1]

    async def _list(self) -> bytes:
        broker = self._broker
        found = list(broker.leases.values()) if broker.is_informed else await broker.held()
        rows = []
        for number, lease in enumerate(found):
            rows.append(as_json(self._row(lease)))
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)  # renewals go before
        return b'{"leases":[%b]}' % b",".join(rows)

    def _make_first(self) -> bytes:
        waiters = sorted(self._broker.waiting.values(), key=lambda waiter: waiter.order)
        present = {
            "leases": [self._row(lease) for lease in self._broker.leases.values()],
            "waiting": len(waiters),
            "queue": [request_row(waiter.request) for waiter in waiters[:MOST_LISTED]],
        }
        return json_event("leases", present)

    def publish_idle(self) -> None:
        """Called regularly: becoming idle is not a change in the ledger."""
        idle = {lease_id for lease_id, lease in self._broker.leases.items() if self._broker.usage_of(lease).is_idle}
        for lease_id in idle - self._idle:
            self._publish_lease("idle", self._broker.leases[lease_id], ())
            if self._webhooks is not None:
                self._webhooks.send("idle", self._broker.leases[lease_id])
        self._idle = idle

    def _publish(self, change: Change) -> None:
        before, after = change.before, change.after
        if isinstance(after, Waiter):
            if before is None:
                self._publish_queue("waiting", after, "waiting")
            return
        if isinstance(before, Waiter):
            self._publish_queue("left", before, "granted" if isinstance(after, Lease) else after.state.value)
        if isinstance(after, Lease):
            if not isinstance(before, Lease):
                self._publish_lease("granted", after, ())
            elif before.state is not after.state:
                self._publish_lease(after.state.value, after, (after.quarantine.reason,) if after.quarantine else ())
        elif after.lease is not None and after.lease_state is not None:
            self._publish_lease(after.lease_state.value, after.lease, after.reasons)

    def _publish_lease(self, what: str, lease: Lease, reasons: Sequence[str]) -> None:
        data = {"change": what, "reasons": list(reasons), "lease": self._row(lease)}
        self._stream.publish(json_event("lease", data))

    def _publish_queue(self, what: str, waiter: Waiter, state: str) -> None:
        row = request_row(waiter.request)
        data = {"change": what, "state": state, "waiting": len(self._broker.waiting), "request": row}
        self._stream.publish(json_event("queue", data))

    def _row(self, lease: Lease) -> dict[str, Any]:
        return lease_row(lease, self._broker.usage_of(lease))
