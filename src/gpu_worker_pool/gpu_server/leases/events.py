"""Publishes changes of leases and of the queue on `/events`, and collects what the GPU routes show of leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.lease_rows import lease_row, promises_of, request_row
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.gpu_server.events import json_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.api.gpu_rows import Promises
    from gpu_worker_pool.broker.broker import Change, LeaseBroker
    from gpu_worker_pool.gpu_server.events import EventStream

#: How many waiting requests the first event lists.
MOST_LISTED: Final = 1000


class LeaseEvents:
    def __init__(self, broker: LeaseBroker, stream: EventStream) -> None:
        self._broker = broker
        self._stream = stream
        #: The leases for which an `idle` event was published.
        self._idle: set[str] = set()

    def follow(self, promises_changed: Callable[[], object]) -> None:
        """`promises_changed` is called when what the GPU routes show of leases is out of date."""

        def on_change(change: Change) -> None:
            if isinstance(change.before, Lease) or isinstance(change.after, Lease):
                promises_changed()
            if self._stream.has_listeners:
                self._publish(change)

        self._broker.on_change = on_change

    def promises(self) -> Promises:
        return promises_of(self._broker.leases.values()) if self._broker.is_informed else None

    def first(self) -> bytes:
        """The present state, for a new listener."""
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
