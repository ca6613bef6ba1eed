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
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import (
    Cancelled,
    Effect,
    Event,
    Lease,
    Observed,
    Outcome,
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
from gpu_worker_pool.errors import IllegalEventError, LedgerUnavailableError
from gpu_worker_pool.hardware.processes import boot_id as id_of_this_boot
from gpu_worker_pool.ledger import Committed, OnCommit, Question
from gpu_worker_pool.ledger.change_tracker import ChangeTracker
from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, SCHEMA, Tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: How often to check for commits of other processes.
FOLLOW_SECONDS: Final = 0.05
#: How often a process writes a time stamp to the ledger, and the age of the stamp that means an outage (rule 10).
STAMP_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
#: After a failure, how long until this thread tries again by itself.
PAUSE_SECONDS: Final = 1.0
#: Ended requests are removed at this interval, or after this many changes: fewer than one removal deletes, so that the
#: file does not grow without bound.
FORGET_SECONDS: Final = 60.0
FORGET_CHANGES: Final = 4_000
MOST_AT_ONCE: Final = 256
#: How many outcomes are kept in memory; others are looked up in the file.
MOST_OUTCOMES: Final = 1000


@dataclass(slots=True)
class _Job:
    """An event or a question, the future of its answer, and the answer once it is known."""

    what: Event | Callable[[Pool, float], Any]
    is_question: bool
    future: asyncio.Future[Any]
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
    #: How long no process served the ledger, if that was long enough to count (rule 10).
    unserved_seconds: float | None


class SQLiteLedger:
    """`on_commit` is called in the thread of the event loop that this was made in."""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        on_commit: OnCommit,
        *,
        clock: Callable[[], float] = boot_time,
        boot_id: str | None = None,
    ) -> None:
        """Raises `LedgerUnavailableError` where the file cannot be used."""
        # Outcomes are dropped from memory between transactions, never within one.
        self._settings = replace(settings, remember_at_most=None)
        self._on_commit = on_commit
        self._clock = clock
        self._boot_id = boot_id or id_of_this_boot()
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closed = False
        self._file = LedgerFile(path, SCHEMA, FORMAT)
        with self._file.errors(), self._file.in_use:
            self._tables = Tables(self._file.connection)
            self.secret = self._tables.secret()
            self._meta = self._tables.meta()
        #: This process's copy of the ledger; None when it must be read again.
        self._pool: Pool | None = None
        self._requests: ChangeTracker[str, Waiter | Lease | Outcome] = ChangeTracker()
        self._data_version = -1
        self._has_served = False
        #: The last readings: they are not in the file, and a pool that is read again needs them.
        self._observed: dict[str, Observed] = {}
        self._forget_at = -math.inf
        self._changes_to_forget_after = FORGET_CHANGES
        self._pause_until = -math.inf
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="gpu-ledger", daemon=True)
        self._thread.start()

    # --- in the event loop's thread ---

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
        job = _Job(what, is_question, self._loop.create_future())
        self._jobs.put(job)
        return job.future

    async def close(self) -> None:
        if self._file.is_inherited:
            return
        if not self._is_closed:
            # Nothing is put into the queue behind this.
            self._is_closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the ledger's thread ---

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            batch: list[_Job] = []
            try:
                job = self._jobs.get(timeout=self._seconds_to_next_turn())
                while True:
                    if job is None:
                        is_closing = True
                        break
                    batch.append(job)
                    if len(batch) >= MOST_AT_ONCE:
                        break
                    job = self._jobs.get_nowait()
            except Empty:
                pass
            try:
                with self._file.in_use:
                    self._turn(batch)
            except Exception:
                logger.exception("the ledger's thread failed; continuing")
        with self._file.in_use, contextlib.suppress(Exception):  # such as a full disk
            self._file.connection.close()

    def _seconds_to_next_turn(self) -> float:
        if self._pool is None:
            return FOLLOW_SECONDS
        due_in = self._pool.timers.next_at() - self._clock()
        return min(max(due_in, 0.0005), FOLLOW_SECONDS)

    def _turn(self, batch: list[_Job]) -> None:
        questions = [job for job in batch if job.is_question]
        events = [job for job in batch if not job.is_question]
        for job in events:
            if isinstance(job.what, Observed):
                # Even if the transaction fails: readings can be shown while the ledger is locked.
                self._observed[job.what.endpoint_id] = job.what
        if self._complaint:
            # The next transaction may block as long as the last one, and questions need not wait for it.
            while questions:
                self._answer_question(questions.pop(0))
        if events or (self._clock() >= self._pause_until and self._has_something_to_do()):
            self._transact(events)
        for job in questions:
            self._answer_question(job)

    def _has_something_to_do(self) -> bool:
        pool, now = self._pool, self._clock()
        if pool is None:
            return True
        if pool.timers.next_at() <= now or self._is_stamp_due(pool, now):
            return True
        try:
            return self._others_have_committed()
        except Exception:
            return True  # the transaction reports the error

    def _others_have_committed(self) -> bool:
        # Not `Connection.data_version`, which only knows what the last statement saw.
        return bool(self._file.connection.pragma("data_version") != self._data_version)

    def _is_stamp_due(self, pool: Pool, now: float) -> bool:
        """A ledger without leases and waiters needs no stamp: nothing in it can expire."""
        has_live = bool(pool.queue.waiting or len(pool.leases))
        return has_live and (self._meta.now is None or now - self._meta.now >= STAMP_SECONDS)

    # --- a transaction ---

    def _transact(self, events: list[_Job]) -> None:
        try:
            with self._file.errors():
                committed = self._in_transaction(events)
        except Exception as error:
            self._failed(error)
            for job in events:
                job.error = error
                if not isinstance(error, LedgerUnavailableError):
                    job.error = LedgerUnavailableError(f"{type(error).__name__}: {error}")
                self._call_in_loop(job.finish)
            return
        self._complaint, self._pause_until = "", -math.inf
        if events or committed.effects or committed.changes or committed.is_everything:
            self._call_in_loop(self._deliver, committed, events)

    def _in_transaction(self, events: list[_Job]) -> Committed:
        connection = self._file.connection
        self._file.check()
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Within the transaction, so that later commits of others change it.
            data_version = connection.pragma("data_version")
            news = self._catch_up()
            pool, now, foreign = news.pool, news.now, self._requests.take_changes()
            effects: list[Effect] = []
            # From here on this process decides: all changes are written and reported.
            if news.unserved_seconds is not None:
                effects += _apply(pool, Resumed(news.unserved_seconds), now)
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
            own = self._requests.take_changes()
            if own or self._is_stamp_due(pool, now) or news.is_other_boot:
                meta = self._tables.write(pool, own, self._meta, self._boot_id)
                self._changes_to_forget_after -= len(own)
                if now >= self._forget_at or self._changes_to_forget_after <= 0:
                    self._forget_at, self._changes_to_forget_after = now + FORGET_SECONDS, FORGET_CHANGES
                    self._tables.forget_ended(now - self._settings.remember_seconds)
                connection.execute("COMMIT")
                self._meta = meta
            else:
                connection.execute("ROLLBACK")
        except BaseException:
            if connection.in_transaction:
                with contextlib.suppress(Exception):
                    connection.execute("ROLLBACK")
            raise
        self._data_version = data_version
        self._has_served = True
        pool.forget_outcomes(MOST_OUTCOMES)
        return Committed(tuple(effects), foreign | own, news.is_everything, pool.fence, dict(pool.tally))

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
        unserved_seconds = 0.0 if meta.now is None else max(now - meta.now, 0.0)
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
        is_silent = unserved_seconds > SILENCE_SECONDS or is_other_boot
        return _News(pool, now, is_any, is_everything, is_other_boot, unserved_seconds if is_silent else None)

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
