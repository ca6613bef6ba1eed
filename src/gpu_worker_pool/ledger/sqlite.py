"""The ledger in a SQLite file, for any number of processes of one host at once.

One thread per process handles all waiting events in one transaction (`transactions.py`), and reports the effects only
when they are on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Effect, Event, Observed, PoolSettings, Renewed, Ticked
from gpu_worker_pool.errors import IllegalEventError, LedgerUnavailableError
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.ledger.bell import Bell
from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.policy_file import PolicyInForce
from gpu_worker_pool.ledger.records import records_of_held
from gpu_worker_pool.ledger.tables import FORMAT, schema_from
from gpu_worker_pool.ledger.transactions import Transactions
from gpu_worker_pool.ledger.usage_files import UsageRead, has_ended_after, read_usage
from gpu_worker_pool.ledger.usage_recorder import UsageRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_worker_pool.ledger import Committed, OnCommit, Question
    from gpu_worker_pool.ledger.policy_file import PolicyFile

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

#: How often to check for commits of other processes, which also ring (`bell.py`) the processes they concern.
FOLLOW_SECONDS: Final = 0.05
#: After a failure, how long until this thread tries again by itself.
PAUSE_SECONDS: Final = 1.0
MOST_AT_ONCE: Final = 256
#: How long questions are answered before it is the turn of the next events.
QUESTIONS_SECONDS: Final = 0.01


@dataclass(slots=True)
class _Job:
    """An event or a question, the future of its answer, and the answer once it is known."""

    what: Any
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
        self._on_commit = on_commit
        self._clock = clock
        self._wall_clock = wall_clock
        self._policy_file = policy_file
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | Literal["ring"] | None] = SimpleQueue()
        self._is_ring_due = False
        self._is_closed = False
        self._recorder = UsageRecorder(path, clock)
        self._file = LedgerFile(path, schema_from(first_fence), FORMAT)
        with self._file.errors(), self._file.in_use:
            self._transactions = Transactions(
                self._file,
                settings,
                self._recorder,
                policy_file=policy_file,
                clock=clock,
                wall_clock=wall_clock,
                boot_id=boot_id,
            )
        self.secret: str = self._transactions.secret
        self._pause_until = -math.inf
        self._complaint = ""
        self._process = name_of_this_process()
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
        return await self.look(lambda _pool, _now: self._transactions.tables.totals())

    async def usage(self, begin: float, keep: Callable[[dict[str, Any]], bool] = lambda _: True) -> UsageRead:
        self._recorder.record_soon()
        await self.submit(Ticked())
        held = await self.look(lambda pool, now: records_of_held(pool, now, self._wall_clock))
        found = await asyncio.to_thread(
            read_usage, self._recorder.path, lambda record: has_ended_after(record, begin) and keep(record)
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
        return min(max(self._transactions.seconds_to_timer(), 0.0005), FOLLOW_SECONDS)

    def _turn(self, events: list[_Job], questions: deque[_Job]) -> None:
        self._transactions.begin_turn([job.what for job in events])
        if self._complaint:
            # The next transaction may block as long as the last one, and questions need not wait for it.
            self._answer_some(questions)
        if events or self._has_something_to_do():
            self._transact(events)
        self._answer_some(questions)

    def _has_something_to_do(self) -> bool:
        return self._clock() >= self._pause_until and self._transactions.has_something_to_do()

    def _answer_some(self, questions: deque[_Job]) -> None:
        """The others are answered in the next turn: reading must not delay renewals."""
        until = time.monotonic() + QUESTIONS_SECONDS
        while questions:
            self._answer_question(questions.popleft())
            if time.monotonic() > until:
                break

    def _transact(self, events: list[_Job]) -> None:
        # An event that came while another attempt was under way has waited already. Once an attempt has failed, no
        # caller waits for readings to be written, but questions wait for the end of the next attempt.
        self._file.asked_at = min((job.asked_at for job in events), default=None)
        if self._complaint and all(isinstance(job.what, Observed) for job in events):
            self._file.asked_at = -math.inf
        try:
            with self._file.errors():
                done = self._transactions.run([job.what for job in events], has_failed=bool(self._complaint))
        except Exception as error:
            self._failed(error)
            for job in events:
                job.error = self._error_of(job.what, error)
                self._call_in_loop(job.finish)
            return
        if done is None:
            return
        committed, answers = done
        for job, answer in zip(events, answers, strict=True):
            if isinstance(answer, IllegalEventError):
                job.error = answer
            else:
                job.value = answer
        self._complaint, self._pause_until = "", -math.inf
        self._bell.ring(self._transactions.concerned - {self._process})
        if events or committed.effects or committed.changes or committed.is_everything:
            self._call_in_loop(self._deliver, committed, events)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, LedgerUnavailableError):
            logger.error("applying events to the ledger failed", exc_info=error)
        self._transactions.drop_copy()
        self._pause_until = self._clock() + PAUSE_SECONDS
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("nothing can be granted: %s", error)

    def _error_of(self, event: Any, error: Exception) -> LedgerUnavailableError:
        if not isinstance(error, LedgerUnavailableError):
            error = LedgerUnavailableError(f"{type(error).__name__}: {error}")
        if isinstance(event, Renewed):
            error = type(error)(str(error))  # others get the same error
            error.lease = "held" if self._transactions.is_held_by_all(event) else "unknown"
        return error

    # --- questions ---

    def _answer_question(self, job: _Job) -> None:
        assert callable(job.what)
        try:
            # As of the last turn: at most `FOLLOW_SECONDS` ago.
            job.value = job.what(self._transactions.pool_for_questions(), self._clock())
        except Exception as error:
            job.error = error
        self._call_in_loop(job.finish)

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
