"""The hosts of a fleet, as they join, report and leave: their GPUs and their leases. Part of `Dispatcher`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.events import (
    Observed,
    Request,
    Unreachable,
)
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.fleet.dispatching import Received, StepDown
from gpu_worker_pool.fleet.host_waiters import HostWaiters
from gpu_worker_pool.fleet.hosts import OF, KnownHost, pool_gpu_id
from gpu_worker_pool.fleet.messages import (
    WITHDRAWN,
    Administer,
    AskAbandoned,
    CallAnswer,
    EndedRow,
    HostLease,
    Join,
    Report,
    ReportWanted,
    TurnedAway,
    Welcome,
)
from gpu_worker_pool.fleet.rows import request_in
from gpu_worker_pool.fleet.store import HOSTS, REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.settings import PoolSettings


from gpu_worker_pool.fleet.placements import (
    HELD,
    MOST_ENDED_AT_HOSTS,
    Asked,
    Placement,
    pooled,
)

HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,40}", re.ASCII)


class Reports(HostWaiters):
    """The pool of a dispatcher, and the hosts that it knows."""

    def __init__(
        self,
        name: str,
        url: str,
        epoch: int,
        settings: PoolSettings,
        rows: Mapping[str, Mapping[str, Mapping[str, Any]]],
        *,
        fleet_id: str,
        secret: str,
    ) -> None:
        super().__init__(name, epoch, settings, rows)
        self.url: str = url
        self.fleet_id: str = fleet_id
        self._secret = secret
        #: Requests whose lease may be at a host that has not reported yet; and by that host, their ids.
        self._unheard: dict[str, Mapping[str, Any]] = {}
        self._unheard_at: dict[str, list[str]] = {}
        #: A host that was removed and comes back may have obeyed commands up to this number.
        self._commanded = 0
        #: The number of the next GPU that is new to the fleet.
        self._next_number = 0
        #: Ended requests that are known only from hosts' reports.
        self._ended_at_hosts: dict[str, EndedRow] = {}
        #: For a GPU that two hosts report: the host to which it belongs.
        self._owner_of_uuid: dict[str, str] = {}
        self._stored_hosts: set[str] = set()
        self._told_candidates: tuple[str, ...] = ()
        #: What came before all hosts have reported; None: they have.
        self._early: list[Received] | None = []

    def _step_down(self, epoch: int, owner: str) -> None:
        if epoch > self.epoch or (epoch == self.epoch and owner != self.name):
            self._effects.append(StepDown(epoch, owner))

    def _joined(self, sender: str, join: Join, now: float) -> None:
        host, name = self.hosts.get(join.name), join.name
        if not HOST_NAME.fullmatch(name) or sender != name:
            self._send(sender, TurnedAway(f"{name[:60]!r} is not the name of a host: use letters, digits and . _ -"))
            return
        if host is not None and host.ledger_id != join.ledger_id:
            text = (
                f"this fleet has another host named {name}, with another ledger: give this one another name with "
                f"GPU_POOL_HOST_NAME, or, if the other one is gone for good, run: gpu-pool fleet remove {name}"
            )
            self._send(sender, TurnedAway(text))
            return
        if join.epoch > self.epoch or (join.epoch == self.epoch and join.epoch_owner != self.name):
            self._step_down(join.epoch, join.epoch_owner)
            return
        if host is None:
            host = self.hosts[name] = KnownHost(name, join.ledger_id, join.url, commanded=self._commanded)
        elif host.is_linked:
            self._link_lost(name, now)
        before = host.document()
        host.joined(join, now)
        if host.document() != before or name not in self._stored_hosts:
            self._stored_hosts.add(name)
            self._rows.mark(HOSTS, name)
        self._pool(Unreachable(name), now)  # until it has reported
        welcome = self._welcome()
        self._send(name, welcome)
        if welcome.candidates != self._told_candidates:
            # Every host keeps a link to each candidate, for when this one fails.
            self._told_candidates = welcome.candidates
            for other in self.hosts.values():
                if other.is_linked and other is not host:
                    self._send(other.name, welcome)

    def _welcome(self) -> Welcome:
        urls = tuple(sorted({self.url, *(host.url for host in self.hosts.values() if host.is_candidate)}))
        return Welcome(
            self.fleet_id, self.epoch, self.name, self.url, urls, is_own=True, secret=self._secret, serves_hosts=True
        )

    def _link_lost(self, name: str, now: float) -> None:
        host = self.hosts.get(name)
        if host is None or not host.is_linked:
            return
        host.is_linked = host.is_heard = False
        self._pool(Unreachable(name), now)
        for poll_id, request_id in list(self._polls.items()):
            if self._asked[request_id].polls.get(poll_id, ("", 0.0))[0] == name:
                self._abandoned(AskAbandoned(request_id, poll_id, is_gone=False), now)
        self._leave_waiters(host, now)

    def _administer(self, message: Administer, now: float) -> CallAnswer:
        host, call_id = self.hosts.get(message.host), message.call_id
        if host is None:
            text = f"this fleet has no host named {message.host[:60]!r}; gpu-pool fleet status lists them"
            return CallAnswer(call_id, error="UnknownHost", text=text)
        if message.what == "remove":
            if host.is_linked:
                text = f"{host.name} is connected: stop its server first, or use: gpu-pool fleet drain {host.name}"
                return CallAnswer(call_id, error="IllegalEventError", text=text)
            self._remove(host, now)
        elif message.what in ("drain", "undrain"):
            host.is_draining = message.what == "drain"
            self._rows.mark(HOSTS, host.name)
            host.readings = None
            self._observe(host, now)
        else:
            text = f"a host can be drained, undrained and removed, not {message.what[:40]!r}"
            return CallAnswer(call_id, error="IllegalEventError", text=text)
        return CallAnswer(call_id, {"host": host.name, "done": message.what})

    def _remove(self, host: KnownHost, now: float) -> None:
        for pool_lease_id in list(host.leases.values()):
            self._lease_is_gone(pool_lease_id, now, ("its host was removed from the fleet",))
        for asked in list(self._asked.values()):
            if asked.placement is not None and asked.placement.host == host.name:
                self._put_back(asked, now)
        for request_id in list(host.waiting):
            self._drop_waiter(self._asked[request_id], now)
        self._pool(Unreachable(host.name, is_removed=True), now)
        self._owner_of_uuid = {uuid: name for uuid, name in self._owner_of_uuid.items() if name != host.name}
        self._unwanted = {key: reason for key, reason in self._unwanted.items() if key[0] != host.name}
        for request_id in self._unheard_at.pop(host.name, ()):
            self._unheard.pop(request_id, None)
        del self.hosts[host.name]
        self._commanded = max(self._commanded, host.commanded)
        self._stored_hosts.discard(host.name)
        self._rows.mark(HOSTS, host.name)

    def _reported(self, host: KnownHost, report: Report, now: float) -> None:
        if host.is_heard and report.number <= host.reported:
            return  # an older one
        if not report.is_whole and not (host.is_heard and report.number == host.reported + 1):
            self._send(host.name, ReportWanted(self.epoch, self.name, is_whole=True))
            return
        host.reported = report.number
        self._see_gpus(host, report)
        for row in report.leases:
            self._adopt(host, row, now)
        self._see_waiting(host, report, now)
        if report.age_seconds is not None:
            host.begun_at = max(host.begun_at, now - max(report.age_seconds, 0.0))
        host.is_heard = True
        if report.age_seconds is not None or report.gpus or report.missing:
            self._observe(host, now)
        for ended in report.ended:
            self._lease_over(host, ended, now)
        if report.is_whole:
            self._is_all_there(host, {row.lease_id for row in report.leases}, now)

    def _see_gpus(self, host: KnownHost, report: Report) -> None:
        if report.is_whole:
            if host.rows and list(host.rows.values()) == list(report.gpus):
                return
            host.rows = {}
        elif not report.gpus and not report.missing:
            return
        host.readings = None
        for gpu_id in report.missing:
            host.rows.pop(gpu_id, None)
        for row in report.gpus:
            host.rows[row.gpu_id] = row
            if row.gpu_id not in host.numbers:
                host.numbers[row.gpu_id] = self._next_number
                self._next_number += 1
                self._rows.mark(HOSTS, host.name)
            if row.uuid is not None and not row.is_simulated:
                self._owner_of_uuid.setdefault(row.uuid, host.name)

    def _observe(self, host: KnownHost, now: float) -> None:
        if self._early is None and host.is_linked and host.is_heard:
            readings = host.readings_for(self._owner_of_uuid)
            self._pool(Observed(host.name, readings, host.begun_at), now)

    def _adopt(self, host: KnownHost, row: HostLease, now: float) -> None:
        """A lease that a host has: placed there, perhaps by an earlier dispatcher, or of a program of that host."""
        request_id = row.request.request_id
        if row.lease_id in host.leases or row.request.within is not None:
            return
        if (host.name, request_id) in self._unwanted:
            self._add_lease(host, row, f"{host.name}{OF}{request_id}", now)
            self._end_at_host(host.name, request_id, self._unwanted[host.name, request_id])
            return
        held = self._unheard.pop(request_id, None)
        asked = self._asked.get(request_id)
        if asked is not None and asked.request.owner != row.request.owner:
            self._add_lease(host, row, f"{host.name}{OF}{request_id}", now)  # of another program, by chance
            return
        placement = None if asked is None else asked.placement
        if asked is not None and placement is not None:
            if placement.host == host.name:
                self._match(host, asked, placement, row, now)
                if asked.polls:
                    self._place(host, asked, now)
                return
            if placement.is_told or row.state != HELD:
                self._add_lease(host, row, f"{host.name}{OF}{request_id}", now)
                self._end_at_host(host.name, request_id, f"its request has a lease at {placement.host}")
                return
            # The previous dispatcher may have reported this lease to its client; the other one was reported to no one.
            self._end_at_host(placement.host, request_id, f"its request has a lease at {host.name}")
            # What the pool has of it is replaced below; its GPUs go to the next with the readings of this report.
            asked.placement = None
        elif asked is None and self._was_cancelled(request_id):
            self._add_lease(host, row, f"{host.name}{OF}{request_id}", now)
            self._end_at_host(host.name, request_id, "its client cancelled it")
            return
        lease_id = self._add_lease(host, row, request_id, now, None if asked is None else asked.request)
        if asked is None:
            asked = Asked(row.request, 0, now - row.held_seconds - row.waited_seconds, is_adopted=True)
            self._asked[request_id] = asked
        gpu_ids = tuple([pool_gpu_id(host.name, gpu_id) for gpu_id in row.gpu_ids])
        asked.placement = Placement(host.name, lease_id, gpu_ids, 0, now, is_placed=True, lease_id=row.lease_id)
        # The previous dispatcher stored where it was; its client may know of it.
        asked.placement.is_told = held is not None and (held["host"], held["lease_id"]) == (host.name, row.lease_id)
        self._rows.mark(REQUESTS, request_id)
        host.waiting.pop(request_id, None)
        if asked.polls:
            self._place(host, asked, now)

    def _was_cancelled(self, request_id: str) -> bool:
        known = self.pool.requests.get(request_id)
        return isinstance(known, Outcome) and known.state is RequestState.CANCELLED

    def _add_lease(
        self, host: KnownHost, row: HostLease, request_id: str, now: float, request: Request | None = None
    ) -> str:
        """Into the pool, under this id of a request; returns the id of the lease there."""
        lease_id = f"{host.name}:{row.lease_id}"
        gpu_ids = tuple([pool_gpu_id(host.name, gpu_id) for gpu_id in row.gpu_ids])
        known = replace(pooled(request or row.request), request_id=request_id)
        granted_at = now - row.held_seconds
        lease = Lease(
            lease_id,
            known,
            host.name,
            gpu_ids,
            self._held(host, gpu_ids),
            self.pool.fence + 1,
            LeaseState.HELD,
            granted_at - row.waited_seconds,
            granted_at,
            None,
        )
        self._replicate([lease], fences=1)
        host.leases[row.lease_id] = lease_id
        return lease_id

    def _lease_over(self, host: KnownHost, ended: EndedRow, now: float) -> None:
        """A lease of this host has ended."""
        request_id = ended.request_id
        was_unwanted = self._unwanted.pop((host.name, request_id), None) is not None
        pool_lease_id = host.leases.pop(ended.lease_id, None)
        asked = self._asked.get(request_id)
        placement = None if asked is None else asked.placement
        if pool_lease_id is not None:
            is_its_own = placement is not None and placement.pool_lease_id == pool_lease_id
            is_withdrawn = ended.state == WITHDRAWN and placement is not None and placement.ends_as is None
            if is_its_own and is_withdrawn and asked is not None and not asked.waits_at:
                self._put_back(asked, now)
            else:
                self._lease_is_gone(pool_lease_id, now, ended.reasons)
        elif was_unwanted or ended.state == WITHDRAWN:
            return
        elif asked is not None and placement is not None:
            if placement.host == host.name and not placement.is_placed:
                self._lease_is_gone(placement.pool_lease_id, now, ended.reasons)
        elif asked is not None:
            # The previous dispatcher granted it, and its last commits are lost.
            waiter = self.pool.requests.get(request_id)
            if isinstance(waiter, Waiter):
                self._replicate([Outcome(waiter.request, RequestState.GRANTED, now, ended.reasons)])
            self._ended(request_id, RequestState.GRANTED, ended.reasons, now)
        elif request_id not in self.pool.requests:
            self._ended_at_hosts[request_id] = ended
            if len(self._ended_at_hosts) > MOST_ENDED_AT_HOSTS:
                del self._ended_at_hosts[next(iter(self._ended_at_hosts))]

    def _lease_is_gone(self, pool_lease_id: str, now: float, reasons: tuple[str, ...]) -> None:
        lease = self.pool.leases.lookup(pool_lease_id)
        if lease is None:
            return
        request_id = lease.request.request_id
        asked = self._asked.get(request_id)
        if asked is not None and asked.placement is not None and asked.placement.pool_lease_id == pool_lease_id:
            self._ended(request_id, asked.placement.ends_as or RequestState.GRANTED, reasons, now)
        self._pool_release(pool_lease_id, now)

    def _is_all_there(self, host: KnownHost, there: set[str], now: float) -> None:
        """The host has sent a whole report: what is missing from it has ended."""
        for lease_id, pool_lease_id in list(host.leases.items()):
            if lease_id not in there:
                del host.leases[lease_id]
                self._lease_is_gone(pool_lease_id, now, ())
        for request_id in self._unheard_at.pop(host.name, ()):
            held = self._unheard.pop(request_id, None)
            if held is not None and request_id not in self.pool.requests:
                outcome = Outcome(pooled(request_in(held)), RequestState.GRANTED, float(held["at"]))
                self.pool.remember(outcome)
