"""The pool takes every event and makes every decision. It does no I/O, reads no clock and writes no log.

`apply(event, now)` is the only way to let a pool decide. It refuses an illegal event before it changes anything; it
runs the timers that are due; it lets the event's handler change leases and waiters; and if that may serve a waiter, it
ends with `assign`. The same events at the same times give the same pool and the same effects.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_worker_pool.core import ending, fleet_order, leaving, legality, placing, renewing, replication
from gpu_worker_pool.core.allocator import GPUAllocator
from gpu_worker_pool.core.assigning import assign
from gpu_worker_pool.core.assignments import Lease, WorkerAssignmentTracker, with_limit
from gpu_worker_pool.core.effects import Effect, Ended, Granted, WakeAt
from gpu_worker_pool.core.events import (
    Cancelled,
    Event,
    FleetOrdered,
    GPUsVanished,
    GrantRefused,
    HolderGone,
    LeaveRequested,
    Observed,
    PolicyRead,
    PollAbandoned,
    QuarantineEnded,
    Released,
    Renewed,
    Requested,
    Resumed,
    Stopped,
    Ticked,
    TurnCame,
    Unreachable,
    UseSeen,
)
from gpu_worker_pool.core.fair_share import FairShare
from gpu_worker_pool.core.inside import enclosure_of, has_ended, impossible_inside
from gpu_worker_pool.core.limits import limits_of, never_allowed
from gpu_worker_pool.core.moves import REQUEST_MOVES, IllegalMoveError, LeaseState, RequestState
from gpu_worker_pool.core.observing import observed, unreachable, vanished, want_readings
from gpu_worker_pool.core.policy import NO_POLICY, Policy
from gpu_worker_pool.core.queue import Waiter, WaiterQueue
from gpu_worker_pool.core.remembered import Outcome, RememberedOutcomes
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.core.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_worker_pool.core.assignments import HeldGPU
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.fair_share import Use
    from gpu_worker_pool.core.fleet_order import FleetOrder
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.replication import Counters, GPUHistory
    from gpu_worker_pool.core.requirements import Requirements

    Handler = Callable[["Pool", Any, float], None]

#: Needed at every grant and release, where looking up an enum's member costs as much as ranking a GPU.
GRANTED, HELD, RELEASED = RequestState.GRANTED, LeaseState.HELD, LeaseState.RELEASED
NEVER = math.inf


class Pool:
    """Belongs to one thread."""

    def __init__(
        self, settings: PoolSettings | None = None, requests: dict[str, Waiter | Lease | Outcome] | None = None
    ) -> None:
        """`requests`: an empty dict to use, such as one that tracks its changes."""
        self.settings: PoolSettings = settings or PoolSettings()
        #: The policy of the last `PolicyRead`, and whether it limits any account.
        self.policy: Policy = NO_POLICY
        self.has_limits: bool = False
        #: The time of the last event; it never goes back.
        self.now: float = -math.inf
        #: The fencing token of the last grant, and what it was before the first one.
        self.fence: int = 0
        self.first_fence = 0
        #: How many requests there were.
        self.ticket: int = 0
        #: Every request that waits, holds a lease, or has ended and is remembered.
        self.requests: dict[str, Waiter | Lease | Outcome] = {} if requests is None else requests
        self.outcomes: RememberedOutcomes = RememberedOutcomes(
            self.requests, self.settings.remember_seconds, self.settings.remember_at_most
        )
        self.allocator: GPUAllocator = GPUAllocator(self.settings)
        #: What accounts used lately; None: use is not counted.
        self.fair_share: FairShare | None = None
        if self.settings.fair_share_half_life_seconds is not None:
            self.fair_share = FairShare(self.settings, self.allocator.gpus)
        self.queue: WaiterQueue = WaiterQueue(self.fair_share, tells_accounts_apart=self.settings.tells_accounts_apart)
        self.leases: WorkerAssignmentTracker = WorkerAssignmentTracker(self.allocator.gpus, self.fair_share)
        self.timers: Timers = Timers()
        #: How many requests and leases have ended in each way.
        self.tally: dict[RequestState | LeaseState, int] = dict.fromkeys((*RequestState, *LeaseState), 0)
        #: The one waiter with reserved GPUs; `Waiter.reserved` names them (rule 4).
        self.reserved_for: Waiter | None = None
        #: What a fleet's dispatcher said last of the order of those who wait here; None: this pool is of no fleet.
        self.fleet_order: FleetOrder | None = None
        #: Whether there is a request class for which no GPU was looked for yet.
        self.has_new_class: bool = False
        #: GPUs that may have become eligible for a waiter since the last assignment.
        self.improved: dict[str, GPUResourceState] = {}
        self.quarantined: dict[str, None] = {}
        #: What the driver is to do, collected while an event is handled.
        self.effects: list[Effect] = []
        #: The earliest moment of a `WakeAt` that has not come yet.
        self._wake_at = math.inf

    def apply(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Handle one event. Raises `IllegalEventError`, and then nothing has changed."""
        now = now if now > self.now else self.now
        check, handle = self._HANDLERS[type(event)]
        if check is not None:
            check(self, event, now)
        timers = self.timers
        self.now = self.leases.now = now
        # Rule 10: after an outage leases and waiters are extended before any timer runs.
        if now >= timers.not_before and type(event) is not Resumed:
            self._run_timers(now)
        handle(self, event, now)
        if self.queue.waiting or timers.not_before < NEVER:
            self._follow_up(now)
        elif self.improved:
            self.improved.clear()  # no waiter is left that it could serve
        if not self.effects:
            return ()
        effects = tuple(self.effects)
        self.effects.clear()
        return effects

    # ---- What another process decided, or this one before a restart. No event, because nothing is decided

    def replicate(
        self,
        news: Iterable[Waiter | Lease | Outcome],
        histories: Iterable[GPUHistory] = (),
        counters: Counters | None = None,
        uses: Iterable[Use] = (),
        order: FleetOrder | None = None,
    ) -> None:
        """Each of `news` replaces what the pool knows of its request; new waiters must come in order of arrival.

        `order`: None: as before.
        """
        replication.replicate(self, news, histories, counters, uses)
        if order is not None:
            fleet_order.take_order(self, order)

    def remember(self, outcome: Outcome) -> None:
        """An outcome that this process had forgotten."""
        self.outcomes.add(outcome)

    def forget(self, outcome: Outcome) -> None:
        """Its client did not learn of it, and may request the same again."""
        self.outcomes.forget(outcome)

    def forget_outcomes(self, most: int) -> None:
        """All but the last `most`: a ledger file keeps the others."""
        self.outcomes.forget_all_but(most)

    def stored_use(self) -> None:
        """The use of accounts is stored; only later changes have to be written."""
        if self.fair_share is not None:
            self.fair_share.stored()

    # ---- Time

    def _follow_up(self, now: float) -> None:
        """After an event: serve waiters, run what is due at once, ask for readings and for the next wake-up."""
        timers = self.timers
        if self.improved or self.has_new_class:
            assign(self, now)
        if now >= timers.not_before and self._run_timers(now):
            assign(self, now)
        if self.allocator.freed and self.queue.waiting:
            want_readings(self, now)
            if self.improved:
                assign(self, now)
        if self._wake_at <= now:
            self._wake_at = math.inf
        if timers.not_before < self._wake_at and (at := timers.next_at()) < self._wake_at:
            self._wake_at = at
            self.effects.append(WakeAt(at))

    def _run_timers(self, now: float) -> bool:
        has_run = False
        while (due := self.timers.pop_due(now)) is not None:
            has_run = True
            kind, name = due
            if kind == "waiter":
                waiter = self.requests[name]
                assert isinstance(waiter, Waiter)  # its timer is cleared when it leaves the queue
                has_timed_out = waiter.deadline is not None and waiter.deadline <= now
                self.end_request(waiter, RequestState.TIMED_OUT if has_timed_out else RequestState.GIVEN_UP, now)
            elif kind == "fleet":
                fleet_order.is_over(self)
            elif kind == "lease":
                lease = self.leases.lookup(name)
                assert lease is not None  # as above
                if lease.state is LeaseState.OFFERED:
                    ending.end_lease(self, lease, LeaseState.RECLAIMED, now, "it was not claimed in time")
                elif lease.state is HELD and not self.is_overdue(lease, now):
                    leaving.ends_for_idleness(self, lease, now)
                elif lease.state is HELD:
                    reason = lease.why_expired(now)
                    ending.lose(self, lease, reason, self.settings.quarantine_seconds, now)
                else:
                    ending.review(self, lease, now)
        return has_run

    # ---- Rule 4: order. Rule 6: every request ends exactly once

    def grant_waiter(
        self, waiter: Waiter, gpus: tuple[GPUResourceState, ...], now: float, longest_seconds: float | None = None
    ) -> None:
        self._leave_queue(waiter, GRANTED)
        offer_deadline = None
        if waiter.poll_deadline is not None and now > waiter.poll_deadline:
            # Rule 9: a client that is between two polls has `offer_ttl_seconds` to come back, but an offer never
            # outlives the client's place in the queue.
            offer_deadline = min(now + self.settings.offer_ttl_seconds, waiter.gives_up_at or math.inf)
        self.grant(waiter.request, waiter.enqueued_at, offer_deadline, gpus, now, waiter.poll_id, longest_seconds)

    def grant(
        self,
        request: Request,
        requested_at: float,
        offer_deadline: float | None,
        gpus: tuple[GPUResourceState, ...],
        now: float,
        poll_id: str,
        longest_seconds: float | None = None,
    ) -> None:
        """The one place that grants; `offer_deadline`: by when its client must claim it, if none is polling now.

        `longest_seconds`: how long the lease may last by the policy of the fleet.
        """
        self.fence = fence = self.fence + 1
        state, expires_at = HELD, None
        if offer_deadline is not None:
            state, expires_at = LeaseState.OFFERED, offer_deadline
        elif request.ttl_seconds is not None:
            expires_at = now + request.ttl_seconds
        gpu = gpus[0]
        held: tuple[HeldGPU, ...] = (gpu.baseline,)
        gpu_ids: tuple[str, ...] = (gpu.gpu_id,)
        if len(gpus) > 1 or gpu.leases:
            held = tuple([gpu.baseline_now() for gpu in gpus])
            gpu_ids = tuple([gpu.gpu_id for gpu in gpus])
        if request.within is not None:
            # The state before the lease around it: what was there then belongs neither to it nor to its neighbours.
            before = {each.gpu_id: each for each in self.leases.by_id[request.within].held}
            held = tuple([before[gpu_id] for gpu_id in gpu_ids])
        endpoint_id = gpu.endpoint.endpoint_id
        lease_id = f"lease-{fence}"
        lease = Lease(
            lease_id, request, endpoint_id, gpu_ids, held, fence, state, requested_at, now, expires_at, None, poll_id
        )
        if self.has_limits and (own_limit := limits_of(self, request).longest_seconds) is not None:
            longest_seconds = own_limit if longest_seconds is None else min(own_limit, longest_seconds)
        if longest_seconds is not None:
            lease = replace(lease, longest_seconds=longest_seconds)
        if request.max_seconds is not None or lease.longest_seconds is not None:
            lease = with_limit(lease)
        self.requests[request.request_id] = lease
        self.leases.assign(lease)
        if request.within is None:
            self.allocator.granted(gpus, fence)
        if lease.expires_at is not None:
            self.set_lease_timer(lease)
        self.effects.append(Granted(lease))

    def end_request(self, waiter: Waiter, state: RequestState, now: float, reasons: tuple[str, ...] = ()) -> None:
        self._leave_queue(waiter, state)
        self.tally[state] += 1
        self.outcomes.add(Outcome(waiter.request, state, now, reasons))
        self.effects.append(Ended(waiter.request.request_id, state, reasons))

    def _leave_queue(self, waiter: Waiter, state: RequestState) -> None:
        if state not in REQUEST_MOVES[waiter.state]:
            raise IllegalMoveError(f"a request cannot go from {waiter.state} to {state}")
        waiter.state = state
        if waiter.request_class is not None:
            self.queue.remove(waiter)
            if waiter.request.asks:
                leaving.withdraw(self, waiter.request.request_id)
            self.timers.clear("waiter", waiter.request.request_id)
            # What was reserved or awaited for it may serve another now.
            if (within := waiter.request.within) is not None:
                if (enclosing := self.leases.lookup(within)) is not None:
                    self.improve(enclosing.gpu_ids)
                return
            self.improved.update(self.allocator.freed)
            if waiter is self.reserved_for:
                self.improve(waiter.reserved)
                self.reserved_for = None

    def set_waiter_timer(self, waiter: Waiter) -> None:
        at = waiter.deadline
        if at is None or (waiter.gives_up_at is not None and waiter.gives_up_at < at):
            at = waiter.gives_up_at
        if at is None:
            self.timers.clear("waiter", waiter.request.request_id)
        else:
            self.timers.set("waiter", waiter.request.request_id, at)

    # ---- Rule 5: impossible requests fail at once. Rule 9: ids are remembered

    def _requested(self, event: Requested, now: float) -> None:
        request, queue, allocator = event.request, self.queue, self.allocator
        known = self.requests.get(request.request_id)
        if known is not None:
            self.outcomes.forget_old(now)
            if not isinstance(known, Outcome) or not self.outcomes.is_old(known, now):
                self._polled_again(known, event, now)
                return
            self.outcomes.forget(known)
        if not event.may_wait:
            placing.grant_or_refuse(self, event, now)
            return
        self.ticket += 1
        requirements, within = request.requirements, request.within
        in_fleet = within is None and fleet_order.follows_fleet(self, now)
        is_alone = not queue.waiting and not self.has_limits and not in_fleet
        if is_alone:
            # No waiter can be overtaken: serve it at once, if a GPU is eligible.
            gpus: tuple[GPUResourceState, ...] | None = None
            if within is not None:
                if (around := enclosure_of(self.leases, within)) is not None:
                    gpus = allocator.best(requirements, self.leases.gpus_of(around.lease), (), now, around)
            elif requirements is ANY_GPU or allocator.is_any_gpu(requirements):
                gpus = allocator.best_free(requirements.count, (), now)
            else:
                gpus = allocator.best(requirements, allocator.gpus.values(), (), now)
            if gpus is not None:
                self.grant(request, now, None, gpus, now, event.poll_id)  # its client is polling
                return
        may_reserve = event.may_reserve and within is None
        waiter = Waiter(request, self.ticket, now, event.deadline, may_reserve=may_reserve, poll_id=event.poll_id)
        if event.poll_deadline is not None:
            self._set_poll(waiter, event, now)
        reasons = self._refusals(request)
        if reasons:
            self.end_request(waiter, RequestState.REJECTED, now, reasons)
            return
        request_class = queue.class_of(request)
        if request_class is None:
            request_class = queue.new_class(request, is_any_gpu=within is None and allocator.is_any_gpu(requirements))
            request_class.tried = is_alone
            self.has_new_class = not is_alone
        elif (self.reserved_for is not None and request.declared_seconds is not None) or self.fair_share is not None:
            # It may be short enough to borrow reserved GPUs, or be ahead of the waiter they are reserved for.
            self.has_new_class = True
        queue.enqueue(waiter, request_class)
        self.requests[request.request_id] = waiter
        self.set_waiter_timer(waiter)

    def _refusals(self, request: Request) -> tuple[str, ...]:
        """Why this can never be granted: by the policy, or by the GPUs."""
        refused = never_allowed(self, request) if self.has_limits else ()
        return refused or self.impossible(request.requirements, request.within)

    def impossible(self, requirements: Requirements, within: str | None) -> tuple[str, ...]:
        """Why this can never be granted; `within`: the lease inside which the request runs."""
        if within is None:
            return self.allocator.impossible(requirements)
        return impossible_inside(self.leases, requirements, within)

    def _polled_again(self, known: Waiter | Lease | Outcome, event: Requested, now: float) -> None:
        if isinstance(known, Waiter):
            # Perhaps another process accepted it, and sees GPUs that this one does not.
            known.is_replicated = False
            if reasons := self._refusals(known.request):
                self.end_request(known, RequestState.REJECTED, now, reasons)
                return
            self._set_poll(known, event, now)
            self.set_waiter_timer(known)
            self.requests[known.request.request_id] = known
        elif isinstance(known, Outcome):
            ended = Ended(known.request.request_id, known.state, known.reasons)
            if ended not in self.effects:  # it may have ended just now
                self.effects.append(ended)
        elif known.is_live:
            self.effects.append(Granted(renewing.renew(self, known, now, event.poll_id)))
        elif known.quarantine is not None:
            reasons = (known.quarantine.reason,)
            self.effects.append(Ended(known.request.request_id, GRANTED, reasons))

    def _set_poll(self, waiter: Waiter, event: Requested, now: float) -> None:
        waiter.deadline = event.deadline
        waiter.poll_deadline = waiter.gives_up_at = None
        if event.poll_deadline is not None:
            # The client is polling now, however long its request was on the way.
            waiter.poll_deadline = max(event.poll_deadline, now)
            waiter.gives_up_at = waiter.poll_deadline + self.settings.queue_ttl_seconds
        waiter.may_reserve = event.may_reserve and waiter.request.within is None
        waiter.poll_id = event.poll_id
        if waiter is self.reserved_for and not waiter.may_reserve:
            self.improve(waiter.reserved)
            self.reserve(waiter, ())

    def reserve(self, waiter: Waiter, gpu_ids: tuple[str, ...]) -> None:
        """Reserve these GPUs for it, and none for any other waiter; `()` ends its reservation."""
        waiter.reserved, waiter.reserved_at = gpu_ids, self.allocator.read_at
        self.reserved_for = waiter if gpu_ids else None
        self.requests[waiter.request.request_id] = waiter

    # ---- Rule 7: a cancelled waiter that was granted in the same instant gives the GPU back

    def _cancelled(self, event: Cancelled, now: float) -> None:
        known = self.requests.get(event.request_id)
        if isinstance(known, Waiter):
            state = RequestState.REJECTED if event.refused else RequestState.CANCELLED
            self.end_request(known, state, now, event.refused)
        elif isinstance(known, Lease) and known.is_live:
            ending.give_back(self, known, now)

    def _stopped(self, event: Stopped, now: float) -> None:
        for waiter in self.queue.in_order():
            self.end_request(waiter, RequestState.STOPPED, now)

    # ---- Rule 8: release hands on at once

    def _released(self, event: Released, now: float) -> None:
        lease = self.leases.by_id.get(event.lease_id)
        if lease is None or lease.quarantine is not None:  # it was released with leases inside it
            return
        if event.use is not None:
            lease = renewing.note_use(self, lease, event.use)
        if self.leases.inner:
            ending.give_back(self, lease, now)
        else:
            ending.end_lease(self, lease, RELEASED, now)

    def reject_inside(self, lease_id: str, now: float) -> None:
        """This lease is not held any more, so that those who wait inside it can never be served."""
        for waiter in self.queue.inside(lease_id):
            self.end_request(waiter, RequestState.REJECTED, now, (has_ended(lease_id),))

    def improve(self, gpu_ids: Sequence[str]) -> None:
        gpus = self.allocator.gpus
        for gpu_id in gpu_ids:
            if gpu_id in gpus:  # another process may reserve a GPU that this one has never seen
                self.improved[gpu_id] = gpus[gpu_id]

    def replace_lease(self, lease: Lease) -> None:
        self.leases.assign(lease)
        self.requests[lease.request.request_id] = lease
        self.set_lease_timer(lease)

    def set_lease_timer(self, lease: Lease) -> None:
        if lease.quarantine is not None:
            self.timers.set("lease", lease.lease_id, lease.quarantine.until)
        elif (at := self._ends_at(lease)) is not None:
            if lease.asked is not None and lease.asked.ends_at is not None:
                at = min(at, lease.asked.ends_at)
            self.timers.set("lease", lease.lease_id, at)

    def _ends_at(self, lease: Lease) -> float | None:
        """When it expires if it is not renewed."""
        grace = self.settings.expiry_grace_seconds if lease.state is HELD else 0.0
        return None if lease.expires_at is None else lease.expires_at + grace

    def is_overdue(self, lease: Lease, now: float) -> bool:
        at = self._ends_at(lease)
        return at is not None and at <= now

    def _policy_read(self, event: PolicyRead, now: float) -> None:
        self.policy, self.has_limits = event.policy, event.policy.has_limits
        for waiter in self.queue.in_order():
            if reasons := never_allowed(self, waiter.request):
                self.end_request(waiter, RequestState.REJECTED, now, reasons)
        # Requests that waited because of a limit may be served now.
        for request_class in self.queue.request_classes():
            request_class.tried = False
            self.has_new_class = True

    def _ticked(self, event: Ticked, now: float) -> None:
        self.outcomes.forget_old(now)

    #: For each event, the check that may refuse it and its handler.
    _HANDLERS: ClassVar[Mapping[type[Any], tuple[Handler | None, Handler]]] = {
        Requested: (legality.check_requested, _requested),
        GrantRefused: (legality.check_grant_refused, placing.undo),
        Cancelled: (legality.check_cancelled, _cancelled),
        FleetOrdered: (None, fleet_order.ordered),
        TurnCame: (None, fleet_order.turn_came),
        Released: (legality.check_released, _released),
        Renewed: (legality.check_renewed, renewing.renewed),
        LeaveRequested: (legality.check_leave_requested, leaving.leave_requested),
        PollAbandoned: (None, renewing.poll_abandoned),
        Resumed: (None, renewing.resumed),
        HolderGone: (None, ending.holder_gone),
        QuarantineEnded: (legality.check_quarantine_ended, ending.quarantine_ended),
        Observed: (None, observed),
        UseSeen: (None, renewing.use_seen),
        PolicyRead: (None, _policy_read),
        Unreachable: (None, unreachable),
        GPUsVanished: (None, vanished),
        Ticked: (None, _ticked),
        Stopped: (None, _stopped),
    }

    def __repr__(self) -> str:
        gpus = sum(endpoint.present for endpoint in self.allocator.endpoints.values())
        return f"<Pool: {gpus} GPUs, {len(self.leases)} leases, {len(self.queue)} waiting, fence {self.fence}>"
