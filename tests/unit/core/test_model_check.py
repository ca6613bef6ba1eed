"""A model check: for pools so small that it can be done, every history there is, not a sample of them.

A scenario is a few GPUs, a few requests and everything that may happen to them. In each state that can be reached,
each of these events is tried, at once and (in timed scenarios) after a silence. States with the same future count as
one, and moments as their distance from now, only as far back as anything asks for; so there are finitely many states,
and when no new one turns up, every interleaving of any length has been seen. Each transition is judged by the pool's
invariants and by the oracle, and from each state it is tried that everybody gets a turn and nothing leaks.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Event,
    GPUsVanished,
    HolderGone,
    Lease,
    LeaseState,
    Observed,
    PollAbandoned,
    Pool,
    PoolSettings,
    ProcessReading,
    QuarantineEnded,
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
    restore,
    save,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.errors import IllegalEventError
from gpu_worker_pool.testing import gpu, snapshot
from tests.unit.core.oracle import Oracle

#: A silence, in seconds; after two, readings are too old. And a time too short to matter.
STEP, MOMENT = 8.0, 1 / 64
#: Some of these end with a silence, some within one; all are exact as floats, and so are their sums and differences.
SETTINGS = PoolSettings(
    max_bypass_seconds=STEP,
    offer_ttl_seconds=STEP,
    queue_ttl_seconds=STEP,
    expiry_grace_seconds=STEP / 2,
    quarantine_seconds=STEP,
    reading_delays_seconds=(0.0, 1 / 8, 1 / 4, 1.0),
)

# ---- What can happen


@dataclass(frozen=True)
class Asker:
    request: Request
    #: How long it is willing to wait.
    waits: float | None = None
    #: How long it listens each time it asks; None: it asks once and listens until it is answered.
    listens: float | None = None
    #: An equal one that comes before it: the other order would be the same history under other names.
    after: str | None = None
    #: The names of its askings, each of which may come and go; empty: it has no name, and stays.
    asks: tuple[str, ...] = ("",)


def askers(
    *names: str,
    waits: float | None = None,
    listens: float | None = None,
    ttl: float | None = None,
    asks: tuple[str, ...] = ("",),
    within: str | None = None,
    behind: str | None = None,
    **requirements: Any,
) -> tuple[Asker, ...]:
    wanted = Requirements(**requirements) if requirements else ANY_GPU
    return tuple(
        Asker(Request(name, wanted, ttl_seconds=ttl, within=within), waits, listens, after, asks)
        for name, after in zip(names, (behind, *names), strict=False)
    )


#: What the first GPU of a host may show; the others are idle. A lease's own process leaves it below all thresholds.
SHOWN: Mapping[str, Mapping[str, Any]] = {
    "idle": {},
    "busy": {"utilization_percent": 95.0, "processes": (ProcessReading(7),)},
    "occupied": {"memory_used_mb": 30_000.0, "processes": (ProcessReading(9),)},
}

#: What may be said of a lease, also long after it ended.
SAID: Mapping[str, Callable[[Lease], Event]] = {
    "is released": lambda lease: Released(lease.lease_id),
    "is released by an old message": lambda lease: Released(lease.lease_id, fence=lease.fence - 1),
    "is renewed": lambda lease: Renewed(lease.lease_id),
    "lost its holder": lambda lease: HolderGone(lease.lease_id),
    "provably lost its holder": lambda lease: HolderGone(lease.lease_id, is_proven=True),
    "is let out of quarantine": lambda lease: QuarantineEnded(lease.lease_id),
}


@dataclass(frozen=True)
class Scenario:
    name: str
    #: How many states and transitions there are at least: an exploration that finds fewer has not explored.
    at_least: tuple[int, int]
    askers: tuple[Asker, ...]
    #: How many GPUs each endpoint has.
    hosts: Mapping[str, int]
    #: How long after the last event each event is tried.
    silences: tuple[float, ...] = (0.0,)
    said: tuple[str, ...] = ("is released",)
    shown: tuple[str, ...] = ("idle",)
    #: How late a reading may come, besides coming at once.
    lateness: float = 0.0
    others: tuple[Event, ...] = ()
    settings: PoolSettings = SETTINGS
    is_read_first: bool = True

    def happenings(self, world: World, now: float) -> Iterator[tuple[str, Event]]:
        """All that may happen now, in words and as an event."""
        asked = world.oracle.requests
        for asker in self.askers:
            name = asker.request.request_id
            if name in asked:
                yield f"{name} cancels", Cancelled(name)
            may_ask = asker.listens is not None if name in asked else asker.after in (None, *asked)
            if may_ask:
                deadline = None if asker.waits is None else now + asker.waits
                poll_deadline = None if asker.listens is None else now + asker.listens
                for poll_id in asker.asks:
                    yield f"{name} asks {poll_id}", Requested(asker.request, deadline, poll_deadline, poll_id=poll_id)
            if name in asked:
                for poll_id in filter(None, asker.asks):
                    yield f"{name} does not hear of {poll_id} any more", PollAbandoned(name, poll_id)
            if name in world.granted:
                for what in self.said:
                    yield f"{name} {what}", SAID[what](world.granted[name])
        for host, number in self.hosts.items():
            for what in self.shown:
                yield f"{host} is read {what}", readings(host, number, now, what)
            if self.lateness:
                yield f"{host} was read idle before", readings(host, number, now - self.lateness)
        for event in self.others:
            yield str(event), event
        if now > world.pool.now:
            yield "time passes", Ticked()


def readings(host: str, number: int, at: float, first: str = "idle") -> Observed:
    shown = [gpu(index, endpoint_id=host, **SHOWN[first if index == 0 else "idle"]) for index in range(number)]
    return snapshot(shown, at=at, endpoint_id=host)


# ---- A pool, and what must be true of it after every event


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.pool = Pool(scenario.settings)
        self.oracle = Oracle(scenario.settings)
        #: What each request was granted, if it ever was.
        self.granted: dict[str, Lease] = {}
        for host, number in scenario.hosts.items():
            self.step(readings(host, number, 0.0) if scenario.is_read_first else Unreachable(host), 0.0)

    def step(self, event: Event, now: float) -> None:
        pool, oracle = self.pool, self.oracle
        if isinstance(event, Resumed):
            oracle.nobody_served(min(event.unserved_seconds or 0.0, now - pool.now))
        effects = pool.apply(event, now)
        check_invariants(pool)
        if isinstance(event, GPUsVanished):
            for gpu_id in event.gpu_ids:
                oracle.cards[gpu_id].reading = None
        if isinstance(event, Resumed):
            for lease in pool.leases:
                oracle._keep_lease(lease)
        oracle.saw(event, effects, now)
        oracle.judge_lifetimes(pool.leases, now)
        self.granted.update((lease.request.request_id, lease) for lease in pool.leases)
        self._compare_books()
        self._check_order(now)

    def _compare_books(self) -> None:
        pool, oracle = self.pool, self.oracle
        in_order = sorted(oracle.waiting.values(), key=lambda waiting: waiting.order)
        assert [each.request for each in pool.queue.in_order()] == [each.request for each in in_order]
        ours, theirs = (
            {lease.lease_id: (lease.state, lease.gpu_ids) for lease in leases}
            for leases in (pool.leases, oracle.leases.values())
        )
        assert ours == theirs
        assert {each.request.request_id: each.state for each in pool.outcomes}.items() <= oracle.ended.items()
        assert pool.fence == oracle.fence
        next_at = pool.timers.next_at()
        assert next_at == math.inf or (oracle.wake_at is not None and oracle.wake_at <= next_at), "overslept"

    def _check_order(self, now: float) -> None:
        """Nothing is kept from the first, and for nobody too early; of the others, the invariants say the same."""
        oracle, reserved_for = self.oracle, self.pool.reserved_for
        for within in {waiting.request.within for waiting in oracle.waiting.values()}:
            queue = (waiting for waiting in oracle.waiting.values() if waiting.request.within == within)
            first = min(queue, key=lambda waiting: waiting.order)
            requirements = first.request.requirements
            able = [
                card.endpoint for card in oracle.cards.values() if oracle.why_not_for(card, first.request, now) is None
            ]
            assert all(able.count(host) < requirements.count for host in able), f"{first} could be served"
        is_due = reserved_for is None or now - reserved_for.enqueued_at >= self.pool.settings.max_bypass_seconds
        assert is_due, "GPUs are kept for one that has not waited long enough"

    def wind_down(self, hosts: Mapping[str, int]) -> None:
        """Whoever holds lets go and all GPUs are read idle, over and over: all get a turn, and nothing is left over."""
        pool, now, pause = self.pool, self.pool.now, MOMENT
        is_quick = not any(lease.state is LeaseState.QUARANTINED for lease in pool.leases)
        impatient = {name for _, kind, name in pool.timers.items() if kind == "waiter"}
        waiting = [
            each.request
            for each in pool.queue.in_order()
            # Those inside a lease end with it.
            if each.request.within is None and (is_quick or each.request.request_id not in impatient)
        ]
        for _ in range(12):
            now += pause
            for host, number in hosts.items():
                self.step(readings(host, number, now), now)
            live = [lease.lease_id for lease in pool.leases if lease.is_live]
            for lease_id in live:
                self.step(Released(lease_id), now)
            if not (live or pool.leases or pool.queue):
                break
            pause = MOMENT if live else STEP
        assert not pool.leases, "a lease never ends"
        assert not pool.queue, "somebody never gets a turn"
        assert pool.allocator.available(now) == sum(hosts.values()), "a GPU has leaked"
        for request in waiting:
            is_possible = request.requirements.count <= max(hosts.values())
            end = RequestState.GRANTED if is_possible else RequestState.REJECTED
            assert self.oracle.ended[request.request_id] is end


# ---- Which states are one


def essence(pool: Pool, lateness: float) -> tuple[Any, ...]:
    """All of a pool that its future depends on: names instead of ids, distances instead of moments, order instead of
    numbers. Left out is what decides nothing: when a lease was granted, the reasons given, how often what happened.
    """
    now, settings, allocator = pool.now, pool.settings, pool.allocator
    leases = {lease.lease_id: lease for lease in sorted(pool.leases, key=lambda lease: lease.fence)}
    gpus, endpoints = allocator.gpus.values(), allocator.endpoints.values()
    order = sorted({each.last_fence for each in (*gpus, *endpoints)} | {each.fence for each in leases.values()}).index

    def age(moment: float, limit: float) -> float:
        return math.inf if now - moment > limit else now - moment

    def seen(moment: float, endpoint_id: str) -> tuple[float, bool]:
        """Whether readings that may still come in begin after it, and whether the last one did."""
        return age(moment, lateness), allocator.endpoints[endpoint_id].begun_at > moment

    def left(moment: float | None) -> float | None:
        return None if moment is None else max(moment - now, -1.0)

    def heard(until: float | None) -> float | None:
        """Since when nobody listens does not matter."""
        return -1.0 if until is not None and until < now else left(until)

    def name(lease_id: str) -> str:
        return leases[lease_id].request.request_id if lease_id in leases else lease_id

    return (
        tuple(
            (
                (waiter.request.request_id, min(now - waiter.enqueued_at, settings.max_bypass_seconds)),
                (left(waiter.deadline), heard(waiter.poll_deadline), left(waiter.gives_up_at)),
                (waiter.reserved, waiter is pool.reserved_for, waiter.poll_id),
            )
            for waiter in pool.queue.in_order()
        ),
        frozenset(
            (request_class.head.request.request_id, request_class.tried)
            for request_class in pool.queue.request_classes()
        ),
        tuple(
            (
                (lease.request.request_id, lease.state, lease.gpu_ids, order(lease.fence), lease.poll_id),
                left(lease.expires_at),
                lease.quarantine and (left(lease.quarantine.until), *seen(lease.quarantine.since, lease.endpoint_id)),
                tuple((held.memory_used_mb, held.processes) for held in lease.held),
            )
            for lease in leases.values()
        ),
        tuple(
            (
                (each.reading, each.last_seen, each.is_gone, order(each.last_fence)),
                (each.baseline.memory_used_mb, each.baseline.processes),
                (seen(each.read_after, each.endpoint.endpoint_id), age(each.freed_at, settings.settle_seconds)),
                each.gpu_id in allocator.freed
                and (each.readings_wanted, seen(each.freed_at, each.endpoint.endpoint_id)),
            )
            for each in gpus
        ),
        tuple(
            (
                (each.is_answering, age(each.begun_at, settings.reading_max_age_seconds)),
                (order(each.last_fence), each.turn),
                tuple(gpu.gpu_id for gpu in sorted(each.free._rank, key=each.free._rank.get)),
            )
            for each in endpoints
        ),
        tuple(
            tuple(each.endpoint_id for each in sorted(ranked._rank, key=ranked._rank.get))
            for ranked in allocator._free_hosts._with
            if len(ranked)
        ),
        frozenset((kind, name(whose), at - now) for at, kind, whose in pool.timers.items()),
        (left(pool.timers.not_before), left(pool._wake_at), pool.has_new_class),
        (tuple(map(name, pool.quarantined)), tuple(pool.improved)),
        frozenset((each.request.request_id, each.state, each.lease_state) for each in pool.outcomes),
    )


def explore(scenario: Scenario, *, depth_first: bool = False) -> tuple[int, int]:
    """Let everything happen in every state that can be reached; how many states and transitions there are."""
    start = World(scenario)
    seen = {essence(start.pool, scenario.lateness)}
    #: For each state the one before it on the way from the start, and how it goes on from there.
    ways: list[tuple[int, str]] = [(0, "")]
    frontier = deque([(0, pickle.dumps(start))])
    transitions = 0
    while frontier:
        number, frozen = frontier.pop() if depth_first else frontier.popleft()
        here: World = pickle.loads(frozen)  # noqa: S301  our own
        before, saved = essence(here.pool, scenario.lateness), save(here.pool)
        how = "it is saved and restored"
        try:
            assert save(restore(saved, scenario.settings)) == saved
            for silence in scenario.silences:
                now = here.pool.now + silence
                for what, event in scenario.happenings(here, now):
                    transitions += 1
                    how = f"after {silence:g} s {what}"
                    there: World = pickle.loads(frozen)  # noqa: S301  our own
                    try:
                        there.step(event, now)
                    except IllegalEventError:
                        unchanged = essence(there.pool, scenario.lateness) == before and save(there.pool) == saved
                        assert unchanged, "it was refused and changed something"
                        continue
                    after = essence(there.pool, scenario.lateness)
                    if after not in seen:
                        seen.add(after)
                        frontier.append((len(ways), pickle.dumps(there)))
                        ways.append((number, how))
            how = "everybody lets go"
            here.wind_down(scenario.hosts)
        except Exception as failure:
            failure.add_note("\n  ".join(["How it came to this:", *way_to(number, ways), how]))
            raise
    return len(seen), transitions


def way_to(number: int, ways: list[tuple[int, str]]) -> list[str]:
    steps = []
    while number:
        number, how = ways[number]
        steps.append(how)
    return steps[::-1]


# ---- The scenarios

TIMED = (0.0, STEP)
A_AND_B: Mapping[str, int] = {"a": 1, "b": 2}
LEASE = ("is released", "is renewed", "lost its holder", "is let out of quarantine")
SHARING = askers("most", memory_mb=50_000, share=True) + askers("some", "more", memory_mb=30_000, share=True)
PRIORITIES = askers("low", "lower") + askers("high", priority=2) + askers("higher", priority=3)
POLLED = askers("brief", listens=0.0, ttl=1.5 * STEP) + askers("long", listens=STEP, ttl=STEP)
BROKEN = askers("twice", listens=2 * STEP, ttl=2 * STEP, asks=("old", "new")) + askers("once", ttl=STEP)
WIDE = askers("two", count=2) + askers("one", "other")
THREE = askers("three", count=3)

SMALL = [
    Scenario("plain", (600, 6_000), askers(*"abcd"), {"": 3}, shown=("idle", "busy"), others=(Stopped(),)),
    Scenario(
        "deadlines", (1_900, 22_000), askers("exact", waits=STEP) + askers("a", "b", waits=1.5 * STEP), {"": 1}, TIMED
    ),
    Scenario("sharing and not", (400, 3_500), SHARING + askers("all"), {"": 2}),
    Scenario("sharing", (300, 2_300), SHARING, {"": 2}, shown=("idle", "occupied")),
    Scenario("priorities", (340, 2_600), PRIORITIES, {"": 2}),
    Scenario(
        "late readings",
        (740, 10_000),
        askers("first", "next", ttl=STEP),
        {"": 1},
        TIMED,
        shown=("idle", "occupied"),
        lateness=STEP,
    ),
    Scenario(
        "unserved",
        (860, 13_300),
        askers("once", ttl=STEP) + askers("again", listens=STEP, ttl=STEP),
        {"": 1},
        TIMED,
        ("is released", "is renewed"),
        others=(Resumed(STEP),),
    ),
    Scenario("polled", (690, 8_800), POLLED, {"": 1}, TIMED),
    Scenario("connections that break", (1_600, 27_000), BROKEN, {"": 1}, TIMED),
    Scenario(
        "endpoints",
        (900, 6_700),
        askers("one") + askers("two", count=2) + THREE,
        A_AND_B,
        others=(Unreachable("b"),),
        is_read_first=False,
    ),
    Scenario(
        "vanishing",
        (1_900, 22_000),
        askers("two", count=2, ttl=STEP) + askers("one", ttl=STEP),
        {"": 2},
        TIMED,
        others=(GPUsVanished(("0",)),),
    ),
]

#: "lease-1" is the first lease there is: that of "outer", or of "next" if "outer" gives up before.
INSIDE = askers("a", "b", ttl=STEP, within="lease-1")
SMALL += [
    Scenario(
        "inside a lease",
        (480, 5_600),
        askers("outer", ttl=2 * STEP) + INSIDE + askers("next", behind="outer", ttl=STEP),
        {"": 1},
        said=("is released", "lost its holder", "is let out of quarantine"),
    ),
    Scenario(
        "inside a lease, over time",
        (1_300, 17_000),
        askers("outer", ttl=2 * STEP) + askers("a", "b", ttl=STEP, within="lease-1"),
        {"": 1},
        TIMED,
    ),
    Scenario(
        "inside an inner lease",
        (270, 4_100),
        askers("outer", ttl=STEP) + askers("a", ttl=STEP, within="lease-1") + askers("b", ttl=STEP, within="lease-2"),
        {"": 1},
        said=(*LEASE, "provably lost its holder"),
        others=(GPUsVanished(("0",)),),
    ),
    Scenario(
        "sharing inside a share",
        (150, 1_200),
        askers("outer", memory_mb=50_000, share=True, ttl=STEP)
        + askers("some", "more", memory_mb=30_000, share=True, within="lease-1")
        + askers("less", memory_mb=20_000, share=True, behind="outer"),
        {"": 1},
    ),
]

LARGE = [
    Scenario(
        "unserved for a part of the TTL",
        (1_000, 15_000),
        askers("once", ttl=4 * STEP) + askers("again", listens=STEP, ttl=4 * STEP),
        {"": 1},
        TIMED,
        ("is released", "is renewed"),
        others=(Resumed(STEP),),
    ),
    Scenario(
        "endpoints, one of them removed",
        (1_600, 13_000),
        askers("one") + askers("other") + askers("third"),
        A_AND_B,
        others=(Unreachable("b", is_removed=True),),
        is_read_first=False,
    ),
    Scenario("several GPUs", (1_700, 24_000), WIDE, {"": 3}, TIMED),
    Scenario("leases", (1_600, 30_000), askers("first", "next", ttl=STEP), {"": 1}, TIMED, LEASE, ("idle", "occupied")),
    Scenario("several GPUs and all", (8_000, 130_000), WIDE + THREE, {"": 3}, TIMED),
    Scenario("several GPUs, one busy", (7_000, 112_000), WIDE, {"": 3}, TIMED, shown=("idle", "busy")),
    Scenario(
        "deadlines of all kinds",
        (3_400, 46_000),
        askers("exact", waits=STEP) + askers("between", waits=1.5 * STEP) + askers("patient"),
        {"": 1},
        TIMED,
        shown=("idle", "busy"),
    ),
    Scenario("sharing, one used", (1_900, 18_000), SHARING + askers("all"), {"": 2}, shown=("idle", "occupied")),
    Scenario("priorities, one busy", (1_400, 12_000), PRIORITIES, {"": 2}, shown=("idle", "busy")),
    Scenario(
        "leases and all that is said",
        (2_800, 70_000),
        askers("between", ttl=STEP) + askers("exact", ttl=1.5 * STEP),
        {"": 1},
        TIMED,
        tuple(SAID),
        ("idle", "occupied"),
        STEP,
    ),
    Scenario("polled and not", (4_200, 62_000), POLLED + askers("once", waits=2 * STEP, ttl=STEP), {"": 1}, TIMED),
    Scenario(
        "endpoints come and go",
        (9_100, 91_000),
        WIDE + THREE,
        A_AND_B,
        others=(Unreachable("a"), Unreachable("b")),
        is_read_first=False,
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_every_history_is_a_right_one(scenario: Scenario) -> None:
    states, transitions = explore(scenario)
    assert states >= scenario.at_least[0]
    assert transitions >= scenario.at_least[1]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", LARGE, ids=lambda scenario: scenario.name)
def test_every_history_of_a_larger_pool_is_a_right_one(scenario: Scenario) -> None:
    test_every_history_is_a_right_one(scenario)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_it_does_not_matter_by_which_way_a_state_is_reached(scenario: Scenario) -> None:
    """Otherwise states would count as one that have different futures, and some would never be seen."""
    assert explore(scenario, depth_first=True) == explore(scenario)
