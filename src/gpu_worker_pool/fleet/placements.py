"""Places what the dispatcher's pool grants at its host, and takes back what the host refuses. Part of `Dispatcher`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.assignments import HeldGPU, Lease
from gpu_worker_pool.core.effects import Effect as PoolEffect
from gpu_worker_pool.core.effects import Ended, Granted, LeaseEnded, ReadingWanted, WakeAt
from gpu_worker_pool.core.events import Event as PoolEvent
from gpu_worker_pool.core.events import (
    GrantRefused,
    QuarantineEnded,
    Released,
    Request,
)
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.core.replication import Counters
from gpu_worker_pool.core.settings import FAIR_SHARE_HALF_LIFE_SECONDS, PoolSettings
from gpu_worker_pool.core.timers import Timers
from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.fleet.dispatching import Effect, Send
from gpu_worker_pool.fleet.hosts import KnownHost, gpu_id_at_host, pool_gpu_id
from gpu_worker_pool.fleet.messages import (
    Answer,
    Ask,
    End,
    EndedRow,
    HostLease,
    Place,
    Placed,
    PlaceRefused,
    ReportWanted,
)
from gpu_worker_pool.fleet.rows import ChangedRows, outcome_document
from gpu_worker_pool.fleet.store import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.remembered import Outcome
    from gpu_worker_pool.fleet.messages import Message

#: How long a host may take to answer a placement before it is asked again, and before the request waits elsewhere.
PLACE_AGAIN_SECONDS: Final = 2.0
PLACE_SECONDS: Final = 15.0
#: How long a poll may be answered late while its grant is on its way.
GRACE_SECONDS: Final = 2.0
#: How many ended requests the database keeps; older ids may be used again.
MOST_OUTCOMES: Final = 20_000
#: How many ended requests of hosts are remembered that the database does not know.
MOST_ENDED_AT_HOSTS: Final = 50_000
#: In a row of an outcome: it was granted, and its lease may still be held.
HELD: Final = "held"


def fleet_settings(settings: PoolSettings | None = None) -> PoolSettings:
    """For the dispatcher's pool: whole hosts stay free for large requests, and the use of accounts counts."""
    settings = settings or PoolSettings(fair_share_half_life_seconds=FAIR_SHARE_HALF_LIFE_SECONDS)
    return replace(settings, strategy="pack", remember_at_most=MOST_OUTCOMES)


@dataclass(slots=True, eq=False)
class Placement:
    """A grant of the pool, on its way to its host or there."""

    host: str
    pool_lease_id: str
    gpu_ids: tuple[str, ...]
    #: The number of the last `Place`.
    number: int
    first_sent_at: float
    #: Whether the host has promised it; then the id of its lease there.
    is_placed: bool = False
    lease_id: str = ""
    #: Whether it was reported to a client.
    is_told: bool = False
    #: The last `Place` before a `PollEnded`, by which what it promised became an offer.
    offered_at: int = 0
    #: How its request ends with it; None: if the host refuses or withdraws it, the request waits again.
    ends_as: RequestState | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """A request of the fleet that waits or holds a lease, and the polls for it."""

    request: Request
    ticket: int
    enqueued_at: float
    may_reserve: bool = True
    is_stored: bool = False
    #: By poll id: the server that asks, and until when.
    polls: dict[str, tuple[str, float]] = field(default_factory=dict)
    #: As the pool knows its last poll.
    poll_id: str = ""
    poll_deadline: float | None = None
    gives_up_at: float | None = None
    placement: Placement | None = None
    #: Known from a host's report only, which does not say everything that its client asked for.
    is_adopted: bool = False
    #: The host in whose ledger it waits, and which alone may serve it; empty: it was asked of the fleet.
    waits_at: str = ""


class Placing:
    """The dispatcher's pool, and its grants on their way to the hosts."""

    def __init__(
        self, name: str, epoch: int, settings: PoolSettings, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]
    ) -> None:
        self.name: str = name
        self.epoch: int = epoch
        self.pool: Pool = Pool(settings)
        self.hosts: dict[str, KnownHost] = {}
        #: Requests of the fleet that wait or hold a lease.
        self._asked: dict[str, Asked] = {}
        #: By poll id, the request.
        self._polls: dict[str, str] = {}
        #: Polls that are answered once the row of their request is stored.
        self._untold: dict[str, list[str]] = {}
        #: Leases that are to end at their host: (host, request id).
        self._unwanted: dict[tuple[str, str], str] = {}
        self._timers = Timers(("poll", "placement", "pool", "hearing", "order"))
        self._effects: list[Effect] = []
        self._rows = ChangedRows(rows, self._document, MOST_OUTCOMES)

    def _document(self, table: str, key: str) -> Mapping[str, Any] | None:
        raise NotImplementedError

    def _adopt(self, host: KnownHost, row: HostLease, now: float) -> None:
        raise NotImplementedError

    def _lease_over(self, host: KnownHost, ended: EndedRow, now: float) -> None:
        raise NotImplementedError

    def _send(self, to: str, message: Message) -> None:
        self._effects.append(Send(to, message))

    def _pool(self, event: PoolEvent, now: float) -> tuple[PoolEffect, ...]:
        effects = self.pool.apply(event, now)
        self._perform(effects, now)
        return effects

    def _perform(self, effects: Iterable[PoolEffect], now: float) -> None:
        for effect in effects:
            match effect:
                case Granted(lease):
                    self._granted(lease, now)
                case Ended(request_id, state, reasons):
                    self._ended(request_id, state, reasons, now)
                case LeaseEnded(lease, _, reason):
                    self._lease_ended(lease, reason)
                case ReadingWanted(endpoint_id):
                    if (host := self.hosts.get(endpoint_id)) is not None and host.is_linked:
                        self._send(endpoint_id, ReportWanted(self.epoch, self.name))
                case WakeAt(at):
                    self._timers.set("pool", "", at)

    def _granted(self, lease: Lease, now: float) -> None:
        asked = self._asked.get(lease.request.request_id)
        if asked is None:
            return  # replicated: a lease of a host that was not requested from the fleet
        placement = asked.placement
        if placement is not None and placement.pool_lease_id == lease.lease_id:
            return  # its client polled again: `_ask` goes to the host
        if lease.state is LeaseState.OFFERED:
            # Its host sees whether its client claims it.
            self._replicate([lease.moved(LeaseState.HELD, expires_at=None)])
        host = self.hosts[lease.endpoint_id]
        asked.placement = Placement(lease.endpoint_id, lease.lease_id, lease.gpu_ids, 0, now)
        self._place(host, asked, now)

    def _place(self, host: KnownHost, asked: Asked, now: float) -> None:
        placement = asked.placement
        assert placement is not None
        placement.number = host.next_command()
        request = asked.request
        self._unwanted.pop((host.name, request.request_id), None)
        lease = self.pool.leases.lookup(placement.pool_lease_id)
        if lease is not None and lease.longest_seconds is not None:
            limit = min(request.max_seconds or math.inf, lease.longest_seconds)
            request = replace(request, max_seconds=limit)
        gpu_ids = tuple(map(gpu_id_at_host, placement.gpu_ids))
        poll_id, is_listening = asked.poll_id, bool(asked.polls)
        number, waits_there = placement.number, bool(asked.waits_at)
        place = Place(self.epoch, self.name, number, request, gpu_ids, poll_id, is_listening, waits_there)
        self._send(host.name, place)
        self._timers.set("placement", request.request_id, now + PLACE_AGAIN_SECONDS)

    def _ended(self, request_id: str, state: RequestState, reasons: tuple[str, ...], now: float) -> None:
        asked = self._asked.get(request_id)
        if asked is None:
            return
        for poll_id in list(asked.polls):
            self._answer(asked, poll_id, Answer(poll_id, request_id, "ended", reasons=reasons, error=state.value))
        if asked.waits_at and state is RequestState.REJECTED:
            self._refuse_waiter(asked.waits_at, request_id, reasons)
        if state is not RequestState.GRANTED:
            document = outcome_document(asked.request, state.value, now, reasons)
            self._rows.mark_outcome(request_id, document)
        self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        request_id = asked.request.request_id
        for poll_id in asked.polls:
            self._drop_poll(poll_id)
        asked.polls.clear()
        self._untold.pop(request_id, None)
        self._timers.clear("placement", request_id)
        if asked.waits_at in self.hosts:
            self.hosts[asked.waits_at].waiting.pop(request_id, None)
        if self._asked.pop(request_id, None) is not None:
            self._rows.mark(REQUESTS, request_id)

    def _lease_ended(self, lease: Lease, reason: str) -> None:
        """The pool has ended it at its time limit. The host ends it, too."""
        request_id = lease.request.request_id
        asked = self._asked.get(request_id)
        placement = None if asked is None else asked.placement
        if asked is None or placement is None or placement.pool_lease_id != lease.lease_id:
            return
        placement.ends_as = RequestState.GRANTED
        self._end_at_host(placement.host, request_id, reason)
        if lease.lease_id not in self.pool.leases.by_id:
            self.hosts[placement.host].leases.pop(placement.lease_id, None)
            self._forget(asked)

    def _end_at_host(self, name: str, request_id: str, reason: str) -> None:
        """Until its host reports that it has ended, also over the next link."""
        self._unwanted[name, request_id] = reason
        host = self.hosts[name]
        if host.is_linked:
            self._send(name, End(self.epoch, self.name, host.next_command(), request_id, reason))

    def _refuse_waiter(self, name: str, request_id: str, reasons: tuple[str, ...] = ()) -> None:
        """End a request that waits in the ledger of this host. If that is lost, the host reports it again.

        `reasons`: why it is refused for good; without any, it was cancelled.
        """
        host = self.hosts.get(name)
        if host is not None and host.is_linked:
            self._send(name, End(self.epoch, self.name, host.next_command(), request_id, "; ".join(reasons), reasons))

    def _answer(self, asked: Asked, poll_id: str, answer: Answer) -> None:
        found = asked.polls.pop(poll_id, None)
        self._drop_poll(poll_id)
        if found is not None:
            self._send(found[0], answer)

    def _drop_poll(self, poll_id: str) -> None:
        self._polls.pop(poll_id, None)
        self._timers.clear("poll", poll_id)

    def _replicate(self, news: Sequence[Waiter | Lease | Outcome], fences: int = 0) -> None:
        pool = self.pool
        tally = {str(state): number for state, number in pool.tally.items()}
        pool.replicate(news, counters=Counters(pool.fence + fences, pool.ticket, pool.now, tally))

    def _pool_release(self, pool_lease_id: str, now: float) -> None:
        lease = self.pool.leases.lookup(pool_lease_id)
        if lease is not None:
            event = Released(pool_lease_id) if lease.quarantine is None else QuarantineEnded(pool_lease_id)
            self._pool(event, now)

    def _held(self, host: KnownHost, gpu_ids: tuple[str, ...]) -> tuple[HeldGPU, ...]:
        return tuple([HeldGPU(gpu_id, host.numbers.get(gpu_id_at_host(gpu_id), 0)) for gpu_id in gpu_ids])

    def _placement_is_late(self, request_id: str, now: float) -> None:
        asked = self._asked.get(request_id)
        placement = None if asked is None else asked.placement
        if asked is None or placement is None or (placement.is_placed and not asked.polls):
            return
        host = self.hosts[placement.host]
        if placement.is_placed or now - placement.first_sent_at < PLACE_SECONDS:
            if host.is_linked:
                self._place(host, asked, now)
            else:
                self._timers.set("placement", request_id, now + PLACE_AGAIN_SECONDS)
        elif placement.ends_as is not None or asked.waits_at:
            self._put_back(asked, now)
        else:
            self._end_at_host(host.name, request_id, "it was placed elsewhere: this host did not answer in time")
            self._put_back(asked, now)

    def _placed(self, host: KnownHost, message: Placed, now: float) -> None:
        asked = self._asked.get(message.request_id)
        placement = None if asked is None else asked.placement
        if asked is None or placement is None or placement.host != host.name:
            self._adopt(host, message.lease, now)
            return
        self._match(host, asked, placement, message.lease, now)
        if message.number == placement.number:
            self._timers.clear("placement", message.request_id)
        if placement.ends_as is not None or not asked.polls:
            return
        if not message.is_held or message.number <= placement.offered_at:
            self._place(host, asked, now)  # its client has polled again since
            return
        placement.is_told = True
        numbers = tuple([host.numbers.get(gpu_id, 0) for gpu_id in message.lease.gpu_ids])
        for poll_id in list(asked.polls):
            answer = Answer(
                poll_id,
                message.request_id,
                "granted",
                host.name,
                host.url,
                placement.lease_id,
                numbers,
                message.body,
                waiting_seconds=max(now - asked.enqueued_at, 0.0),
            )
            self._answer(asked, poll_id, answer)

    def _match(self, host: KnownHost, asked: Asked, placement: Placement, row: HostLease, now: float) -> None:
        """The host has promised what was placed, or had promised it before, perhaps on other GPUs."""
        if placement.is_placed and placement.lease_id == row.lease_id:
            return
        lease = self.pool.leases.lookup(placement.pool_lease_id)
        gpu_ids = tuple([pool_gpu_id(host.name, gpu_id) for gpu_id in row.gpu_ids])
        if lease is not None and set(gpu_ids) != set(lease.gpu_ids):
            self._replicate([replace(lease, gpu_ids=gpu_ids, held=self._held(host, gpu_ids))])
            placement.gpu_ids = gpu_ids
        before = host.leases.get(row.lease_id)
        if before is not None and before != placement.pool_lease_id:
            self._pool_release(before, now)  # its client had gone, and has polled again
        placement.is_placed, placement.lease_id = True, row.lease_id
        host.waiting.pop(asked.request.request_id, None)
        host.leases[row.lease_id] = placement.pool_lease_id
        request = asked.request
        document = outcome_document(request, HELD, now, (), host.name, row.lease_id)
        self._rows.mark_outcome(request.request_id, document)
        self._rows.mark(REQUESTS, request.request_id)

    def _place_refused(self, host: KnownHost, message: PlaceRefused, now: float) -> None:
        asked = self._asked.get(message.request_id)
        placement = None if asked is None else asked.placement
        if asked is None or placement is None or (placement.host, placement.number) != (host.name, message.number):
            return
        self._timers.clear("placement", message.request_id)
        if message.ended is not None:
            self._lease_over(host, message.ended, now)
        elif not placement.is_placed:
            self._put_back(asked, now)
        else:
            # Its reports show whether it still has the lease.
            error = LedgerUnavailableError(f"{host.name}: {'; '.join(message.reasons) or 'it does not answer'}")
            for poll_id in list(asked.polls):
                self._answer(asked, poll_id, refused(Ask(poll_id, asked.request), error))

    def _put_back(self, asked: Asked, now: float) -> None:
        """The request waits again, in its place."""
        placement, request_id = asked.placement, asked.request.request_id
        assert placement is not None
        asked.placement = None
        self._timers.clear("placement", request_id)
        if placement.pool_lease_id not in self.pool.leases.by_id:
            self._forget(asked)
        elif placement.ends_as is not None:
            self._rows.mark_outcome(request_id, outcome_document(asked.request, placement.ends_as.value, now))
            self._forget(asked)
            self._pool(Released(placement.pool_lease_id), now)
        else:
            self._rows.mark(REQUESTS, request_id)
            event = GrantRefused(
                placement.pool_lease_id,
                asked.ticket,
                None,
                asked.poll_deadline,
                asked.gives_up_at,
                asked.may_reserve,
                asked.poll_id,
            )
            self._pool(event, now)


def pooled(request: Request) -> Request:
    """As the dispatcher's pool knows it; only its host knows whether its lease is still held."""
    return replace(
        request, ttl_seconds=None, max_seconds=None, expected_seconds=request.declared_seconds, process="", within=None
    )


def refused(ask: Ask, error: Exception) -> Answer:
    name, reasons = type(error).__name__, tuple(getattr(error, "reasons", ()))
    return Answer(ask.poll_id, ask.request.request_id, "refused", reasons=reasons, error=name, text=str(error))
