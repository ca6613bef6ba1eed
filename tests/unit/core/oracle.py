"""The rules once more, written from their text alone: what a pool did is judged by this, not by its own code.

It keeps its own books of who holds and who waits, from nothing but the events it was shown and the effects it saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cmp_to_key
from itertools import combinations

from gpu_worker_pool.core import (
    Cancelled,
    Effect,
    Ended,
    Event,
    GPUsVanished,
    Granted,
    Lease,
    LeaseEnded,
    LeaseState,
    Observed,
    PollAbandoned,
    PoolSettings,
    ProcessReading,
    QuarantineEnded,
    Reading,
    Released,
    Request,
    Requested,
    RequestState,
    Requirements,
    Resumed,
    Unreachable,
    WakeAt,
)
from gpu_worker_pool.core.policy import NO_POLICY, Limits, Policy


@dataclass
class Waiting:
    request: Request
    arrival: int
    since: float
    may_reserve: bool = True
    #: Until when somebody hears the answer to its last asking; None: until there is one.
    heard_until: float | None = None
    poll_id: str = ""

    def asked(self, event: Requested, now: float) -> None:
        self.may_reserve, self.poll_id = event.may_reserve, event.poll_id
        self.heard_until = None if event.poll_deadline is None else max(event.poll_deadline, now)

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.requirements.priority, self.arrival)


@dataclass
class Card:
    endpoint: str
    reading: Reading | None
    begun_at: float
    #: Promises on it, oldest first, with the memory used and the processes seen before each.
    promises: dict[str, Lease] = field(default_factory=dict)
    #: Leases inside those.
    inner: dict[str, Lease] = field(default_factory=dict)
    used_before_first: float | None = None
    percent_before_first: float | None = None
    processes_before_first: frozenset[tuple[int, float | None]] | None = None
    last_lease_ended: float = -math.inf
    #: When it last became nobody's; what a reading begun before shows is the load of whoever had it.
    freed_at: float = -math.inf


@dataclass
class Spell:
    """For how long an account had how many GPUs, in time in which somebody served the ledger."""

    account: str
    gpus: int
    begun_at: float
    ended_at: float | None = None


class Oracle:
    def __init__(self, settings: PoolSettings) -> None:
        #: By lease, what its account used by it; and those accounts of which the oracle does not know exactly.
        self.spells: dict[str, Spell] = {}
        self.fuzzy: set[str] = set()
        self.unserved_seconds = 0.0
        self.outages = 0
        self.settings = settings
        self.cards: dict[str, Card] = {}
        self.endpoint_begun: dict[str, float] = {}
        self.waiting: dict[str, Waiting] = {}
        self.leases: dict[str, Lease] = {}
        self.ended: dict[str, RequestState] = {}
        self.requests: dict[str, Request] = {}
        self.lease_ends: dict[str, LeaseState] = {}
        self.fence = 0
        self.arrivals = 0
        self.wake_at: float | None = None
        #: Whether leases inside a lease may be lost with it now: an administrator ended it, or its GPUs are gone.
        self.may_lose_inside = False
        self.policy = NO_POLICY
        #: The one in force until this event: what is due comes before what an event changes.
        self.policy_before = NO_POLICY
        #: By lease, its time limit: its own, or that of the policy when it was granted.
        self.longest: dict[str, float] = {}
        #: By lease that is to end for idleness, since when that is known.
        self.idle_asked: dict[str, float] = {}
        #: For how long nobody served so far, and of each lease, when it was last renewed and how long that was then.
        self.unserved = 0.0
        self.renewed: dict[str, tuple[float, float]] = {}

    # ---- rule 10: time in which nobody serves does not count

    def nobody_served(self, seconds: float) -> None:
        """An outage of this length is over, and was noticed."""
        self.unserved += seconds

    def judge_lifetimes(self, leases: Iterable[Lease], now: float) -> None:
        """What is left of each lease, and the time for which it was served since it was renewed, make its TTL."""
        for lease in leases:
            ttl, longest = lease.request.ttl_seconds, self.longest.get(lease.lease_id)
            if lease.asked is not None and lease.asked.ends_at is not None:
                self.idle_asked.setdefault(lease.lease_id, now)
            else:
                self.idle_asked.pop(lease.lease_id, None)
            if longest is not None and lease.state is LeaseState.HELD:
                assert lease.expires_at is not None
                assert lease.expires_at <= lease.granted_at + longest + 1e-6, f"{lease.lease_id} outlives its limit"
            elif ttl is not None and lease.state is LeaseState.HELD:
                assert lease.expires_at is not None
                left, served = lease.expires_at - now, self._served(lease, now)
                assert left + served >= ttl - 1e-6, f"{lease.lease_id} has {left} s left after {served} s of {ttl} s"

    def _served(self, lease: Lease, now: float) -> float:
        renewed_at, unserved = self.renewed[lease.lease_id]
        return now - renewed_at - (self.unserved - unserved)

    # ---- following a history

    def saw(self, event: Event, effects: tuple[Effect, ...], now: float) -> None:
        if self.wake_at is not None and self.wake_at <= now:
            self.wake_at = None
        if isinstance(event, Unreachable):
            for card in self.cards.values():
                if card.endpoint == event.endpoint_id:
                    card.reading = None
        self.may_lose_inside = isinstance(event, (QuarantineEnded, GPUsVanished))
        if isinstance(event, Resumed):
            self.unserved_seconds += event.unserved_seconds or 0.0
            self.outages += 1
        asked_again = None
        if isinstance(event, Requested):
            asked_again = self._saw_request(event, now)
        # What is due or was observed may end leases before this event's own end is applied: effects say so first.
        ends_here = self._own_end(event)
        if isinstance(event, Observed):
            self._saw_readings(event, now)
        for effect in effects:
            if isinstance(effect, LeaseEnded) and effect.lease.lease_id == ends_here:
                ends_here = None  # it was lost in the same moment
            is_after_it = ends_here is not None and (
                (isinstance(effect, Granted) and effect.lease.lease_id != ends_here)
                or (isinstance(effect, LeaseEnded) and self.leases[ends_here].request.within == effect.lease.lease_id)
            )
            if ends_here is not None and is_after_it:
                self._end_lease(ends_here, LeaseState.RELEASED, now)
                ends_here = None
            self._saw_effect(effect, asked_again, now)
        if ends_here is not None:
            self._end_lease(ends_here, LeaseState.RELEASED, now)
        if isinstance(event, PollAbandoned) and event.poll_id:
            self._saw_one_go(event, now)
        for request_id, waiting in self.waiting.items():
            assert request_id not in self.ended, f"{request_id} waits and has ended"
            assert not self._is_never_allowed(waiting.request), f"{request_id} waits for what it may never have"
            around = self._around(waiting.request)
            assert waiting.request.within is None or (around is not None and around.state is LeaseState.HELD), (
                f"{request_id} waits inside a lease that nobody holds"
            )

    def _own_end(self, event: Event) -> str | None:
        if isinstance(event, Released) and event.lease_id in self.leases:
            # What its holder released while others hold parts of it ends with them.
            is_released = self.leases[event.lease_id].state is LeaseState.QUARANTINED
            return None if is_released else event.lease_id
        if isinstance(event, Cancelled) and event.request_id not in self.waiting:
            for lease in self.leases.values():
                if lease.request.request_id == event.request_id and lease.state is not LeaseState.QUARANTINED:
                    return lease.lease_id
        return None

    def _around(self, request: Request) -> Lease | None:
        return None if request.within is None else self.leases.get(request.within)

    def _inside(self, lease_id: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.request.within == lease_id]

    def _outermost(self, lease: Lease) -> Lease:
        while (around := self._around(lease.request)) is not None:
            lease = around
        return lease

    def beside(self, request: Request) -> list[Waiting]:
        """Those that wait for the same: inside the same lease, or outside any."""
        return [other for other in self.waiting.values() if other.request.within == request.within]

    def _saw_request(self, event: Requested, now: float) -> str | None:
        request = event.request
        if request.request_id in self.requests:
            if request.request_id in self.waiting:
                self.waiting[request.request_id].asked(event, now)
            return request.request_id
        self.arrivals += 1
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = waiting = Waiting(request, self.arrivals, now)
        waiting.asked(event, now)
        return None

    def ask_of(self, request_id: str) -> str:
        """The asking that waits for an answer, or that nobody but its asker knows to have had one."""
        if request_id in self.waiting:
            return self.waiting[request_id].poll_id
        return next((each.poll_id for each in self.leases.values() if each.request.request_id == request_id), "")

    def _saw_one_go(self, event: PollAbandoned, now: float) -> None:
        """Only the asking that it is about is touched, as a waiter or as what it was granted."""
        if self.ask_of(event.request_id) != event.poll_id:
            return
        if event.request_id in self.waiting:
            self.waiting[event.request_id].heard_until = -math.inf
        for lease in list(self.leases.values()):
            has_reached_it = self._inside(lease.lease_id) or any(
                other.request.within == lease.lease_id for other in self.waiting.values()
            )
            if lease.request.request_id == event.request_id and lease.state is LeaseState.HELD and not has_reached_it:
                offer_deadline = now + self.settings.offer_ttl_seconds
                self._keep_lease(replace(lease, state=LeaseState.OFFERED, expires_at=offer_deadline))

    def _saw_readings(self, event: Observed, now: float) -> None:
        begun_at = min(event.begun_at, now)
        if begun_at < self.endpoint_begun.get(event.endpoint_id, -math.inf):
            return
        self.endpoint_begun[event.endpoint_id] = begun_at
        for card in self.cards.values():
            if card.endpoint == event.endpoint_id:
                card.reading = None
        for reading in event.readings:
            card = self.cards.setdefault(reading.gpu_id, Card(event.endpoint_id, None, begun_at))
            if card.endpoint == event.endpoint_id and card.reading is None:
                card.reading, card.begun_at = reading, begun_at

    def _saw_effect(self, effect: Effect, asked_again: str | None, now: float) -> None:
        if isinstance(effect, Granted):
            self._saw_grant(effect.lease, now)
        elif isinstance(effect, Ended):
            if effect.request_id == asked_again and effect.request_id in self.ended:
                assert self.ended[effect.request_id] is effect.state, "asked again, it ended otherwise"
                return
            if effect.request_id == asked_again and effect.state is RequestState.GRANTED:
                return
            assert effect.request_id not in self.ended, f"{effect.request_id} ended twice"
            assert effect.state not in (RequestState.GRANTED, RequestState.WAITING)
            del self.waiting[effect.request_id]
            self.ended[effect.request_id] = effect.state
        elif isinstance(effect, LeaseEnded):
            ttl = effect.lease.request.ttl_seconds
            if effect.reason == "its lease was not renewed in time" and ttl is not None:
                served = self._served(effect.lease, now)
                assert served >= ttl + self.settings.expiry_grace_seconds - 1e-6, f"expired after {served} s of {ttl} s"
            if effect.reason.startswith("it was idle"):
                self._judge_idleness(effect.lease, now)
            is_lost_with_another = effect.state is LeaseState.LOST and effect.lease.request.within is not None
            if is_lost_with_another and effect.lease.state is not LeaseState.OFFERED:
                assert self.may_lose_inside, "what was held inside a lease was lost with it"
            if effect.state is LeaseState.QUARANTINED:
                assert self.leases[effect.lease.lease_id].state is not LeaseState.QUARANTINED
                self._keep_lease(effect.lease)
            else:
                self._end_lease(effect.lease.lease_id, effect.state, now)
        elif isinstance(effect, WakeAt):
            assert self.wake_at is None or effect.at < self.wake_at, "woken for what was asked for already"
            self.wake_at = effect.at

    def _saw_grant(self, lease: Lease, now: float) -> None:
        self.renewed[lease.lease_id] = (now, self.unserved)
        request_id = lease.request.request_id
        if request_id not in self.waiting:
            # A renewal, or the same lease told once more.
            assert lease.lease_id in self.leases, f"{lease.lease_id} was granted to nobody who waits"
            assert self.leases[lease.lease_id].fence == lease.fence
            self._keep_lease(lease)
            return
        waiting = self.waiting.pop(request_id)
        self._judge_grant(waiting, lease, now)
        self.ended[request_id] = RequestState.GRANTED
        self.fence = lease.fence
        for gpu_id in () if lease.request.within else lease.gpu_ids:
            card = self.cards[gpu_id]
            # Handed on before it was read again, it still has the level from before the one who had it.
            if not card.promises and card.begun_at > card.freed_at:
                assert card.reading is not None
                card.used_before_first = card.reading.memory_used_mb
                card.percent_before_first = card.reading.memory_usage_percent
                card.processes_before_first = card.reading.process_identities
        self._keep_lease(lease)

    def _keep_lease(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease
        self._count_use(lease)
        for gpu_id in lease.gpu_ids:
            card = self.cards[gpu_id]
            (card.inner if lease.request.within else card.promises)[lease.lease_id] = lease

    def _end_lease(self, lease_id: str, state: LeaseState, now: float) -> None:
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        if lease_id in self.spells and self.spells[lease_id].ended_at is None:
            self.spells[lease_id].ended_at = now - self.unserved_seconds
        assert lease_id not in self.lease_ends, f"{lease_id} ended twice"
        self.lease_ends[lease_id] = state
        assert not self._inside(lease_id), f"{lease_id} ended before what is inside it"
        if lease.request.within is not None:
            for gpu_id in lease.gpu_ids:
                card = self.cards[gpu_id]
                del card.inner[lease_id]
                if self._outermost(lease).quarantine is not None:
                    card.freed_at = card.last_lease_ended = now  # only what is read after this shows it empty
            return
        was_told = lease.state is not LeaseState.OFFERED
        for gpu_id in lease.gpu_ids:
            card = self.cards[gpu_id]
            del card.promises[lease_id]
            card.freed_at = now
            if (lease.request.ttl_seconds is not None or lease.quarantine is not None) and was_told:
                ended = now if lease.quarantine is None else lease.quarantine.since
                card.last_lease_ended = max(card.last_lease_ended, ended)

    # ---- fair share

    def _count_use(self, lease: Lease) -> None:
        account = lease.request.account
        if not account or lease.request.within is not None:
            return
        if lease.request.requirements.share:
            self.fuzzy.add(account)  # counts by its part of a memory that may be unknown
        begun_at = lease.granted_at - self.unserved_seconds
        spell = self.spells.setdefault(lease.lease_id, Spell(account, len(lease.gpu_ids), begun_at))
        if lease.quarantine is not None and spell.ended_at is None:
            spell.ended_at = lease.quarantine.since - self.unserved_seconds

    def used(self, account: str, now: float) -> float:
        """GPU seconds, each of them counted less the longer it is ago."""
        half_life = self.settings.fair_share_half_life_seconds
        assert half_life is not None
        decay, served = math.log(2) / half_life, now - self.unserved_seconds
        total = 0.0
        for spell in self.spells.values():
            if spell.account == account:
                until = served if spell.ended_at is None else spell.ended_at
                total += spell.gpus * (
                    math.exp(-decay * (served - until)) - math.exp(-decay * (served - spell.begun_at))
                )
        return total / decay

    def is_before(self, first: Waiting, second: Waiting, now: float) -> bool:
        """Whether it surely comes first: by priority, long waiting, use, arrival, in this order."""
        if self.settings.fair_share_half_life_seconds is None:
            return first.order < second.order
        priorities = (first.request.requirements.priority, second.request.requirements.priority)
        if priorities[0] != priorities[1]:
            return priorities[0] > priorities[1]
        if first.request.within is not None:
            return first.arrival < second.arrival
        are_old = [now - each.since > self.settings.fair_share_age_seconds for each in (first, second)]
        if are_old[0] != are_old[1]:
            return are_old[0]
        accounts = {first.request.account, second.request.account}
        if all(are_old) or len(accounts) == 1:
            return first.arrival < second.arrival
        if accounts & self.fuzzy:
            return False
        uses = [self.used(each.request.account, now) for each in (first, second)]
        # The last stamp before an outage may be a moment older than what was used until then, which may even seem to be
        # less than nothing.
        unknown = 3.0 * self.outages if any(uses) else 0.0
        if abs(uses[0] - uses[1]) <= 1e-6 * (1 + max(uses)) + unknown:
            return uses == [0.0, 0.0] and first.arrival < second.arrival
        return uses[0] < uses[1]

    # ---- the rules

    def limits_of(self, request: Request, policy: Policy | None = None) -> Limits:
        """Of its account, else of everyone; nothing inside a lease, nor without an account, is limited."""
        if not request.account or request.within is not None:
            return Limits()
        policy = policy or self.policy
        own, everyone = policy.accounts.get(request.account, Limits()), policy.everyone
        return Limits(
            everyone.most_gpus if own.most_gpus is None else own.most_gpus,
            everyone.most_waiting if own.most_waiting is None else own.most_waiting,
            everyone.highest_priority if own.highest_priority is None else own.highest_priority,
            everyone.longest_seconds if own.longest_seconds is None else own.longest_seconds,
            everyone.idle_may_be_asked if own.idle_may_be_asked is None else own.idle_may_be_asked,
        )

    def _is_never_allowed(self, request: Request) -> bool:
        limits, requirements = self.limits_of(request), request.requirements
        longest, wanted = limits.longest_seconds, request.max_seconds
        return (
            (limits.most_gpus is not None and requirements.count > limits.most_gpus)
            or (limits.highest_priority is not None and requirements.priority > limits.highest_priority)
            or (longest is not None and wanted is not None and wanted > longest)
        )

    def _held_by(self, account: str) -> set[str]:
        leases = (lease for lease in self.leases.values() if lease.request.account == account)
        return {gpu_id for lease in leases if lease.request.within is None for gpu_id in lease.gpu_ids}

    def is_kept_back(self, request: Request, policy: Policy | None = None) -> bool:
        """Whether a limit keeps it from some GPUs at least."""
        most = self.limits_of(request, policy).most_gpus
        return most is not None and len(self._held_by(request.account)) + request.requirements.count > most

    def _judge_idleness(self, lease: Lease, now: float) -> None:
        """Rule 14: the policy says so, it computed nothing, it was told, a grace passed, and somebody waits for it."""
        policy = self.policy_before
        assert self.limits_of(lease.request, policy).idle_may_be_asked, f"the policy does not let {lease.lease_id} end"
        assert lease.use is not None
        assert lease.use.busy_at is not None
        assert lease.use.seen_until - lease.use.busy_at >= policy.idle.after_seconds
        told_at = self.idle_asked[lease.lease_id]
        assert now - told_at >= policy.idle.grace_seconds - 1e-6, f"told at {told_at}, ended at {now}"
        assert any(
            waiting.request.within is None and not self.is_kept_back(waiting.request, policy)
            for waiting in self.waiting.values()
        ), "it ended, and nobody waits who could use it"

    def _judge_limits(self, served: Request, lease: Lease) -> None:
        most, held = self.limits_of(served).most_gpus, self._held_by(served.account)
        if most is not None:
            after = held | set(lease.gpu_ids)
            assert len(after) <= most or after == held, f"{served.account} may hold {most}, not {after}"

    def _judge_grant(self, waiting: Waiting, lease: Lease, now: float) -> None:
        requirements = waiting.request.requirements
        self._judge_limits(waiting.request, lease)
        limits = (waiting.request.max_seconds, self.limits_of(waiting.request).longest_seconds)
        if any(limits):
            self.longest[lease.lease_id] = min(each for each in limits if each is not None)
        assert lease.fence > self.fence, "fences only grow"
        is_heard = waiting.heard_until is None or now <= waiting.heard_until
        assert lease.state is (LeaseState.HELD if is_heard else LeaseState.OFFERED), (
            "offered only to who does not listen"
        )
        if not is_heard:
            assert lease.expires_at is not None, "nobody may ever come for it"
            assert now < lease.expires_at <= now + self.settings.offer_ttl_seconds, "kept for too long, or not at all"
        assert len(set(lease.gpu_ids)) == requirements.count, "all or none"
        assert len({self.cards[gpu_id].endpoint for gpu_id in lease.gpu_ids}) == 1, "never across endpoints"
        for gpu_id in lease.gpu_ids:
            why_not = self.why_not_for(self.cards[gpu_id], waiting.request, now)
            assert why_not is None, f"{gpu_id} was granted for {requirements} although {why_not}"
            self._judge_order(waiting, gpu_id, now)
        if waiting.request.within is None:
            self._judge_overtaking(waiting, lease, now)
        else:
            self._judge_overtaking_inside(waiting, now)
        if requirements.share and waiting.request.within is None:
            self._judge_packing(waiting, lease, now)
        if requirements.count > 1 and not requirements.share:
            self._judge_links(waiting, lease, now)

    def _judge_packing(self, served: Waiting, lease: Lease, now: float) -> None:
        """Shares fill the card with the least room that is enough; one that nobody shares comes last."""
        is_first = all(self.is_before(served, other, now) for other in self.waiting.values())
        if not is_first or self.is_kept_back(served.request):
            return  # cards may be kept for one of them
        requirements = served.request.requirements

        def room(gpu_id: str) -> float:
            card = self.cards[gpu_id]
            if not card.promises:
                return math.inf
            assert card.reading is not None
            assert card.reading.memory_total_mb is not None
            assert card.reading.memory_used_mb is not None
            assert card.used_before_first is not None
            declared = sum(each.request.requirements.memory_mb or math.inf for each in card.promises.values())
            return card.reading.memory_total_mb - max(card.reading.memory_used_mb, card.used_before_first + declared)

        widest = max(room(gpu_id) for gpu_id in lease.gpu_ids)
        for gpu_id, card in self.cards.items():
            if gpu_id in lease.gpu_ids or card.endpoint != lease.endpoint_id:
                continue
            if self.why_not(card, requirements, now) is None:
                assert room(gpu_id) >= widest, f"{lease.gpu_ids} was shared out before {gpu_id} was full"

    def _judge_links(self, served: Waiting, lease: Lease, now: float) -> None:
        """Of one host, no other GPUs that it could have had are nearer to each other."""
        if not all(self.is_before(served, other, now) for other in self.waiting.values()):
            return  # GPUs may be kept for one of them
        if self.is_kept_back(served.request):
            return

        def farthest(gpu_ids: Iterable[str]) -> float:
            readings = [reading for gpu_id in gpu_ids if (reading := self.cards[gpu_id].reading) is not None]
            away = [
                first.distances[second.index] if second.index < len(first.distances) else None
                for first in readings
                for second in readings
                if first is not second
            ]
            return max(math.inf if each is None else each for each in away)

        free = [
            gpu_id
            for gpu_id, card in self.cards.items()
            if card.endpoint == lease.endpoint_id and self.why_not_for(card, served.request, now) is None
        ]
        for others in combinations(free, len(lease.gpu_ids)):
            assert farthest(lease.gpu_ids) <= farthest(others), (
                f"{others} are nearer to each other than {lease.gpu_ids}"
            )

    def _judge_order(self, served: Waiting, gpu_id: str, now: float) -> None:
        """No barging: nobody is served before an earlier one that the same GPU would serve."""
        for other in self.beside(served.request):
            if self.is_kept_back(other.request):
                continue  # it blocks nobody
            if self.is_before(other, served, now) and other.request.requirements.count == 1:
                why_not = self.why_not_for(self.cards[gpu_id], other.request, now)
                kept_for_another = self._is_kept_from(other, now)
                assert why_not is not None or kept_for_another, (
                    f"{served.request.request_id} got {gpu_id} before {other.request.request_id}"
                )

    def _is_kept_from(self, other: Waiting, now: float) -> bool:
        """Whether one before it has waited so long that GPUs may be kept for it."""
        return any(
            not self.is_before(other, first, now)
            and first is not other
            and now - first.since >= self.settings.max_bypass_seconds
            for first in self.beside(other.request)
        )

    def _judge_overtaking(self, served: Waiting, lease: Lease, now: float) -> None:
        """Rule 4: once it has waited `max_bypass`, the first such waiter is not passed on GPUs that could serve it."""
        before = [each for each in self.beside(served.request) if self.is_before(each, served, now)]
        if any(
            not (self.is_before(a, b, now) or self.is_before(b, a, now)) for a in before for b in before if a is not b
        ):
            return  # nobody knows which of them is the first
        for first in sorted(before, key=cmp_to_key(lambda a, b: -1 if self.is_before(a, b, now) else 1)):
            if self.is_kept_back(first.request):
                continue
            if now - first.since < self.settings.max_bypass_seconds or not first.may_reserve:
                continue
            hosts = {card.endpoint for card in self.cards.values()}
            able = {host: self._could_have(first, host, now) for host in hosts}
            keeping = [
                host for host, (eligible, soon) in able.items() if eligible + soon >= first.request.requirements.count
            ]
            if len(keeping) == 1 and keeping[0] == lease.endpoint_id and not self._delays_nobody(served, first, lease):
                for gpu_id in lease.gpu_ids:
                    why_not = self.why_not(self.cards[gpu_id], first.request.requirements, now)
                    assert why_not is not None, f"{served.request.request_id} took {gpu_id} from {first}"
            if keeping:
                return

    def _delays_nobody(self, served: Waiting, first: Waiting, lease: Lease) -> bool:
        """It declared that it is done before a lease which is in the way of the other one anyway."""
        seconds = _declared(served.request)
        if seconds is None:
            return False
        return any(
            declared is not None and each.granted_at + declared >= lease.granted_at + seconds - 1e-6
            for card in self.cards.values()
            if card.endpoint == lease.endpoint_id and self._is_held(card)
            for each in card.promises.values()
            if each.lease_id != lease.lease_id and self._is_sound(card, first.request.requirements, lease.granted_at)
            for declared in [_declared(each.request)]
        )

    def _judge_overtaking_inside(self, served: Waiting, now: float) -> None:
        """Inside a lease nobody passes one that has waited so long, if only others inside it are in its way."""
        around = self._around(served.request)
        assert around is not None
        for first in self.beside(served.request):
            if self.is_before(first, served, now) and now - first.since >= self.settings.max_bypass_seconds:
                sound = [
                    self._why_never_inside(self.cards[gpu_id], first.request, around, now) is None
                    for gpu_id in around.gpu_ids
                ]
                assert sum(sound) < first.request.requirements.count, f"{served} passed {first} inside {around}"

    def _could_have(self, waiting: Waiting, host: str, now: float) -> tuple[int, int]:
        eligible = soon = 0
        for card in self.cards.values():
            if card.endpoint == host:
                if self.why_not(card, waiting.request.requirements, now) is None:
                    eligible += 1
                elif self._is_held(card) and self._is_sound(card, waiting.request.requirements, now):
                    soon += 1
        return eligible, soon

    def _is_held(self, card: Card) -> bool:
        """A quarantine may last for ever: nothing has to be kept beside it."""
        return bool(card.promises) and all(lease.quarantine is None for lease in card.promises.values())

    def _is_sound(self, card: Card, requirements: Requirements, now: float) -> bool:
        reading = card.reading
        if reading is None or reading.fault or reading.is_leased_elsewhere:
            return False
        return now - self.endpoint_begun[card.endpoint] <= 15 and self._never(reading, requirements) is None

    def _never(self, reading: Reading, requirements: Requirements) -> str | None:
        is_blind = reading.has_unified_memory and not reading.reports_processes
        if is_blind and (requirements.policy == "idle" or not reading.reports_utilization):
            return "nothing ever shows whether it is idle"
        return self._never_whatever_it_does(reading, requirements)

    def _never_whatever_it_does(self, reading: Reading, requirements: Requirements) -> str | None:
        if requirements.gpu_model and requirements.gpu_model.lower() not in reading.name.lower():
            return "wrong model"
        names = {reading.gpu_id, str(reading.index)}
        if requirements.only is not None and not names & set(requirements.only):
            return "not among only"
        if names & set(requirements.exclude):
            return "excluded"
        if reading.is_mig_device and requirements.count > 1:
            return "a process can use only one of these"
        needed = max(requirements.memory_mb or 0, requirements.min_free_memory_mb or 0)
        if reading.memory_total_mb is not None and needed > reading.memory_total_mb:
            return "too small"
        return None

    def why_not_for(self, card: Card, request: Request, now: float) -> str | None:
        """Outside by the rules for all; inside a lease by those for what it has."""
        if request.within is None:
            return self.why_not(card, request.requirements, now)
        around, requirements = self._around(request), request.requirements
        if around is None or around.state is not LeaseState.HELD:
            return "nobody holds the lease around it"
        if around.lease_id not in (*card.promises, *card.inner):
            return "not a GPU of the lease around it"
        why_never = self._why_never_inside(card, request, around, now)
        if why_never is not None:
            return why_never
        beside = [lease for lease in card.inner.values() if lease.request.within == request.within]
        if beside and not (requirements.share and all(lease.request.requirements.share for lease in beside)):
            return "promised inside the lease"
        if requirements.memory_mb is not None:
            declared = sum(lease.request.requirements.memory_mb or math.inf for lease in beside)
            room = self._room_inside(card, around)
            if room is None or room - declared < requirements.memory_mb:
                return "too little left inside the lease"
        return None

    def _why_never_inside(self, card: Card, request: Request, around: Lease, now: float) -> str | None:
        """What does not end with the leases beside it. What the GPU is doing does not count."""
        reading, requirements = card.reading, request.requirements
        if reading is None or now - self.endpoint_begun[card.endpoint] > max(3 * self.settings.poll_seconds, 15):
            return "not seen, or stale"
        if reading.fault is not None:
            return "unhealthy"
        if (never := self._never_whatever_it_does(reading, requirements)) is not None:
            return never
        room = self._room_inside(card, around)
        if requirements.memory_mb is not None and (room is None or room < requirements.memory_mb):
            return "the lease around it has less, or nobody knows"
        total, used = reading.memory_total_mb, reading.memory_used_mb
        if requirements.min_free_memory_mb is not None and (
            total is None or used is None or total - used < requirements.min_free_memory_mb
        ):
            return "too little free"
        return None

    def _room_inside(self, card: Card, around: Lease) -> float | None:
        lease: Lease | None = around
        while lease is not None:
            if lease.request.requirements.share:
                return lease.request.requirements.memory_mb
            lease = self._around(lease.request)
        return None if card.reading is None else card.reading.memory_total_mb

    def why_not(self, card: Card, requirements: Requirements, now: float) -> str | None:
        reading = card.reading
        if reading is None:
            return "not seen"
        if now - self.endpoint_begun[card.endpoint] > max(3 * self.settings.poll_seconds, 15):
            return "stale"
        if self.endpoint_begun[card.endpoint] <= card.last_lease_ended:
            return "not read since the last lease ended"
        if reading.fault is not None or reading.is_leased_elsewhere:
            return "unhealthy, or leased elsewhere"
        if self._never(reading, requirements) is not None:
            return self._never(reading, requirements)
        used, utilization = reading.memory_usage_percent, reading.utilization_percent
        memory_limit = requirements.memory_threshold
        utilization_limit = requirements.utilization_threshold
        is_idle_wanted = requirements.policy == "idle"
        if not requirements.share and not is_idle_wanted:
            memory_limit = self.settings.memory_threshold_percent if memory_limit is None else memory_limit
            if utilization_limit is None:
                utilization_limit = self.settings.utilization_threshold_percent
        if used is None and not (is_idle_wanted and reading.has_unified_memory and memory_limit is None):
            return "memory unknown"
        if used is not None and memory_limit is not None and not used < memory_limit:
            return "memory above threshold"
        if utilization is None and reading.reports_utilization:
            return "utilization unknown"
        if utilization is not None and utilization_limit is not None and not utilization < utilization_limit:
            return "utilization above threshold"
        if utilization is None and self._foreign(card, reading) != []:
            return "foreign process, or none can be seen"
        if is_idle_wanted and (why_in_use := self._why_in_use(card, reading)) is not None:
            return why_in_use
        return self._no_room(card, reading, requirements)

    def _foreign(self, card: Card, reading: Reading) -> list[ProcessReading] | None:
        """Those that compute and are nobody's of the pool; None where that cannot be seen."""
        if reading.processes is None:
            return None
        if not card.promises:
            return list(reading.processes)
        if card.processes_before_first is None:
            return None
        return [process for process in reading.processes if process.identity in card.processes_before_first]

    def _why_in_use(self, card: Card, reading: Reading) -> str | None:
        """Idle: nobody else computes there, a desktop has at most 1 GiB, and nearly no memory is unexplained."""
        foreign = self._foreign(card, reading)
        if foreign or reading.unnamed_processes:
            return "a foreign process computes"
        drawn_mb = sum(each.memory_used_mb for each in reading.graphics or () if each.memory_used_mb is not None)
        if drawn_mb > 1024:
            return "a desktop that uses much"
        if reading.has_unified_memory:
            return "no process can be seen" if foreign is None else None
        if card.promises and foreign is not None:
            return None  # the rest is theirs
        percent: float | None
        if card.promises:
            used_mb, percent = card.used_before_first, card.percent_before_first
            if used_mb is None and percent is None:
                return "neither processes nor memory were seen"
        else:
            used_mb, percent = reading.memory_used_mb, reading.memory_usage_percent
            if used_mb is not None:
                computed_mb = sum(each.memory_used_mb or 0 for each in reading.processes or ())
                used_mb = used_mb - drawn_mb - computed_mb
        if used_mb is None:
            return "unexplained memory" if percent is not None and percent >= 5 else None
        limit_mb = max(1024.0, 0.05 * (reading.memory_total_mb or 0))
        return "unexplained memory" if used_mb >= limit_mb else None

    def _no_room(self, card: Card, reading: Reading, requirements: Requirements) -> str | None:
        promised = list(card.promises.values())
        if promised and not (requirements.share and all(lease.request.requirements.share for lease in promised)):
            return "promised"
        total, used = reading.memory_total_mb, reading.memory_used_mb
        if requirements.min_free_memory_mb is not None and (
            total is None or used is None or total - used < requirements.min_free_memory_mb
        ):
            return "too little free"
        if requirements.memory_mb is not None:
            before = card.used_before_first if promised else used
            if total is None or used is None or before is None:
                return "memory left unknown"
            declared = sum(lease.request.requirements.memory_mb or math.inf for lease in promised)
            if total - max(used, before + declared) < requirements.memory_mb:
                return "too little left"
        return None


def _declared(request: Request) -> float | None:
    """How long it says that it will take: a limit is an expectation, too."""
    return min((each for each in (request.expected_seconds, request.max_seconds) if each is not None), default=None)
