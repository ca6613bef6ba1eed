"""This host's desk without a server: its readings, its ledger and the desk, for a program that uses `local://`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.simulated_load import SimulatedLoad
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.hardware.host import host_sampler
from gpu_worker_pool.ledger.host import open_host_ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.hardware.sampler import LatestSamples
    from gpu_worker_pool.hardware.samples import HostSample


INTERVAL_SECONDS: Final = 1.0


class LocalBroker:
    """`broker` is open between `start` and `stop`; meanwhile this or another process samples the host's GPUs."""

    def __init__(
        self,
        backend: str = "auto",
        *,
        settings: PoolSettings | None = None,
        state_dir: str | None = None,
        on_sample: Callable[[HostSample], object] | None = None,
    ) -> None:
        """`on_sample` is called in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._on_sample = on_sample
        settings = settings or PoolSettings(poll_seconds=INTERVAL_SECONDS)
        load = SimulatedLoad.of(backend)
        self._sampler = host_sampler(
            backend,
            interval_seconds=INTERVAL_SECONDS,
            keep=1,
            # The only crossing from the sampler's thread to the loop's.
            on_sample=lambda sample: self._loop.call_soon_threadsafe(self._take, sample),
            state_dir=state_dir,
            holders=tuple if load is None else load.holders,
        )
        self.broker = LeaseBroker(
            lambda tell: open_host_ledger(backend, settings, tell, state_dir=state_dir),
            self._sampler.want_fresh,
            on_leases=None if load is None else load.take,
        )

    @property
    def seen(self) -> LatestSamples:
        """What is known of the GPUs at this moment."""
        return self._sampler.seen

    async def start(self) -> None:
        await self.broker.start()
        self._sampler.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)
        await self.broker.stop()

    def _take(self, sample: HostSample) -> None:
        self.broker.take(sample)
        if self._on_sample is not None:
            self._on_sample(sample)
