"""What `map` prints on stderr: the states of its jobs, and a summary at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.quantities import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_worker_pool.cli.running.progress import Progress

#: Beyond this many, failed jobs are counted but not named.
_MOST_NAMED: Final = 20


class States:
    """`is_quiet`: print only problems."""

    def __init__(self, progress: Progress, *, is_quiet: bool) -> None:
        self._progress = progress
        self._is_quiet = is_quiet
        self._gpus: set[tuple[str, int]] = set()
        self._first_wait_seconds: float | None = None

    def say(self, text: str, *, is_problem: bool = False) -> None:
        if is_problem or not self._is_quiet:
            self._progress.say(text)

    def granted(self, waited_seconds: float) -> None:
        if self._first_wait_seconds is None:
            self._first_wait_seconds = waited_seconds

    def used(self, gpus: Iterable[tuple[str, int]]) -> None:
        self._gpus.update(gpus)

    def summarize(self, *, jobs: int, succeeded: int, failed: Sequence[int], stopped: int, took_seconds: float) -> None:
        numbers = ", ".join(map(str, failed[:_MOST_NAMED])) + ("…" if len(failed) > _MOST_NAMED else "")
        counts = [f"{succeeded} done"]
        if failed:
            counts.append(f"{len(failed)} failed ({numbers})")
        if stopped:
            counts.append(f"{stopped} stopped")
        not_run = jobs - succeeded - len(failed) - stopped
        if not_run:
            counts.append(f"{not_run} not run")
        where = f" on {len(self._gpus)} GPU{'s' if len(self._gpus) > 1 else ''}" if self._gpus else ""
        first_wait = self._first_wait_seconds or 0.0
        waited = f"; the first one was granted after {spoken_seconds(first_wait)}" if first_wait >= 1.0 else ""
        took = spoken_seconds(took_seconds)
        self.say(
            f"{jobs} job{'s' if jobs != 1 else ''}: {', '.join(counts)}, in {took}{where}{waited}",
            is_problem=succeeded < jobs,
        )
