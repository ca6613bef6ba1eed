"""The pool takes every event and makes every decision. It does no I/O, reads no clock and writes no log.

`apply(event, now)` is the only way to let a pool decide. It refuses an illegal event before it changes anything; it
runs the timers that are due; it lets the event's handler change leases and waiters; and if that may serve a waiter, it
ends with `assign`. The same events at the same times give the same pool and the same effects.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_worker_pool.core import legality, replication
from gpu_worker_pool.core.allocator import GPUAllocator
from gpu_worker_pool.core.assigning import assign
from gpu_worker_pool.core.assignments import Lease, Quarantine, WorkerAssignmentTracker
from gpu_worker_pool.core.effects import Effect, Ended, Granted, LeaseEnded, ReadingWanted, WakeAt
from gpu_worker_pool.core.events import (
    Cancelled,
    Event,
    GPUsVanished,
    HolderGone,
    Observed,
    PollAbandoned,
    QuarantineEnded,
    Released,
    Renewed,
    Requested,
    Resumed,
    Stopped,
    Ticked,
    Unreachable,
)
from gpu_worker_pool.core.evidence import trace_of
from gpu_worker_pool.core.inside import enclosure_of, has_ended, impossible_inside
from gpu_worker_pool.core.moves import LEASE_MOVES, REQUEST_MOVES, IllegalMoveError, LeaseState, RequestState
from gpu_worker_pool.core.queue import RequestClass, Waiter, WorkerQueue
from gpu_worker_pool.core.remembered import Outcome, RememberedOutcomes
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.core.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_worker_pool.core.assignments import HeldGPU
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.replication import Counters, GPUHistory
    from gpu_worker_pool.core.requirements import Requirements

    Handler = Callable[["Pool", Any, float], None]

#: Needed at every grant and release, where looking up an enum's member costs as much as ranking a GPU.
GRANTED, HELD, RELEASED = RequestState.GRANTED, LeaseState.HELD, LeaseState.RELEASED


class Pool:
    """Belongs to one thread."""

    def __init__(
        self, settings: PoolSettings | None = None, requests: dict[str, Waiter | Lease | Outcome] | None = None
    ) -> None:
        """`requests`: an empty dict to use, such as one that tracks its changes."""
        self.settings = settings or PoolSettings()
        #: The time of the last event; it never goes back.
        self.now = -math.inf
        #: How many grants there were: the fencing token of the last one.
        self.fence = 0
        #: How many requests there were.
        self.ticket = 0
        #: Every request that waits, holds a lease, or has ended and is remembered.
        self.requests = {} if requests is None else requests
        self.queue = WorkerQueue()
        self.outcomes = RememberedOutcomes(
            self.requests, self.settings.remember_seconds, self.settings.remember_at_most
        )
        self.allocator = GPUAllocator(self.settings)
        self.leases = WorkerAssignmentTracker(self.allocator.gpus)
        self.timers = Timers()
        #: How many requests and leases have ended in each way.
        self.tally: dict[RequestState | LeaseState, int] = dict.fromkeys((*RequestState, *LeaseState), 0)
        #: The one waiter with reserved GPUs; `Waiter.reserved` names them (rule 4).
        self.reserved_for: Waiter | None = None
        #: Whether there is a request class for which no GPU was looked for yet.
        self.has_new_class = False
        #: GPUs that may have become eligible for a waiter since the last assignment.
        self.improved: dict[str, GPUResourceState] = {}
        self.quarantined: dict[str, None] = {}
        self._effects: list[Effect] = []
        #: The earliest moment of a `WakeAt` that has not come yet.
        self._wake_at = math.inf

    def apply(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Handle one event. Raises `IllegalEventError`, and then nothing has changed."""
        now = now if now > self.now else self.now
        check, handle = self._HANDLERS[type(event)]
        if check is not None:
            check(self, event, now)
        timers = self.timers
        self.now = now
        # Rule 10: after an outage leases and waiters are extended before any timer runs.
        if now >= timers.not_before and type(event) is not Resumed:
            self._run_timers(now)
        handle(self, event, now)
        if self.queue.waiting or timers.not_before < math.inf:
            self._follow_up(now)
        elif self.improved:
            self.improved.clear()  # no waiter is left that it could serve
        if not self._effects:
            return ()
        effects = tuple(self._effects)
        self._effects.clear()
        return effects

    # ---- What another process decided, or this one before a restart. No event, because nothing is decided

    def replicate(
        self,
        news: Iterable[Waiter | Lease | Outcome],
        histories: Iterable[GPUHistory] = (),
        counters: Counters | None = None,
    ) -> None:
        """Each of `news` replaces what the pool knows of its request; new waiters must come in order of arrival."""
        replication.replicate(self, news, histories, counters)

    def remember(self, outcome: Outcome) -> None:
        """An outcome that this process had forgotten."""
        self.outcomes.add(outcome)

    def forget_outcomes(self, most: int) -> None:
        """All but the last `most`: a ledger file keeps the others."""
        self.outcomes.forget_all_but(most)

    # ---- Time

    def _follow_up(self, now: float) -> None:
        """After an event: serve waiters, run what is due at once, ask for readings and for the next wake-up."""
        timers = self.timers
        if self.improved or self.has_new_class:
            assign(self, now)
        if now >= timers.not_before and self._run_timers(now):
            assign(self, now)
        if self.allocator.freed and self.queue.waiting:
            self._want_readings(now)
            if self.improved:
                assign(self, now)
        if self._wake_at <= now:
            self._wake_at = math.inf
        if timers.not_before < self._wake_at and (at := timers.next_at()) < self._wake_at:
            self._wake_at = at
            self._effects.append(WakeAt(at))

    def _run_timers(self, now: float) -> bool:
        has_run = False
        while (due := self.timers.pop_due(now)) is not None:
            has_run = True
            kind, name = due
            if kind == "waiter":
                waiter = self.requests[name]
                assert isinstance(waiter, Waiter)  # its timer is cleared when it leaves the queue
                has_timed_out = waiter.deadline is not None and waiter.deadline <= now
                self._end_request(waiter, RequestState.TIMED_OUT if has_timed_out else RequestState.GIVEN_UP, now)
            elif kind == "lease":
                lease = self.leases.lookup(name)
                assert lease is not None  # as above
                if lease.state is LeaseState.OFFERED:
                    self._end_lease(lease, LeaseState.RECLAIMED, now, "it was not claimed in time")
                elif lease.state is HELD:
                    self._lose(lease, "its lease was not renewed in time", self.settings.quarantine_seconds, now)
                else:
                    self._review(lease, now)
        return has_run

    # ---- Rule 4: order. Rule 6: every request ends exactly once

    def grant_waiter(self, waiter: Waiter, gpus: tuple[GPUResourceState, ...], now: float) -> None:
        self._leave_queue(waiter, GRANTED)
        offer_deadline = None
        if waiter.poll_deadline is not None and now > waiter.poll_deadline:
            # Rule 9: a client that is between two polls has `offer_ttl_seconds` to come back, but an offer never
            # outlives the client's place in the queue.
            offer_deadline = min(now + self.settings.offer_ttl_seconds, waiter.gives_up_at or math.inf)
        self._grant(waiter.request, waiter.enqueued_at, offer_deadline, gpus, now, waiter.poll_id)

    def _grant(
        self,
        request: Request,
        requested_at: float,
        offer_deadline: float | None,
        gpus: tuple[GPUResourceState, ...],
        now: float,
        poll_id: str,
    ) -> None:
        """The one place that grants; `offer_deadline`: by when its client must claim it, if none is polling now."""
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
            # The state before the lease around it: what was there then is neither its own nor that of its neighbours.
            before = {each.gpu_id: each for each in self.leases.by_id[request.within].held}
            held = tuple([before[gpu_id] for gpu_id in gpu_ids])
        endpoint_id = gpu.endpoint.endpoint_id
        lease_id = f"lease-{fence}"
        lease = Lease(
            lease_id, request, endpoint_id, gpu_ids, held, fence, state, requested_at, now, expires_at, None, poll_id
        )
        self.requests[request.request_id] = lease
        self.leases.assign(lease)
        if request.within is None:
            self.allocator.granted(gpus, fence)
        if expires_at is not None:
            self.set_lease_timer(lease)
        self._effects.append(Granted(lease))

    def _end_request(self, waiter: Waiter, state: RequestState, now: float, reasons: tuple[str, ...] = ()) -> None:
        self._leave_queue(waiter, state)
        self.tally[state] += 1
        self.outcomes.add(Outcome(waiter.request, state, now, reasons))
        self._effects.append(Ended(waiter.request.request_id, state, reasons))

    def _leave_queue(self, waiter: Waiter, state: RequestState) -> None:
        if state not in REQUEST_MOVES[waiter.state]:
            raise IllegalMoveError(f"a request cannot go from {waiter.state} to {state}")
        waiter.state = state
        if waiter.request_class is not None:
            self.queue.remove(waiter)
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
        self.ticket += 1
        requirements, within = request.requirements, request.within
        is_alone = not queue.waiting
        if is_alone:
            # No waiter can be overtaken: serve it at once, if a GPU is eligible.
            gpus: tuple[GPUResourceState, ...] | None = None
            if within is not None:
                if (around := enclosure_of(self.leases, within)) is not None:
                    gpus = allocator.best(requirements, self.leases.gpus_of(around.lease), (), now, around)
            elif requirements is ANY_GPU or allocator.is_any_gpu(requirements):
                gpus = allocator.best_free((), now)
            else:
                gpus = allocator.best(requirements, allocator.gpus.values(), (), now)
            if gpus is not None:
                self._grant(request, now, None, gpus, now, event.poll_id)  # its client is polling
                return
        may_reserve = event.may_reserve and within is None
        waiter = Waiter(request, self.ticket, now, event.deadline, may_reserve=may_reserve, poll_id=event.poll_id)
        if event.poll_deadline is not None:
            self._set_poll(waiter, event, now)
        reasons = self.impossible(requirements, within)
        if reasons:
            self._end_request(waiter, RequestState.REJECTED, now, reasons)
            return
        request_class = queue.request_class(requirements, within)
        if request_class is None:
            is_any_gpu = within is None and allocator.is_any_gpu(requirements)
            request_class = RequestClass(requirements, within, is_any_gpu=is_any_gpu)
            request_class.tried = is_alone
            self.has_new_class = not is_alone
        queue.enqueue(waiter, request_class)
        self.requests[request.request_id] = waiter
        self.set_waiter_timer(waiter)

    def impossible(self, requirements: Requirements, within: str | None) -> tuple[str, ...]:
        """Why this can never be granted; `within`: the lease inside which the request runs."""
        if within is None:
            return self.allocator.impossible(requirements)
        return impossible_inside(self.leases, requirements, within)

    def _polled_again(self, known: Waiter | Lease | Outcome, event: Requested, now: float) -> None:
        if isinstance(known, Waiter):
            # Perhaps another process accepted it, and sees GPUs that this one does not.
            known.is_replicated = False
            if reasons := self.impossible(known.request.requirements, known.request.within):
                self._end_request(known, RequestState.REJECTED, now, reasons)
                return
            self._set_poll(known, event, now)
            self.set_waiter_timer(known)
            self.requests[known.request.request_id] = known
        elif isinstance(known, Outcome):
            ended = Ended(known.request.request_id, known.state, known.reasons)
            if ended not in self._effects:  # it may have ended just now
                self._effects.append(ended)
        elif known.is_live:
            self._effects.append(Granted(self._renew(known, now, event.poll_id)))
        elif known.quarantine is not None:
            reasons = (known.quarantine.reason,)
            self._effects.append(Ended(known.request.request_id, GRANTED, reasons))

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
            self._end_request(known, RequestState.CANCELLED, now)
        elif isinstance(known, Lease) and known.is_live:
            self._give_back(known, now)

    def _stopped(self, event: Stopped, now: float) -> None:
        for waiter in self.queue.in_order():
            self._end_request(waiter, RequestState.STOPPED, now)

    # ---- Rule 8: release hands on at once

    def _released(self, event: Released, now: float) -> None:
        lease = self.leases.by_id.get(event.lease_id)
        if lease is None or lease.quarantine is not None:  # it was released with leases inside it
            return
        if self.leases.inner:
            self._give_back(lease, now)
        else:
            self._end_lease(lease, RELEASED, now)

    def _give_back(self, lease: Lease, now: float) -> None:
        """Its holder is done with it; what is held inside it still uses its GPUs."""
        if lease.state is HELD and any(inner.state is not LeaseState.OFFERED for inner in self._inside(lease)):
            self._quarantine(lease, legality.RELEASED_AROUND_OTHERS, now, now)
        else:
            self._end_lease(lease, RELEASED, now)

    def _end_lease(
        self, lease: Lease, state: LeaseState, now: float, reason: str = "", *, ends_with_another: bool = False
    ) -> None:
        """`ends_with_another`: the lease around it ends, too."""
        if state not in LEASE_MOVES[lease.state]:
            raise IllegalMoveError(f"a lease cannot go from {lease.state} to {state}")
        if self.leases.inner:
            for inner in self._inside(lease):
                self._end_lease(inner, LeaseState.LOST, now, has_ended(lease.lease_id), ends_with_another=True)
        read_after = None
        if lease.quarantine is not None:
            read_after = lease.quarantine.since
            del self.quarantined[lease.lease_id]
            self.timers.clear("lease", lease.lease_id)
        elif lease.expires_at is not None:
            # An offer was never used; an assignment within one process is handed on without a fresh reading.
            read_after = now if lease.state is HELD else None
            self.timers.clear("lease", lease.lease_id)
        enclosing = None if lease.request.within is None else self.leases.enclosing(lease)
        self.leases.release(lease)
        if enclosing is None:
            self.allocator.ended(lease.held, now, read_after)
        elif self.leases.outermost(enclosing).quarantine is not None:
            # Only a reading begun after this shows whether its GPUs are empty.
            self.allocator.ended(lease.held, now, now)
        if self.queue.waiting:
            self.reject_inside(lease.lease_id, now)
            self.improve(lease.gpu_ids)
        self.tally[state] += 1
        if state is RELEASED and not self.settings.remembers_releases:
            del self.requests[lease.request.request_id]
        else:
            reasons = (reason,) if reason else ()
            self.outcomes.add(Outcome(lease.request, GRANTED, now, reasons, lease, state))
        if reason:
            self._effects.append(LeaseEnded(lease, state, reason))
        if enclosing is not None and enclosing.quarantine is not None and not ends_with_another:
            self._review(enclosing, now)

    # ---- Inside a lease

    def _inside(self, lease: Lease) -> list[Lease]:
        return self.leases.inside(lease.lease_id)

    def reject_inside(self, lease_id: str, now: float) -> None:
        """This lease is not held any more, so that those who wait inside it can never be served."""
        for waiter in self.queue.inside(lease_id):
            self._end_request(waiter, RequestState.REJECTED, now, (has_ended(lease_id),))

    def improve(self, gpu_ids: Sequence[str]) -> None:
        gpus = self.allocator.gpus
        for gpu_id in gpu_ids:
            if gpu_id in gpus:  # another process may reserve a GPU that this one has never seen
                self.improved[gpu_id] = gpus[gpu_id]

    def _want_readings(self, now: float) -> None:
        delays = self.settings.reading_delays_seconds
        wanted: dict[str, None] = {}
        for gpu in list(self.allocator.freed.values()):
            endpoint_id = gpu.endpoint.endpoint_id
            while gpu.freed_at + delays[gpu.readings_wanted] <= now:
                wanted[endpoint_id] = None
                gpu.readings_wanted += 1
                if gpu.readings_wanted == len(delays):
                    # It was not read in time: no longer withhold it.
                    del self.allocator.freed[gpu.gpu_id]
                    self.improved[gpu.gpu_id] = gpu
                    break
            else:
                at = gpu.freed_at + delays[gpu.readings_wanted]
                known_at = self.timers.get("reading", endpoint_id)
                if known_at is None or at < known_at:
                    self.timers.set("reading", endpoint_id, at)
        self._effects.extend(map(ReadingWanted, wanted))

    # ---- Rule 9: renewing. Rule 10: time in which no process served the ledger does not count

    def _renewed(self, event: Renewed, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        assert lease is not None  # else it was not legal
        self._effects.append(Granted(self._renew(lease, now)))

    def _renew(self, lease: Lease, now: float, poll_id: str = "") -> Lease:
        """Held for another TTL; an offer is held from now on."""
        ttl_seconds = lease.request.ttl_seconds
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        if lease.state is LeaseState.OFFERED:
            self.timers.clear("lease", lease.lease_id)
            lease = lease.moved(HELD, expires_at=expires_at, poll_id=poll_id)
        else:
            lease = lease.extended(expires_at, poll_id)
        self._replace_lease(lease)
        return lease

    def _replace_lease(self, lease: Lease) -> None:
        self.leases.assign(lease)
        self.requests[lease.request.request_id] = lease
        self.set_lease_timer(lease)

    def set_lease_timer(self, lease: Lease) -> None:
        if lease.quarantine is not None:
            self.timers.set("lease", lease.lease_id, lease.quarantine.until)
        elif lease.expires_at is not None:
            grace = self.settings.expiry_grace_seconds if lease.state is HELD else 0.0
            self.timers.set("lease", lease.lease_id, lease.expires_at + grace)

    def _resumed(self, event: Resumed, now: float) -> None:
        for lease in self.leases:
            if lease.is_live and lease.expires_at is not None:
                ttl_seconds = lease.request.ttl_seconds or self.settings.default_ttl_seconds
                if lease.state is LeaseState.OFFERED:  # it may never be claimed
                    ttl_seconds = min(ttl_seconds, self.settings.offer_ttl_seconds)
                self._replace_lease(lease.extended(max(lease.expires_at, now + ttl_seconds)))
        for waiter in self.queue.in_order():
            if waiter.gives_up_at is not None:
                # Not for an hour where the TTL is an hour: the client may be gone, and GPUs be reserved for it.
                default_seconds = self.settings.default_ttl_seconds
                ttl_seconds = min(waiter.request.ttl_seconds or default_seconds, default_seconds)
                waiter.gives_up_at = max(waiter.gives_up_at, now + ttl_seconds)
            if waiter.deadline is not None:
                waiter.deadline += event.unserved_seconds
            self.set_waiter_timer(waiter)
            self.requests[waiter.request.request_id] = waiter

    def _poll_abandoned(self, event: PollAbandoned, now: float) -> None:
        known = self.requests.get(event.request_id)
        if known is None or isinstance(known, Outcome) or not event.poll_id or known.poll_id != event.poll_id:
            return
        if isinstance(known, Waiter):
            # In the past: a grant at this very moment must already be an offer.
            known.poll_deadline = now - 1.0
            # Most clients that hang up are gone for good, and others wait behind them.
            settings = self.settings
            known.gives_up_at = now + (settings.offer_ttl_seconds if event.is_gone else settings.queue_ttl_seconds)
            self.set_waiter_timer(known)
            self.requests[event.request_id] = known
        elif known.state is HELD and not self._inside(known) and not self.queue.inside(known.lease_id):
            # Its client does not know of it; with others inside it, it does.
            offer_deadline = now + self.settings.offer_ttl_seconds
            self._replace_lease(known.moved(LeaseState.OFFERED, expires_at=offer_deadline))

    def _holder_gone(self, event: HolderGone, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        if lease is None or not lease.is_live:
            return
        if lease.state is LeaseState.OFFERED:
            self._end_lease(lease, LeaseState.RECLAIMED, now, "its client is gone")
        else:
            self._lose(lease, "its holder is gone", 0.0 if event.is_proven else self.settings.quarantine_seconds, now)

    # ---- Rule 11: quarantine

    def _lose(self, lease: Lease, reason: str, quarantine_seconds: float, now: float) -> None:
        """A held lease ends without being released."""
        is_inner = self.leases.enclosing(lease) is not None
        if is_inner and not any(inner.state is not LeaseState.OFFERED for inner in self._inside(lease)):
            # The lease around it still has its GPUs, and readings do not show what inside that lease uses them.
            self._end_lease(lease, LeaseState.RECLAIMED, now, reason)
        else:
            self._quarantine(lease, reason, now if is_inner else now + quarantine_seconds, now)

    def _quarantine(self, lease: Lease, reason: str, until: float, now: float) -> None:
        lease = lease.moved(LeaseState.QUARANTINED, quarantine=Quarantine(reason, now, until))
        self._replace_lease(lease)
        self.quarantined[lease.lease_id] = None
        if self.leases.enclosing(lease) is None:
            self.allocator.ended(lease.held, now, None)
        self._effects.append(LeaseEnded(lease, LeaseState.QUARANTINED, reason))
        # What is held inside it goes on, and it stays in quarantine until that has ended.
        for inner in self._inside(lease):
            if inner.state is LeaseState.OFFERED:
                self._end_lease(inner, LeaseState.LOST, now, has_ended(lease.lease_id))
        self.reject_inside(lease.lease_id, now)

    def _review(self, lease: Lease, now: float) -> None:
        """End a quarantine if it has lasted long enough and no reading speaks against it."""
        if lease.quarantine is None or now < lease.quarantine.until or self._inside(lease):
            return
        if self.leases.enclosing(lease) is not None:
            self._end_lease(lease, LeaseState.RECLAIMED, now, "nothing inside it is held any more")
        elif all(trace_of(lease, gpu, self.settings) is None for gpu in self.leases.gpus_of(lease)):
            self._end_lease(lease, LeaseState.RECLAIMED, now, "readings show nothing of its holder any more")

    def _quarantine_ended(self, event: QuarantineEnded, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        if lease is not None:  # else it has just ended by itself
            self._end_lease(lease, LeaseState.RECLAIMED, now, "an administrator ended its quarantine")

    # ---- Readings

    def _observed(self, event: Observed, now: float) -> None:
        endpoint = self.allocator.endpoint(event.endpoint_id)
        was_known = endpoint.present > 0
        if not self.allocator.observe(event.endpoint_id, event.readings, min(event.begun_at, now)):
            return
        for lease_id in list(self.quarantined):
            lease = self.leases.lookup(lease_id)
            if lease is not None and lease.endpoint_id == event.endpoint_id:
                self._review(lease, now)
        if self.queue:
            self.improved.update(endpoint.gpus)
            if not was_known:
                self._reject_impossible(now)
        else:
            for gpu in list(self.allocator.freed.values()):
                if gpu.endpoint is endpoint and gpu.freed_at < endpoint.begun_at:
                    del self.allocator.freed[gpu.gpu_id]

    def _reject_impossible(self, now: float) -> None:
        for request_class in self.queue.request_classes():
            reasons = self.impossible(request_class.requirements, request_class.within)
            if reasons:
                for waiter in list(request_class.waiters.values()):
                    if not waiter.is_replicated:  # the process that accepted it may see other GPUs
                        self._end_request(waiter, RequestState.REJECTED, now, reasons)

    def _unreachable(self, event: Unreachable, now: float) -> None:
        self.allocator.forget_readings(event.endpoint_id)
        if event.is_removed:
            self.allocator.remove(event.endpoint_id)
            self._reject_impossible(now)

    def _vanished(self, event: GPUsVanished, now: float) -> None:
        gpus = [gpu for gpu_id in event.gpu_ids if (gpu := self.allocator.gpus.get(gpu_id)) is not None]
        for gpu in gpus:
            self.allocator.mark_gone(gpu)
        inner = {lease.lease_id: lease for gpu in gpus for lease in gpu.inner_leases.values()}
        for lease in inner.values():
            # If it has others left, it goes on: the lease around it is in quarantine, and ends after it.
            if lease.lease_id in self.leases.by_id and all(gpu.is_gone for gpu in self.leases.gpus_of(lease)):
                self._end_lease(lease, LeaseState.LOST, now, f"GPU {', '.join(lease.gpu_ids)} is gone")
        affected = {lease.lease_id: lease for gpu in gpus for lease in gpu.leases.values()}
        for lease in affected.values():
            its_gpus = self.leases.gpus_of(lease)
            reason = f"GPU {', '.join(gpu.gpu_id for gpu in its_gpus if gpu.is_gone)} is gone"
            if all(gpu.is_gone for gpu in its_gpus):
                self._end_lease(lease, LeaseState.LOST, now, reason)
            elif lease.state is HELD:
                # Its other GPUs may still be in use.
                self._quarantine(lease, reason, now + self.settings.quarantine_seconds, now)
            elif lease.state is LeaseState.OFFERED:
                self._end_lease(lease, LeaseState.RECLAIMED, now, reason)
        self._reject_impossible(now)

    def _ticked(self, event: Ticked, now: float) -> None:
        self.outcomes.forget_old(now)

    #: For each event, the check that may refuse it and its handler.
    _HANDLERS: ClassVar[Mapping[type[Any], tuple[Handler | None, Handler]]] = {
        Requested: (legality.check_requested, _requested),
        Cancelled: (legality.check_cancelled, _cancelled),
        Released: (legality.check_released, _released),
        Renewed: (legality.check_renewed, _renewed),
        PollAbandoned: (None, _poll_abandoned),
        Resumed: (None, _resumed),
        HolderGone: (None, _holder_gone),
        QuarantineEnded: (legality.check_quarantine_ended, _quarantine_ended),
        Observed: (None, _observed),
        Unreachable: (None, _unreachable),
        GPUsVanished: (None, _vanished),
        Ticked: (None, _ticked),
        Stopped: (None, _stopped),
    }

    def __repr__(self) -> str:
        gpus = sum(endpoint.present for endpoint in self.allocator.endpoints.values())
        return f"<Pool: {gpus} GPUs, {len(self.leases)} leases, {len(self.queue)} waiting, fence {self.fence}>"
