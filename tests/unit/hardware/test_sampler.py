"""The sampler: one probe at a time on the whole host, whatever the driver does; samples are shared by all."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.sampler import Sampler
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample

INTERVAL = 0.05


class Driver:
    """Counts who asks it, and does as it is told."""

    def __init__(self) -> None:
        self.reads = 0
        self.at_once = 0
        self.most_at_once = 0
        self.answers = threading.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.closed = 0
        self.interrupted = 0

    def read(self) -> DriverAnswer:
        self.reads += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.answers.wait()
            if self.error is not None:
                raise self.error
            return DriverAnswer((GPUReading(0, f"read {self.reads}"),), "1", "test")
        finally:
            self.at_once -= 1

    def interrupt(self) -> None:
        self.interrupted += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.answers.set()


@pytest.fixture
def start(driver: Driver, tmp_path: Path) -> Iterator[Callable[..., Sampler]]:
    started: list[Sampler] = []
    (tmp_path / "state").mkdir()

    def start(
        *, shared: bool = True, interval: float = INTERVAL, keep: int = 50, reader: Driver | None = None
    ) -> Sampler:
        taken: list[HostSample] = []
        sampler = Sampler(
            reader or driver,
            interval_seconds=interval,
            on_sample=taken.append,
            open_log=(lambda: SampleLog(tmp_path / "state", "real", keep=keep)) if shared else None,
        )
        sampler.taken = taken  # type: ignore[attr-defined]
        sampler.start()
        started.append(sampler)
        return sampler

    yield start
    driver.answers.set()
    for sampler in started:
        assert sampler.stop(5)


@pytest.mark.parametrize("shared", [True, False])
def test_it_samples_again_and_again_with_growing_numbers(start: Callable[..., Sampler], shared: bool) -> None:
    sampler = start(shared=shared)
    eventually(lambda: len(sampler.taken) >= 5)
    taken = list(sampler.taken)
    assert [sample.number for sample in taken] == list(range(1, len(taken) + 1))
    gaps = [after.begun_at - before.begun_at for before, after in itertools.pairwise(taken)]
    assert min(gaps) >= INTERVAL * 0.99


def test_four_processes_cost_the_driver_no_more_than_one(start: Callable[..., Sampler], driver: Driver) -> None:
    interval = 0.2
    begun = time.monotonic()
    samplers = [start(interval=interval) for _ in range(4)]
    eventually(lambda: all(len(sampler.taken) >= 12 for sampler in samplers))
    elapsed = time.monotonic() - begun
    assert driver.most_at_once == 1
    assert driver.reads <= elapsed / interval + 4
    histories = [{sample.number: str(sample) for sample in sampler.taken} for sampler in samplers]
    common = set.intersection(*(set(history) for history in histories))
    assert len(common) >= 10
    for number in common:
        assert len({history[number] for history in histories}) == 1


def test_who_comes_later_has_the_history_of_those_before(start: Callable[..., Sampler]) -> None:
    first = start()
    eventually(lambda: len(first.taken) >= 8)
    second = start()
    assert second.wait_until_up_to_date(5)
    eventually(lambda: len(second.taken) >= 8)
    assert [sample.number for sample in second.taken][:3] == [1, 2, 3]


def test_another_takes_over_when_the_one_that_asked_is_gone(start: Callable[..., Sampler], driver: Driver) -> None:
    first = start()
    eventually(lambda: first.taken)
    second = start()
    eventually(lambda: second.taken)
    assert first.stop(5)
    numbers = {sample.number for sample in second.taken}
    eventually(lambda: len(second.taken) > len(numbers) + 3)
    assert [sample.number for sample in second.taken] == sorted({sample.number for sample in second.taken})


def test_a_driver_that_hangs_costs_one_probe_and_is_forgiven(start: Callable[..., Sampler], driver: Driver) -> None:
    samplers = [start() for _ in range(3)]
    eventually(lambda: all(sampler.taken for sampler in samplers))
    driver.answers.clear()
    eventually(lambda: driver.at_once == 1)
    reads = driver.reads
    time.sleep(INTERVAL * 10)
    assert (driver.reads, driver.at_once) == (reads, 1)
    # All of them know: the one that asked, and those that find the right to ask taken.
    eventually(lambda: all(sampler.seen.probing_since is not None for sampler in samplers))
    assert all(sampler.seen.good is not None for sampler in samplers)
    driver.answers.set()
    eventually(lambda: all(sampler.seen.last.number > reads for sampler in samplers))  # type: ignore[union-attr]
    assert driver.most_at_once == 1


def test_a_failure_is_counted_told_to_all_and_keeps_the_last_good_sample(
    start: Callable[..., Sampler], driver: Driver
) -> None:
    asking = start()
    following = start()
    eventually(lambda: asking.seen.good and following.seen.good)
    driver.error = DriverError("it broke", code="broken")
    for sampler in (asking, following):
        eventually(lambda sampler=sampler: isinstance(sampler.seen.last.answer, DriverFailure))
        assert sampler.seen.last is not None
        assert sampler.seen.last.answer == DriverFailure("it broke", "broken")
        assert sampler.seen.last.failed_total >= 1
        assert isinstance(sampler.seen.good.answer, DriverAnswer)
    driver.error = None
    eventually(lambda: isinstance(following.seen.last.answer, DriverAnswer))
    assert following.seen.last.failed_total >= 1


def test_a_reader_with_a_bug_is_a_failed_sample_and_one_line_of_log(
    start: Callable[..., Sampler], driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.error = ZeroDivisionError("oh")
    sampler = start()
    eventually(lambda: len(sampler.taken) > 3)
    assert sampler.taken[-1].answer == DriverFailure("unexpected: ZeroDivisionError: oh", "reader_error")
    assert caplog.text.count("the reader failed") == 1


def test_a_fresh_sample_is_taken_at_once(start: Callable[..., Sampler], driver: Driver) -> None:
    sampler = start(interval=3600)
    follower = start(interval=3600)
    eventually(lambda: sampler.taken and follower.taken)
    reads = driver.reads
    begun = boot_time()
    for one in (follower, sampler):
        one.want_fresh(begun)
    eventually(lambda: sampler.seen.last.begun_at >= begun and follower.seen.last.begun_at >= begun)
    assert driver.reads == reads + 1, "one fresh sample is fresh for both"
    assert boot_time() - begun < 5


def test_without_a_place_to_share_it_reads_alone_and_says_so_once(
    driver: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[HostSample] = []
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    sampler = Sampler(
        driver,
        interval_seconds=INTERVAL,
        on_sample=taken.append,
        open_log=lambda: SampleLog(blocked, "real", keep=5),
    )
    sampler.start()
    eventually(lambda: len(taken) > 3)
    assert sampler.stop(5)
    assert caplog.text.count("reading the GPUs alone") == 1


def test_a_disk_that_fills_up_stops_nobody_from_reading(
    start: Callable[..., Sampler], driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(log: SampleLog, sample: HostSample) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SampleLog, "append", full)
    samplers = [start(), start()]
    eventually(lambda: all(len(sampler.taken) > 3 for sampler in samplers))
    assert driver.most_at_once == 1
    assert caplog.text.count("No space left on device") == 2  # one for each


def test_stopping_closes_the_reader_and_does_not_wait_for_a_hanging_driver(
    start: Callable[..., Sampler], driver: Driver
) -> None:
    sampler = start(shared=False)
    eventually(lambda: sampler.taken)
    driver.answers.clear()
    eventually(lambda: driver.at_once == 1)
    begun = time.monotonic()
    assert not sampler.stop(0.2)
    assert time.monotonic() - begun < 2
    driver.answers.set()
    assert sampler.stop(5)
    assert driver.closed == 1
    assert driver.interrupted == 2


def test_a_folder_that_is_removed_or_replaced_costs_a_line_of_log(
    start: Callable[..., Sampler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = start()
    eventually(lambda: sampler.taken)
    shutil.rmtree(tmp_path / "state")
    count = len(sampler.taken)
    eventually(lambda: len(sampler.taken) > count + 5)
    assert len(caplog.records) == 1


def test_an_old_sample_in_the_log_is_not_the_present(start: Callable[..., Sampler], driver: Driver) -> None:
    first = start()
    eventually(lambda: first.taken)
    assert first.stop(5)
    time.sleep(INTERVAL * 4)
    driver.answers.clear()
    second = start()
    eventually(lambda: second.taken)
    assert not second.wait_until_up_to_date(INTERVAL * 2)
    driver.answers.set()
    assert second.wait_until_up_to_date(5)


def test_a_sample_from_the_future_stops_nobody(start: Callable[..., Sampler], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)
    log = SampleLog(tmp_path / "state", "real", keep=5)
    log.append(HostSample(7, 0, boot_time() + 10_000, 0.0, "", DriverAnswer((), "1", "test")))
    log.close()
    sampler = start()
    eventually(lambda: len(sampler.taken) > 3)
    assert sampler.seen.last is not None
    assert sampler.seen.last.begun_at <= boot_time()


@pytest.mark.parametrize("blind_interval", [INTERVAL, INTERVAL / 4, INTERVAL * 4])
@pytest.mark.parametrize("blind_first", [True, False])
def test_one_that_cannot_read_the_gpus_blinds_nobody_who_can(
    start: Callable[..., Sampler], blind_interval: float, blind_first: bool
) -> None:
    blind = Driver()
    blind.error = DriverError("no driver here", code="not_here")
    started = {}
    for name in ("blind", "seeing") if blind_first else ("seeing", "blind"):
        is_blind = name == "blind"
        started[name] = start(reader=blind, interval=blind_interval) if is_blind else start()
        eventually(lambda name=name: started[name].seen.last)
    seeing = started["seeing"]
    eventually(lambda: isinstance(seeing.seen.last.answer, DriverAnswer))
    since = len(seeing.taken)
    eventually(lambda: len(seeing.taken) > since + 20)
    failures = [sample for sample in seeing.taken[since:] if isinstance(sample.answer, DriverFailure)]
    assert failures == []
    eventually(lambda: isinstance(started["blind"].seen.last.answer, DriverAnswer))


def test_a_restart_does_not_wait_for_somebody_who_is_gone(start: Callable[..., Sampler], driver: Driver) -> None:
    first = start(interval=0.5)
    eventually(lambda: first.taken)
    assert first.stop(5)
    reads, begun = driver.reads, time.monotonic()
    start(interval=0.5)
    eventually(lambda: driver.reads > reads)
    assert time.monotonic() - begun < 1.2


def test_a_probe_longer_than_the_interval_is_up_to_date_too(start: Callable[..., Sampler], driver: Driver) -> None:
    driver.answers.clear()
    sampler = start(interval=0.05)
    threading.Timer(0.3, driver.answers.set).start()
    begun = time.monotonic()
    assert sampler.wait_until_up_to_date(5)
    assert time.monotonic() - begun < 2


def test_who_follows_does_not_ask_while_somebody_else_does(start: Callable[..., Sampler], driver: Driver) -> None:
    own = Driver()
    first = start(interval=0.2)
    second = start(interval=0.2, reader=own)
    eventually(lambda: len(first.taken) >= 3 and len(second.taken) >= 3)  # who asks is settled by then
    before = (driver.reads, own.reads)
    eventually(lambda: len(second.taken) >= 15)
    asked = (driver.reads - before[0], own.reads - before[1])
    assert min(asked) <= 1, asked
    assert max(asked) >= 8, asked


def test_a_sample_that_came_while_the_lock_was_waited_for_is_not_taken_again(driver: Driver) -> None:
    class Log:
        """Another process samples between our look and our lock."""

        def __init__(self) -> None:
            self.is_locked = False

        def follow(self) -> list[HostSample]:
            fresh = HostSample(9, 0, boot_time(), 0.0, "", DriverAnswer((), "1", "test"))
            return [fresh] if self.is_locked else []

        def try_lock(self) -> bool:
            self.is_locked = True
            return True

        def unlock(self) -> None:
            self.is_locked = False

        def close(self) -> None:
            pass

    sampler = Sampler(driver, interval_seconds=60, on_sample=lambda _: None, open_log=Log)  # type: ignore[arg-type]
    sampler.start()
    assert sampler.wait_until_up_to_date(5)
    assert sampler.stop(5)
    assert driver.reads == 0
