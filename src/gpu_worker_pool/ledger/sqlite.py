"""The ledger in a SQLite file, for any number of processes of one host at once.

One thread per process handles all waiting events in one transaction: it reads what others have committed, lets the
core decide, writes the difference, and reports the effects only when they are on the disk. If anything fails, nothing
was granted, and this process drops its copy and reads the file again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from gpu_worker_pool.clocks import boot_time
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
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.ledger import Committed, OnCommit, Question
from gpu_worker_pool.ledger.bell import Bell, processes_concerned
from gpu_worker_pool.ledger.change_tracker import ChangeTracker
from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.policy_file import PolicyInForce
from gpu_worker_pool.ledger.records import add_to_totals, records_of, records_of_held
from gpu_worker_pool.ledger.tables import FORMAT, Tables, schema_from
from gpu_worker_pool.ledger.usage_files import (
    UsageFile,
    UsageRead,
    has_ended_after,
    parse_record,
    read_usage,
    usage_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_worker_pool.ledger.policy_file import PolicyFile

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

#: How often to check for commits of other processes, which also ring where they know whom they concern.
FOLLOW_SECONDS: Final = 0.05
#: After a failure, how long until this thread tries again by itself.
PAUSE_SECONDS: Final = 1.0
#: Ended requests are removed at this interval, or after this many changes: fewer than one removal deletes, so that the
#: file does not grow without bound.
FORGET_SECONDS: Final = 60.0
FORGET_CHANGES: Final = 4_000
#: The same where they still need too much space.
FORGET_CHANGES_SOON: Final = 400
#: How long records wait, so that many are written at once; and after a failure.
RECORD_SECONDS: Final = 1.0
RECORD_AGAIN_SECONDS: Final = 10.0
MANY_RECORDS: Final = 64
MOST_AT_ONCE: Final = 256
#: For how long questions are answered before the next events have their turn.
QUESTIONS_SECONDS: Final = 0.01
#: How many outcomes are kept in memory; others are looked up in the file.
MOST_OUTCOMES: Final = 1000


@dataclass(slots=True)
class _Job:
    """An event or a question, the future of its answer, and the answer once it is known."""

    what: Event | Callable[[Pool, float], Any]
    is_question: bool
    future: asyncio.Future[Any]
    #: By the monotonic clock.
    asked_at: float
    value: Any = None
    error: BaseException | None = None

    def finish(self) -> None:
        """In the event loop's thread."""
        if self.future.done():  # the caller was cancelled; the transaction stays
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


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


class SQLiteLedger:
    """`on_commit` is called in the thread of the event loop that this was made in."""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        on_commit: OnCommit,
        *,
        policy_file: PolicyFile | None = None,
        clock: Callable[[], float] = boot_time,
        wall_clock: Callable[[], float] = time.time,
        boot_id: str | None = None,
        first_fence: int | None = None,
    ) -> None:
        """`policy_file`: None: nothing is limited. `first_fence`: of a new ledger, for tests.

        Raises `LedgerUnavailableError` where the file cannot be used.
        """
        # Outcomes are dropped from memory between transactions, never within one.
        self._settings = replace(settings, remember_at_most=None)
        self._on_commit = on_commit
        self._clock = clock
        self._wall_clock = wall_clock
        self._policy_file = policy_file
        self._usage_file = UsageFile(usage_path(path))
        #: When to write the records that wait in the ledger; at first those that other processes have left there, if
        #: they are many: commands that end soon leave the others to the next process.
        self._record_at = -math.inf
        self._leaves_few_records = True
        self._usage_complaint = ""
        self._boot_id = boot_id or id_of_this_boot()
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | Literal["ring"] | None] = SimpleQueue()
        self._is_ring_due = False
        self._is_closed = False
        self._file = LedgerFile(path, schema_from(first_fence), FORMAT)
        with self._file.errors(), self._file.in_use:
            self._tables = Tables(self._file.connection, stores_use=settings.fair_share_half_life_seconds is not None)
            self.secret: str = self._tables.secret()
            self._meta = self._tables.meta()
            if policy_file is not None:
                policy_file.update(self._tables.policy())
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
        self._pause_until = -math.inf
        self._complaint = ""
        self._process = name_of_this_process()
        #: The processes that the last transaction concerns.
        self._concerned: set[str] = set()
        self._bell = Bell(path, self._process, self._loop, self._rung)
        self._thread = threading.Thread(target=self._run, name="gpu-ledger", daemon=True)
        self._thread.start()

    # --- in the event loop's thread ---

    @property
    def problem(self) -> str | None:
        return self._complaint or None

    @property
    def policy(self) -> PolicyInForce:
        return PolicyInForce() if self._policy_file is None else self._policy_file.in_force

    async def totals(self) -> dict[str, Any]:
        return await self.look(lambda _pool, _now: self._tables.totals())

    async def usage(self, begin: float, keep: Callable[[dict[str, Any]], bool] = lambda _: True) -> UsageRead:
        self._record_at, self._leaves_few_records = -math.inf, False
        await self.submit(Ticked())  # records that wait in the ledger are written now
        held = await self.look(lambda pool, now: records_of_held(pool, now, self._wall_clock))
        found = await asyncio.to_thread(
            read_usage, self._usage_file.path, lambda record: has_ended_after(record, begin) and keep(record)
        )
        found.records += held
        return found

    async def submit(self, event: Event) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = await self._enqueue(event, is_question=False)
        return effects

    async def look(self, question: Question[T]) -> T:
        answer: T = await self._enqueue(question, is_question=True)
        return answer

    def _enqueue(self, what: Any, *, is_question: bool) -> asyncio.Future[Any]:
        if self._file.is_inherited:
            raise LedgerUnavailableError("the ledger was opened by the process this one was forked from: open it again")
        if self._is_closed:
            raise LedgerUnavailableError("the ledger was closed")
        job = _Job(what, is_question, self._loop.create_future(), time.monotonic())
        self._jobs.put(job)
        return job.future

    def _rung(self) -> None:
        """Another process has committed something: look now."""
        if not self._is_ring_due:
            self._is_ring_due = True
            self._jobs.put("ring")

    async def close(self) -> None:
        if self._file.is_inherited:
            return
        if not self._is_closed:
            # No job is put into the queue behind this.
            self._is_closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._bell.close()

    # --- in the ledger's thread ---

    def _run(self) -> None:
        is_closing, questions = False, deque[_Job]()
        while not is_closing or questions:
            events: list[_Job] = []
            try:
                job = self._jobs.get(timeout=0.0 if questions else self._seconds_to_next_turn())
                while True:
                    if job is None:
                        is_closing = True
                        break
                    if job == "ring":
                        self._is_ring_due = False  # before looking: a later one must not be missed
                    else:
                        (questions if job.is_question else events).append(job)
                    if len(events) >= MOST_AT_ONCE:
                        break
                    job = self._jobs.get_nowait()
            except Empty:
                pass
            try:
                with self._file.in_use:
                    self._turn(events, questions)
            except Exception:
                logger.exception("the ledger's thread failed; continuing")
        with self._file.in_use, contextlib.suppress(Exception):  # such as a full disk
            self._file.connection.close()

    def _seconds_to_next_turn(self) -> float:
        if self._pool is None:
            return FOLLOW_SECONDS
        due_in = self._pool.timers.next_at() - self._clock()
        return min(max(due_in, 0.0005), FOLLOW_SECONDS)

    def _turn(self, events: list[_Job], questions: deque[_Job]) -> None:
        now = self._clock()
        self._away_seconds, self._awake_at = now - self._awake_at, now
        for job in events:
            if isinstance(job.what, Observed):
                # Even if the transaction fails: readings can be shown while the ledger is locked.
                self._observed[job.what.endpoint_id] = job.what
        if self._complaint:
            # The next transaction may block as long as the last one, and questions need not wait for it.
            self._answer_some(questions)
        if events or (self._clock() >= self._pause_until and self._has_something_to_do()):
            self._transact(events)
        self._answer_some(questions)

    def _answer_some(self, questions: deque[_Job]) -> None:
        """The others in the next turn: who only looks must not delay who renews."""
        until = time.monotonic() + QUESTIONS_SECONDS
        while questions:
            self._answer_question(questions.popleft())
            if time.monotonic() > until:
                break

    def _has_something_to_do(self) -> bool:
        pool, now = self._pool, self._clock()
        if pool is None:
            return True
        if pool.timers.next_at() <= now or self._clock() >= self._record_at:
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
        meta = self._tables.meta()
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
        if pool is None or self._complaint or pool.timers.next_at() <= now or not self._is_stamp_due(pool, now):
            return False
        self._file.check()
        connection.execute("PRAGMA synchronous=NORMAL")
        try:
            connection.execute("BEGIN IMMEDIATE")
            meta = self._tables.meta()
            if meta != self._meta or unserved_seconds(meta.now, now, self._settings) is not None:
                return False
            data_version = connection.pragma("data_version")
            self._meta = self._tables.stamp(meta, now)
            connection.execute("COMMIT")
            self._data_version = data_version
            return True
        finally:
            self._roll_back()
            connection.execute("PRAGMA synchronous=FULL")

    # --- a transaction ---

    def _transact(self, events: list[_Job]) -> None:
        # An event that came while another attempt was under way has waited already.
        self._file.asked_at = min((job.asked_at for job in events), default=None)
        try:
            with self._file.errors():
                if not events and self._stamped():
                    return
                committed = self._in_transaction(events)
        except Exception as error:
            self._failed(error)
            for job in events:
                job.error = self._error_of(job.what, error)
                self._call_in_loop(job.finish)
            return
        self._complaint, self._pause_until = "", -math.inf
        self._bell.ring(self._concerned)
        if events or committed.effects or committed.changes or committed.is_everything:
            self._call_in_loop(self._deliver, committed, events)

    def _in_transaction(self, events: list[_Job]) -> Committed:
        connection = self._file.connection
        self._concerned = set()
        self._file.check()
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Within the transaction, so that later commits of others change it.
            data_version = connection.pragma("data_version")
            news = self._catch_up()
            pool, now, foreign = news.pool, news.now, self._requests.take_changes()
            effects: list[Effect] = []
            is_to_write = self._write_records()
            # From here on this process decides: all changes are written and reported.
            if news.resumed is not None and not self._has_served_unstamped(pool):
                effects += _apply(pool, news.resumed, now)  # before any other event, which would run timers
            if self._policy_file is not None:
                is_to_write |= self._follow_policy(self._policy_file, news)
                if pool.policy is not self._policy_file.in_force.policy:
                    effects += _apply(pool, PolicyRead(self._policy_file.in_force.policy), now)
            if news.is_everything:
                for observed in self._observed.values():
                    effects += _apply(pool, observed, now)  # as if they had just arrived
            for job in events:
                try:
                    self._remember(pool, job.what, now)
                    job.value = _apply(pool, job.what, now)
                except IllegalEventError as problem:
                    job.error = problem
                else:
                    effects += job.value
            if not events or news.is_any:
                effects += _apply(pool, Ticked(), now)
            decided_at = self._clock()
            own = self._requests.take_changes()
            has_uses = pool.fair_share is not None and bool(pool.fair_share.changed)
            # After a failure, something must be written: else a ledger that cannot be would count as served.
            is_to_write |= has_uses or news.is_other_boot or bool(self._complaint)
            is_to_write |= self._tables.is_other_order(pool.fleet_order)
            if own or is_to_write or self._is_stamp_due(pool, now):
                has_records = self._tables.to_record(records_of(pool, own.values(), now, self._wall_clock))
                meta = self._tables.write(pool, own, self._meta, self._boot_id)
                self._changes_to_forget_after -= len(own)
                if now >= self._forget_at or self._changes_to_forget_after <= 0:
                    self._forget_at, self._changes_to_forget_after = now + FORGET_SECONDS, FORGET_CHANGES
                    if self._tables.forget_ended(now - self._settings.remember_seconds):
                        self._changes_to_forget_after = FORGET_CHANGES_SOON
                    if (long := self._file.check_size()) is not None:
                        logger.warning(long)
                connection.execute("COMMIT")
                self._meta = meta
                self._concerned = processes_concerned(pool, own.values()) - {self._process}
                if has_records:
                    self._record_at = min(self._record_at, now + RECORD_SECONDS)
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
        known, meta = self._meta, self._tables.meta()
        now = self._clock()
        is_other_boot = meta.boot_id != self._boot_id
        if is_other_boot:
            if self._has_served:
                # No process survives a reboot, so the other boot id means another host, with other clocks and GPUs.
                raise LedgerUnavailableError(
                    f"the ledger {self._file.path} is used by another host, or by a container with its own kernel"
                )
            if meta.boot_id:
                meta = self._tables.restart_clock(meta, now, self._boot_id)
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
            self._tables.load(pool, None, meta)
        elif is_any:
            self._tables.load(pool, known.revision, meta)
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
        stored = self._tables.policy()
        if (after := policy_file.update(stored)) == stored:
            return False
        self._tables.store_policy(after)
        return True

    def _write_records(self) -> bool:
        """Move the records that wait in the ledger to the usage file; whether there were any. Nothing depends on it."""
        if self._clock() < self._record_at:
            return False
        if self._leaves_few_records:
            self._leaves_few_records = False
            if not self._tables.has_unrecorded(MANY_RECORDS):
                self._record_at = self._clock() + RECORD_SECONDS
                return False
        self._record_at = math.inf
        waiting = self._tables.unrecorded()
        if not waiting:
            return False
        try:
            self._usage_file.append([record for _, record in waiting])
        except OSError as error:
            lost = self._tables.forget_unrecorded()
            self._complain_of_usage(f"{self._usage_file.path} cannot be written: {error.strerror or error}", lost)
            self._record_at = self._clock() + RECORD_AGAIN_SECONDS
            return lost > 0
        self._usage_complaint = ""
        totals = self._tables.totals()
        add_to_totals(totals, (record for _, line in waiting if (record := parse_record(line)) is not None))
        self._tables.store_totals(totals)
        self._tables.recorded(waiting[-1][0])
        self._record_at = self._clock()  # there may be more
        return True

    def _complain_of_usage(self, complaint: str, lost: int) -> None:
        if complaint != self._usage_complaint or lost:
            self._usage_complaint = complaint
            logger.error("%s; %s", complaint, f"{lost} records were lost" if lost else "its records wait in the ledger")

    def _remember(self, pool: Pool, event: Any, now: float) -> None:
        """Load the outcome that the event is about, if it is only in the file."""
        outcome: Outcome | None = None
        match event:
            case Requested(request=request) if request.request_id not in pool.requests:
                outcome = self._tables.ended_request(request.request_id)
            case Cancelled(request_id=request_id) if request_id not in pool.requests:
                outcome = self._tables.ended_request(request_id)
            case Released(lease_id=lease_id) | Renewed(lease_id=lease_id) | QuarantineEnded(lease_id=lease_id):
                if pool.leases.lookup(lease_id) is None and pool.outcomes.of_lease(lease_id, now) is None:
                    outcome = self._tables.ended_lease(lease_id)
            case _:
                return
        if outcome is not None and not pool.outcomes.is_old(outcome, now):
            pool.remember(outcome)
            self._requests.forget_change(outcome.request.request_id)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, LedgerUnavailableError):
            logger.error("applying events to the ledger failed", exc_info=error)
        self._pool = None
        self._pause_until = self._clock() + PAUSE_SECONDS
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("nothing can be granted: %s", error)

    def _error_of(self, event: Any, error: Exception) -> LedgerUnavailableError:
        if not isinstance(error, LedgerUnavailableError):
            error = LedgerUnavailableError(f"{type(error).__name__}: {error}")
        if isinstance(event, Renewed):
            error = type(error)(str(error))  # others get the same error
            error.lease = "held" if self._is_held_by_all(event) else "unknown"
        return error

    def _is_held_by_all(self, event: Renewed) -> bool:
        """Whether no process can write the ledger, so that the lease has a full TTL from now on (rule 10).

        Whoever can write it again first finds that nobody served it until then.
        """
        connection = self._file.connection
        try:
            self._file.check()
            connection.execute("BEGIN")
            meta, lease = self._tables.meta(), self._tables.live_lease(event.lease_id)
        except Exception:
            return False
        finally:
            self._roll_back()
        if meta.boot_id != self._boot_id or lease is None or lease.state is not LeaseState.HELD:
            return False
        is_theirs = event.by in (None, lease.request.owner)
        return is_theirs and unserved_seconds(meta.now, self._clock(), self._settings) is not None

    # --- questions ---

    def _answer_question(self, job: _Job) -> None:
        assert callable(job.what)
        try:
            # As of the last turn: at most `FOLLOW_SECONDS` ago.
            job.value = job.what(self._pool or self._read_only_pool(), self._clock())
        except Exception as error:
            job.error = error
        self._call_in_loop(job.finish)

    def _read_only_pool(self) -> Pool:
        """For questions while the ledger cannot be written, for example because the disk is full."""
        pool = MirrorPool(self._settings)
        connection = self._file.connection
        with self._file.errors():
            self._file.check()
            connection.execute("BEGIN")
            try:
                self._tables.load(pool, None, self._tables.meta())
            finally:
                connection.execute("ROLLBACK")
        for observed in self._observed.values():
            pool.observe(observed.endpoint_id, observed.readings, observed.begun_at)
        return pool

    # --- answers ---

    def _deliver(self, committed: Committed, events: list[_Job]) -> None:
        try:
            self._on_commit(committed)
        except Exception:  # callers get their answers anyway: the commit is done
            logger.exception("the commit listener failed")
        for job in events:
            job.finish()

    def _call_in_loop(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)


def _apply(pool: Pool, event: Any, now: float) -> tuple[Effect, ...]:
    return tuple(effect for effect in pool.apply(event, now) if not isinstance(effect, WakeAt))
