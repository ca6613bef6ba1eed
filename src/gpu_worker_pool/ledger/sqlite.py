"""The ledger in a SQLite file, for any number of processes of one host at once.

One thread a process takes all events that wait and makes one transaction of them: it reads what others have committed
since, lets the core decide, writes the difference, and only when that is on the disk is anybody told. If anything
fails, nobody was promised anything, and what this process believed is dropped and read anew.
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
from gpu_worker_pool.ledger import Committed, Question, Tell, tell_of
from gpu_worker_pool.ledger.change_tracker import ChangeTracker
from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, SCHEMA, Tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: How soon what another process committed is noticed.
FOLLOW_SECONDS: Final = 0.05
#: How often somebody says that the ledger is served, and after which silence nobody did (rule 10).
STAMP_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 15.0
#: After a failure, how long until this thread tries again by itself.
PAUSE_SECONDS: Final = 1.0
FORGET_SECONDS: Final = 60.0
#: Fewer than are removed at once: however busy a day, the file does not grow beyond what is kept.
FORGET_CHANGES: Final = 4_000
MOST_AT_ONCE: Final = 256
#: Kept in this process's memory; the others are looked up in the file.
MOST_OUTCOMES: Final = 1000


@dataclass(slots=True)
class _Asked:
    """An event, or a question, and whom to tell what came of it."""

    what: Event | Callable[[Pool, float], Any]
    is_question: bool
    answer: Callable[[Any, BaseException | None], object]


@dataclass(slots=True)
class _News:
    """What a transaction found when it began."""

    pool: Pool
    now: float
    #: Whether others have committed anything since, and whether everything was read anew.
    is_any: bool
    is_everything: bool
    is_other_boot: bool
    #: For how long nobody served the ledger, if that was long enough to count (rule 10).
    unserved_seconds: float | None


class SQLiteLedger:
    """`tell` is called in the thread of the event loop that this was made in."""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        tell: Tell,
        *,
        clock: Callable[[], float] = boot_time,
        boot_id: str | None = None,
    ) -> None:
        """Raises `LedgerUnavailableError` where the file cannot be used."""
        # What is too much to keep in memory is forgotten between transactions, never within one.
        self._settings = replace(settings, remember_at_most=None)
        self._tell = tell
        self._clock = clock
        self._boot_id = boot_id or id_of_this_boot()
        self._loop = asyncio.get_running_loop()
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._is_closed = False
        self._file = LedgerFile(path, SCHEMA, FORMAT)
        with self._file.errors(), self._file.in_use:
            self._tables = Tables(self._file.connection)
            self.secret = self._tables.secret()
            self._meta = self._tables.meta()
        #: What this process believes; None when it must be read anew.
        self._pool: Pool | None = None
        self._requests: ChangeTracker[str, Waiter | Lease | Outcome] = ChangeTracker()
        self._data_version = -1
        self._has_served = False
        #: The last readings: they are in no file, and a pool that is read anew needs them.
        self._observed: dict[str, Observed] = {}
        self._forget_at = -math.inf
        self._changes_to_forget_after = FORGET_CHANGES
        self._pause_until = -math.inf
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="gpu-ledger", daemon=True)
        self._thread.start()

    # --- asking, in the event loop's thread ---

    async def submit(self, event: Event) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = await self._ask(event, is_question=False)
        return effects

    async def look(self, question: Question[T]) -> T:
        answer: T = await self._ask(question, is_question=True)
        return answer

    def _ask(self, what: Any, *, is_question: bool) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()

        def answer(value: Any, error: BaseException | None) -> None:
            if future.done():  # whoever asked has gone; what was done is done
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        if self._file.is_inherited:
            raise LedgerUnavailableError("the ledger was opened by the process this one was forked from: open it anew")
        if self._is_closed:
            raise LedgerUnavailableError("the ledger was closed")
        self._asked.put(_Asked(what, is_question, answer))
        return future

    async def close(self) -> None:
        if self._file.is_inherited:
            return
        if not self._is_closed:
            # Nothing is put into the queue behind this.
            self._is_closed = True
            self._asked.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the ledger's thread ---

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            batch: list[_Asked] = []
            try:
                asked = self._asked.get(timeout=self._seconds_to_next_turn())
                while True:
                    if asked is None:
                        is_closing = True
                        break
                    batch.append(asked)
                    if len(batch) >= MOST_AT_ONCE:
                        break
                    asked = self._asked.get_nowait()
            except Empty:
                pass
            try:
                with self._file.in_use:
                    self._turn(batch)
            except Exception:
                logger.exception("the ledger's thread failed; going on")
        with self._file.in_use, contextlib.suppress(Exception):  # a full disk is no reason to fail at the end
            self._file.connection.close()

    def _seconds_to_next_turn(self) -> float:
        if self._pool is None:
            return FOLLOW_SECONDS
        due_in = self._pool.timers.next_at() - self._clock()
        return min(max(due_in, 0.0005), FOLLOW_SECONDS)

    def _turn(self, batch: list[_Asked]) -> None:
        questions = [asked for asked in batch if asked.is_question]
        events = [asked for asked in batch if not asked.is_question]
        for asked in events:
            if isinstance(asked.what, Observed):
                # Whatever becomes of the transaction: what GPUs show is no secret of a ledger that is locked.
                self._observed[asked.what.endpoint_id] = asked.what
        if self._complaint:
            # The next attempt may take as long as the last one, and whoever only looks need not wait for it.
            while questions:
                self._answer_question(questions.pop(0))
        if events or (self._clock() >= self._pause_until and self._has_something_to_do()):
            self._transact(events)
        for asked in questions:
            self._answer_question(asked)

    def _has_something_to_do(self) -> bool:
        pool, now = self._pool, self._clock()
        if pool is None:
            return True
        if pool.timers.next_at() <= now or self._is_stamp_due(pool, now):
            return True
        try:
            return self._others_have_committed()
        except Exception:
            return True  # what is wrong with it, the transaction says

    def _others_have_committed(self) -> bool:
        # Not `Connection.data_version`, which does not look: it knows what the last statement happened to see.
        return bool(self._file.connection.pragma("data_version") != self._data_version)

    def _is_stamp_due(self, pool: Pool, now: float) -> bool:
        """A ledger without leases and waiters needs no stamp: nobody's time runs."""
        has_live = bool(pool.queue.waiting or len(pool.leases))
        return has_live and (self._meta.now is None or now - self._meta.now >= STAMP_SECONDS)

    # --- a transaction ---

    def _transact(self, events: list[_Asked]) -> None:
        results: list[tuple[_Asked, Any, BaseException | None]] = []
        try:
            with self._file.errors():
                committed = self._in_transaction(events, results)
        except LedgerUnavailableError as error:
            self._failed(error)
            for asked in events:
                self._call_in_loop(asked.answer, None, error)
            return
        except Exception as error:
            logger.exception("the ledger could not decide")
            self._failed(error)
            for asked in events:
                self._call_in_loop(asked.answer, None, LedgerUnavailableError(f"{type(error).__name__}: {error}"))
            return
        self._complaint, self._pause_until = "", -math.inf
        if results or committed.effects or committed.changes or committed.is_everything:
            self._call_in_loop(self._deliver, committed, results)

    def _in_transaction(
        self, events: list[_Asked], results: list[tuple[_Asked, Any, BaseException | None]]
    ) -> Committed:
        connection = self._file.connection
        self._file.check()
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Within the transaction: what others commit from now on will have changed it.
            data_version = connection.pragma("data_version")
            news = self._catch_up()
            pool, now, foreign = news.pool, news.now, self._requests.take_changes()
            effects: list[Effect] = []
            # From here on it is this process that decides: all of it is written, and told.
            if news.unserved_seconds is not None:
                effects += _apply(pool, Resumed(news.unserved_seconds), now)
            if news.is_everything:
                for observed in self._observed.values():
                    effects += _apply(pool, observed, now)  # as if they had just come in
            for asked in events:
                try:
                    self._remember(pool, asked.what, now)
                    done = _apply(pool, asked.what, now)
                except IllegalEventError as problem:
                    results.append((asked, None, problem))
                    continue
                effects += done
                results.append((asked, done, None))
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
        """Have the pool know everything that was committed by anybody; nothing is decided here."""
        known, meta = self._meta, self._tables.meta()
        now = self._clock()
        is_other_boot = meta.boot_id != self._boot_id
        if is_other_boot:
            if self._has_served:
                # This process has not survived a reboot. Their clocks are not ours, and neither are their GPUs.
                raise LedgerUnavailableError(
                    f"the ledger {self._file.path} is used by another host, or by a container with a kernel of its own"
                )
            if meta.boot_id:
                meta = self._tables.restart_clock(meta, now, self._boot_id)
            self._pool = None
        if known.revision < meta.forgotten:
            self._pool = None  # how something ended that this process believes in is not written any more
        unserved_seconds = 0.0 if meta.now is None else max(now - meta.now, 0.0)
        # Time never goes back, whatever this process's clock says.
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
        """Bring what the event is about to the pool's mind, if it ended and only the file knows."""
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
        self._pool = None
        self._pause_until = self._clock() + PAUSE_SECONDS
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("nothing can be granted: %s", error)

    # --- looking ---

    def _answer_question(self, asked: _Asked) -> None:
        assert callable(asked.what)
        value, problem = None, None
        try:
            # As of the last turn: at most `FOLLOW_SECONDS` ago.
            value = asked.what(self._pool or self._read_only_pool(), self._clock())
        except Exception as error:
            problem = error
        self._call_in_loop(asked.answer, value, problem)

    def _read_only_pool(self) -> Pool:
        """To look at, while nothing can be written: a full disk is no reason not to tell who waits for what."""
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

    # --- telling ---

    def _deliver(self, committed: Committed, results: list[tuple[_Asked, Any, BaseException | None]]) -> None:
        tell_of(committed, self._tell)
        for asked, value, problem in results:
            asked.answer(value, problem)

    def _call_in_loop(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *args)


def _apply(pool: Pool, event: Any, now: float) -> tuple[Effect, ...]:
    return tuple(effect for effect in pool.apply(event, now) if not isinstance(effect, WakeAt))
