"""Requests that wait in the ledgers of hosts (`local://`): each stands in the fleet's queue. Part of `Dispatcher`.

Their host polls for them: as long as it has a link, they keep their place; what it reports is what there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.events import Cancelled, Requested
from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.core.origins import name_of
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.errors import IllegalEventError
from gpu_worker_pool.fleet.hosts import at_host, gpu_id_at_host, host_of_gpu
from gpu_worker_pool.fleet.messages import AskAbandoned, HostOrder
from gpu_worker_pool.fleet.placements import Asked, Placing, pooled
from gpu_worker_pool.fleet.store import REQUESTS

if TYPE_CHECKING:
    from gpu_worker_pool.fleet.hosts import KnownHost
    from gpu_worker_pool.fleet.messages import HostWaiter, Report

#: As if its host had polled, until its link is lost.
HOST_POLL: Final = "its host"
#: How often hosts are told the places of their requests; and where the queue is long.
ORDER_SECONDS: Final = 1.0
LONG_ORDER_SECONDS: Final = 5.0
LONG_QUEUE: Final = 256


class HostWaiters(Placing):
    """The pool of a dispatcher, and what waits in the ledgers of its hosts."""

    def _abandoned(self, message: AskAbandoned, now: float) -> None:
        raise NotImplementedError

    def _see_waiting(self, host: KnownHost, report: Report, now: float) -> None:
        there = {row.request.request_id for row in report.waiting}
        gone = [each for each in host.waiting if each not in there] if report.is_whole else report.not_waiting
        for request_id in gone:
            self._waits_no_more(host, request_id, now)
        for row in report.waiting:
            self._take_waiter(host, row, now)

    def _take_waiter(self, host: KnownHost, row: HostWaiter, now: float) -> None:
        """It is new, or its host polls again."""
        request, request_id = row.request, row.request.request_id
        known = self._asked.get(request_id)
        if request.within is not None or (known is not None and known.waits_at != host.name):
            return
        if known is not None and known.placement is not None:
            # Its grant is on its way; if it is refused, it waits as this says.
            known.poll_id, known.poll_deadline, known.gives_up_at = HOST_POLL, None, None
            return
        if known is None and not self._may_take(host, request_id):
            return
        requirements = at_host(request.requirements, host.name)
        asked = known or Asked(replace(request, requirements=requirements), self.pool.ticket + 1, now)
        event = Requested(pooled(asked.request), None, None, row.may_reserve, HOST_POLL)
        try:
            effects = self.pool.apply(event, now)
        except IllegalEventError as error:
            self._refuse_waiter(host.name, request_id, (str(error),))
            return
        asked.waits_at, asked.may_reserve = host.name, row.may_reserve
        asked.poll_id, asked.poll_deadline, asked.gives_up_at = HOST_POLL, None, None
        if known is None:
            self._asked[request_id] = asked
            host.waiting[request_id] = None
            self._rows.mark(REQUESTS, request_id)
        self._perform(effects, now)
        if self._timers.get("order", "") is None:
            self._timers.set("order", "", now)

    def _may_take(self, host: KnownHost, request_id: str) -> bool:
        found = self.pool.requests.get(request_id)
        if not isinstance(found, Outcome):
            return found is None
        if found.state in (RequestState.CANCELLED, RequestState.REJECTED):
            # Its host has not heard so yet.
            self._refuse_waiter(host.name, request_id, found.reasons)
            return False
        self._forget_outcome(found)  # its host was away for too long
        return True

    def _forget_outcome(self, outcome: Outcome) -> None:
        self.pool.forget(outcome)
        self._rows.mark_outcome(outcome.request.request_id, None)

    def _waits_no_more(self, host: KnownHost, request_id: str, now: float) -> None:
        """Its host says so: its client has cancelled it or is gone, or the host has served it itself."""
        asked = self._asked.get(request_id)
        if asked is None or asked.waits_at != host.name:
            return
        if asked.placement is None:
            self._drop_waiter(asked, now)
        elif not asked.placement.is_placed:
            asked.placement.ends_as = RequestState.CANCELLED  # unless it was just granted

    def _drop_waiter(self, asked: Asked, now: float) -> None:
        """As if it had not been: what becomes of it, its host knows."""
        request_id = asked.request.request_id
        self._pool(Cancelled(request_id), now)
        outcome = self.pool.requests.get(request_id)
        if isinstance(outcome, Outcome):
            self._forget_outcome(outcome)

    def _leave_waiters(self, host: KnownHost, now: float) -> None:
        """The link of their host is lost: they keep their place for as long as those of clients that do not poll."""
        for request_id in list(host.waiting):
            self._abandoned(AskAbandoned(request_id, HOST_POLL, is_gone=False), now)

    def _tell_order(self, now: float) -> None:
        """Tell hosts what has changed of the order in which their requests wait."""
        hosts = [host for host in self.hosts.values() if host.is_linked and (host.waiting or host.order is not None)]
        in_order = self.pool.queue.in_order() if any(host.waiting for host in hosts) else []
        places = {waiter.request.request_id: place for place, waiter in enumerate(in_order, 1)}
        for host in hosts:
            order = self._order_of(host, places)
            if order != (host.order or HostOrder(self.epoch, self.name)):
                self._send(host.name, order)
            host.order = order if host.waiting else None
        if any(host.waiting for host in hosts):
            pause = LONG_ORDER_SECONDS if len(in_order) > LONG_QUEUE else ORDER_SECONDS
            self._timers.set("order", "", now + pause)

    def _order_of(self, host: KnownHost, places: dict[str, int]) -> HostOrder:
        if not host.waiting:
            return HostOrder(self.epoch, self.name)
        # A place is told once it is committed.
        positions = {
            request_id: places[request_id]
            for request_id in host.waiting
            if request_id in places and self._asked[request_id].is_stored
        }
        note = f"{host.name} is being drained, and grants nothing" if host.is_draining else ""
        first = self.pool.reserved_for
        reserved: tuple[str, ...] = ()
        if first is not None:
            reserved = tuple([gpu_id_at_host(each) for each in first.reserved if host_of_gpu(each) == host.name])
        if first is None or not reserved:
            return HostOrder(self.epoch, self.name, positions, note=note)
        request = first.request
        name = name_of(request, self.pool.settings.host)
        return HostOrder(self.epoch, self.name, positions, reserved, request.request_id, name, note)
