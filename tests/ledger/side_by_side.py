"""Random histories of the core, told to ledgers as well: in memory, in a file, and in a file that two share.

The pool of `Histories`, judged by its oracle, is the model. After every step each ledger must have answered as it did,
and must hold the same; what is in the files must be what is in memory; and one who only follows must decide nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Effect,
    Ended,
    Event,
    GPUsVanished,
    Observed,
    Pool,
    PoolSettings,
    ReadingWanted,
    Released,
    Requested,
    RequestState,
    Requirements,
    Resumed,
    Ticked,
    Unreachable,
    WakeAt,
    restore,
    save,
)
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.core.saved import to_json, with_later_fields, with_later_lease_fields
from gpu_worker_pool.core.service import unserved_seconds
from gpu_worker_pool.errors import IllegalEventError
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.testing import History, gpus, snapshot
from tests.fakes.memory_ledger import MemoryLedger
from tests.ledger.places import InSQLite, Told, request
from tests.unit.core.histories import Histories

T = TypeVar("T")

#: What each process reads for itself: such an event happens to all of them.
READ_BY_EACH = (Observed, Unreachable, GPUsVanished)


class StandingClock:
    """Time as the history says; nothing is ever called by itself."""

    at = 0.0

    def now(self) -> float:
        return self.at

    def call_at(self, when: float, callback: Callable[[], object], /) -> Any:  # noqa: ARG002  # as clocks have it
        return self

    def cancel(self) -> None:
        pass


class SteppedLedger(SQLiteLedger):
    """Acts when it is told to, so that the moment at which it looks around is part of the history."""

    may_look = False

    def _has_something_to_do(self) -> bool:
        return self.may_look and super()._has_something_to_do()

    async def follow(self) -> None:
        """Notice what others have committed."""
        self.may_look = True
        await self.look(lambda pool, now: None)
        self.may_look = False


class Member:
    """One process on a file."""

    def __init__(self, path: Path, settings: PoolSettings, clock: StandingClock, boot_id: str) -> None:
        self.told = Told()
        self.ledger = SteppedLedger(path, settings, self.told, clock=clock.now, boot_id=boot_id, first_fence=0)

    def take_effects(self) -> list[Effect]:
        effects = self.told.effects
        self.told.all.clear()
        return effects


class Files:
    """A folder for one history, an event loop, and processes on files in it."""

    def __init__(self, settings: PoolSettings) -> None:
        base = Path("/dev/shm")  # noqa: S108  # what a disk does is tested elsewhere; here a thousand commits count
        self.folder = Path(tempfile.mkdtemp(dir=base if base.is_dir() else None))
        self.settings = settings
        self.clock = StandingClock()
        self.boot = 1
        self._runner = asyncio.Runner()
        self.groups: dict[str, list[Member]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def place(self, name: str) -> InSQLite:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return InSQLite(folder)

    def open(self, name: str) -> Member:
        async def opened() -> Member:
            return Member(self.place(name).path, self.settings, self.clock, f"boot-{self.boot}")

        return self.run(opened())

    def reopen(self, name: str, number: int) -> None:
        self.run(self.groups[name][number].ledger.close())
        self.groups[name][number] = self.open(name)

    def close(self) -> None:
        for members in self.groups.values():
            for member in members:
                self.run(member.ledger.close())
        self._runner.close()
        shutil.rmtree(self.folder)


def decisions(effects: list[Effect] | tuple[Effect, ...]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, (WakeAt, ReadingWanted))]


def books(pool: Pool) -> dict[str, Any]:
    """All that processes must agree on. Readings are each one's own, and so is which of the past it remembers."""
    saved = save(pool)
    gpus = {row["gpu_id"]: row for row in saved["gpus"] if row["last_fence"] or row["freed_at"] is not None}
    for row in gpus.values():
        del row["is_gone"]
    return {
        **{name: saved[name] for name in ("fence", "ticket", "leases", "waiters", "requests_ended", "leases_ended")},
        "gpus": gpus,
        "kept_for": None if pool.reserved_for is None else pool.reserved_for.request.request_id,
    }


def checked_books(pool: Pool) -> dict[str, Any]:
    check_invariants(pool)
    return books(pool)


_ROWS = (
    "SELECT requests.request_id, kind, requests.data, later_fields.data, later_lease_fields.data FROM requests"
    " LEFT JOIN later_fields USING (request_id) LEFT JOIN later_lease_fields USING (request_id)"
)


def written(place: InSQLite, which: str) -> dict[str, Any]:
    """Rows of the file by request id, with what came after the first format and is stored apart."""
    found = {}
    for request_id, kind, data, later, of_lease in place.read(f"{_ROWS} WHERE {which}"):
        row = with_later_fields(json.loads(data), json.loads(later or "{}"))
        found[request_id] = row if kind == "waiter" else with_later_lease_fields(row, json.loads(of_lease or "{}"))
    return found


def check_file(place: InSQLite, pool: Pool, outcomes_at: float) -> None:
    """Whoever opens the file finds what this pool has."""
    live = {row["request"]["request_id"]: row for row in (books(pool)["leases"] + books(pool)["waiters"])}
    assert written(place, "ended_at IS NULL") == json.loads(json.dumps(live))
    promised = {
        (gpu_id if lease.within is None else f"{lease.within}/{gpu_id}", lease.lease_id, int(lease.is_shareable))
        for lease in pool.leases
        for gpu_id in lease.gpu_ids
    }
    assert set(place.read("SELECT * FROM promised")) == promised
    ended = written(place, "ended_at IS NOT NULL")
    for outcome in pool.outcomes:
        if not pool.outcomes.is_old(outcome, outcomes_at):
            assert ended[outcome.request.request_id] == json.loads(json.dumps(to_json(outcome)))
    assert place.read("SELECT fence, ticket FROM meta") == [(pool.fence, pool.ticket)]


class SideBySide(Histories):
    """GPUs are kept for nobody: from when on they are depends on who looks when, and that is `Converging`'s part."""

    settings_of_pool = PoolSettings(
        remember_seconds=60.0, offer_ttl_seconds=2.0, max_bypass_seconds=1e9, most_waiting_of_an_account=3
    )
    #: Holders are asked with each reading, and two processes read twice as often as one.
    may_ask_holders = False

    def __init__(self) -> None:
        super().__init__()
        self.files = Files(self.settings_of_pool)
        self.files.groups = {
            "alone": [self.files.open("alone")],
            "shared": [self.files.open("shared"), self.files.open("shared")],
        }
        self.told_in_memory = Told()
        self.memory: MemoryLedger | None = self.files.run(self._in_memory())
        #: Who of the two is given the next event, and whether the other one looks after every step.
        self.active = 0
        self.is_lagging = False
        self.has_rebooted = True  # a new ledger has seen no boot yet
        self.last_observed: Observed | None = None

    async def _in_memory(self) -> MemoryLedger:
        return MemoryLedger(self.settings_of_pool, self.told_in_memory, self.files.clock)

    @initialize()
    def first_readings(self) -> None:  # type: ignore[override]
        self.hosts = ("a",)
        self.observe("a", [{}, {}, {}], None, 0.0)

    @rule(active=st.integers(0, 1), is_lagging=st.booleans())
    def another_serves(self, active: int, is_lagging: bool) -> None:
        self.active, self.is_lagging = active, is_lagging
        for member in self.files.groups["shared"]:
            self._follows(member)  # what the other one did while it lagged

    @precondition(lambda self: self.lease_ids)
    @rule(
        number=st.integers(0, 11), by=st.sampled_from(["me", "you", None, None]), is_busy=st.sampled_from([False, True])
    )
    def renew(self, number: int, by: str | None, is_busy: bool) -> None:
        self._notice_silence()
        super().renew(number, by, is_busy)

    @precondition(lambda self: self.lease_ids)
    @rule(number=st.integers(0, 11))
    def end_quarantine(self, number: int) -> None:
        self._notice_silence()
        super().end_quarantine(number)

    def _notice_silence(self) -> None:
        if unserved_seconds(self.stamped_at(), self.now, self.settings_of_pool) is not None:
            assert self.step(Ticked())  # gives everybody time first, of which these rules must know

    # ---- one step of all

    def step(self, event: Event) -> bool:
        self.files.clock.at = self.now
        effects: list[Effect] = []
        if (resumed := self._resumed()) is not None:
            assert super().step(resumed)
            effects += self.history.steps[-1][2]
            self._in_oracle()
            self._to_memory(resumed)
        number = len(self.history.steps)
        is_legal = super().step(event)
        answer = self.history.steps[-1][2] if len(self.history.steps) > number else None
        effects += answer or ()
        self._to_memory(event, answer)
        if not is_legal:
            # It happened to nobody; but a ledger that also heard news has looked at the time.
            assert super().step(Ticked())
            effects += self.history.steps[-1][2]
            self._to_memory(Ticked(), self.history.steps[-1][2])
        for members in self.files.groups.values():
            active = members[self.active % len(members)]
            others = [member for member in members if member is not active]
            answered = self._submitted(active, event)
            if others and isinstance(event, READ_BY_EACH):
                self._all_read(active, others, event, effects)
                continue
            assert answered == (None if answer is None else decisions(answer)), event
            if not is_legal:
                self._submitted(active, Ticked())
            assert decisions(active.take_effects()) == decisions(effects), event
            for other in others:
                self._follows(other)
        if isinstance(event, Observed):
            if min(event.begun_at, self.now) == self.oracle.endpoint_begun["a"]:  # it was the newest
                self.last_observed = replace(event, begun_at=min(event.begun_at, self.now))
        elif isinstance(event, READ_BY_EACH):
            self.last_observed = None
        self.compare()
        return is_legal

    def _submitted(self, member: Member, event: Event) -> list[Effect] | None:
        try:
            return decisions(self.files.run(member.ledger.submit(event)))
        except IllegalEventError:
            return None

    def _all_read(self, active: Member, others: list[Member], event: Event, effects: list[Effect]) -> None:
        """The first does it all, but for rejecting what others took in: that is theirs, who may see more than it."""
        done = decisions(active.take_effects())
        for other in others:
            self._submitted(other, event)
            theirs = decisions(other.take_effects())
            assert all(isinstance(effect, Ended) and effect.state is RequestState.REJECTED for effect in theirs), theirs
            done += theirs
        assert sorted(map(repr, done)) == sorted(map(repr, decisions(effects))), event
        self._follows(active)

    def _follows(self, member: Member) -> None:
        """Whoever only notices what another has done has nothing to decide."""
        if not self.is_lagging:
            self.files.run(member.ledger.follow())
        assert (told := decisions(member.take_effects())) == [], told

    def _resumed(self) -> Resumed | None:
        """As whoever looks at the file finds it (rule 10)."""
        metas = [self.files.place(name).read("SELECT now FROM meta") for name in self.files.groups]
        assert metas[0] == metas[1], "one file was stamped and the other was not"
        if self.has_rebooted:
            self.has_rebooted = False
            return Resumed(None)  # its stamp is of another clock
        (stamp,) = metas[0]
        unserved = unserved_seconds(stamp, self.now, self.settings_of_pool)
        return None if unserved is None else Resumed(unserved)

    def _to_memory(self, event: Event, answer: tuple[Effect, ...] | None = None) -> None:
        if self.memory is not None:
            try:
                effects: tuple[Effect, ...] | None = self.files.run(self.memory.submit(event))
            except IllegalEventError:
                effects = None
            if not isinstance(event, Resumed):
                without_wake_ups = [effect for effect in answer or () if not isinstance(effect, WakeAt)]
                assert effects == (None if answer is None else tuple(without_wake_ups))

    def _in_oracle(self) -> None:
        for lease in self.pool.leases:
            self.oracle._keep_lease(lease)

    def compare(self) -> None:
        model = books(self.pool)
        for name, members in self.files.groups.items():
            check_file(self.files.place(name), self.pool, self.now)
            for member in members:
                if not self.is_lagging or len(members) == 1:
                    found = self.files.run(member.ledger.look(lambda pool, now: checked_books(pool)))
                    assert found == model

    # ---- restarts

    @rule(is_reboot=st.booleans())
    def restart(self, is_reboot: bool) -> None:
        self.memory = None  # it does not survive one
        place = self.files.place("alone")
        (stamp,) = place.read("SELECT now FROM meta")
        saved = json.loads(json.dumps(save(self.pool)))
        # Of what was not written nothing is known: how late it was, and which devices ceased to exist.
        saved["now"] = stamp
        for row in saved["gpus"]:
            row["is_gone"] = False
        if is_reboot:
            # And so is how much has been forgotten since the last stamp.
            ended = written(place, "ended_at IS NOT NULL ORDER BY ended_at").values()
            saved["outcomes"] = [row for row in ended if stamp - row["at"] < self.settings_of_pool.remember_seconds]
            self.files.boot += 1
            self.has_rebooted = True
            self.now = 3.0
            self._shift_oracle(3.0 - stamp)
            begun_anew = restore(saved, self.settings_of_pool, clock_restarted_at=3.0)
            saved = json.loads(json.dumps(save(begun_anew)))
        self.files.clock.at = self.now
        for name, members in self.files.groups.items():
            for number in range(len(members)):
                self.files.reopen(name, number)
        self.history = History(self.settings_of_pool, start=saved)
        for card in self.oracle.cards.values():
            card.reading = None
        self.oracle.endpoint_begun.clear()
        self.oracle.wake_at = None
        self._in_oracle()
        self.last_observed = None
        assert self.step(Unreachable("a"))
        self._in_oracle()

    @precondition(lambda self: self.last_observed is not None)
    @rule()
    def one_of_two_restarts(self) -> None:
        """It has nothing to decide: it is told what the others were told, and finds what they did."""
        observed = self.last_observed
        assert observed is not None
        freed = [card.freed_at for card in self.oracle.cards.values() if card.freed_at > -math.inf]
        if max(freed, default=-math.inf) >= self.oracle.endpoint_begun["a"] or self._is_stamp_due():
            return  # what was on a GPU before its last lease is known only to who has read it since
        self.files.reopen("shared", 1 - self.active)
        again = self.files.groups["shared"][1 - self.active]
        assert self._submitted(again, observed) == decisions(again.take_effects()) == []
        self.compare()

    def _is_stamp_due(self) -> bool:
        return self.now - self.stamped_at() >= self.settings_of_pool.stamp_seconds

    def stamped_at(self) -> float:
        (stamp,) = self.files.place("alone").read("SELECT now FROM meta")
        return -math.inf if stamp is None else float(stamp)

    def teardown(self) -> None:
        self.files.close()


class Converging(RuleBasedStateMachine):
    """Three processes, GPUs that are kept soon, readings that only one of them has: in the end all know the same."""

    settings_of_pool = PoolSettings(max_bypass_seconds=2.0, offer_ttl_seconds=2.0, queue_ttl_seconds=20.0)

    def __init__(self) -> None:
        super().__init__()
        self.files = Files(self.settings_of_pool)
        self.members = self.files.groups["shared"] = [self.files.open("shared") for _ in range(3)]
        self.place = self.files.place("shared")
        self.serial = 0
        self.fence = 0

    def submit(self, who: int, event: Event) -> None:
        with contextlib.suppress(IllegalEventError):
            self.files.run(self.members[who].ledger.submit(event))

    def pool_of(self, who: int, look: Callable[[Pool], T]) -> T:
        return self.files.run(self.members[who].ledger.look(lambda pool, now: look(pool)))

    @rule(
        who=st.integers(0, 2),
        count=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1]),
        polls=st.sampled_from([0.0, 5.0]),
        may_reserve=st.booleans(),
        share=st.booleans(),
    )
    def request(self, who: int, count: int, priority: int, polls: float, may_reserve: bool, share: bool) -> None:
        self.serial += 1
        requirements = (
            Requirements(count, 30_000, share=True, priority=priority) if share else replace(ANY_GPU, count=count)
        )
        asked = replace(request(f"r{self.serial}"), requirements=requirements)
        self.submit(who, Requested(asked, poll_deadline=self.files.clock.at + polls, may_reserve=may_reserve))

    @rule(who=st.integers(0, 2), number=st.integers(0, 10))
    def release(self, who: int, number: int) -> None:
        leases = self.pool_of(who, lambda pool: [lease.lease_id for lease in pool.leases])
        if leases:
            self.submit(who, Released(leases[number % len(leases)]))

    @rule(who=st.integers(0, 2), number=st.integers(0, 10))
    def take_back(self, who: int, number: int) -> None:
        waiting = self.pool_of(who, lambda pool: [waiter.request.request_id for waiter in pool.queue.in_order()])
        if waiting:
            self.submit(who, Cancelled(waiting[number % len(waiting)]))

    @rule(who=st.integers(0, 2), used=st.sampled_from([0.0, 0.0, 70_000.0]), number=st.sampled_from([4, 4, 2]))
    def observe(self, who: int, used: float, number: int) -> None:
        self.files.clock.at += 0.01
        self.submit(who, snapshot(gpus(number, memory_used_mb=used), at=self.files.clock.at))

    @rule(who=st.integers(0, 2), seconds=st.sampled_from([0.1, 1.0, 4.0, 20.0]))
    def time_passes(self, who: int, seconds: float) -> None:
        self.files.clock.at += seconds
        self.submit(who, Ticked())

    @invariant()
    def all_agree(self) -> None:
        for _ in range(6):
            (before,) = self.place.read("SELECT revision FROM meta")
            for member in self.members:
                self.files.run(member.ledger.follow())
            if self.place.read("SELECT revision FROM meta") == [before]:
                break
        else:
            raise AssertionError("they never come to rest")
        found = [self.pool_of(who, checked_books) for who in range(3)]
        assert found[0] == found[1] == found[2]
        self.files.run(self.members[0].ledger.look(lambda pool, now: check_file(self.place, pool, now)))
        assert found[0]["fence"] >= self.fence
        self.fence = found[0]["fence"]

    def teardown(self) -> None:
        self.files.close()
