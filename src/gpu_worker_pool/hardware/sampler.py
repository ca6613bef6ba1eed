"""The sampler: keeps one process supplied with samples, from the driver or from whoever else on the host asks it.

It runs in a thread of its own, because the driver may take its time: a driver that hangs for ever costs this thread,
and the samples age. Nobody who wants to know something waits for it.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, HostSample

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.sample_log import SampleLog

logger = logging.getLogger(__name__)

#: A process that follows another's samples takes over when they are this many intervals old.
TAKE_OVER_INTERVALS = 3
#: How soon what another process sampled is noticed.
FOLLOW_SECONDS = 0.1
#: Whatever goes wrong, the thread does not spin.
SHORTEST_TURN_SECONDS = 0.01
#: A failure of ours says nothing while another process's sample is no older.
OTHERS_SECONDS = 15.0
#: How long to do without the file that the samples are shared by, once it could not be used.
REOPEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the host's GPUs at one moment; replaced as a whole, so that every thread sees one whole."""

    #: The last attempt that told something, and the last attempt.
    good: HostSample | None = None
    last: HostSample | None = None
    #: Since when the driver has owed somebody on this host an answer, on the clock of `boot_time`.
    probing_since: float | None = None


class Sampler:
    """`on_sample` is called in the sampler's thread with every sample, in order, this process's own or not."""

    def __init__(
        self,
        reader: Reader,
        *,
        interval_seconds: float,
        on_sample: Callable[[HostSample], object],
        open_log: Callable[[], SampleLog] | None = None,
    ) -> None:
        self.interval_seconds = interval_seconds
        self.seen = Seen()
        self._reader = reader
        self._on_sample = on_sample
        self._open_log = open_log
        self._open_log_at = 0.0
        self._log: SampleLog | None = None
        #: Whether the last sample was this process's own, so that the next one is its turn too.
        self._is_asking = False
        #: Whether another process has sampled since this one was started.
        self._has_company = False
        self._has_followed = False
        self._probed_at = -math.inf
        self._complaint = ""
        self._woken = threading.Event()
        #: A sample that began before this is not fresh enough for somebody.
        self._wanted_after = -math.inf
        self._is_stopping = False
        self._is_up_to_date = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_up_to_date(self, timeout_seconds: float) -> bool:
        """Whether the present state of the GPUs, good or bad, is known by then."""
        return self._is_up_to_date.wait(timeout_seconds)

    def want_fresh(self, begun_after: float) -> None:
        """Ask the driver now instead of at the next turn, unless somebody else has since that moment."""
        self._wanted_after = max(self._wanted_after, begun_after)
        self._woken.set()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """Whether the thread has ended: one that waits for a hanging driver has not, and is left to it."""
        self._is_stopping = True
        self._woken.set()
        self._reader.interrupt()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # --- in the sampler's thread ---

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    self._turn()
                    wait = max(self._seconds_to_next_turn(), SHORTEST_TURN_SECONDS)
                except Exception:  # a sampler that ends would leave the readings to age for ever
                    logger.exception("sampling failed; trying again")
                    wait = self.interval_seconds
                self._woken.wait(wait)
                self._woken.clear()
        finally:
            self._reader.close()
            self._drop_log()

    def _turn(self) -> None:
        self._follow()
        if self._is_due():
            if self._try_lock():
                try:
                    # Whoever had the lock until now may just have sampled.
                    self._follow()
                    if self._is_due():
                        self._probe()
                        self._is_up_to_date.set()
                finally:
                    self._unlock()
            elif self.seen.probing_since is None:
                self.seen = Seen(self.seen.good, self.seen.last, probing_since=boot_time())
        if not self._is_due():
            self._is_up_to_date.set()

    def _is_due(self) -> bool:
        last, now = self.seen.last, boot_time()
        if last is None or (self._probed_at < self._wanted_after and last.begun_at < self._wanted_after):
            return True
        if isinstance(last.answer, DriverFailure) and not self._is_asking:
            # Another process could not read the GPUs. Perhaps this one can.
            return now - self._probed_at >= TAKE_OVER_INTERVALS * self.interval_seconds
        return not 0 <= now - last.begun_at < self._patience_seconds()

    def _patience_seconds(self) -> float:
        is_somebodys_turn = self._log is not None and self._has_company and not self._is_asking
        return self.interval_seconds * (TAKE_OVER_INTERVALS if is_somebodys_turn else 1)

    def _seconds_to_next_turn(self) -> float:
        last = self.seen.last
        due_in = 0.0 if last is None else last.begun_at + self._patience_seconds() - boot_time()
        return due_in if self._log is None else min(due_in, FOLLOW_SECONDS)

    def _probe(self) -> None:
        begun_at = self._probed_at = boot_time()
        timestamp = datetime.now().isoformat()
        last = self.seen.last
        self.seen = Seen(self.seen.good, last, probing_since=begun_at)
        answer: DriverAnswer | DriverFailure
        try:
            answer = self._reader.read()
        except DriverError as error:
            answer = DriverFailure(str(error), error.code)
        except Exception as error:  # whatever a reader stumbles over, the next sample may be fine
            if not isinstance(last.answer if last else None, DriverFailure):
                logger.exception("the reader failed")
            answer = DriverFailure(f"unexpected: {type(error).__name__}: {error}", "reader_error")
        if isinstance(answer, DriverFailure) and self._others_can_read(begun_at):
            # What this process lacks, the driver or the right to use it, is no news for those who have it.
            self.seen = Seen(self.seen.good, last)
            return
        sample = HostSample(
            number=1 if last is None else last.number + 1,
            failed_total=(0 if last is None else last.failed_total) + isinstance(answer, DriverFailure),
            begun_at=begun_at,
            took_seconds=boot_time() - begun_at,
            timestamp=timestamp,
            answer=answer,
        )
        self._is_asking = True
        self._take(sample)  # first: somebody here may wait for it
        self._share(sample)

    def _others_can_read(self, now: float) -> bool:
        good = self.seen.good
        return good is not None and not self._is_asking and 0 <= now - good.begun_at <= OTHERS_SECONDS

    def _take(self, sample: HostSample) -> None:
        is_good = isinstance(sample.answer, DriverAnswer)
        self.seen = Seen(sample if is_good else self.seen.good, sample)
        self._on_sample(sample)

    # --- sharing: whatever becomes of the file, this process goes on by itself ---

    def _follow(self) -> None:
        if self._log is None and self._open_log is not None and boot_time() >= self._open_log_at:
            try:
                self._log = self._open_log()
            except OSError as error:
                self._complain(error)
        if self._log is None:
            return
        try:
            samples = self._log.follow()
        except OSError as error:
            self._complain(error)
            return
        if samples:
            self._is_asking = False
            self._has_company = self._has_company or self._has_followed
        self._has_followed = True
        for sample in samples:
            self._take(sample)

    def _try_lock(self) -> bool:
        """False only where another process has it."""
        if self._log is None:
            return True
        try:
            return self._log.try_lock()
        except OSError as error:
            self._complain(error)
            return True

    def _unlock(self) -> None:
        if self._log is not None:
            self._log.unlock()

    def _share(self, sample: HostSample) -> None:
        if self._log is None:
            return
        try:
            self._log.append(sample)
        except OSError as error:
            # The others will find the samples old, ask the driver themselves, and fare no worse than without us.
            self._complain(error)
        else:
            self._complaint = ""

    def _complain(self, error: OSError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("cannot share readings with other processes, reading the GPUs alone: %s", error)
        self._drop_log()

    def _drop_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
        self._open_log_at = boot_time() + REOPEN_SECONDS
