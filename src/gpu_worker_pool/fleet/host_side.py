"""The host's side of a fleet: which dispatcher it obeys, what it places and reports. Pure; `agent` does its I/O."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.record import record
from gpu_worker_pool.fleet.messages import (
    FORMAT,
    WITHDRAWN,
    Answer,
    CallAnswer,
    End,
    EndedRow,
    EpochRefused,
    HostOrder,
    Join,
    Place,
    Placed,
    PlaceRefused,
    PollEnded,
    Report,
    ReportWanted,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gpu_worker_pool.fleet.messages import GPURow, HostLease, HostWaiter, Message, ToHost

#: A lease that was just placed may be missing from this many reports.
MOST_MISSED: Final = 2
#: How long a host without a link waits before it serves those who wait in its ledger itself.
OWN_ORDER_SECONDS: Final = 15.0
#: How many requests that a dispatcher withdrew are remembered.
MOST_WITHDRAWN: Final = 10_000

# --- what it wants done, in this order ---


@record
class SendToCandidate:
    """Send this over the link to this candidate; if it is closed, forget it."""

    to: str
    message: Message


@record
class RememberEpoch:
    """Make this durable before anything that follows."""

    epoch: int
    epoch_owner: str


@record
class DoPlace:
    """Let the broker grant `place.request`, which names the GPUs, at once or not at all (`Requested.may_wait`).

    Where the request has a lease already, that is the answer; where it waits in the ledger, its turn has come
    (`TurnCame`). Then call `placed` or `refused`.
    """

    to: str
    place: Place


@record
class DoEnd:
    """Cancel this request, and release its lease; where it waits in the ledger and is refused, that is its answer."""

    request_id: str
    reason: str
    refused: tuple[str, ...] = ()


@record
class DoAbandon:
    """`LeaseBroker.poll_abandoned`."""

    request_id: str
    poll_id: str
    is_gone: bool


@record
class DoRead:
    """Call `observe` immediately without a reading (`gpus=None`), then read the GPUs and call it again."""


@record
class FollowFleet:
    """The ledger follows the fleet (`FleetOrdered`): for `OWN_ORDER_SECONDS`, and again while `follows_fleet`.

    None: from now on, it does not.
    """

    order: HostOrder | None


@record
class Settled:
    """The answer to an `Ask` or to a call of this server: `Answer` or `CallAnswer`."""

    message: Answer | CallAnswer


@record
class DispatcherIs:
    """The link over which `Ask` and calls reach the dispatcher; empty: none is known. Repeat what is unanswered."""

    candidate: str
    epoch: int
    name: str
    url: str


HostEffect = (
    SendToCandidate | RememberEpoch | DoPlace | DoEnd | DoAbandon | DoRead | FollowFleet | Settled | DispatcherIs
)


class HostSide:
    """`epoch` and `epoch_owner`: what `RememberEpoch` stored last."""

    def __init__(
        self,
        name: str,
        ledger_id: str,
        url: str,
        version: str,
        *,
        is_candidate: bool = False,
        epoch: int = 0,
        epoch_owner: str = "",
    ) -> None:
        self.name: str = name
        self.ledger_id: str = ledger_id
        self.url: str = url
        self.version: str = version
        self.is_candidate: bool = is_candidate
        self.epoch: int = epoch
        self.epoch_owner: str = epoch_owner
        #: The link over which the dispatcher is reached; empty: there is none.
        self.dispatcher_link: str = ""
        #: The number of the last `Place` or `End` of this epoch.
        self._commanded = 0
        #: The number of the last report, and whether the next one must be whole.
        self._numbered = 0
        self._is_whole_due = True
        self._gpus: dict[str, GPURow] = {}
        self._leases: dict[str, HostLease] = {}
        #: Placed so recently that the next observation may miss them: there, missing does not mean ended.
        self._unobserved: dict[str, tuple[HostLease, int]] = {}
        #: The last reading of each GPU.
        self._last_gpus: tuple[GPURow, ...] = ()
        #: Requests that wait in the ledger, as they were reported.
        self._waiting: dict[str, HostWaiter] = {}
        #: What the dispatcher said of the order in which they wait; None: it does not serve them, or there is none.
        self.order: HostOrder | None = None
        #: Requests whose leases a dispatcher withdrew before a client learned of them: they have not ended.
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def join(self) -> Join:
        """The first message on every link."""
        return Join(
            self.name,
            self.ledger_id,
            self.url,
            self.version,
            FORMAT,
            self.epoch,
            self.epoch_owner,
            self.is_candidate,
        )

    def link_lost(self, candidate: str) -> list[HostEffect]:
        """The link to this candidate is closed. `candidate` is the caller's name for that link."""
        if candidate != self.dispatcher_link:
            return []
        self.dispatcher_link, self._is_whole_due, self.order = "", True, None
        return [DispatcherIs("", self.epoch, "", "")]

    def received(self, candidate: str, message: ToHost, now: float) -> list[HostEffect]:  # noqa: ARG002  # for `agent`
        """A message came from a candidate. Raises nothing; outdated messages are ignored."""
        match message:
            case Welcome():
                return self._welcomed(candidate, message)
            case Place() | End() | HostOrder() | PollEnded() | ReportWanted():
                effects = self._obey(candidate, message.epoch, message.dispatcher)
                if self._is_obeyed(message.epoch, message.dispatcher):
                    effects += self._command(candidate, message)
                return effects
            case Answer() | CallAnswer():
                return [Settled(message)]
            case _:
                return []

    def _welcomed(self, candidate: str, welcome: Welcome) -> list[HostEffect]:
        """Only a dispatcher's own claim counts; what another candidate has heard is passed to the caller."""
        if not welcome.is_own:
            return []
        is_known = candidate == self.dispatcher_link and self._is_obeyed(welcome.epoch, welcome.dispatcher)
        effects = self._obey(candidate, welcome.epoch, welcome.dispatcher)
        if self._is_obeyed(welcome.epoch, welcome.dispatcher) and not is_known:
            self.dispatcher_link, self._is_whole_due = candidate, True
            effects.append(DispatcherIs(candidate, welcome.epoch, welcome.dispatcher, welcome.dispatcher_url))
            self.order = HostOrder(welcome.epoch, welcome.dispatcher) if welcome.serves_hosts else None
            effects += [FollowFleet(self.order), DoRead()]
        return effects

    def _obey(self, candidate: str, epoch: int, owner: str) -> list[HostEffect]:
        """Take note of a higher epoch; refuse a lower one, and the same one of another dispatcher."""
        if epoch > self.epoch:
            self.epoch, self.epoch_owner, self._commanded = epoch, owner, 0
            return [RememberEpoch(epoch, owner)]
        return [] if self._is_obeyed(epoch, owner) else [self._refusal(candidate)]

    def _is_obeyed(self, epoch: int, owner: str) -> bool:
        return (epoch, owner) == (self.epoch, self.epoch_owner)

    def _refusal(self, candidate: str) -> SendToCandidate:
        return SendToCandidate(candidate, EpochRefused(self.epoch, self.epoch_owner))

    def _command(self, candidate: str, message: Place | End | HostOrder | PollEnded | ReportWanted) -> list[HostEffect]:
        if isinstance(message, HostOrder):
            if self.order is None:
                return []  # of a link that is closed
            self.order = message
            return [FollowFleet(message)]
        if isinstance(message, PollEnded):
            return [DoAbandon(message.request_id, message.poll_id, message.is_gone)]
        if isinstance(message, ReportWanted):
            self._is_whole_due |= message.is_whole
            return [DoRead()]
        if message.number <= self._commanded:
            return []  # a newer command has come already
        self._commanded = message.number
        if isinstance(message, End):
            self._withdrawn[message.request_id] = None
            if len(self._withdrawn) > MOST_WITHDRAWN:
                self._withdrawn.popitem(last=False)
            return [DoEnd(message.request_id, message.reason, message.refused)]
        request = message.request
        self._withdrawn.pop(request.request_id, None)
        requirements = replace(request.requirements, only=message.gpu_ids, exclude=())
        return [DoPlace(candidate, replace(message, request=replace(request, requirements=requirements)))]

    # --- what the broker did ---

    def placed(self, effect: DoPlace, lease: HostLease, body: Mapping[str, Any], *, is_held: bool) -> list[HostEffect]:
        """The broker granted it."""
        place = effect.place
        if not self._is_whole_due:
            self._leases[lease.lease_id] = lease  # it may end before the next report
        self._unobserved[lease.lease_id] = lease, MOST_MISSED
        return [SendToCandidate(effect.to, Placed(place.number, place.request.request_id, lease, body, is_held))]

    def refused(self, effect: DoPlace, reasons: tuple[str, ...], ended: EndedRow | None = None) -> list[HostEffect]:
        """The broker did not grant it; `ended`: its earlier lease here has ended."""
        place = effect.place
        if ended is not None:
            ended = self._ended(ended)
        return [SendToCandidate(effect.to, PlaceRefused(place.number, place.request.request_id, reasons, ended))]

    def _ended(self, row: EndedRow) -> EndedRow:
        return replace(row, state=WITHDRAWN) if row.request_id in self._withdrawn else row

    # --- reports ---

    def observe(
        self,
        gpus: Sequence[GPURow] | None,
        leases: Sequence[HostLease],
        ended: Sequence[EndedRow],
        waiting: Sequence[HostWaiter] = (),
        *,
        age_seconds: float | None,
        unread: Collection[str] = (),
    ) -> list[HostEffect]:
        """Reports what has changed. Call it with everything, after every reading and after every change of a lease.

        `gpus`: None where nothing was read since the last call. `ended`: what is remembered of requests of the fleet.
        `waiting`: those outside any lease, in order of arrival, at the same moment as `leases`.
        `unread`: leases that have ended since that reading; that they have is reported with the next one.
        """
        is_new = gpus is not None
        if gpus is not None:
            self._last_gpus = tuple(gpus)
        if not self.dispatcher_link:
            return []
        gpus, is_whole = self._last_gpus, self._is_whole_due
        age_seconds = age_seconds if is_new else None
        rows, held = {row.gpu_id: row for row in gpus}, {row.lease_id: row for row in leases}
        for over_row in ended if self._unobserved else ():
            self._unobserved.pop(over_row.lease_id, None)
        for lease_id in held:
            self._unobserved.pop(lease_id, None)
        for lease_id, (lease, left) in list(self._unobserved.items()):
            held[lease_id] = lease
            self._unobserved[lease_id] = lease, left - 1
            if not left:
                del self._unobserved[lease_id], held[lease_id]
        for lease_id in () if is_whole else unread:
            if (known := self._leases.get(lease_id)) is not None:
                held[lease_id] = known
        before = {} if is_whole else self._gpus
        changed = self._last_gpus if is_whole else tuple([row for row in gpus if before.get(row.gpu_id) != row])
        missing = () if is_whole else tuple([gpu_id for gpu_id in before if gpu_id not in rows])
        new = tuple([row for row in held.values() if is_whole or not self._is_known(row)])
        over = tuple(map(self._ended, ended)) if is_whole else self._over(held, ended)
        self._gpus, self._leases = rows, held
        now_waiting = {row.request.request_id: row for row in waiting}
        waited = {} if is_whole else self._waiting
        come = tuple([row for request_id, row in now_waiting.items() if waited.get(request_id) != row])
        gone = tuple([request_id for request_id in waited if request_id not in now_waiting])
        self._waiting = now_waiting
        if not is_whole and age_seconds is None and not (changed or missing or new or over or come or gone):
            return []
        self._numbered += 1
        self._is_whole_due = False
        report = Report(self._numbered, is_whole, age_seconds, changed, missing, new, over, come, gone)
        return [SendToCandidate(self.dispatcher_link, report)]

    def _is_known(self, row: HostLease) -> bool:
        before = self._leases.get(row.lease_id)
        return before is not None and (before.state, before.gpu_ids) == (row.state, row.gpu_ids)

    def _over(self, held: Mapping[str, HostLease], ended: Sequence[EndedRow]) -> tuple[EndedRow, ...]:
        gone = [row for lease_id, row in self._leases.items() if lease_id not in held]
        if not gone:
            return ()
        remembered = {row.lease_id: row for row in ended}
        return tuple(
            [
                self._ended(remembered.get(row.lease_id) or EndedRow(row.request.request_id, row.lease_id, "released"))
                for row in gone
            ]
        )
