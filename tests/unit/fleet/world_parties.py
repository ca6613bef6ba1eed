"""The hosts and the candidates of a fleet's world, as simple as they can be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core import (
    Cancelled,
    FleetOrder,
    FleetOrdered,
    Granted,
    Lease,
    Observed,
    Outcome,
    Pool,
    PoolSettings,
    Reading,
    Requested,
    Ticked,
    TurnCame,
    Waiter,
)
from gpu_worker_pool.core.events import PollAbandoned
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.fleet import host_side
from gpu_worker_pool.fleet.dispatcher import (
    Dispatcher,
    LinkLost,
    Received,
    Send,
    StepDown,
    Stored,
    StoreLost,
    TimePassed,
)
from gpu_worker_pool.fleet.host_side import HostSide
from gpu_worker_pool.fleet.messages import (
    Answer,
    Ask,
    EndedRow,
    GPURow,
    HostLease,
    HostOrder,
    HostWaiter,
    Join,
    Place,
)
from gpu_worker_pool.fleet.store import CommitsLost, Delete, Deposed, Office, Put, StoreUnavailable

if TYPE_CHECKING:
    from tests.unit.fleet.world import World


class BrokenPromiseError(AssertionError):
    """A promise of the fleet was broken."""


# --- hosts ---


class WorldHost:
    """A server with GPUs: its ledger is a pool, which survives restarts, and so does the epoch it has seen."""

    def __init__(self, world: World, name: str, gpus: int, side: type[HostSide]) -> None:
        self.world, self.name = world, name
        self.gpu_ids = [f"GPU-{name}-{number}" for number in range(gpus)]
        self.ledger = Pool(PoolSettings(remember_at_most=5000))
        self.epoch = (0, "")
        self.side_type = side
        self.side = self._new_side()
        self.is_up = True
        self.read_at = -10.0
        #: The polls of clients at this server that are unanswered.
        self.polls: dict[str, Ask] = {}
        self.local: list[Lease] = []
        #: When its ledger was told last that its fleet is there.
        self.followed_at = -math.inf
        #: When the dispatcher had heard it last.
        self.linked_at = 0.0

    def _new_side(self) -> HostSide:
        is_candidate = self.name in self.world.candidate_names
        epoch, owner = self.epoch
        return self.side_type(
            self.name,
            f"ledger of {self.name}",
            f"http://{self.name}",
            "1",
            is_candidate=is_candidate,
            epoch=epoch,
            epoch_owner=owner,
        )

    def restart(self) -> None:
        self.polls.clear()
        self.side = self._new_side()

    def apply(self, event: Any) -> tuple[Any, ...]:
        effects = self.ledger.apply(event, self.world.now)
        if type(event) is not TurnCame:
            for effect in effects:
                if isinstance(effect, Granted):
                    self.world.saw_local(self, effect.lease, by_fleet=False)
        return effects

    def perform(self, effects: Sequence[host_side.HostEffect]) -> None:
        for effect in effects:
            match effect:
                case host_side.SendToCandidate(to, message):
                    self.world.post(self.name, to, message)
                case host_side.RememberEpoch(epoch, owner):
                    if epoch <= self.epoch[0]:
                        raise BrokenPromiseError(f"{self.name} obeys epoch {epoch} after {self.epoch}")
                    self.epoch = epoch, owner
                case host_side.DoPlace():
                    self.place(effect)
                case host_side.DoEnd(request_id, _, refused):
                    known = self.ledger.requests.get(request_id)
                    if isinstance(known, Waiter) or (isinstance(known, Lease) and known.is_live):
                        self.apply(Cancelled(request_id, refused=refused))
                    self.observe(reads=True)
                case host_side.FollowFleet(order):
                    self.follow(order)
                case host_side.DoAbandon(request_id, poll_id, is_gone):
                    self.apply(PollAbandoned(request_id, poll_id, is_gone))
                case host_side.DoRead():
                    self.observe(reads=False)
                    self.observe(reads=True)
                case host_side.Settled(message):
                    if isinstance(message, Answer):
                        self.polls.pop(message.poll_id, None)
                        self.world.answered(message)
                case host_side.DispatcherIs(candidate):
                    if candidate:
                        for ask in self.polls.values():
                            self.world.post(self.name, candidate, ask)

    def place(self, effect: host_side.DoPlace) -> None:
        place = effect.place
        self.world.saw_command(self, place)
        known = self.ledger.requests.get(place.request.request_id)
        if isinstance(known, Waiter):
            self.turn_came(effect, known)
            return
        if place.waits_there and not isinstance(known, Lease):
            self.perform(self.side.refused(effect, ("it does not wait here any more",)))
            return
        if isinstance(known, Outcome) or (isinstance(known, Lease) and not known.is_live):
            lease = known.lease if isinstance(known, Outcome) else known
            row = EndedRow(known.request.request_id, lease.lease_id if lease else "", "released")
            self.perform(self.side.refused(effect, ("it has ended",), row))
            return
        request = known.request if known is not None else place.request
        now = self.world.now
        poll_deadline = now + 1.0 if place.is_listening else now - 1.0
        if isinstance(known, Lease) and not place.is_listening:
            effects: tuple[Any, ...] = (Granted(known),)
        else:
            effects = self.apply(Requested(request, None, poll_deadline, True, place.poll_id, may_wait=False))
        found = [each.lease for each in effects if isinstance(each, Granted) and each.lease.request == request]
        if found:
            lease = found[0]
            self.perform(
                self.side.placed(
                    effect, self.row(lease), {"lease_id": lease.lease_id}, is_held=lease.state is LeaseState.HELD
                )
            )
        else:
            self.perform(self.side.refused(effect, ("no",)))

    def turn_came(self, effect: host_side.DoPlace, waiter: Waiter) -> None:
        request_id = waiter.request.request_id
        effects = self.apply(TurnCame(request_id, effect.place.gpu_ids))
        found = [each.lease for each in effects if isinstance(each, Granted) and each.lease.request is waiter.request]
        if found:
            is_held = found[0].state is LeaseState.HELD
            self.perform(self.side.placed(effect, self.row(found[0]), {}, is_held=is_held))
            self.world.saw_local(self, found[0], by_fleet=True)
        else:
            self.perform(self.side.refused(effect, ("no",)))
        self.observe(reads=False)

    def follow(self, order: HostOrder | None) -> None:
        self.followed_at = self.world.now if order is not None else -math.inf
        until = self.world.now + (host_side.OWN_ORDER_SECONDS if order is not None else 0.0)
        found = FleetOrder(until) if order is None else FleetOrder(until, order.positions)
        self.apply(FleetOrdered(found))
        self.world.saw_order(self, found)

    def row(self, lease: Lease) -> HostLease:
        held = self.world.now - lease.granted_at
        return HostLease(lease.lease_id, lease.request, lease.gpu_ids, lease.state.value, held)

    def observe(self, *, reads: bool) -> None:
        now = self.world.now
        if reads:
            self.read_at = now
            readings = tuple(
                Reading(gpu_id, index, "GPU", gpu_id, 1000.0, 0.0, utilization_percent=0.0, processes=())
                for index, gpu_id in enumerate(self.gpu_ids)
            )
            self.apply(Observed("", readings, now))
        rows = tuple(
            GPURow(gpu_id, index, "GPU", gpu_id, 1000.0, 0.0, None, 0.0, foreign_processes=0)
            for index, gpu_id in enumerate(self.gpu_ids)
        )
        ended = [
            EndedRow(each.request.request_id, each.lease.lease_id, str(each.lease_state))
            for each in self.ledger.outcomes
            if each.lease is not None and not each.request.request_id.startswith("local")
        ]
        leases = [self.row(lease) for lease in self.ledger.leases]
        waiters = sorted(self.ledger.queue.in_order(), key=lambda waiter: waiter.ticket)
        waiting = [HostWaiter(waiter.request, waiter.may_reserve) for waiter in waiters]
        age_seconds = 0.0 if reads else None
        self.perform(self.side.observe(rows if reads else None, leases, ended, waiting, age_seconds=age_seconds))

    def tick(self) -> None:
        before = len(self.ledger.leases)
        self.apply(Ticked())
        if self.side.order is not None and self.world.now - self.followed_at > 3.0:
            self.follow(self.side.order)
        if self.world.now - self.read_at > 4.0 or len(self.ledger.leases) != before:
            self.observe(reads=True)


# --- candidates ---


class WorldCandidate:
    """The office of a candidate, as simple as it can be."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dispatcher: Dispatcher | None = None
        self.office: Office | None = None
        self.is_up = True
        self.is_frozen = False
        self.joins: dict[str, Join] = {}
        self.highest = 0
        self.renewed_at = self.began_at = 0.0
        self.batch: tuple[int, Sequence[Put | Delete]] | None = None

    def stop(self) -> None:
        self.dispatcher = self.office = self.batch = None
        self.joins.clear()

    def resign(self) -> None:
        self.dispatcher = self.office = self.batch = None

    def received(self, host: str, message: Any) -> None:
        if isinstance(message, Join):
            self.joins[host] = message
            self.highest = max(self.highest, message.epoch)
        self.submit(Received(host, message))

    def lost(self, host: str) -> None:
        self.joins.pop(host, None)
        self.submit(LinkLost(host))

    def submit(self, event: Any) -> None:
        if self.dispatcher is None:
            return
        for effect in self.dispatcher.apply(event, self.world.now):
            if isinstance(effect, Send):
                if isinstance(effect.message, Place):
                    self.world.saw_place(self, effect.to, effect.message)
                self.world.post(self.name, effect.to, effect.message, to_host=True)
            elif isinstance(effect, StepDown):
                self.highest = max(self.highest, effect.epoch)
                self.resign()
                return

    def tick(self) -> None:
        store, now = self.world.store, self.world.now
        try:
            if self.office is None:
                self.office = store.stand(self.name, self.highest)
                if self.office is not None:
                    self.begin(store.load())
                return
            if now - self.renewed_at > 0.5:
                store.renew(self.office, self.name)
                self.renewed_at = now
            self.write()
        except StoreUnavailable as error:
            if self.dispatcher is None:
                self.resign()
            else:
                self.submit(StoreLost(str(error)))
        except Deposed as error:
            self.highest = max(self.highest, error.epoch)
            self.resign()
        except CommitsLost:
            self.rewrite()
        if self.dispatcher is not None and self.dispatcher.next_due() <= now:
            self.submit(TimePassed())

    def begin(self, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        assert self.office is not None
        self.dispatcher = self.world.new_dispatcher(self, rows)
        self.renewed_at = self.world.now
        for host, join in list(self.joins.items()):
            self.submit(Received(host, join))

    def write(self) -> None:
        assert self.office is not None
        if self.dispatcher is None:
            return
        batch, changes = self.dispatcher.take_changes()
        if changes:
            self.office = self.world.store.write(self.office, changes, self.name)
        self.submit(Stored(batch))

    def rewrite(self) -> None:
        if self.dispatcher is None or self.office is None:
            self.resign()
            return
        try:
            batch, everything = self.dispatcher.everything()
            self.office = self.world.store.rewrite(self.office, json.loads(json.dumps(everything)), self.name)
            self.submit(Stored(batch))
        except StoreUnavailable as error:
            self.submit(StoreLost(str(error)))
        except Deposed:
            self.resign()
