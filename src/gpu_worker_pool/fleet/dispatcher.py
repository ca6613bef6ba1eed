"""The dispatcher of a fleet: one queue and one order for many hosts. Pure: no clock, no I/O.

It holds one `core.Pool` in which every host is an endpoint, and decides nothing that the pool decides. What the pool
grants is placed at its host, which grants or refuses; what a host refused waits again, in its place.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.events import (
    Cancelled,
    PolicyRead,
    PollAbandoned,
    Request,
    Requested,
    Ticked,
    Unreachable,
)
from gpu_worker_pool.core.fair_share import Use
from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.core.replication import Counters
from gpu_worker_pool.errors import IllegalEventError, LedgerUnavailableError
from gpu_worker_pool.fleet import views as viewing
from gpu_worker_pool.fleet.dispatching import Effect as Effect
from gpu_worker_pool.fleet.dispatching import Event as Event
from gpu_worker_pool.fleet.dispatching import LinkLost as LinkLost
from gpu_worker_pool.fleet.dispatching import NewPolicy as NewPolicy
from gpu_worker_pool.fleet.dispatching import Received as Received
from gpu_worker_pool.fleet.dispatching import Send as Send
from gpu_worker_pool.fleet.dispatching import StepDown as StepDown
from gpu_worker_pool.fleet.dispatching import StoreBack as StoreBack
from gpu_worker_pool.fleet.dispatching import Stored as Stored
from gpu_worker_pool.fleet.dispatching import StoreLost as StoreLost
from gpu_worker_pool.fleet.dispatching import TimePassed as TimePassed
from gpu_worker_pool.fleet.hosts import KnownHost
from gpu_worker_pool.fleet.messages import (
    Administer,
    Answer,
    Ask,
    AskAbandoned,
    Call,
    CallAnswer,
    Cancel,
    EpochRefused,
    Join,
    Placed,
    PlaceRefused,
    PollEnded,
    Query,
    Report,
)
from gpu_worker_pool.fleet.rows import COUNTERS, request_document, request_in
from gpu_worker_pool.fleet.store import ACCOUNTS, HOSTS, OUTCOMES, REQUESTS, TABLES, Delete, Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.fleet.messages import FromHost

from gpu_worker_pool.fleet.placements import (
    GRACE_SECONDS,
    HELD,
    Asked,
    Placement,
    pooled,
    refused,
)
from gpu_worker_pool.fleet.placements import fleet_settings as fleet_settings
from gpu_worker_pool.fleet.reports import Reports

LONGEST_POLL_SECONDS: Final = 3600.0


class Dispatcher(Reports):
    """`rows`: what the store had at the election (`FleetStore.load`).

    `now` is the database's time at the election plus a monotonic clock's, in seconds; it never goes back.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        fleet_id: str,
        epoch: int,
        secret: str,
        rows: Mapping[str, Mapping[str, Mapping[str, Any]]],
        settings: PoolSettings,
        now: float,
        hear_seconds: float = 2.0,
    ) -> None:
        super().__init__(name, url, epoch, settings, rows, fleet_id=fleet_id, secret=secret)
        self.views: viewing.Views = viewing.Views()
        #: Why the database does not answer; None if it does.
        self.store_problem: str | None = None
        #: How far the database's clock was set back.
        self._behind = 0.0
        self._load(rows, now)
        self._timers.set("hearing", "", now + hear_seconds)

    def apply(self, event: Event, now: float) -> list[Effect]:
        now += self._behind
        match event:
            case Received(sender, message):
                self._received(sender, message, now)
            case LinkLost(host):
                self._link_lost(host, now)
            case Stored(batch):
                self._stored(batch, now)
            case StoreLost(reason):
                self.store_problem = reason
                self._rows.lost()
                for request_id in list(self._untold):
                    self._answer_waiting(request_id, now)
            case StoreBack():
                self.store_problem = None
            case NewPolicy(policy):
                self._pool(PolicyRead(policy), now)
            case TimePassed():
                pass
        self._run_timers(now)
        if self._early is not None and self._is_everybody_heard():
            self._begin(now)
        effects, self._effects = self._effects, []
        return effects

    def next_due(self) -> float:
        """When to submit `TimePassed` next."""
        return self._timers.next_at() - self._behind

    def take_changes(self) -> tuple[int, Sequence[Put | Delete]]:
        """What is to be stored next, and its number for `Stored`; without changes, nothing needs to be written."""
        self._mark_accounts()
        return self._rows.take()

    def everything(self) -> tuple[int, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
        """All rows, for `FleetStore.rewrite`, and the number for `Stored`."""
        self._mark_accounts()
        keys: dict[str, Iterable[str]] = {
            REQUESTS: self._asked,
            HOSTS: self.hosts,
            ACCOUNTS: [COUNTERS, *(use.account for use in self._uses())],
        }
        rows: dict[str, dict[str, Mapping[str, Any]]] = {table: {} for table in TABLES}
        rows[OUTCOMES].update(self._rows.outcomes)
        for table, found in keys.items():
            for key in list(found):
                if (document := self._document(table, key)) is not None:
                    rows[table][key] = document
        return self._rows.take_all(rows), rows

    def _received(self, sender: str, message: FromHost, now: float) -> None:
        if self._early is not None and isinstance(message, Ask | AskAbandoned | Cancel):
            self._early.append(Received(sender, message))
            return
        if (host := self.hosts.get(sender)) is not None:
            host.seen_at = now
        match message:
            case Join():
                self._joined(sender, message, now)
            case EpochRefused(epoch, owner):
                self._step_down(epoch, owner)
            case Ask():
                self._ask(sender, message, now)
            case AskAbandoned():
                self._abandoned(message, now)
            case Cancel():
                self._cancel(sender, message, now)
            case Query():
                self._send(sender, viewing.answer(self, message, now))
            case Administer():
                self._send(sender, self._administer(message, now))
            case Call() | CallAnswer():
                pass  # the office passes these on
            case Report() | Placed() | PlaceRefused() if host is not None and host.is_linked:
                self._from_host(host, message, now)
            case _:
                pass  # of a host that has not joined

    def _from_host(self, host: KnownHost, message: Report | Placed | PlaceRefused, now: float) -> None:
        if isinstance(message, Report):
            self._reported(host, message, now)
        elif isinstance(message, Placed):
            self._placed(host, message, now)
        else:
            self._place_refused(host, message, now)

    def _ask(self, server: str, ask: Ask, now: float) -> None:
        request, request_id = ask.request, ask.request.request_id
        known = self._asked.get(request_id)
        if known is None and (refusal := self._why_not(ask)) is not None:
            self._send(server, refusal)
            return
        if known is not None and known.waits_at and known.placement is None and known.request.owner == request.owner:
            # It waited in the ledger of its server before that was in the fleet, and is asked of the fleet now.
            self._drop_waiter(known, now)
            known = None
        if known is not None and known.is_adopted and known.request.owner == request.owner:
            self._learn_request(known, request)
        deadline = now + min(max(ask.wait_seconds, 0.0), LONGEST_POLL_SECONDS)
        ticket = self.pool.ticket + 1
        try:
            event = Requested(pooled(request), None, deadline, ask.may_reserve, ask.poll_id)
            effects = self.pool.apply(event, now)
        except IllegalEventError as error:
            self._send(server, refused(ask, error))
            return
        asked = known or Asked(request, ticket, now)
        self._asked[request_id] = asked
        asked.polls[ask.poll_id] = (server, deadline)
        self._polls[ask.poll_id] = request_id
        asked.poll_id, asked.poll_deadline, asked.may_reserve = ask.poll_id, deadline, ask.may_reserve
        asked.gives_up_at = deadline + self.pool.settings.queue_ttl_seconds
        self._timers.set("poll", ask.poll_id, deadline)
        self._perform(effects, now)
        if self._asked.get(request_id) is not asked:
            return  # it has ended
        if known is None:
            self._rows.mark(REQUESTS, request_id)
        if asked.placement is None:
            if known is None and self.store_problem is not None:
                self._turn_down(asked, ask, now)
        elif known is not None and asked.placement.is_placed:
            # Only its host has the lease in the form that this client asked for, and can make an offer held.
            self._place(self.hosts[asked.placement.host], asked, now)

    def _learn_request(self, asked: Asked, request: Request) -> None:
        """A host reported its lease; only its client knows in which words it was requested."""
        asked.request, asked.is_adopted = request, False
        lease = self.pool.requests.get(request.request_id)
        if isinstance(lease, Lease):
            self._replicate([replace(lease, request=pooled(request))])

    def _turn_down(self, asked: Asked, ask: Ask, now: float) -> None:
        """It must not wait, because its place cannot be stored; it can ask again with the same id."""
        error = LedgerUnavailableError(
            f"no GPU is free, and nobody else can wait while the fleet's database does not answer: {self.store_problem}"
        )
        self._answer(asked, ask.poll_id, refused(ask, error))
        self._pool(Cancelled(ask.request.request_id), now)
        outcome = self.pool.requests.get(ask.request.request_id)
        if isinstance(outcome, Outcome):
            self.pool.forget(outcome)
            self._rows.mark_outcome(ask.request.request_id, None)

    def _why_not(self, ask: Ask) -> Answer | None:
        """A request that is new to this pool may already have a lease at a host."""
        request_id = ask.request.request_id
        if (ended := self._ended_at_hosts.get(request_id)) is not None:
            reasons = ended.reasons
            return Answer(ask.poll_id, request_id, "ended", reasons=reasons, error=RequestState.GRANTED.value)
        if (held := self._unheard.get(request_id)) is not None:
            text = f"its lease is at {held['host']}, which does not answer; ask again later"
            return refused(ask, LedgerUnavailableError(text))
        return None

    def _poll_is_over(self, poll_id: str, now: float) -> None:
        request_id = self._polls.get(poll_id)
        asked = None if request_id is None else self._asked.get(request_id)
        if asked is None or request_id is None or poll_id not in asked.polls:
            return
        if (placement := asked.placement) is not None:
            if now < asked.polls[poll_id][1] + GRACE_SECONDS:
                self._timers.set("poll", poll_id, asked.polls[poll_id][1] + GRACE_SECONDS)
                return
            self._end_poll(placement, request_id, poll_id, is_gone=False)
        elif not asked.is_stored and self.store_problem is None:
            self._untold.setdefault(request_id, []).append(poll_id)
            return
        self._tell_waiting(asked, poll_id, now)

    def _tell_waiting(self, asked: Asked, poll_id: str, now: float) -> None:
        request_id = asked.request.request_id
        if not asked.is_stored and asked.placement is None and self.store_problem is not None:
            text = f"the fleet's database does not answer: {self.store_problem}; ask again with the same request id"
            error = LedgerUnavailableError(text)
            self._answer(asked, poll_id, refused(Ask(poll_id, asked.request), error))
            return
        position, reasons = viewing.place_of(self, request_id, now)
        waiting = now - asked.enqueued_at
        answer = Answer(
            poll_id, request_id, "waiting", position=position, waiting_seconds=max(waiting, 0.0), reasons=reasons
        )
        self._answer(asked, poll_id, answer)

    def _answer_waiting(self, request_id: str, now: float) -> None:
        asked = self._asked.get(request_id)
        for poll_id in self._untold.pop(request_id, ()):
            if asked is not None and poll_id in asked.polls:
                self._tell_waiting(asked, poll_id, now)

    def _abandoned(self, message: AskAbandoned, now: float) -> None:
        request_id, poll_id = message.request_id, message.poll_id
        asked = self._asked.get(request_id)
        if asked is None:
            return
        asked.polls.pop(poll_id, None)
        self._drop_poll(poll_id)
        if asked.poll_id != poll_id:
            return
        settings = self.pool.settings
        asked.poll_deadline = now - 1.0
        asked.gives_up_at = now + (settings.offer_ttl_seconds if message.is_gone else settings.queue_ttl_seconds)
        if asked.placement is None:
            self._pool(PollAbandoned(request_id, poll_id, message.is_gone), now)
        else:
            self._end_poll(asked.placement, request_id, poll_id, is_gone=message.is_gone)

    def _end_poll(self, placement: Placement, request_id: str, poll_id: str, *, is_gone: bool) -> None:
        placement.offered_at = placement.number
        self._send(placement.host, PollEnded(self.epoch, self.name, request_id, poll_id, is_gone))

    def _cancel(self, server: str, message: Cancel, now: float) -> None:
        request_id = message.request_id
        asked = self._asked.get(request_id)
        if asked is None:
            text = f"no waiting request has the id {request_id[:64]!r}; GET /queue lists them"
            self._send(server, CallAnswer(message.call_id, error="UnknownRequest", text=text))
            return
        if message.by is not None and message.by != asked.request.owner:
            text = f"request {request_id!r} is not yours"
            self._send(server, CallAnswer(message.call_id, error="NotYourLeaseError", text=text))
            return
        if (placement := asked.placement) is None:
            if asked.waits_at:
                self._refuse_waiter(asked.waits_at, request_id)
            self._pool(Cancelled(request_id), now)
        else:
            placement.ends_as = RequestState.CANCELLED
            self._end_at_host(placement.host, request_id, "its client cancelled it")
            for poll_id in list(asked.polls):
                cancelled = RequestState.CANCELLED.value
                self._answer(asked, poll_id, Answer(poll_id, request_id, "ended", error=cancelled))
        self._send(server, CallAnswer(message.call_id, {"request_id": request_id, "cancelled": True}))

    def _run_timers(self, now: float) -> None:
        while (due := self._timers.pop_due(now)) is not None:
            kind, name = due
            if kind == "poll":
                self._poll_is_over(name, now)
            elif kind == "placement":
                self._placement_is_late(name, now)
            elif kind == "pool":
                self._pool(Ticked(), now)
            elif kind == "order":
                self._tell_order(now)
            elif kind == "hearing" and self._early is not None:
                self._begin(now)

    def _load(self, rows: Mapping[str, Mapping[str, Mapping[str, Any]]], now: float) -> None:
        counters = rows.get(ACCOUNTS, {}).get(COUNTERS, {})
        self._behind = max(0.0, float(counters.get("now", now)) - now)
        now += self._behind
        self._stored_hosts = set(rows.get(HOSTS, ()))
        for name, row in rows.get(HOSTS, {}).items():
            self.hosts[name] = KnownHost.of_document(name, row)
        waiters, ticket = [], int(counters.get("ticket", 0))
        ttl = self.pool.settings.queue_ttl_seconds
        for request_id, row in sorted(rows.get(REQUESTS, {}).items(), key=lambda item: int(item[1]["ticket"])):
            request = request_in(row)
            asked = Asked(request, int(row["ticket"]), float(row["enqueued_at"]), bool(row["may_reserve"]), True)
            asked.poll_deadline, asked.gives_up_at = now, now + ttl
            self._asked[request_id] = asked
            asked.waits_at = str(row.get("waits_at", ""))
            if asked.waits_at in self.hosts:
                self.hosts[asked.waits_at].waiting[request_id] = None
            waiters.append(
                Waiter(pooled(request), asked.ticket, asked.enqueued_at, None, now, now + ttl, asked.may_reserve)
            )
            ticket = max(ticket, asked.ticket)
        outcomes = []
        for request_id, row in rows.get(OUTCOMES, {}).items():
            if row["state"] == HELD:
                self._unheard[request_id] = row
                self._unheard_at.setdefault(str(row["host"]), []).append(request_id)
            else:
                reasons = tuple(map(str, row.get("reasons", ())))
                outcomes.append(Outcome(pooled(request_in(row)), RequestState(row["state"]), float(row["at"]), reasons))
        uses = [
            Use(account, float(row["gpu_seconds"]), float(row["at"]))
            for account, row in rows.get(ACCOUNTS, {}).items()
            if account != COUNTERS
        ]
        numbers = [number for host in self.hosts.values() for number in host.numbers.values()]
        self._next_number = max(numbers, default=-1) + 1
        fence = int(counters.get("fence", 0))
        self.pool.replicate([*outcomes, *waiters], counters=Counters(fence, ticket, now, {}), uses=uses)
        for name in self.hosts:
            self._pool(Unreachable(name), now)

    def _is_everybody_heard(self) -> bool:
        return all(host.is_heard for host in self.hosts.values())

    def _begin(self, now: float) -> None:
        """Grant from now on."""
        early, self._early = self._early or [], None
        self._timers.clear("hearing", "")
        for host in self.hosts.values():
            if host.is_heard and host.begun_at > -math.inf:
                self._observe(host, now)
        for received in early:
            self._received(received.sender, received.message, now)

    @property
    def is_hearing(self) -> bool:
        """Whether hosts still have to report before anything is granted."""
        return self._early is not None

    def unheard(self) -> list[Mapping[str, Any]]:
        """The rows of leases at hosts that have not reported yet."""
        return list(self._unheard.values())

    def _stored(self, batch: int, now: float) -> None:
        self.store_problem = None
        for request_id in self._rows.stored(batch):
            if (asked := self._asked.get(request_id)) is not None:
                asked.is_stored = True
                self._answer_waiting(request_id, now)

    def _mark_accounts(self) -> None:
        fair_share = self.pool.fair_share
        if fair_share is not None and fair_share.changed:
            for account in fair_share.changed:
                self._rows.mark(ACCOUNTS, account)
            self.pool.stored_use()
        if self._rows:
            self._rows.mark(ACCOUNTS, COUNTERS)

    def _uses(self) -> list[Use]:
        return [] if self.pool.fair_share is None else list(self.pool.fair_share.uses())

    def _document(self, table: str, key: str) -> Mapping[str, Any] | None:
        if table == REQUESTS:
            asked = self._asked.get(key)
            if asked is None or (asked.placement is not None and asked.placement.is_placed):
                return None  # it has no place in the queue any more
            return request_document(
                asked.request,
                asked.ticket,
                asked.enqueued_at,
                may_reserve=asked.may_reserve,
                waits_at=asked.waits_at,
            )
        if table == HOSTS:
            host = self.hosts.get(key)
            return None if host is None else host.document()
        if key == COUNTERS:
            return {"ticket": self.pool.ticket, "fence": self.pool.fence, "now": self.pool.now}
        assert self.pool.fair_share is not None
        (use,) = self.pool.fair_share.uses([key])
        return {"gpu_seconds": use.gpu_seconds, "at": use.at}
