"""The transactions of one process on a ledger file, and the copy of the ledger that they keep up to date.

A transaction reads what others have committed, lets the core decide, and writes the difference. If anything fails,
nothing was granted, and this process drops its copy and reads the file again.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core import (
    Cancelled,
    Effect,
    Event,
    Lease,
    LeaseState,
    Observed,
    Outcome,
    PolicyRead,
    Pool,
    PoolSettings,
    QuarantineEnded,
    Released,
    Renewed,
    Requested,
    Resumed,
    Ticked,
    Waiter,
    WakeAt,
)
from gpu_worker_pool.core.mirror import MirrorPool
from gpu_worker_pool.core.service import unserved_seconds
from gpu_worker_pool.errors import IllegalEventError, LedgerUnavailableError
from gpu_worker_pool.hardware.processes import boot_id as id_of_this_boot
from gpu_worker_pool.ledger import Committed
from gpu_worker_pool.ledger.bell import processes_concerned
from gpu_worker_pool.ledger.change_tracker import ChangeTracker
from gpu_worker_pool.ledger.records import records_of
from gpu_worker_pool.ledger.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.ledger.file import LedgerFile
    from gpu_worker_pool.ledger.policy_file import PolicyFile
    from gpu_worker_pool.ledger.usage_recorder import UsageRecorder

    #: The effects of an event, or why it was refused.
    Answer = tuple[Effect, ...] | IllegalEventError

# All of the ledger logs under one name.
logger: logging.Logger = logging.getLogger("gpu_worker_pool.ledger.sqlite")

#: Ended requests are removed at this interval, or after this many changes: fewer than one removal deletes, so that the
#: file does not grow without bound.
FORGET_SECONDS: Final = 60.0
FORGET_CHANGES: Final = 4_000
#: The interval while they still need too much space.
FORGET_CHANGES_SOON: Final = 400
#: How many outcomes are kept in memory; others are looked up in the file.
MOST_OUTCOMES: Final = 1000


@dataclass(slots=True)
class _News:
    """What a transaction found when it began."""

    pool: Pool
    now: float
    #: Whether other processes have committed since the last one, and whether the whole file was read again.
    is_any: bool
    is_everything: bool
    is_other_boot: bool
    #: Set if no process served the ledger for a while (rule 10).
    resumed: Resumed | None


class Transactions:
    """Belongs to the ledger's thread. A caller handles the errors of `run`, and calls `drop_copy` after one."""

    def __init__(
        self,
        file: LedgerFile,
        settings: PoolSettings,
        recorder: UsageRecorder,
        *,
        policy_file: PolicyFile | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        boot_id: str | None,
    ) -> None:
        # Outcomes are dropped from memory between transactions, never within one.
        self._settings = replace(settings, remember_at_most=None)
        self._recorder = recorder
        self._clock = clock
        self._wall_clock = wall_clock
        self._policy_file = policy_file
        self._boot_id = boot_id or id_of_this_boot()
        self._file = file
        self.tables: Tables = Tables(file.connection, stores_use=settings.fair_share_half_life_seconds is not None)
        self.secret: str = self.tables.secret()
        self._meta = self.tables.meta()
        if policy_file is not None:
            policy_file.update(self.tables.policy())
        #: This process's copy of the ledger; None when it must be read again.
        self._pool: Pool | None = None
        self._requests: ChangeTracker[str, Waiter | Lease | Outcome] = ChangeTracker()
        self._data_version = -1
        self._has_served = False
        #: The last readings: they are not in the file, and a pool that is read again needs them.
        self._observed: dict[str, Observed] = {}
        #: When this process was last seen to serve the ledger, and for how long it had not been before.
        self._awake_at, self._away_seconds = -math.inf, math.inf
        self._forget_at = -math.inf
        self._changes_to_forget_after = FORGET_CHANGES
        #: The processes that the last transaction concerns.
        self.concerned: set[str] = set()

    def begin_turn(self, events: Sequence[Event]) -> None:
        """Called for each turn of the thread, before anything else."""
        now = self._clock()
        self._away_seconds, self._awake_at = now - self._awake_at, now
        for event in events:
            if isinstance(event, Observed):
                # Even if the transaction fails: readings can be shown while the ledger is locked.
                self._observed[event.endpoint_id] = event

    def seconds_to_timer(self) -> float:
        """Until the next timer of the copy is due; infinite without a copy."""
        return math.inf if self._pool is None else self._pool.timers.next_at() - self._clock()

    def drop_copy(self) -> None:
        """After a failure: read the whole file again."""
        self._pool = None

    def pool_for_questions(self) -> Pool:
        """As of the last transaction, which was a moment ago; without a copy, as the file is now."""
        return self._pool or self._read_only_pool()

    def has_something_to_do(self) -> bool:
        pool, now = self._pool, self._clock()
        if pool is None:
            return True
        if pool.timers.next_at() <= now or self._recorder.is_due:
            return True
        if self._policy_file is not None and self._policy_file.has_changed():
            return True
        try:
            return self._others_have_committed() or self._is_stamp_due(pool, now)
        except Exception:
            return True  # the transaction reports the error

    def _others_have_committed(self) -> bool:
        """More than a stamp."""
        # Not `Connection.data_version`, which only knows what the last statement saw.
        data_version = self._file.connection.pragma("data_version")
        if data_version == self._data_version:
            return False
        meta = self.tables.meta()
        if replace(meta, now=self._meta.now) != self._meta:
            return True
        self._meta, self._data_version = meta, data_version
        return False

    def _is_stamp_due(self, pool: Pool, now: float) -> bool:
        """A ledger without leases and waiters needs no stamp: nothing in it can expire."""
        has_live = bool(pool.queue.waiting or len(pool.leases))
        return has_live and (self._meta.now is None or now - self._meta.now >= self._settings.stamp_seconds)

    def _has_served_unstamped(self, pool: Pool) -> bool:
        """Whether this process has served a ledger that needed no stamp: then no time was unserved, and use decayed."""
        is_awake = self._has_served and self._away_seconds <= 2 * self._settings.stamp_seconds
        return is_awake and not (pool.queue.waiting or len(pool.leases))

    def _stamped(self) -> bool:
        """Leave the stamp, if nothing else is due. Not synced: after a loss of power it would mean nothing anyway."""
        pool, now, connection = self._pool, self._clock(), self._file.connection
        if pool is None or pool.timers.next_at() <= now or not self._is_stamp_due(pool, now):
            return False
        self._file.check()
        connection.execute("PRAGMA synchronous=NORMAL")
        try:
            connection.execute("BEGIN IMMEDIATE")
            meta = self.tables.meta()
            if meta != self._meta or unserved_seconds(meta.now, now, self._settings) is not None:
                return False
            data_version = connection.pragma("data_version")
            self._meta = self.tables.stamp(meta, now)
            connection.execute("COMMIT")
            self._data_version = data_version
            return True
        finally:
            self._roll_back()
            connection.execute("PRAGMA synchronous=FULL")

    def run(self, events: Sequence[Event], *, has_failed: bool) -> tuple[Committed, list[Answer]] | None:
        """Apply these events in one transaction; None if only the stamp was written.

        `has_failed`: the last transaction did.
        """
        if not events and not has_failed and self._stamped():
            return None
        answers: list[Answer] = []
        return self._in_transaction(events, answers, has_failed=has_failed), answers

    def _in_transaction(self, events: Sequence[Event], answers: list[Answer], *, has_failed: bool) -> Committed:
        connection = self._file.connection
        self.concerned = set()
        self._file.check()
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Within the transaction, so that later commits of others change it.
            data_version = connection.pragma("data_version")
            news = self._catch_up()
            pool, now, foreign = news.pool, news.now, self._requests.take_changes()
            effects: list[Effect] = []
            is_to_write = self._recorder.write(self.tables)
            # From here on, this process decides: all changes are written and reported.
            if news.resumed is not None and not self._has_served_unstamped(pool):
                effects += _apply(pool, news.resumed, now)  # before any other event, which would run timers
            if self._policy_file is not None:
                is_to_write |= self._follow_policy(self._policy_file, news)
                if pool.policy is not self._policy_file.in_force.policy:
                    effects += _apply(pool, PolicyRead(self._policy_file.in_force.policy), now)
            if news.is_everything:
                for observed in self._observed.values():
                    effects += _apply(pool, observed, now)  # as if they had just arrived
            for event in events:
                try:
                    self._remember(pool, event, now)
                    answer = _apply(pool, event, now)
                except IllegalEventError as problem:
                    answers.append(problem)
                else:
                    answers.append(answer)
                    effects += answer
            if not events or news.is_any:
                effects += _apply(pool, Ticked(), now)
            decided_at = self._clock()
            own = self._requests.take_changes()
            has_uses = pool.fair_share is not None and bool(pool.fair_share.changed)
            # After a failure, something must be written: else a ledger that cannot be would count as served.
            is_to_write |= has_uses or news.is_other_boot or has_failed
            is_to_write |= self.tables.is_other_order(pool.fleet_order)
            if own or is_to_write or self._is_stamp_due(pool, now):
                has_records = self.tables.to_record(records_of(pool, own.values(), now, self._wall_clock))
                meta = self.tables.write(pool, own, self._meta, self._boot_id)
                self._changes_to_forget_after -= len(own)
                if now >= self._forget_at or self._changes_to_forget_after <= 0:
                    self._forget_at, self._changes_to_forget_after = now + FORGET_SECONDS, FORGET_CHANGES
                    if self.tables.forget_ended(now - self._settings.remember_seconds):
                        self._changes_to_forget_after = FORGET_CHANGES_SOON
                    if (long := self._file.check_size()) is not None:
                        logger.warning(long)
                connection.execute("COMMIT")
                self._meta = meta
                self.concerned = processes_concerned(pool, own.values())
                if has_records:
                    self._recorder.stored(now)
            else:
                connection.execute("ROLLBACK")
        except BaseException:
            self._roll_back()
            raise
        self._data_version = data_version
        self._has_served = True
        pool.forget_outcomes(MOST_OUTCOMES)
        grants = pool.fence - pool.first_fence
        return Committed(tuple(effects), foreign | own, news.is_everything, grants, dict(pool.tally), decided_at)

    def _roll_back(self) -> None:
        if self._file.connection.in_transaction:
            with contextlib.suppress(Exception):
                self._file.connection.execute("ROLLBACK")

    def _catch_up(self) -> _News:
        """Bring the pool up to date with what all processes have committed; nothing is decided here."""
        known, meta = self._meta, self.tables.meta()
        now = self._clock()
        is_other_boot = meta.boot_id != self._boot_id
        if is_other_boot:
            if self._has_served:
                # No process survives a reboot, so the other boot id means another host, with other clocks and GPUs.
                raise LedgerUnavailableError(
                    f"the ledger {self._file.path} is used by another host, or by a container with its own kernel"
                )
            if meta.boot_id:
                meta = self.tables.restart_clock(meta, now, self._boot_id)
            self._pool = None
        if known.revision < meta.forgotten:
            self._pool = None  # the outcomes of leases in its copy may have been removed
        unserved = unserved_seconds(meta.now, now, self._settings)
        # Time never goes back.
        now = now if meta.now is None else max(now, meta.now)
        pool, is_everything = self._pool, self._pool is None
        is_any = is_everything or meta.revision != known.revision
        if pool is None:
            self._requests = ChangeTracker()
            self._pool = pool = Pool(self._settings, self._requests)
            self.tables.load(pool, None, meta)
        elif is_any:
            self.tables.load(pool, known.revision, meta)
        self._meta = meta
        resumed = None
        if is_other_boot:
            resumed = Resumed(None)
        elif unserved is not None:
            resumed = Resumed(unserved)
        return _News(pool, now, is_any, is_everything, is_other_boot, resumed)

    def _follow_policy(self, policy_file: PolicyFile, news: _News) -> bool:
        """Read the policy again if it may have changed; whether there is something to store."""
        if not (policy_file.has_changed() or news.is_any):
            return False
        stored = self.tables.policy()
        if (after := policy_file.update(stored)) == stored:
            return False
        self.tables.store_policy(after)
        return True

    def _remember(self, pool: Pool, event: Any, now: float) -> None:
        """Load the outcome that the event is about, if it is only in the file."""
        outcome: Outcome | None = None
        match event:
            case Requested(request=request) if request.request_id not in pool.requests:
                outcome = self.tables.ended_request(request.request_id)
            case Cancelled(request_id=request_id) if request_id not in pool.requests:
                outcome = self.tables.ended_request(request_id)
            case Released(lease_id=lease_id) | Renewed(lease_id=lease_id) | QuarantineEnded(lease_id=lease_id):
                if pool.leases.lookup(lease_id) is None and pool.outcomes.of_lease(lease_id, now) is None:
                    outcome = self.tables.ended_lease(lease_id)
            case _:
                return
        if outcome is not None and not pool.outcomes.is_old(outcome, now):
            pool.remember(outcome)
            self._requests.forget_change(outcome.request.request_id)

    def is_held_by_all(self, event: Renewed) -> bool:
        """Whether no process can write the ledger, so that the lease has a full TTL from now on (rule 10).

        The process that first writes it again finds that it was not served until then.
        """
        connection = self._file.connection
        try:
            self._file.check()
            connection.execute("BEGIN")
            meta, lease = self.tables.meta(), self.tables.live_lease(event.lease_id)
        except Exception:
            return False
        finally:
            self._roll_back()
        if meta.boot_id != self._boot_id or lease is None or lease.state is not LeaseState.HELD:
            return False
        is_theirs = event.by in (None, lease.request.owner)
        return is_theirs and unserved_seconds(meta.now, self._clock(), self._settings) is not None

    def _read_only_pool(self) -> Pool:
        """For questions while the ledger cannot be written, for example because the disk is full."""
        pool = MirrorPool(self._settings)
        connection = self._file.connection
        with self._file.errors():
            self._file.check()
            connection.execute("BEGIN")
            try:
                self.tables.load(pool, None, self.tables.meta())
            finally:
                connection.execute("ROLLBACK")
        for observed in self._observed.values():
            pool.observe(observed.endpoint_id, observed.readings, observed.begun_at)
        return pool


def _apply(pool: Pool, event: Any, now: float) -> tuple[Effect, ...]:
    return tuple(effect for effect in pool.apply(event, now) if not isinstance(effect, WakeAt))
