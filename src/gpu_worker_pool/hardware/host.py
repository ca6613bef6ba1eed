"""This host's GPUs, put together: the reader that a backend names, sampled, and shared through the state directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.hardware.readers.choose import make_reader, readings_name
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.sampler import Sampler
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.readers.simulated import Holder
    from gpu_worker_pool.hardware.samples import HostSample


def host_sampler(
    backend: str,
    *,
    interval_seconds: float,
    keep: int,
    on_sample: Callable[[HostSample], object],
    state_dir: str | None = None,
    reader: Reader | None = None,
    holders: Callable[[], Iterable[Holder]] = tuple,
) -> Sampler:
    """`keep`: how many samples of the past whoever starts later may want to see. `state_dir`: see `state_directory`.

    `holders`: who has simulated GPUs; asked in the sampler's thread.
    """
    return Sampler(
        reader or make_reader(backend, boot_time, holders),
        interval_seconds=interval_seconds,
        on_sample=on_sample,
        open_log=lambda: SampleLog(state_directory(state_dir), readings_name(backend), keep=keep),
    )
