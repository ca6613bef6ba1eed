"""One request at several places, with one outcome: the best is asked first, then the next, then all are waited at.

In the client's event loop. The first grant wins; every other place is given up, and any second grant given back. GPUs
that are assigned in process, where some servers give no leases, are one more place.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    PoolStoppedError,
    ServiceRefusedError,
    WorkerTimeoutError,
)
from gpu_worker_pool.leases.endpoint import Trouble
from gpu_worker_pool.leases.endpoint_request import Failed
from gpu_worker_pool.leases.values import HeldLease, StillWaiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.leases.endpoint_request import Place
    from gpu_worker_pool.models import GPUAssignment

#: An endpoint that is silent for so long does not keep the next one from being asked.
HEDGE_SECONDS = 1.0
#: Whoever waits for no time at all waits so long for what the endpoints say to that.
FIRST_ANSWER_SECONDS = 2.0


@dataclass(eq=False)
class Entry:
    """A place, and what it has said."""

    name: str
    begun_at: float
    place: Place | None = None
    #: Instead of a place: what is asked in process.
    task: asyncio.Task[GPUAssignment] | None = None
    has_answered: bool = False
    waiting: StillWaiting | None = None
    #: What went wrong last, if it is asked again.
    trouble: GPUWorkerPoolError | None = None
    #: Why it is not asked any more.
    error: Exception | None = None
    won: HeldLease | None = None


class Race:
    """`make_place` says how to ask an endpoint, or raises why that makes no sense; `ask_in_process` begins there, and
    `release_in_process` gives back what was granted there in vain."""

    def __init__(
        self,
        make_place: Callable[[str, Callable[[Place, object], object]], Place],
        ask_in_process: Callable[[], asyncio.Task[GPUAssignment]],
        release_in_process: Callable[[GPUAssignment], object],
        *,
        timeout_seconds: float,
        is_answering: Callable[[str], bool] = lambda _: True,
        on_blocked: Callable[[tuple[str, ...]], object] = lambda _: None,
    ) -> None:
        """`is_answering` says whether it is any use to wait for what an endpoint says; `on_blocked` is called when it
        is clear that it takes longer.
        """
        self._loop = asyncio.get_running_loop()
        self._make_place = make_place
        self._ask_in_process = ask_in_process
        self._release_in_process = release_in_process
        self._is_answering = is_answering
        self._on_blocked = on_blocked
        self.was_blocked = False
        self.begun_at = time.monotonic()
        self._deadline = self.begun_at + timeout_seconds
        #: Whom to ask one after the other, and whom after that, all at once; None stands for this process.
        self._first: deque[str | None] = deque()
        self._then: list[str | None] = []
        self.entries: dict[str | None, Entry] = {}
        self._last: Entry | None = None
        self._news = asyncio.Event()
        self._is_stopped = False
        self._thread_: Entry | None = None

    # --- who takes part ---

    def line_up(self, first: Iterable[str | None], then: Iterable[str | None]) -> None:
        self._first.extend(first)
        self._then.extend(then)

    def join(self, name: str | None) -> None:
        """One more, while it runs."""
        if name not in self.entries and name not in self._first and name not in self._then:
            self._then.append(name)
            self._news.set()

    def leave(self, name: str | None) -> None:
        for waiting in (self._first, self._then):
            with suppress(ValueError):
                waiting.remove(name)
        entry = self.entries.pop(name, None)
        if entry is not None:
            self._withdraw(entry)
        self._news.set()

    def refuse(self, name: str, error: GPUWorkerPoolError) -> None:
        """An endpoint that cannot take part, and why."""
        self.leave(name)
        self.entries[name] = Entry(name, time.monotonic(), has_answered=True, error=error)

    def stop(self) -> None:
        """At once: whoever gives places up is stopped next."""
        self._is_stopped = True
        for entry in self.entries.values():
            self._withdraw(entry)
        self._news.set()

    @property
    def is_in_process(self) -> bool:
        """Whether it waits in the queue of this process, too."""
        entry = self.entries.get(None)
        return entry is not None and entry.has_answered and entry.task is not None and not entry.task.done()

    # --- the race ---

    async def run(self) -> Entry:
        """The place that was granted it; a `TimeoutError` without a text where the caller knows better what to say."""
        won: Entry | None = None
        try:
            while True:
                if self._is_stopped:
                    raise PoolStoppedError
                won = self._winner()
                if won is not None:
                    return won
                wake_at = self._move()
                self._keep_in_one_place()
                self._give_up_if_hopeless()
                self._say_if_blocked()
                if self._news.is_set() or wake_at <= time.monotonic():
                    self._news.clear()
                    await asyncio.sleep(0)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if wake_at == math.inf else wake_at - time.monotonic()):
                        await self._news.wait()
                self._news.clear()
        finally:
            for entry in self.entries.values():
                if entry is not won:
                    self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        if entry.place is not None:
            entry.place.withdraw()
        task = entry.task
        if task is not None and not task.cancel() and not task.cancelled() and task.exception() is None:
            self._release_in_process(task.result())  # granted in the same moment as another one

    def _move(self) -> float:
        """Begin what there is to begin; when to look again, if there is no news. Raises when the time is over."""
        now = time.monotonic()
        while (self._first or self._then) and now < self._deadline:
            last = self._last
            if last is not None and not last.has_answered and now < last.begun_at + HEDGE_SECONDS:
                return min(last.begun_at + HEDGE_SECONDS, self._deadline)
            if not self._first:
                break
            self._last = self._begin(self._first.popleft(), now)
        for name in [*self._first, *self._then]:
            self._begin(name, now)
        self._first.clear()
        self._then.clear()
        if now < self._deadline:
            return self._deadline
        if self.entries.keys() == {None}:
            return math.inf  # who waits in process only is told there, in time
        patience_until = max(self._deadline, self.begun_at + FIRST_ANSWER_SECONDS)
        if now >= patience_until or all(entry.has_answered for entry in self.entries.values()):
            raise TimeoutError
        return patience_until

    def _begin(self, name: str | None, now: float) -> Entry:
        if name is None:
            entry = Entry("this process", now, task=self._ask_in_process())
            assert entry.task is not None
            entry.task.add_done_callback(lambda _: self._news.set())
            # After its first step, which is all it needs to take what is free.
            self._loop.call_soon(self._answered_in_process, entry)
        else:
            entry = Entry(name, now, has_answered=not self._is_answering(name))
            try:
                entry.place = self._make_place(name, self._tell)
            except GPUWorkerPoolError as error:
                entry.error, entry.has_answered = error, True
            else:
                if self._thread_ is None:
                    self._thread_, entry.place.may_reserve = entry, True
                entry.place.begin()
        self.entries[name] = entry
        return entry

    def _answered_in_process(self, entry: Entry) -> None:
        entry.has_answered = True
        self._news.set()

    def _winner(self) -> Entry | None:
        for entry in self.entries.values():
            if entry.won is not None:
                return entry
            task = entry.task
            if task is not None and task.done() and entry.error is None:
                entry.has_answered = True
                if task.cancelled():
                    entry.error = PoolStoppedError()
                elif (error := task.exception()) is None:
                    return entry
                elif isinstance(error, Exception):
                    entry.error = error
                else:
                    raise error
        return None

    def _keep_in_one_place(self) -> None:
        """Rule 4: only one endpoint at a time may keep GPUs free for it; another one, when that one fails."""
        thread = self._thread_
        if thread is not None and thread.error is None and thread.trouble is None and thread in self.entries.values():
            return
        able = (entry for entry in self.entries.values() if entry.waiting is not None and entry.trouble is None)
        other = next((entry for entry in able if entry.error is None), None)
        if other is None or other.place is None:
            return
        if thread is not None and thread.place is not None:
            thread.place.may_reserve = False
        self._thread_, other.place.may_reserve = other, True

    def _give_up_if_hopeless(self) -> None:
        if self._first or self._then or not self.entries:
            return
        entries = list(self.entries.values())
        if any(isinstance(entry.error, PoolStoppedError) for entry in entries):
            raise PoolStoppedError
        if not all(entry.error is not None for entry in entries):
            return
        if len(entries) == 1:
            raise _taken_from(entries[0])
        if all(isinstance(entry.error, WorkerTimeoutError) for entry in entries):
            raise TimeoutError
        raise _all_of(entries)

    def _say_if_blocked(self) -> None:
        is_first_asked = not self._first and all(entry.has_answered for entry in self.entries.values())
        if is_first_asked and not self.was_blocked:
            self.was_blocked = True
            told = (entry.waiting for entry in self.entries.values() if entry.waiting is not None)
            self._on_blocked(tuple(reason for waiting in told for reason in waiting.reasons[1:]))

    # --- what places tell ---

    def _tell(self, place: Place, news: object) -> None:
        """In the keeper's thread."""
        try:
            self._loop.call_soon_threadsafe(self._hear, place, news)
        except RuntimeError:  # the loop is closed, and nobody left who could have it
            place.withdraw()

    def _hear(self, place: Place, news: object) -> None:
        entry = next((entry for entry in self.entries.values() if entry.place is place), None)
        if entry is None:
            return
        entry.has_answered = True
        match news:
            case HeldLease():
                entry.won = news
            case StillWaiting():
                entry.waiting, entry.trouble = news, None
            case Trouble():
                entry.trouble = news.error
            case Failed():
                entry.error = news.error
        self._news.set()


def _taken_from(entry: Entry) -> Exception:
    """An error knows the frames it came through; what they know must not know it, or nobody forgets either."""
    error, entry.error = entry.error, None
    assert error is not None  # whoever calls this has looked
    return error


def _all_of(entries: Iterable[Entry]) -> GPUWorkerPoolError:
    """Nobody is left to be asked: everything they said."""
    told = [(entry.name, entry.error) for entry in entries if entry.error is not None]
    if all(isinstance(error, ImpossibleRequestError) for _, error in told):
        reasons = [
            reason if reason.startswith(f"{name}: ") else f"{name}: {reason}"
            for name, error in told
            if isinstance(error, ImpossibleRequestError)
            for reason in error.reasons or (str(error),)
        ]
        return ImpossibleRequestError(reasons=tuple(reasons))
    refusals = [error for _, error in told if isinstance(error, ServiceRefusedError)]
    return ServiceRefusedError(
        "; ".join(f"{name}: {error}" for name, error in told), status=refusals[0].status if refusals else None
    )
