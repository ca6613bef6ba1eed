"""A host's side of its fleet: keeps a link to every candidate, places what the dispatcher says, and reports.

What it obeys and reports is decided by `HostSide`; this is what performs it, in the event loop of the host's server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from gpu_worker_pool.api.lease_rows import lease_body
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import is_private_url
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.core.fleet_order import FleetOrder
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    RequestEndedError,
)
from gpu_worker_pool.fleet import host_side
from gpu_worker_pool.fleet.bridging import Bridge
from gpu_worker_pool.fleet.links import HandshakeError, OpenedLink, open_link
from gpu_worker_pool.fleet.message_json import MessageError, decode, encode
from gpu_worker_pool.fleet.messages import (
    Call,
    CallAnswer,
    EndedRow,
    HostLease,
    HostOrder,
    HostWaiter,
    TurnedAway,
    Welcome,
)
from gpu_worker_pool.fleet.questions import Questions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    import aiohttp

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.fleet.epoch_file import EpochFile
    from gpu_worker_pool.fleet.host_side import HostEffect, HostSide
    from gpu_worker_pool.fleet.keys import FleetKeys
    from gpu_worker_pool.fleet.links import Link
    from gpu_worker_pool.fleet.messages import GPURow, Message

logger: logging.Logger = logging.getLogger(__name__)

#: How long a report waits for the reading after a release.
LONGEST_READING_SECONDS: Final = 0.5
#: How often a host without a link checks whether it must renew leases for their holders.
RENEW_SECONDS: Final = 0.5
#: How often the ledger of a host is told that its fleet's dispatcher is there.
FOLLOW_SECONDS: Final = 3.0
#: How many ended leases of the fleet are reported again to each new dispatcher.
MOST_ENDED: Final = 2000
#: How many requests that wait in the ledger are reported: those behind them are when these are served.
MOST_WAITING: Final = 2000
#: What others may ask of this host.
_CALLS: Final = ("renew", "release", "yield")
#: The longest pause before a candidate is tried again. Hosts that lost one come back within this time, so that they do
#: not all come at once.
LONGEST_PAUSE_SECONDS: Final = 5.0
SPREAD_SECONDS: Final = 1.0


class HostBroker(Protocol):
    """What the agent needs of the host's broker."""

    async def known(self, request_id: str) -> Waiter | Lease | Outcome | None: ...
    async def place(self, request: Request, *, poll_id: str = "", is_offer: bool = False) -> Lease: ...
    async def turn_came(self, request_id: str, gpu_ids: tuple[str, ...], max_seconds: float | None = None) -> Lease: ...
    async def follow_fleet(self, order: FleetOrder) -> None: ...
    async def cancel(self, request_id: str, by: str | None, *, refused: tuple[str, ...] = ()) -> bool: ...
    async def poll_abandoned(self, request_id: str, poll_id: str, *, is_gone: bool = True) -> None: ...
    async def held(self) -> list[Lease]: ...
    async def held_and_waiting(self) -> tuple[list[Lease], list[Waiter]]: ...
    async def granted_and_ended(self, most: int) -> list[Outcome]: ...
    async def renew(self, lease_id: str, by: str | None, *, is_busy: bool = False) -> Lease: ...
    async def release(self, lease_id: str, by: str | None) -> None: ...
    async def ask_to_leave(self, lease_id: str, reason: str) -> None: ...
    def index_of(self, gpu_id: str) -> int | None: ...


class Seen(NamedTuple):
    """What the host last read."""

    gpus: tuple[GPURow, ...]
    begun_at: float


class FleetAgent(Questions):
    """Belongs to one event loop. `see` returns what was last read, `want_reading` asks for a fresh reading."""

    def __init__(
        self,
        side: HostSide,
        broker: HostBroker,
        keys: FleetKeys,
        epochs: EpochFile,
        *,
        own_url: str,
        join: Iterable[str],
        is_insecure: bool,
        see: Callable[[], Seen | None],
        want_reading: Callable[[float], object],
        connect: Callable[[aiohttp.ClientSession, str, FleetKeys], Awaitable[OpenedLink]] = open_link,
    ) -> None:
        super().__init__()
        self._side = side
        self._broker = broker
        self._keys = keys
        self._epochs = epochs
        self._own_url = own_url
        self._is_insecure = is_insecure
        self._see = see
        self._want_reading = want_reading
        self._connect = connect
        self._session: aiohttp.ClientSession | None = None
        #: For each address that is tried, its task.
        self._dialers: dict[str, asyncio.Task[None]] = {}
        self._first = [url.rstrip("/") for url in join]
        self.welcome: Welcome | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, EndedRow] = OrderedDict()
        self._reported_at: float | None = None
        self._is_observing = self._is_outdated = False
        #: Leases that have ended, and when: each is reported with a later reading.
        self._unread: dict[str, float] = {}
        self._bridge = Bridge()

    @property
    def name(self) -> str:
        return self._side.join().name

    # --- start and stop ---

    async def start(self) -> None:
        """The broker's ledger must be open."""
        self._session = make_session(limit_per_host=0)
        for outcome in await self._broker.granted_and_ended(MOST_ENDED):
            self._remember(outcome)
        for url in dict.fromkeys((*self._first, *self._epochs.candidates)):
            self._dial(url)
        self._run(self._keep_following())

    async def stop(self) -> None:
        """Waiting callers get a `FleetUnavailableError`."""
        self.stop_waiting()
        for task in (*self._dialers.values(), *self._tasks):
            task.cancel()
        await asyncio.gather(*self._dialers.values(), *self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close("the server stops")
        if self._session is not None:
            await self._session.close()

    # --- links ---

    def _dial(self, url: str) -> None:
        if url != self._own_url and url not in self._dialers and not self._is_stopping:
            self._dialers[url] = asyncio.get_running_loop().create_task(self._keep_link(url))

    async def _keep_link(self, url: str) -> None:
        """Keeps a link to the candidate at this address while the server runs."""
        assert self._session is not None  # it was started
        attempt = 0
        while True:
            if not self._is_insecure and not is_private_url(url):
                self._note_trouble(
                    url, f"{url} would be a link that others on the network can read: use https, or --fleet-insecure"
                )
                return
            try:
                link = await self._connect(self._session, url, self._keys)
            except HandshakeError as error:
                self._note_trouble(url, str(error))
                await asyncio.sleep(0.1 + backoff_seconds(attempt, random.random(), longest=LONGEST_PAUSE_SECONDS))  # noqa: S311
                attempt += 1
                continue
            candidate = link.name or url
            if candidate in self._links or candidate == self._own_url:
                link.close("there is a link already")
                if candidate != url:  # another address of the same
                    self._dialers.pop(url, None)
                    self._dial(candidate)
                    return
                # The link to it was made to another of its addresses.
                await asyncio.sleep(LONGEST_PAUSE_SECONDS * (0.5 + random.random()))  # noqa: S311
                continue
            closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._attach(candidate, link, closed)
            self.troubles.pop(url, None)
            begun_at = asyncio.get_running_loop().time()
            reason = await closed
            self._note_trouble(url, f"{url}: {reason}")
            # All hosts lose a dispatcher that ends at the same moment.
            has_lasted = asyncio.get_running_loop().time() - begun_at > LONGEST_PAUSE_SECONDS
            attempt = 0 if has_lasted else attempt + 1
            pause_seconds = backoff_seconds(attempt, random.random(), longest=LONGEST_PAUSE_SECONDS)  # noqa: S311
            await asyncio.sleep(random.random() * SPREAD_SECONDS if has_lasted else 0.1 + pause_seconds)  # noqa: S311

    def attach_own(self, link: Link) -> None:
        """The link to the candidate that runs in this very process."""
        self._attach(self._own_url, link, None)

    def _attach(self, candidate: str, link: Link, closed: asyncio.Future[str] | None) -> None:
        def lost(_: Link, reason: str) -> None:
            if self._links.get(candidate) is link:
                del self._links[candidate]
                if not self._links.keys() - {self._own_url}:
                    if not self._bridge.is_needed(boot_time()):
                        self._run(self._renew_for_holders())
                    self._bridge.lost(boot_time())
                self._perform(self._side.link_lost(candidate))
                self._call_again(candidate)
            if closed is not None and not closed.done():
                closed.set_result(reason)

        link.on_closed = lost
        link.on_message = lambda _, row: self._received(candidate, row)
        self._links[candidate] = link
        if candidate != self._own_url:
            self._bridge.linked()
        self._wake_calls()
        link.send(encode(self._side.join()))

    def _note_trouble(self, url: str, problem: str) -> None:
        if self.troubles.get(url) != problem:
            self.troubles[url] = problem
            if not self._is_stopping:
                logger.warning("no link to a candidate of the fleet: %s", problem)

    # --- messages ---

    def _received(self, candidate: str, row: dict[str, Any]) -> None:
        try:
            message: Any = decode(row)
        except MessageError as error:
            logger.warning("%s sent a message that is not understood: %s", candidate, error)
            return
        if isinstance(message, Call):
            self._run(self._answer_call(candidate, message))
            return
        if isinstance(message, Welcome):
            self._take_welcome(message)
        elif isinstance(message, TurnedAway):
            self._note_trouble(candidate, f"{candidate} does not take this host: {message.reason}")
            if candidate != self._own_url and (link := self._links.get(candidate)) is not None:
                link.close(message.reason)  # it frees the name there, and a new link asks again
                return
        self._perform(self._side.received(candidate, message, asyncio.get_running_loop().time()))

    def _take_welcome(self, message: Welcome) -> None:
        if self.welcome is None or message.epoch >= self.welcome.epoch:
            self.welcome = message
        if message.candidates:
            self._epochs.store_candidates(message.candidates)
            for url in message.candidates:
                self._dial(url.rstrip("/"))

    def _perform(self, effects: Iterable[HostEffect]) -> None:
        for effect in effects:
            match effect:
                case host_side.SendToCandidate(to=to, message=message):
                    self._send(to, message)
                case host_side.RememberEpoch(epoch=epoch, epoch_owner=owner):
                    try:
                        self._epochs.store_epoch(epoch, owner)
                    except OSError:
                        # What is not stored is not obeyed.
                        self._side.epoch, self._side.epoch_owner = self._epochs.epoch, self._epochs.epoch_owner
                        raise
                case host_side.DoPlace():
                    self._run(self._place(effect))
                case host_side.DoEnd(request_id=request_id, refused=refused):
                    self._run(self._quietly(self._broker.cancel(request_id, None, refused=refused)))
                case host_side.DoAbandon(request_id=request_id, poll_id=poll_id, is_gone=is_gone):
                    self._run(self._quietly(self._broker.poll_abandoned(request_id, poll_id, is_gone=is_gone)))
                case host_side.DoRead():
                    self._unread.clear()  # everything is reported now, and not with the reading
                    self.changed()
                    self._want_reading(boot_time())
                case host_side.FollowFleet(order=order):
                    self._run(self._follow_fleet(order))
                case host_side.Settled(message=message):
                    self._settle(message)
                case host_side.DispatcherIs(candidate=candidate):
                    self._follow(candidate)

    def _send(self, candidate: str, message: Message) -> None:
        link = self._links.get(candidate)
        if link is not None:
            link.send(encode(message))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self, work: Coroutine[Any, Any, Any]) -> None:
        with suppress(GPUWorkerPoolError):  # the ledger has logged it
            await work
        self.changed()

    # --- placements ---

    async def _place(self, effect: host_side.DoPlace) -> None:
        place = effect.place
        request_id = place.request.request_id
        try:
            known = await self._broker.known(request_id)
            if isinstance(known, Outcome) and known.lease is not None:
                self._perform(self._side.refused(effect, known.reasons, _ended_row(known)))
                return
            if isinstance(known, Lease) and known.quarantine is not None:
                ended = EndedRow(request_id, known.lease_id, known.state.value, (known.quarantine.reason,))
                self._perform(self._side.refused(effect, ended.reasons, ended))
                return
            if isinstance(known, Lease):
                lease = known
                if place.is_listening:
                    lease = await self._broker.place(known.request, poll_id=place.poll_id)
            elif isinstance(known, Waiter):
                lease = await self._broker.turn_came(request_id, place.gpu_ids, place.request.max_seconds)
            elif place.waits_there:
                self._perform(self._side.refused(effect, ("it does not wait here any more",)))
                return
            else:
                requirements = replace(
                    place.request.requirements, only=place.gpu_ids, exclude=(), count=len(place.gpu_ids)
                )
                lease = await self._broker.place(
                    replace(place.request, requirements=requirements),
                    poll_id=place.poll_id,
                    is_offer=not place.is_listening,
                )
        except (ImpossibleRequestError, RequestEndedError) as error:
            self._perform(self._side.refused(effect, tuple(error.reasons) or (str(error),)))
        except GPUWorkerPoolError as error:
            self._perform(self._side.refused(effect, (str(error),)))
        else:
            body = lease_body(lease, self._broker.index_of, "index")
            is_held = lease.state is LeaseState.HELD
            self._perform(self._side.placed(effect, _lease_row(lease, boot_time()), body, is_held=is_held))
        self.changed()

    # --- the order of the fleet, for those who wait in the ledger ---

    async def _follow_fleet(self, order: HostOrder | None) -> None:
        now = boot_time()
        if order is None:
            known = FleetOrder(now)
        else:
            known = FleetOrder(
                now + host_side.OWN_ORDER_SECONDS,
                order.positions,
                order.reserved,
                order.reserved_for,
                order.reserved_name,
                order.note,
            )
        with suppress(GPUWorkerPoolError):  # what cannot be written, cannot be granted either
            await self._broker.follow_fleet(known)

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            if self._side.order is not None:
                await self._follow_fleet(self._side.order)

    # --- reports ---

    def took(self) -> None:
        """Called after every reading."""
        self.changed()

    def ended(self, outcome: Outcome) -> None:
        """Called when a lease of this host has ended."""
        self._remember(outcome)
        # The dispatcher gets both in one report: that the lease has ended, and whether its GPUs look free.
        now = boot_time()
        if outcome.lease is not None:
            self._unread[outcome.lease.lease_id] = now
        self._want_reading(now)
        asyncio.get_running_loop().call_later(LONGEST_READING_SECONDS, self.changed)
        self.changed()

    def _remember(self, outcome: Outcome) -> None:
        if outcome.lease is not None:
            self._bridge.ended(outcome.lease.lease_id)
            self._ended[outcome.request.request_id] = _ended_row(outcome)
            self._ended.move_to_end(outcome.request.request_id)
            while len(self._ended) > MOST_ENDED:
                self._ended.popitem(last=False)

    def changed(self) -> None:
        """Called after every change of a lease: reports it, together with what else changes in this moment."""
        self._is_outdated = True
        if not self._is_observing and not self._is_stopping:
            self._is_observing = True
            self._run(self._observe())

    async def _observe(self) -> None:
        try:
            while self._is_outdated:
                self._is_outdated = False
                await asyncio.sleep(0)
                try:
                    leases, waiters = await self._broker.held_and_waiting()
                except GPUWorkerPoolError:
                    return  # nothing is reported, so that nothing is granted here
                now, seen = boot_time(), self._see()
                read_at = max(now - LONGEST_READING_SECONDS, -math.inf if seen is None else seen.begun_at)
                self._unread = {lease_id: at for lease_id, at in self._unread.items() if at > read_at}
                is_new = seen is not None and seen.begun_at != self._reported_at
                gpus: Sequence[GPURow] | None = seen.gpus if seen is not None and is_new else None
                age = now - seen.begun_at if seen is not None and is_new else None
                self._reported_at = None if seen is None else seen.begun_at
                rows = [_lease_row(lease, now) for lease in leases]
                ended = tuple(self._ended.values())
                waiting = [HostWaiter(waiter.request, waiter.may_reserve) for waiter in waiters[:MOST_WAITING]]
                self._perform(self._side.observe(gpus, rows, ended, waiting, age_seconds=age, unread=self._unread))
        finally:
            self._is_observing = False

    # --- what others ask of this host ---

    async def _answer_call(self, candidate: str, call: Call) -> None:
        arguments, broker = call.arguments, self._broker
        lease_id, by = arguments.get("lease_id"), arguments.get("by")
        if not isinstance(lease_id, str) or not (by is None or isinstance(by, str)) or call.what not in _CALLS:
            text = f"this host is of another version, and does not understand {call.what[:40]!r}"
            self._send(candidate, CallAnswer(call.call_id, error="ServiceUnavailableError", text=text))
            return
        try:
            body: dict[str, Any] = {}
            if call.what == "renew":
                lease = await broker.renew(lease_id, by, is_busy=arguments.get("is_busy") is True)
                self._bridge.renewed(lease_id, boot_time())
                body = lease_body(lease, broker.index_of, "index")
            elif call.what == "release":
                await broker.release(lease_id, by)
            elif call.what == "yield":
                await broker.ask_to_leave(lease_id, str(arguments.get("reason", ""))[:300])
            answer = CallAnswer(call.call_id, body)
        except GPUWorkerPoolError as error:
            answer = CallAnswer(call.call_id, error=type(error).__name__, text=str(error))
        self._send(candidate, answer)

    async def _renew_for_holders(self) -> None:
        """While this host has no link, holders that renewed through other servers cannot do so."""
        while self._bridge.is_needed(boot_time()):
            with suppress(GPUWorkerPoolError):  # it has just ended, or the ledger cannot be used
                for lease_id in self._bridge.due(await self._broker.held(), boot_time()):
                    await self._broker.renew(lease_id, None)
            await asyncio.sleep(RENEW_SECONDS)


def _ended_row(outcome: Outcome) -> EndedRow:
    assert outcome.lease is not None  # checked by the caller
    how = outcome.lease_state.value if outcome.lease_state is not None else "released"
    return EndedRow(outcome.request.request_id, outcome.lease.lease_id, how, outcome.reasons)


def _lease_row(lease: Lease, now: float) -> HostLease:
    return HostLease(
        lease.lease_id,
        lease.request,
        lease.gpu_ids,
        lease.state.value,
        max(now - lease.granted_at, 0.0),
        max(lease.granted_at - lease.requested_at, 0.0),
        None if lease.expires_at is None else max(lease.expires_at - now, 0.0),
        lease.fence,
    )
