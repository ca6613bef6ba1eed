"""Builds the sampler of this host: the reader of a backend, with samples shared through the state directory."""

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
    from gpu_worker_pool.hardware.readers.simulated import SimulatedHolder
    from gpu_worker_pool.hardware.samples import HostSample


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
    """`keep`: the number of past samples for processes that start later. `state_dir`: see `state_directory`.

    `holders`: the holders of simulated GPUs; called in the sampler's thread.
    """
    return Sampler(
        reader or make_reader(backend, boot_time, holders),
        interval_seconds=interval_seconds,
        on_sample=on_sample,
        open_log=lambda: SampleLog(state_directory(state_dir), readings_name(backend), keep=keep),
    )
