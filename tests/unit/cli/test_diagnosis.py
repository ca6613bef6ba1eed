"""What a doctor says of a driver."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker_pool.cli.checking.diagnosis import read_gpus
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.samples import DriverAnswer


class Broken:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self) -> DriverAnswer:
        raise self._error

    def close(self) -> None:
        pass


def reading(error: Exception) -> Callable[[str, Callable[[], float]], Broken]:
    return lambda _backend, _clock: Broken(error)


def test_what_goes_wrong_is_told_as_what_it_is() -> None:
    refused = DriverError("the driver says no", code="refused")
    assert read_gpus("auto", reading(refused)) is refused
    failed = read_gpus("auto", reading(KeyError("memory")))
    assert isinstance(failed, DriverError)
    assert str(failed) == "reading failed: KeyError: 'memory'"
