"""This host's GPUs, put together: the reader that a backend names, sampled, and shared through the state directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.hardware.readers.choose import hardware_name, make_reader
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.sampler import Sampler, boot_time
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import Sample


def host_sampler(
    backend: str,
    *,
    interval_seconds: float,
    keep: int,
    on_sample: Callable[[Sample], object],
    state_dir: str | None = None,
    reader: Reader | None = None,
) -> Sampler:
    """`keep`: how many samples of the past whoever starts later may want to see. `state_dir`: see `state_directory`."""
    return Sampler(
        reader or make_reader(backend, boot_time),
        interval_seconds=interval_seconds,
        on_sample=on_sample,
        open_log=lambda: SampleLog(state_directory(state_dir), hardware_name(backend), keep=keep),
    )
