"""The sampler supplies one process with samples, from the driver or from another process of the host.

It runs in its own thread, because the driver may hang: then only this thread hangs, and the samples age.
"""

from __future__ import annotations

import logging
import math
import threading
from datetime import datetime
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.errors import DriverError, LedgerUnusableError
from gpu_worker_pool.hardware.readers.choose import make_reader, readings_name
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, HostSample
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.readers.simulated import SimulatedHolder

logger: logging.Logger = logging.getLogger(__name__)

#: A process that follows takes over when the last sample is this many intervals old.
TAKE_OVER_INTERVALS = 3
#: Interval between looks for samples of other processes.
FOLLOW_SECONDS = 0.1
#: The thread never spins.
SHORTEST_TURN_SECONDS = 0.01
#: Our own failure does not count while another process has a good sample this young.
OTHERS_SECONDS = 15.0
#: Pause before the next attempt to use the shared file after an error.
REOPEN_SECONDS = 10.0


@frozen
class LatestSamples:
    """Immutable and replaced as a whole, so that other threads always see a consistent state."""

    #: The last successful sample, and the last one of any kind.
    good: HostSample | None = None
    last: HostSample | None = None
    #: Since when a read of the driver has been running on this host, by `boot_time`.
    probing_since: float | None = None


class Sampler:
    """`on_sample` is called in the sampler's thread with every sample in order, also those of other processes."""

    def __init__(
        self,
        reader: Reader,
        *,
        interval_seconds: float,
        on_sample: Callable[[HostSample], object],
        open_log: Callable[[], SampleLog] | None = None,
    ) -> None:
        self.interval_seconds = interval_seconds
        self.seen: LatestSamples = LatestSamples()
        self._reader = reader
        self._on_sample = on_sample
        self._open_log = open_log
        self._open_log_at = 0.0
        self._log: SampleLog | None = None
        #: Whether this process took the last sample, so that it takes the next one too.
        self._is_probing_process = False
        #: Whether another process took a sample since this one started.
        self._others_sample = False
        self._has_followed = False
        self._probed_at = -math.inf
        self._complaint = ""
        self._woken = threading.Event()
        #: A caller needs a sample that began after this.
        self._wanted_after = -math.inf
        self._is_stopping = False
        self._is_up_to_date = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_up_to_date(self, timeout_seconds: float) -> bool:
        """Whether the current state of the GPUs, good or bad, is known in time."""
        return self._is_up_to_date.wait(timeout_seconds)

    def want_fresh(self, begun_after: float) -> None:
        """Read the driver now instead of at the next turn, unless a sample began after that moment."""
        self._wanted_after = max(self._wanted_after, begun_after)
        self._woken.set()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """Whether the thread has ended; a thread that waits for a hanging driver is abandoned."""
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
                except Exception:  # keep sampling: without the thread the readings would age forever
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
                    # The last holder of the lock may just have taken a sample.
                    self._follow()
                    if self._is_due():
                        self._probe()
                        self._is_up_to_date.set()
                finally:
                    self._unlock()
            elif self.seen.probing_since is None:
                self.seen = LatestSamples(self.seen.good, self.seen.last, probing_since=boot_time())
        if not self._is_due():
            self._is_up_to_date.set()

    def _is_due(self) -> bool:
        last, now = self.seen.last, boot_time()
        if last is None or (self._probed_at < self._wanted_after and last.begun_at < self._wanted_after):
            return True
        if isinstance(last.answer, DriverFailure) and not self._is_probing_process:
            # Another process could not read the GPUs; perhaps this one can.
            return now - self._probed_at >= TAKE_OVER_INTERVALS * self.interval_seconds
        return not 0 <= now - last.begun_at < self._due_after_seconds()

    def _due_after_seconds(self) -> float:
        is_anothers_turn = self._log is not None and self._others_sample and not self._is_probing_process
        return self.interval_seconds * (TAKE_OVER_INTERVALS if is_anothers_turn else 1)

    def _seconds_to_next_turn(self) -> float:
        last = self.seen.last
        due_in = 0.0 if last is None else last.begun_at + self._due_after_seconds() - boot_time()
        return due_in if self._log is None else min(due_in, FOLLOW_SECONDS)

    def _probe(self) -> None:
        begun_at = self._probed_at = boot_time()
        timestamp = datetime.now().isoformat()
        last = self.seen.last
        self.seen = LatestSamples(self.seen.good, last, probing_since=begun_at)
        answer: DriverAnswer | DriverFailure
        try:
            answer = self._reader.read()
        except DriverError as error:
            answer = DriverFailure(str(error), error.code)
        except Exception as error:  # the next sample may be fine
            if not isinstance(last.answer if last else None, DriverFailure):
                logger.exception("the reader failed")
            answer = DriverFailure(f"unexpected: {type(error).__name__}: {error}", "reader_error")
        if isinstance(answer, DriverFailure) and self._others_can_read(begun_at):
            # This process lacks the driver or a permission; others can read, so do not share the failure.
            self.seen = LatestSamples(self.seen.good, last)
            return
        sample = HostSample(
            number=1 if last is None else last.number + 1,
            failed_total=(0 if last is None else last.failed_total) + isinstance(answer, DriverFailure),
            begun_at=begun_at,
            took_seconds=boot_time() - begun_at,
            timestamp=timestamp,
            answer=answer,
        )
        self._is_probing_process = True
        self._take(sample)  # first: a caller in this process may wait for it
        self._share(sample)

    def _others_can_read(self, now: float) -> bool:
        good = self.seen.good
        return good is not None and not self._is_probing_process and 0 <= now - good.begun_at <= OTHERS_SECONDS

    def _take(self, sample: HostSample) -> None:
        is_good = isinstance(sample.answer, DriverAnswer)
        self.seen = LatestSamples(sample if is_good else self.seen.good, sample)
        self._on_sample(sample)

    # --- sharing: without the file, this process reads the GPUs alone ---

    def _follow(self) -> None:
        if self._log is None and self._open_log is not None and boot_time() >= self._open_log_at:
            try:
                self._log = self._open_log()
            except (OSError, LedgerUnusableError) as error:
                self._complain(error)
        if self._log is None:
            return
        try:
            samples = self._log.follow()
        except OSError as error:
            self._complain(error)
            return
        if samples:
            self._is_probing_process = False
            self._others_sample = self._others_sample or self._has_followed
        self._has_followed = True
        for sample in samples:
            self._take(sample)

    def _try_lock(self) -> bool:
        """False only if another process holds it."""
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
            # The others will notice that the samples are old, and read the driver themselves.
            self._complain(error)
        else:
            self._complaint = ""

    def _complain(self, error: OSError | LedgerUnusableError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("cannot share readings with other processes, reading the GPUs alone: %s", error)
        self._drop_log()

    def _drop_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
        self._open_log_at = boot_time() + REOPEN_SECONDS


def host_sampler(
    backend: str,
    *,
    interval_seconds: float,
    keep: int,
    on_sample: Callable[[HostSample], object],
    state_dir: str | None = None,
    reader: Reader | None = None,
    holders: Callable[[], Iterable[SimulatedHolder]] = tuple,
) -> Sampler:
    """The sampler of this host: the reader of a backend, with samples shared through the state directory.

    `keep`: the number of past samples for processes that start later. `state_dir`: see `state_directory`.

    `holders`: the holders of simulated GPUs; called in the sampler's thread.
    """
    return Sampler(
        reader or make_reader(backend, boot_time, holders),
        interval_seconds=interval_seconds,
        on_sample=on_sample,
        open_log=lambda: SampleLog(state_directory(state_dir), readings_name(backend), keep=keep),
    )
