"""Readings of this host's GPUs, as a client's monitor fetches them from `local://`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gpu_worker_pool.api.gpu_rows import summary_body
from gpu_worker_pool.api.lease_rows import promises_of
from gpu_worker_pool.api.replies import Fetched
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import PoolStoppedError, ServiceRetryableError
from gpu_worker_pool.models import UNKNOWN_GPU, GPUInfo, GPUStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.leases.lease_thread import LeaseThread
    from gpu_worker_pool.leases.local import LocalLeaseService
    from gpu_worker_pool.leases.unix_socket import SocketLeaseService


class LocalReadings:
    def __init__(self, service: LocalLeaseService | SocketLeaseService, thread: LeaseThread) -> None:
        self.url: str = service.url
        self._service = service
        self._thread = thread

    async def fetch(self) -> Fetched:
        begun = time.monotonic()
        try:
            found = await asyncio.wrap_future(self._thread.do(self._readings))
        except PoolStoppedError as error:  # says nothing about the readings
            raise ServiceRetryableError(str(error)) from error
        if isinstance(found, Fetched):
            return found
        sample, gpus, leases = found
        # As a server would send them.
        body = summary_body(sample, gpus, promises_of(leases))
        rows = [GPUInfo(**{**row, "name": row["name"] or UNKNOWN_GPU}) for row in body.pop("gpus_summary")]
        age_seconds = max(boot_time() - sample.begun_at, 0.0)
        stats = GPUStats(**body, gpus_summary=rows, sample_age_seconds=age_seconds)
        return Fetched(stats, (), time.monotonic(), time.monotonic() - begun)

    async def _readings(self) -> Fetched | tuple[HostSample, tuple[GPUReading, ...], Sequence[Lease]]:
        return await self._service.readings()
