"""The progress of an executor's tasks: reported to a callback as `tqdm` has it, or as a line on stderr."""

from __future__ import annotations

import math
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

#: The interval of new lines: on a terminal they replace each other, elsewhere a log gets them.
_LIVE_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 10.0


def progress_of(given: object) -> TaskProgress | None:
    """Raises a `ValueError` that says what was expected."""
    if given is None or given is False:
        return None
    if given is True:
        return Bar(sys.stderr)
    update = getattr(given, "update", None)
    if callable(update):
        return ReportedProgress(update, given)
    if callable(given):
        return ReportedProgress(given)
    raise ValueError(
        f"progress must be True, a function that is called with the number of tasks that were finished, or a bar with "
        f"such a function as its `update`, as those of tqdm; not {given!r}"
    )


class TaskProgress:
    """Counts tasks; `submitted` is called in any thread, the others in the executor's."""

    #: When `show` is to be called again, whatever happens.
    next_show: float = math.inf

    def submitted(self, count: int) -> None:
        raise NotImplementedError

    def finished(self, count: int) -> None:
        raise NotImplementedError

    def show(self, busy: int, workers: int, waiting_for: str) -> None:
        """`workers`: those that have a GPU; `waiting_for`: why a further one does not."""

    def close(self) -> None:
        """All tasks are finished."""


class ReportedProgress(TaskProgress):
    """Calls `update(1)` for every task. A bar of tqdm gets its `total`, too, unless it has one."""

    def __init__(self, update: Callable[[int], object], bar: Any = None) -> None:
        self._update = update
        self._bar = bar if hasattr(bar, "total") and bar.total is None else None
        self._has_failed = False

    def submitted(self, count: int) -> None:
        if self._bar is not None:
            self._bar.total = (self._bar.total or 0) + count

    def finished(self, count: int) -> None:
        if self._has_failed:
            return
        try:
            self._update(count)
        except Exception as error:  # tasks matter more
            self._has_failed = True
            with suppress(Exception):
                sys.stderr.write(f"gpu-pool: the progress callback failed, and is not called again: {error!r}\n")


class Bar(TaskProgress):
    """`12/100 tasks, 4 of 4 workers busy, 30 s` on a terminal; elsewhere a line now and then; one when all are done."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_live = stream.isatty()
        self._interval = _LIVE_SECONDS if self._is_live else _LOG_SECONDS
        self._lock = threading.Lock()
        self._total = self._finished = 0
        self._begun_at = 0.0
        #: The last line, without its time, and when it was written.
        self._shown = ""
        self._written_at = -math.inf
        #: Nothing was submitted since a line said that all tasks are done.
        self._is_told = True

    def submitted(self, count: int) -> None:
        with self._lock:
            if self._finished == self._total:
                self._begun_at = self._clock()
                self.next_show: float = self._begun_at + self._interval
                self._is_told = False
            self._total += count

    def finished(self, count: int) -> None:
        with self._lock:
            self._finished += count

    def show(self, busy: int, workers: int, waiting_for: str) -> None:
        with self._lock:
            now = self._clock()
            is_over = self._finished == self._total
            # After the last line there is nothing to say until more is submitted; workers that end are no progress.
            if self._is_told:
                return
            if is_over:  # at once, unless each task is submitted when the one before has ended
                self.next_show = min(self.next_show, self._written_at + self._interval)
            if now < self.next_show:
                return
            self._is_told = is_over
            self.next_show = math.inf if is_over else now + self._interval
        text = f"{self._finished}/{self._total} tasks"
        if not is_over:
            text += f", {busy} of {workers} worker{'' if workers == 1 else 's'} busy"
            text += f", waiting for a GPU: {waiting_for}" if waiting_for and not workers else ""
        if text == self._shown and not self._is_live:
            return
        self._shown, self._written_at = text, now
        self._write(f"{_drawn(self._finished, self._total)}{text}, {spoken_seconds(now - self._begun_at)}")

    def close(self) -> None:
        self._written_at = -math.inf
        self.show(0, 0, "")
        if self._is_live and self._shown:
            with suppress(Exception):
                self._stream.write("\n")
                self._stream.flush()

    def _write(self, line: str) -> None:
        with suppress(Exception):  # stderr is closed
            self._stream.write(f"\r{line}\x1b[K" if self._is_live else f"gpu-pool: {line}\n")
            self._stream.flush()


def _drawn(finished: int, total: int, width: int = 20) -> str:
    full = width if not total else width * finished // total
    return f"[{'#' * full}{'.' * (width - full)}] "
