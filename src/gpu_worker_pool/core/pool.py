"""The pool: every event goes in here, every decision comes out. No I/O, no clock, no randomness, no log.

`apply(event, now)` is the only way to change a pool. It refuses an illegal event before it changes anything; it runs
what time has brought due; it lets the event's handler change who holds and who waits; and it ends with `_assign`, the
one place that decides a grant. The same events at the same times give the same pool and the same effects.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.allocator import GPUAllocator
from gpu_worker_pool.core.assignments import Lease, WorkerAssignmentTracker
from gpu_worker_pool.core.effects import Effect, Ended, Granted, LeaseEnded, ReadingWanted, WakeAt
from gpu_worker_pool.core.events import (
    Cancelled,
    Event,
    GPUsVanished,
    HolderGone,
    Observed,
    QuarantineEnded,
    Released,
    Renewed,
    Requested,
    Stopped,
    Ticked,
    Unreachable,
)
from gpu_worker_pool.core.evidence import trace_of
from gpu_worker_pool.core.keeping import gpus_to_keep
from gpu_worker_pool.core.legality import check_legal
from gpu_worker_pool.core.moves import LeaseState, RequestState, check_lease_move, check_request_move
from gpu_worker_pool.core.queue import Line, Waiter, WorkerQueue
from gpu_worker_pool.core.remembered import Outcome, RememberedOutcomes
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.core.timers import TimerKey, Timers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState


class Pool:
    """Belongs to one thread."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        #: The time of the last event; it never goes back.
        self.now = -math.inf
        #: Grows with every grant, and with nothing else.
        self.fence = 0
        #: Grows with every arrival.
        self.ticket = 0
        self.allocator = GPUAllocator(self.settings)
        self.queue = WorkerQueue()
        self.leases = WorkerAssignmentTracker()
        self.outcomes = RememberedOutcomes(self.settings.remember_seconds, self.settings.remember_at_most)
        self.timers = Timers()
        #: How many requests and leases have come into each state, ever.
        self.tally: Counter[RequestState | LeaseState] = Counter()
        #: The one waiter for whom GPUs are kept; which ones, it knows itself (rule 4).
        self.keeper: Waiter | None = None
        self._newcomer: Waiter | None = None
        #: GPUs that may have become eligible for somebody since the last assignment.
        self._improved: dict[str, GPUResourceState] = {}
        #: Endpoints of which fresh readings are wanted while someone waits (rule 8).
        self._freed: dict[str, EndpointState] = {}
        self._quarantined: dict[str, None] = {}
        self._effects: list[Effect] = []
        #: The earliest moment that was asked for by `WakeAt` and has not come.
        self._wake_at: float | None = None

    def apply(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Let one thing happen. Raises `IllegalEventError`, and then nothing has changed."""
        check_legal(self, event, now)
        now = self._advance(now)
        self._HANDLERS[type(event)](self, event, now)
        self._assign(now)
        if self._run_timers(now):
            self._assign(now)
        self._want_readings(now)
        self._announce()
        effects, self._effects = tuple(self._effects), []
        return effects

    # ---- Coming back from what was saved

    def readopt_lease(self, lease: Lease) -> None:
        self.leases.assign(lease, tuple(self.allocator.gpu(gpu_id, lease.endpoint_id) for gpu_id in lease.gpu_ids))
        if lease.state is LeaseState.QUARANTINED:
            self._quarantined[lease.lease_id] = None
        self._set_lease_timer(lease)

    def readopt_waiter(self, waiter: Waiter, line: Line) -> None:
        self.queue.enqueue(waiter, line)
        self._set_waiter_timer(waiter)
        if waiter.kept:
            self.keeper = waiter

    # ---- Time

    def was_unserved(self, now: float) -> bool:
        """Rule 10: whether so much time has passed since the last event that nobody can have served the ledger."""
        limit = self.settings.unserved_after_seconds
        return limit is not None and now - self.now > limit and self.now > -math.inf

    def _advance(self, now: float) -> float:
        now = max(now, self.now)
        if self.was_unserved(now):
            self.resume(now, unserved_seconds=now - self.now)
        self.now = now
        if self._wake_at is not None and self._wake_at <= now:
            self._wake_at = None
        self._run_timers(now)
        return now

    def _run_timers(self, now: float) -> bool:
        has_run = False
        while (key := self.timers.pop_due(now)) is not None:
            has_run = True
            kind, name = key
            if kind == "waiter":
                waiter = self.queue.lookup(name)
                assert waiter is not None  # its timer is cleared when it leaves the queue
                has_timed_out = waiter.deadline is not None and waiter.deadline <= now
                self._end_request(waiter, RequestState.TIMED_OUT if has_timed_out else RequestState.GIVEN_UP, now)
            elif kind == "lease":
                lease = self.leases.lookup(name)
                assert lease is not None  # as above
                if lease.state is LeaseState.OFFERED:
                    self._end_lease(lease, LeaseState.RECLAIMED, now, "nobody came for it in time")
                elif lease.state is LeaseState.HELD:
                    quarantined_until = now + self.settings.quarantine_seconds
                    self._quarantine(lease, "its lease was not renewed in time", quarantined_until, now)
                else:
                    self._review(lease, now)
        return has_run

    def _announce(self) -> None:
        at = self.timers.next_at()
        if at is not None and (self._wake_at is None or at < self._wake_at):
            self._wake_at = at
            self._effects.append(WakeAt(at))

    # ---- Rule 4: order. Rule 6: every request ends exactly once

    def _assign(self, now: float) -> None:
        """Grant whatever can be granted, in order. Ends every event; nothing else grants."""
        if self._newcomer is not None and not self._admit(self._newcomer, now):
            return
        if not self.queue:
            self._improved.clear()
            return
        kept: Sequence[str] = ()
        for line, waiter in self.queue.heads():
            gpus = self._choose(line, kept, now)
            if gpus is not None:
                self._grant(waiter, gpus, now)
                continue
            line.tried = True
            if not kept and now - waiter.enqueued_at >= self.settings.max_bypass_seconds:
                kept = self._keep(waiter, now)
        self._improved.clear()

    def _admit(self, newcomer: Waiter, now: float) -> bool:
        """Serve a newcomer that meets no queue, or let it wait; True if others must be looked at as well."""
        self._newcomer = None
        wishes = newcomer.request.wishes
        line = self.queue.line(wishes) or Line(wishes, is_plain=self.allocator.is_plain(wishes))
        if not self.queue:
            gpus = self._choose(line, (), now)
            if gpus is not None:
                self._grant(newcomer, gpus, now)
                return False
            line.tried = True
        self.queue.enqueue(newcomer, line)
        self._set_waiter_timer(newcomer)
        # Nothing improved, and it stands behind others of whom no one can be served.
        return bool(self._improved) or not line.tried

    def _choose(self, line: Line, kept: Sequence[str], now: float) -> tuple[GPUResourceState, ...] | None:
        allocator = self.allocator
        if line.is_plain:
            return allocator.best_plain(kept, now)
        wishes = line.wishes
        candidates = list(allocator.gpus.values())
        if line.tried:
            changed = [gpu for gpu in self._improved.values() if allocator.is_eligible(gpu, wishes, now)]
            if not changed:
                return None
            if wishes.count == 1:
                candidates = changed
        return allocator.best(wishes, candidates, kept, now)

    def _keep(self, waiter: Waiter, now: float) -> Sequence[str]:
        """Keep GPUs for a waiter that has been overtaken for long enough; whoever comes after it cannot have them."""
        kept = gpus_to_keep(self.allocator, waiter, self._improved.values() if waiter is self.keeper else None, now)
        previous = self.keeper
        if previous is not None and (previous is not waiter or previous.kept != kept):
            self._improve(previous.kept)
            previous.kept = ()
        waiter.kept = kept
        self.keeper = waiter if kept else None
        return kept

    def _grant(self, waiter: Waiter, gpus: tuple[GPUResourceState, ...], now: float) -> None:
        request = waiter.request
        self.fence = fence = self.fence + 1
        # Rule 9: an asker that does not listen just now has `claim_seconds` to come back.
        is_listening = waiter.asking_until is None or now <= waiter.asking_until
        state = LeaseState.HELD if is_listening else LeaseState.OFFERED
        expires_at = None
        if request.ttl_seconds is not None:
            expires_at = now + (request.ttl_seconds if is_listening else self.settings.claim_seconds)
        lease = Lease(
            f"lease-{fence}",
            request,
            gpus[0].endpoint.endpoint_id,
            tuple([gpu.gpu_id for gpu in gpus]),
            fence,
            state,
            waiter.enqueued_at,
            now,
            expires_at,
            tuple([gpu.level_before_grant() for gpu in gpus]),
        )
        self._leave_queue(waiter, RequestState.GRANTED)
        self.leases.assign(lease, gpus)
        self.allocator.granted(gpus, fence)
        self._set_lease_timer(lease)
        self.tally[state] += 1
        self._effects.append(Granted(lease))

    def _end_request(self, waiter: Waiter, state: RequestState, now: float, reasons: tuple[str, ...] = ()) -> None:
        self._leave_queue(waiter, state)
        self._remember(Outcome(waiter.request, state, now, reasons))
        self._effects.append(Ended(waiter.request.request_id, state, reasons))

    def _leave_queue(self, waiter: Waiter, state: RequestState) -> None:
        check_request_move(waiter.state, state)
        waiter.state = state
        self.tally[state] += 1
        if self.queue.remove(waiter.request.request_id) is not None:
            self.timers.clear(("waiter", waiter.request.request_id))
            if waiter is self.keeper:
                self._improve(waiter.kept)
                self.keeper = None

    def _set_waiter_timer(self, waiter: Waiter) -> None:
        key: TimerKey = ("waiter", waiter.request.request_id)
        moments = [at for at in (waiter.deadline, waiter.gives_up_at) if at is not None]
        if moments:
            self.timers.set(key, min(moments))
        else:
            self.timers.clear(key)

    # ---- Rule 5: impossible requests fail at once. Rule 9: ids are remembered

    def _requested(self, event: Requested, now: float) -> None:
        request = event.request
        waiter = self.queue.lookup(request.request_id)
        if waiter is not None:
            self._listens(waiter, event, now)
            self._set_waiter_timer(waiter)
            return
        lease = self.leases.lookup_request(request.request_id)
        if lease is not None:
            if lease.state is LeaseState.OFFERED:
                lease = self._renew(lease, LeaseState.HELD, now)
            if lease.is_live:
                self._effects.append(Granted(lease))
            else:
                self._effects.append(Ended(request.request_id, RequestState.GRANTED, (lease.quarantine_reason,)))
            return
        outcome = self.outcomes.of_request(request.request_id)
        if outcome is not None:
            self._effects.append(Ended(request.request_id, outcome.state, outcome.reasons))
            return

        self.ticket += 1
        self.tally[RequestState.WAITING] += 1
        waiter = Waiter(request, self.ticket, now)
        self._listens(waiter, event, now)
        reasons = self.allocator.impossible(request.wishes)
        if reasons:
            self._end_request(waiter, RequestState.REJECTED, now, reasons)
        else:
            self._newcomer = waiter

    def _listens(self, waiter: Waiter, event: Requested, now: float) -> None:
        waiter.deadline = event.deadline
        waiter.asking_until = event.asking_until
        if event.asking_until is not None:
            waiter.gives_up_at = max(event.asking_until, now) + self.settings.patience_seconds

    def _remember(self, outcome: Outcome) -> None:
        self.outcomes.add(outcome)
        self.outcomes.forget_old(outcome.at)

    # ---- Rule 7: a cancelled waiter that was granted in the same instant gives the GPU back

    def _cancelled(self, event: Cancelled, now: float) -> None:
        waiter = self.queue.lookup(event.request_id)
        if waiter is not None:
            self._end_request(waiter, RequestState.CANCELLED, now)
            return
        lease = self.leases.lookup_request(event.request_id)
        if lease is not None and lease.is_live:
            self._end_lease(lease, LeaseState.RELEASED, now)

    def _stopped(self, event: Stopped, now: float) -> None:
        for waiter in self.queue.in_order():
            self._end_request(waiter, RequestState.STOPPED, now)

    # ---- Rule 8: release hands on at once

    def _released(self, event: Released, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        if lease is not None:
            self._end_lease(lease, LeaseState.RELEASED, now)

    def _end_lease(self, lease: Lease, state: LeaseState, now: float, reason: str = "") -> None:
        check_lease_move(lease.state, state)
        # What was never told to anybody was never used, and an assignment within one process goes straight on.
        needs_reading = lease.request.ttl_seconds is not None and lease.state is not LeaseState.OFFERED
        ended_at = now if lease.quarantined_at is None else lease.quarantined_at
        gpus = self.leases.release(lease.lease_id)
        self.allocator.freed(gpus, at=ended_at, needs_reading=needs_reading)
        if lease.request.ttl_seconds is not None or lease.state is LeaseState.QUARANTINED:
            self.timers.clear(("lease", lease.lease_id))
            self._quarantined.pop(lease.lease_id, None)
        self.tally[state] += 1
        self._remember(Outcome(lease.request, RequestState.GRANTED, now, (reason,) if reason else (), lease, state))
        if reason:
            self._effects.append(LeaseEnded(lease, state, reason))
        self._look_again(gpus[0].endpoint, now)
        if self.queue:
            self._improve(lease.gpu_ids)

    def _improve(self, gpu_ids: Sequence[str]) -> None:
        for gpu_id in gpu_ids:
            self._improved[gpu_id] = self.allocator.gpus[gpu_id]

    def _look_again(self, endpoint: EndpointState, now: float) -> None:
        endpoint.freed_at = now
        endpoint.readings_wanted = 0
        self._freed[endpoint.endpoint_id] = endpoint

    def _want_readings(self, now: float) -> None:
        if not self._freed or not self.queue:
            return
        delays = self.settings.reading_delays_seconds
        for endpoint in list(self._freed.values()):
            if endpoint.freed_at + delays[endpoint.readings_wanted] <= now:
                self._effects.append(ReadingWanted(endpoint.endpoint_id))
                while endpoint.readings_wanted < len(delays):
                    if endpoint.freed_at + delays[endpoint.readings_wanted] > now:
                        break
                    endpoint.readings_wanted += 1
            if endpoint.readings_wanted == len(delays):
                del self._freed[endpoint.endpoint_id]
            else:
                next_at = endpoint.freed_at + delays[endpoint.readings_wanted]
                self.timers.set(("reading", endpoint.endpoint_id), next_at)

    # ---- Rule 9: renewing. Rule 10: time in which nobody served does not count

    def _renewed(self, event: Renewed, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        assert lease is not None  # else it was not legal
        self._effects.append(Granted(self._renew(lease, lease.state, now)))

    def _renew(self, lease: Lease, state: LeaseState, now: float) -> Lease:
        ttl_seconds = lease.request.ttl_seconds
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        if state is lease.state:
            lease = lease.changed(expires_at=expires_at)
        else:
            lease = lease.moved(state, expires_at=expires_at)
            self.tally[state] += 1
        self.leases.replace(lease)
        self._set_lease_timer(lease)
        return lease

    def _set_lease_timer(self, lease: Lease) -> None:
        if lease.state is LeaseState.QUARANTINED:
            self.timers.set(("lease", lease.lease_id), lease.quarantined_until)
        elif lease.expires_at is not None:
            grace = self.settings.expiry_grace_seconds if lease.state is LeaseState.HELD else 0.0
            self.timers.set(("lease", lease.lease_id), lease.expires_at + grace)

    def resume(self, now: float, unserved_seconds: float) -> None:
        """Nobody served the ledger for a while: every lease and every waiter gets one full TTL."""
        for lease in list(self.leases):
            if lease.is_live and lease.expires_at is not None:
                ttl_seconds = lease.request.ttl_seconds or self.settings.default_ttl_seconds
                lease = lease.changed(expires_at=max(lease.expires_at, now + ttl_seconds))
                self.leases.replace(lease)
                self._set_lease_timer(lease)
        for waiter in self.queue.in_order():
            if waiter.gives_up_at is not None:
                ttl_seconds = waiter.request.ttl_seconds or self.settings.default_ttl_seconds
                waiter.gives_up_at = max(waiter.gives_up_at, now + ttl_seconds)
            if waiter.deadline is not None:
                waiter.deadline += unserved_seconds
            self._set_waiter_timer(waiter)

    def _holder_gone(self, event: HolderGone, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        if lease is None or not lease.is_live:
            return
        if lease.state is LeaseState.OFFERED:
            self._end_lease(lease, LeaseState.RECLAIMED, now, "its asker is gone")
        else:
            quarantined_until = now if event.is_proven else now + self.settings.quarantine_seconds
            self._quarantine(lease, "its holder is gone", quarantined_until, now)

    # ---- Rule 11: quarantine

    def _quarantine(self, lease: Lease, reason: str, until: float, now: float) -> None:
        lease = lease.moved(
            LeaseState.QUARANTINED, quarantined_at=now, quarantine_reason=reason, quarantined_until=until
        )
        self.leases.replace(lease)
        self._quarantined[lease.lease_id] = None
        self._set_lease_timer(lease)
        self.tally[LeaseState.QUARANTINED] += 1
        self._effects.append(LeaseEnded(lease, LeaseState.QUARANTINED, reason))
        self._look_again(self.allocator.endpoints[lease.endpoint_id], now)

    def _review(self, lease: Lease, now: float) -> None:
        """End a quarantine if it has lasted long enough and no reading speaks against it."""
        if now < lease.quarantined_until:
            return
        gpus = self.leases.gpus_of(lease.lease_id)
        if all(trace_of(lease, gpu, self.settings) is None for gpu in gpus):
            self._end_lease(lease, LeaseState.RECLAIMED, now, "readings show nothing of its holder any more")

    def _quarantine_ended(self, event: QuarantineEnded, now: float) -> None:
        lease = self.leases.lookup(event.lease_id)
        assert lease is not None  # else it was not legal
        self._end_lease(lease, LeaseState.RECLAIMED, now, "an administrator ended its quarantine")

    # ---- Readings

    def _observed(self, event: Observed, now: float) -> None:
        endpoint = self.allocator.endpoint(event.endpoint_id)
        was_known = endpoint.present > 0
        if not self.allocator.observe(event.endpoint_id, event.readings, min(event.begun_at, now)):
            return
        for lease_id in list(self._quarantined):
            lease = self.leases.lookup(lease_id)
            if lease is not None and lease.endpoint_id == event.endpoint_id:
                self._review(lease, now)
        if self.queue:
            self._improved.update(endpoint.gpus)
            if not was_known:
                self._reject_impossible(now)
        elif endpoint.begun_at > endpoint.freed_at:
            self._freed.pop(endpoint.endpoint_id, None)

    def _reject_impossible(self, now: float) -> None:
        for line in self.queue.lines():
            reasons = self.allocator.impossible(line.wishes)
            if reasons:
                for waiter in list(line.waiters.values()):
                    self._end_request(waiter, RequestState.REJECTED, now, reasons)

    def _unreachable(self, event: Unreachable, now: float) -> None:
        self.allocator.forget_readings(event.endpoint_id)

    def _vanished(self, event: GPUsVanished, now: float) -> None:
        gpus = [gpu for gpu_id in event.gpu_ids if (gpu := self.allocator.gpus.get(gpu_id)) is not None]
        for gpu in gpus:
            self.allocator.mark_gone(gpu)
        affected = {lease.lease_id: lease for gpu in gpus for lease in gpu.leases.values()}
        for lease in affected.values():
            its_gpus = self.leases.gpus_of(lease.lease_id)
            reason = f"GPU {', '.join(gpu.gpu_id for gpu in its_gpus if gpu.is_gone)} is gone"
            if all(gpu.is_gone for gpu in its_gpus):
                self._end_lease(lease, LeaseState.LOST, now, reason)
            elif lease.state is LeaseState.HELD:
                # Its other GPUs may still be in use.
                self._quarantine(lease, reason, now + self.settings.quarantine_seconds, now)
            elif lease.state is LeaseState.OFFERED:
                self._end_lease(lease, LeaseState.RECLAIMED, now, reason)

    def _ticked(self, event: Ticked, now: float) -> None:
        self.outcomes.forget_old(now)

    _HANDLERS: Mapping[type[Any], Callable[[Pool, Any, float], None]] = {
        Requested: _requested,
        Cancelled: _cancelled,
        Released: _released,
        Renewed: _renewed,
        HolderGone: _holder_gone,
        QuarantineEnded: _quarantine_ended,
        Observed: _observed,
        Unreachable: _unreachable,
        GPUsVanished: _vanished,
        Ticked: _ticked,
        Stopped: _stopped,
    }

    def __repr__(self) -> str:
        gpus = sum(endpoint.present for endpoint in self.allocator.endpoints.values())
        return f"<Pool: {gpus} GPUs, {len(self.leases)} leases, {len(self.queue)} waiting, fence {self.fence}>"
