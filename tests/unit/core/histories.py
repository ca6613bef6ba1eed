"""Random histories: everything that can happen to a pool, in any order, judged by the oracle after every step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    GPUsVanished,
    HolderGone,
    LeaseState,
    LeaseUse,
    LeaveRequested,
    Outcome,
    PolicyRead,
    PollAbandoned,
    PoolSettings,
    ProcessReading,
    QuarantineEnded,
    Reading,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Resumed,
    Stopped,
    Ticked,
    Unreachable,
    UseSeen,
    explain,
    explain_requirements,
    restore,
    save,
)
from gpu_worker_pool.core.events import Event
from gpu_worker_pool.core.policy import IdleRule, Limits, Policy
from gpu_worker_pool.core.service import unserved_seconds
from gpu_worker_pool.errors import IllegalEventError, RequestMismatchError
from gpu_worker_pool.testing import History, gpu, replay, snapshot
from tests.unit.core.oracle import Oracle

HOSTS = {"a": 3, "b": 2}
#: Of one host the first and the last GPU have a link; of the other nothing is known.
DISTANCES = {"a": [(0, 50, 0), (50, 0, 50), (0, 50, 0)], "b": [(), ()]}
MODELS = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"]

requirements = st.one_of(
    st.just(ANY_GPU),
    st.builds(Requirements, priority=st.sampled_from([0, 0, 1])),
    st.builds(Requirements, count=st.sampled_from([1, 2, 2, 3])),
    st.builds(Requirements, policy=st.just("idle")),
    st.builds(
        Requirements,
        count=st.sampled_from([1, 1, 2]),
        memory_mb=st.sampled_from([10_000, 30_000, 60_000]),
        share=st.booleans(),
        policy=st.sampled_from(["thresholds", "thresholds", "idle"]),
    ),
    st.builds(
        Requirements,
        count=st.sampled_from([1, 1, 2]),
        gpu_model=st.sampled_from([None, "h100", "A100"]),
        only=st.sampled_from([None, ("0",), ("1", "a:0")]),
        exclude=st.sampled_from([(), ("0",)]),
        policy=st.sampled_from(["thresholds", "idle"]),
        min_free_memory_mb=st.sampled_from([None, 20_000]),
        memory_threshold=st.sampled_from([None, 50.0, 80.0]),
        utilization_threshold=st.sampled_from([None, 20.0, 90.0]),
        priority=st.sampled_from([0, 1]),
    ),
)

reading_changes = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"memory_used_mb": st.sampled_from([0.0, 200.0, 20_000.0, 70_000.0])}),
    st.fixed_dictionaries({"utilization_percent": st.sampled_from([0.0, 50.0, 95.0, None])}),
    st.just({"utilization_percent": None, "reports_utilization": False}),
    st.just({"utilization_percent": None, "reports_utilization": False, "is_mig_device": True}),
    st.just({"memory_used_mb": None}),
    st.just({"memory_total_mb": None, "memory_used_mb": None, "memory_usage_percent": 10.0}),
    st.fixed_dictionaries({"memory_usage_percent": st.sampled_from([float("nan"), 250.0, -5.0, 79.9, 80.0])}),
    st.just({"memory_used_mb": 90_000.0}),
    st.just({"fault": "GPU is lost"}),
    st.just({"is_leased_elsewhere": True}),
    st.just({"processes": None}),
    st.just({"processes": None, "memory_used_mb": 20_000.0}),
    st.just({"processes": None, "unnamed_processes": 2}),
    # Explained by a desktop, by a desktop that is too large, by a process, and by none.
    st.fixed_dictionaries(
        {
            "memory_used_mb": st.sampled_from([1_100.0, 4_000.0, 5_000.0]),
            "graphics": st.sampled_from(
                [None, (ProcessReading(9, memory_used_mb=1_000.0),), (ProcessReading(9, memory_used_mb=1_500.0),)]
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "has_unified_memory": st.just(True),
            "processes": st.sampled_from([None, (), (ProcessReading(7),)]),
            "memory_used_mb": st.sampled_from([None, 1_000.0, 70_000.0]),
            "reports_processes": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"processes": st.sampled_from([(ProcessReading(7),), (ProcessReading(8, 1.0),)])}),
)


class Histories(RuleBasedStateMachine):
    """Subclasses say which settings to use."""

    settings_of_pool = PoolSettings(remember_seconds=500.0)
    #: Whether some requests ask the holders in their way.
    may_ask_holders = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.serial = 0
        self.history = History(self.settings_of_pool)
        self.oracle = Oracle(self.settings_of_pool)
        self.lease_ids: list[str] = []
        #: Whether a step failed or timed out half way, so that the history lacks what the pool did.
        self.is_interrupted = False

    @property
    def pool(self) -> Any:
        return self.history.pool

    @initialize(hosts=st.sampled_from([("a",), ("a",), ("a", "b")]))
    def first_readings(self, hosts: tuple[str, ...]) -> None:
        self.hosts = hosts
        for host in hosts:
            self.observe(host, [{}, {}, {}], None, 0.0)

    def step(self, event: Event) -> bool:
        """Apply an event; False if it was refused, and then nothing may have changed."""
        before = save(self.pool)
        self.is_interrupted = True
        try:
            effects = self.history.apply(event, self.now)
        except IllegalEventError:
            self.is_interrupted = False
            assert save(self.pool) == before, f"{event} was refused and changed something"
            return False
        self.is_interrupted = False
        self.oracle.saw(event, effects, self.now)
        self.check()
        self.lease_ids += [
            effect.lease.lease_id
            for effect in effects
            if hasattr(effect, "lease") and effect.lease.lease_id not in self.lease_ids
        ]
        return True

    def check(self) -> None:
        """The oracle's books and the pool's are the same."""
        assert {waiter.request.request_id for waiter in self.pool.queue.in_order()} == set(self.oracle.waiting)
        assert {lease.lease_id for lease in self.pool.leases} == set(self.oracle.leases)
        next_at = self.pool.timers.next_at()
        assert next_at == math.inf or (self.oracle.wake_at is not None and self.oracle.wake_at <= next_at), "overslept"
        assert self.pool.fence == self.oracle.fence
        self.oracle.judge_lifetimes(self.pool.leases, self.pool.now)

    def some(self, items: list[str], number: int) -> str:
        return items[-1 - number % min(len(items), 12)]

    # ---- requests

    @rule(
        requirements=requirements,
        ttl=st.sampled_from([None, 10.0, 60.0]),
        patience=st.sampled_from([None, None, 0.0, 5.0, 90.0]),
        polls=st.sampled_from([None, None, 0.0, 3.0]),
        owner=st.sampled_from(["me", "you"]),
        account=st.sampled_from(["", "", "ours", "theirs"]),
        expected=st.sampled_from([None, None, None, 5.0, 50.0]),
        longest=st.sampled_from([None, None, None, 20.0]),
        may_reserve=st.sampled_from([True, True, False]),
        asks=st.sampled_from([None, None, True]),
        inside=st.sampled_from([None, None, 0, 1, 2, 5]),
    )
    def request(
        self,
        requirements: Requirements,
        ttl: float | None,
        patience: float | None,
        polls: float | None,
        owner: str,
        account: str,
        expected: float | None,
        longest: float | None,
        may_reserve: bool,
        asks: bool | None,
        inside: int | None,
    ) -> None:
        """`inside`: which of the last leases it runs in, of which some have ended."""
        within = None if inside is None or not self.lease_ids else self.some(self.lease_ids, inside)
        self.serial += 1
        ttl = 60.0 if polls is not None else ttl
        request = Request(
            f"r{self.serial}",
            requirements,
            owner=owner,
            ttl_seconds=ttl,
            account=account,
            within=within,
            expected_seconds=expected,
            max_seconds=longest,
            asks=asks if self.may_ask_holders else None,
        )
        deadline = None if patience is None else self.now + patience
        most = self.settings_of_pool.most_waiting_of_an_account
        waiting = sum(each.request.account == account for each in self.oracle.waiting.values())
        is_done = self.step(
            Requested(request, deadline, None if polls is None else self.now + polls, may_reserve, f"a{self.serial}")
        )
        limit = self.oracle.limits_of(request).most_waiting
        most = limit if most is None else most if limit is None else min(most, limit)
        assert is_done or (account and most is not None and waiting >= most)

    @precondition(lambda self: self.serial)
    @rule(
        number=st.integers(0, 11), polls=st.sampled_from([0.0, 3.0]), is_other=st.booleans(), may_reserve=st.booleans()
    )
    def ask_again(self, number: int, polls: float, is_other: bool, may_reserve: bool) -> None:
        request = self.oracle.requests[self.some(list(self.oracle.requests), number)]
        known = self.pool.requests.get(request.request_id)
        if known is None or (isinstance(known, Outcome) and self.pool.outcomes.is_old(known, self.now)):
            return  # it ended long ago, and may be asked anew
        poll_deadline = None if request.ttl_seconds is None else self.now + polls
        if is_other:
            with pytest.raises(RequestMismatchError):
                self.pool.apply(Requested(replace(request, label="another"), None, poll_deadline), self.now)
        else:
            assert self.step(Requested(request, None, poll_deadline, may_reserve, f"again-{number}"))

    @precondition(lambda self: self.serial)
    @rule(number=st.integers(0, 11), by=st.sampled_from(["me", "you", None]))
    def cancel(self, number: int, by: str | None) -> None:
        request_id = self.some(list(self.oracle.requests), number)
        self.step(Cancelled(request_id, by))

    # ---- leases

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11), by=st.sampled_from(["me", "you", None, None]), fence=st.sampled_from([None, 0, 1]))
    def release(self, number: int, by: str | None, fence: int | None) -> None:
        lease_id = self.some(self.lease_ids, number)
        known = self.oracle.leases.get(lease_id)
        if fence and known is not None:
            fence = known.fence
        is_done = self.step(Released(lease_id, by, fence))
        if known is not None and (by not in (None, known.request.owner) or fence == 0):
            assert not is_done, "a stranger, or an old fence, released a lease"

    @precondition(lambda self: self.lease_ids)
    @rule(
        number=st.integers(0, 11), by=st.sampled_from(["me", "you", None, None]), is_busy=st.sampled_from([False, True])
    )
    def renew(self, number: int, by: str | None, is_busy: bool) -> None:
        lease_id = self.some(self.lease_ids, number)
        known = self.oracle.leases.get(lease_id)
        is_done = self.step(Renewed(lease_id, by, is_busy=is_busy))
        if is_done:
            assert known is not None, "an ended lease was revived"
            assert known.state is LeaseState.HELD
            assert by in (None, known.request.owner)
            if known.expires_at is not None:
                grace = self.settings_of_pool.expiry_grace_seconds
                assert self.now < known.expires_at + grace, "renewed after it expired"

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11))
    def ask_to_leave(self, number: int) -> None:
        """Somebody asks for it; nobody must follow, so the oracle learns nothing of it."""
        lease_id = self.some(self.lease_ids, number)
        known = self.oracle.leases.get(lease_id)
        is_done = self.step(LeaveRequested(lease_id, "a demo"))
        assert not is_done or (known is not None and known.state is LeaseState.HELD)

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11), idle=st.sampled_from([0.0, 4.0, 30.0]))
    def see_use(self, number: int, idle: float) -> None:
        lease_id = self.some(self.lease_ids, number)
        now = max(self.now, self.pool.now)
        assert self.step(UseSeen({lease_id: LeaseUse(now, idle, idle, now - idle, None)}))

    @precondition(lambda self: self.serial)
    @rule(number=st.integers(0, 11), is_old=st.booleans())
    def stop_listening(self, number: int, is_old: bool) -> None:
        """Nobody hears the answer to the last asking any more; or to one that was followed by another."""
        request_id = self.some(list(self.oracle.requests), number)
        self.step(PollAbandoned(request_id, "an old one" if is_old else self.oracle.ask_of(request_id)))

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11), is_proven=st.booleans())
    def holder_gone(self, number: int, is_proven: bool) -> None:
        assert self.step(HolderGone(self.some(self.lease_ids, number), is_proven))

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11))
    def end_quarantine(self, number: int) -> None:
        lease_id = self.some(self.lease_ids, number)
        known = self.oracle.leases.get(lease_id)
        is_done = self.step(QuarantineEnded(lease_id))
        assert is_done == (known is not None and known.state is LeaseState.QUARANTINED)

    # ---- readings and time

    @rule(
        host=st.sampled_from(list(HOSTS)),
        changes=st.lists(reading_changes, min_size=3, max_size=3),
        missing=st.sampled_from([None, None, None, 0, 1]),
        age=st.sampled_from([0.0, 0.0, 0.5, 20.0, -1.0]),
    )
    def observe(self, host: str, changes: list[dict[str, Any]], missing: int | None, age: float) -> None:
        if host not in self.hosts:
            return
        readings: list[Reading] = [
            gpu(
                index,
                endpoint_id=host,
                **{"name": MODELS[index % 2], "distances": DISTANCES[host][index], **changes[index]},
            )
            for index in range(HOSTS[host])
            if index != missing
        ]
        assert self.step(snapshot([*readings, *readings[:1]], at=self.now - age, endpoint_id=host))

    @rule(host=st.sampled_from(list(HOSTS)))
    def all_idle(self, host: str) -> None:
        self.now += 0.01
        self.observe(host, [{}, {}, {}], None, 0.0)

    @rule(host=st.sampled_from(list(HOSTS)))
    def unreachable(self, host: str) -> None:
        if host in self.hosts:
            assert self.step(Unreachable(host))

    @rule(host=st.sampled_from(list(HOSTS)), index=st.integers(0, 2))
    def vanish(self, host: str, index: int) -> None:
        gpu_id = f"{host}:{index}"
        if gpu_id in self.oracle.cards:
            self.oracle.cards[gpu_id].reading = None
        assert self.step(GPUsVanished((gpu_id,)))

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.3, 1.0, 4.0, 11.0, 35.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        assert self.step(Ticked())

    @rule(seconds=st.sampled_from([1.0, 12.0, 62.0]))
    def time_passes_unnoticed(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        seconds=st.sampled_from([0.2, 0.9, 1.1, 1.7, 4.0, 9.0, 20.0, 200.0]),
        since_stamp=st.sampled_from([0.0, 0.3, 0.5]),
    )
    def nobody_serves_for_a_while(self, seconds: float, since_stamp: float) -> None:
        """Rule 10: that time does not count, whatever the TTL, if it is long enough to be noticed.

        The last stamp is a little older than the outage, and all that the next transaction has to go by.
        """
        self.now = served_until = max(self.now, self.pool.now)
        assert self.step(Ticked())  # what was due until then has happened
        self.now = served_until + seconds
        stamped_at = served_until - since_stamp
        unserved = unserved_seconds(stamped_at, self.now, self.settings_of_pool)
        if unserved is None:
            assert seconds <= 2 * self.settings_of_pool.stamp_seconds, "an outage was not noticed"
            assert self.step(Ticked())
            return
        assert unserved >= seconds - 1e-9
        self.oracle.nobody_served(seconds)
        live = {lease.lease_id for lease in self.pool.leases if lease.is_live}
        waiting = set(self.oracle.waiting)
        assert self.step(Resumed(unserved))
        over = {lease_id for lease_id in live if self._is_over(lease_id)}
        assert {lease.lease_id for lease in self.pool.leases if lease.is_live} >= live - over
        for request_id in waiting - set(self.oracle.waiting):
            # A quarantine or a time limit that ended meanwhile may have made room; its lease took those inside with it.
            was_inside = self.oracle.requests[request_id].within in over
            expected = RequestState.REJECTED if was_inside else RequestState.GRANTED
            assert self.oracle.ended[request_id] is expected, f"{request_id} ended because nobody served"
        for lease in self.pool.leases:
            self.oracle._keep_lease(lease)

    def _is_over(self, lease_id: str) -> bool:
        """Its time limit has passed meanwhile, which no outage extends; or that of the lease around it."""
        lease = self.pool.leases.lookup(lease_id)
        return lease is None or (lease.quarantine is not None and lease.ends_at is not None)

    @rule()
    def explain(self) -> None:
        for request_id, waiting in self.oracle.waiting.items():
            told = explain(self.pool, request_id, self.now)
            assert told is not None
            assert told.waiting_seconds == pytest.approx(self.now - waiting.since)
            if self.settings_of_pool.fair_share_half_life_seconds is None:
                earlier = sum(other.order < waiting.order for other in self.oracle.beside(waiting.request))
                assert told.position == 1 + earlier
            for gpu_told in told.gpus:
                card = self.oracle.cards.get(gpu_told.gpu_id)
                if card is not None:
                    why_not = self.oracle.why_not_for(card, waiting.request, max(self.now, self.pool.now))
                    own = [found for found in gpu_told.obstacles if found.kind not in ("kept", "limit")]
                    assert (why_not is None) == (not own), f"{gpu_told} but {why_not}"
        if self.settings_of_pool.fair_share_half_life_seconds is not None:
            return  # by the use at the last assignment, of which the oracle does not know when it was
        assert explain_requirements(self.pool, ANY_GPU, self.now).position == 1 + sum(
            waiting.request.requirements.priority >= 0 and waiting.request.within is None
            for waiting in self.oracle.waiting.values()
        )

    @rule(is_reboot=st.booleans())
    def restart(self, is_reboot: bool) -> None:
        """What was saved comes back; only readings are gone."""
        replay(self.history)
        saved = json.loads(json.dumps(save(self.pool)))
        assert save(restore(saved, self.settings_of_pool)) == saved
        leases, queue = set(self.oracle.leases), list(self.oracle.waiting)
        if is_reboot:
            offset = 3.0 - self.pool.now
            begun_anew = restore(saved, self.settings_of_pool, clock_restarted_at=3.0)
            saved = json.loads(json.dumps(save(begun_anew)))
            self.now = 3.0
            self._shift_oracle(offset)
        self.history = History(self.settings_of_pool, start=saved)
        for card in self.oracle.cards.values():
            card.reading = None
        self.oracle.endpoint_begun.clear()
        self.oracle.wake_at = None
        assert {lease.lease_id for lease in self.pool.leases} == leases
        assert {waiter.request.request_id for waiter in self.pool.queue.in_order()} == set(queue)
        for lease in self.pool.leases:
            self.oracle._keep_lease(lease)
        for host in self.hosts:
            assert self.step(Unreachable(host))
        assert self.step(PolicyRead(self.oracle.policy))  # as a ledger reads it again
        assert self.step(Resumed(None))
        for lease in self.pool.leases:
            self.oracle._keep_lease(lease)

    def _shift_oracle(self, seconds: float) -> None:
        for card in self.oracle.cards.values():
            card.last_lease_ended += seconds
            card.freed_at += seconds
            card.begun_at += seconds
            card.processes_before_first = None
        for waiting in self.oracle.waiting.values():
            waiting.since += seconds
            waiting.heard_until = None if waiting.heard_until is None else waiting.heard_until + seconds
        for spell in self.oracle.spells.values():
            spell.begun_at += seconds
            spell.ended_at = None if spell.ended_at is None else spell.ended_at + seconds
        oracle = self.oracle
        oracle.renewed = {name: (at + seconds, unserved) for name, (at, unserved) in oracle.renewed.items()}

    @rule(really=st.sampled_from([False, False, False, True]))
    def stop(self, really: bool) -> None:
        if really:
            assert self.step(Stopped())
            assert not self.oracle.waiting

    def teardown(self) -> None:
        if hasattr(self, "hosts") and not self.is_interrupted:
            replay(self.history)


class InProcess(Histories):
    """As the client keeps it: a pool that is always served."""


class OnALedger(Histories):
    """As a server keeps it: many that poll, and few ids remembered for long."""

    settings_of_pool = PoolSettings(
        remember_seconds=50.0, offer_ttl_seconds=2.0, strategy="weighted", most_waiting_of_an_account=2
    )


class UnderAPolicy(Histories):
    """Limits that change while people wait, so that they meet everything else."""

    settings_of_pool = PoolSettings(remember_seconds=500.0, max_bypass_seconds=2.0, tells_accounts_apart=True)

    @rule(
        most_gpus=st.sampled_from([None, 0, 1, 1, 2]),
        most_waiting=st.sampled_from([None, None, 1, 3]),
        highest_priority=st.sampled_from([None, None, 0]),
        longest=st.sampled_from([None, None, 15.0]),
        idle_may_be_asked=st.sampled_from([None, True]),
        of=st.sampled_from(["everyone", "ours", "both", "nobody"]),
    )
    def policy_changes(
        self,
        most_gpus: int | None,
        most_waiting: int | None,
        highest_priority: int | None,
        longest: float | None,
        idle_may_be_asked: bool | None,
        of: str,
    ) -> None:
        limits = Limits(most_gpus, most_waiting, highest_priority, longest, idle_may_be_asked)
        everyone = limits if of in ("everyone", "both") else Limits()
        accounts = {"ours": limits if of == "ours" else Limits(most_gpus=2)} if of in ("ours", "both") else {}
        assert self.step(PolicyRead(Policy(everyone, accounts, idle=IdleRule(3.0, 2.0))))

    @rule(
        is_told=st.booleans(),
        seconds=st.sampled_from([0.5, 3.0, 25.0]),
        wanted=st.sampled_from([ANY_GPU, Requirements(count=3), Requirements(policy="idle")]),
        asks=st.sampled_from([None, True]),
    )
    def is_idle_for_long(self, is_told: bool, seconds: float, wanted: Requirements, asks: bool | None) -> None:
        """Seldom met by chance: holders that compute nothing while others wait, under a policy that minds."""
        assert self.step(PolicyRead(Policy(Limits(idle_may_be_asked=True), idle=IdleRule(3.0, 2.0))))
        for host in self.hosts:
            self.all_idle(host)
        for account, requirements in (("ours", ANY_GPU), ("ours", ANY_GPU), ("theirs", wanted), ("theirs", ANY_GPU)):
            self.request(requirements, 60.0, None, None, "me", account, None, None, True, asks, None)
        for passed in (0.0, 0.5, seconds, seconds):
            self.now += passed
            for number in range(3) if self.lease_ids else ():
                self.see_use(number, 30.0)
            for host in self.hosts:
                self.all_idle(host)
            for number in range(3) if self.lease_ids and is_told else ():
                self.renew(number, None, is_busy=False)

    def step(self, event: Event) -> bool:
        self.oracle.policy_before = self.oracle.policy
        if isinstance(event, PolicyRead):
            self.oracle.policy = event.policy
        return super().step(event)


class ImpatientBypass(Histories):
    """GPUs are kept soon, so that keeping meets everything else."""

    settings_of_pool = PoolSettings(remember_seconds=500.0, max_bypass_seconds=2.0, strategy="round_robin")


class FairlyShared(Histories):
    """Who used least is served first, until another has waited for too long."""

    settings_of_pool = PoolSettings(
        remember_seconds=500.0,
        max_bypass_seconds=20.0,
        fair_share_half_life_seconds=30.0,
        fair_share_age_seconds=100.0,
        strategy="pack",
    )
