"""What `LocalBroker.sample` returns and raises: one rule for every program that uses `local://`."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.leasing import until

from gpu_worker_pool.broker import local
from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Requirements
from gpu_worker_pool.errors import DriverError, ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.hardware.readers.choose import readings_name
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample

ANSWER = DriverAnswer((GPUReading(0, "NVIDIA H100 80GB HBM3", "GPU-a"),))


class FakeReader:
    def __init__(self, *answers: DriverAnswer | DriverError | None) -> None:
        """None: it hangs. The last one is repeated."""
        self.answers = list(answers)
        self.is_interrupted = threading.Event()

    def read(self) -> DriverAnswer:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            self.is_interrupted.wait()
            raise DriverError("interrupted")
        if isinstance(answer, DriverError):
            raise answer
        return answer

    def interrupt(self) -> None:
        self.is_interrupted.set()

    def close(self) -> None:
        pass


@asynccontextmanager
async def broker(directory: Path, *answers: DriverAnswer | DriverError | None) -> AsyncIterator[LocalBroker]:
    host = LocalBroker(state_dir=str(directory), reader=FakeReader(*answers))
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Other threads run as soon as they can: a question that reaches the ledger first is answered first."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def another_process_sampled(directory: Path, answer: DriverAnswer | DriverFailure, *, seconds_ago: float) -> None:
    log = SampleLog(directory, readings_name("auto"), keep=1)
    log.append(HostSample(1, 0, boot_time() - seconds_ago, 0.1, "2026-01-01T00:00:00", answer))
    log.close()


async def test_the_first_good_sample_is_waited_for_and_then_at_hand(tmp_path: Path) -> None:
    async with broker(tmp_path, ANSWER) as host:
        sample = await host.sample()
        assert sample.answer == ANSWER
        assert await host.sample(0.0) == sample


async def test_the_failure_of_the_driver_is_said_at_once_and_may_pass(tmp_path: Path) -> None:
    async with broker(tmp_path, DriverError("the GPU fell off the bus", code="driver_error")) as host:
        with pytest.raises(ServiceRetryableError, match="the GPU fell off the bus"):
            await host.sample()


@pytest.mark.parametrize("code", sorted(local.NO_DRIVER))
async def test_without_a_driver_it_is_final(tmp_path: Path, code: str) -> None:
    async with broker(tmp_path, DriverError("no driver is installed", code=code)) as host:
        with pytest.raises(ServiceRefusedError, match="no driver is installed"):
            await host.sample()


async def test_a_driver_that_hangs_is_not_waited_for_longer_than_that(tmp_path: Path) -> None:
    async with broker(tmp_path, None) as host:
        began = boot_time()
        with pytest.raises(ServiceRetryableError, match="the driver has not answered for 1 s"):
            await host.sample(1.0)
        assert boot_time() - began < 3.0


@pytest.mark.parametrize("answer", [ANSWER, DriverFailure("no driver here", "nvml_not_found")])
async def test_what_another_process_saw_long_ago_is_not_the_answer(
    tmp_path: Path, answer: DriverAnswer | DriverFailure
) -> None:
    """It arrives before this process has asked its own driver."""
    another_process_sampled(tmp_path, answer, seconds_ago=60.0)
    async with broker(tmp_path, ANSWER) as host:
        sample = await host.sample()
        assert boot_time() - sample.begun_at < 10.0


async def test_a_sample_of_another_process_serves_while_it_is_fresh(tmp_path: Path) -> None:
    another_process_sampled(tmp_path, ANSWER, seconds_ago=5.0)
    async with broker(tmp_path, None) as host:
        assert (await host.sample(1.0)).answer == ANSWER


async def test_what_is_explained_after_a_sample_knows_it(tmp_path: Path, eager_threads: None) -> None:
    """Also where the sample came at this very moment: else a held GPU would be "missing from the last reading"."""
    async with broker(tmp_path, None) as host:
        for turn in range(50):
            await until(lambda: not host.broker._is_observing)
            name = f"model {turn}"
            answer = DriverAnswer((GPUReading(0, name, "GPU-a"),))
            host._take(HostSample(1, 0, boot_time(), 0.1, "2026-01-01T00:00:00", answer))
            assert (await host.sample()).answer == answer
            explained = await host.broker.explain_requirements(Requirements())
            assert [gpu.name for gpu in explained.gpus] == [name]


async def test_a_stale_sample_is_not_an_answer(tmp_path: Path) -> None:
    another_process_sampled(tmp_path, ANSWER, seconds_ago=60.0)
    async with broker(tmp_path, None) as host:
        with pytest.raises(ServiceRetryableError, match=r"the driver has not answered for 6\d s"):
            await host.sample(0.5)


async def test_the_last_good_sample_serves_through_a_short_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker(tmp_path, ANSWER, DriverError("busy")) as host:
        good = await host.sample()
        host._sampler.want_fresh(boot_time())
        await until(lambda: host._last is not None and isinstance(host._last.answer, DriverFailure))
        assert await host.sample() == good
        monkeypatch.setattr(local, "SAMPLE_MAX_AGE_SECONDS", 0.0)
        with pytest.raises(ServiceRetryableError, match="busy"):
            await host.sample()
