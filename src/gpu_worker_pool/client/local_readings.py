"""Readings of this host's GPUs without a server, as a client's monitor fetches them from `local://`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gpu_worker_pool.api.http_client import Fetched
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import PoolStoppedError, ServiceRetryableError
from gpu_worker_pool.models import GPUInfo, GPUStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.client.lease_thread import LeaseThread
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.leases.local import LocalLeaseService


class LocalReadings:
    def __init__(self, service: LocalLeaseService, thread: LeaseThread) -> None:
        self.url = service.url
        self._service = service
        self._thread = thread

    async def fetch(self) -> Fetched:
        begun = time.monotonic()
        try:
            sample, gpus, promised = await asyncio.wrap_future(self._thread.do(self._service.readings))
        except PoolStoppedError as error:  # says nothing about the readings
            raise ServiceRetryableError(str(error)) from error
        stats = _stats_of(sample, gpus, promised, max(boot_time() - sample.begun_at, 0.0))
        return Fetched(stats, (), time.monotonic(), time.monotonic() - begun)


def _stats_of(sample: HostSample, gpus: Iterable[GPUReading], promised: set[str], age_seconds: float) -> GPUStats:
    rows = [
        GPUInfo(
            gpu.index,
            gpu.name,
            gpu.memory_usage_percent,
            gpu.utilization_percent,
            uuid=gpu.uuid,
            memory_total_mb=gpu.memory_total_mb,
            memory_used_mb=gpu.memory_used_mb,
            fault=gpu.fault,
            leased=gpu.identity in promised or any(device.uuid in promised for device in gpu.mig_devices),
            reports_utilization=gpu.reports_utilization,
            process_count=None if gpu.processes is None else len(gpu.processes),
        )
        for gpu in gpus
    ]
    both = [row for row in rows if row.memory_total_mb is not None and row.memory_used_mb is not None]
    total = sum(row.memory_total_mb or 0.0 for row in both)
    used = sum(row.memory_used_mb or 0.0 for row in both)
    utilizations = [row.utilization_percent for row in rows if row.utilization_percent is not None]
    return GPUStats(
        gpu_count=len(rows),
        total_memory_mb=total if both else None,
        total_used_memory_mb=used if both else None,
        average_utilization_percent=sum(utilizations) / len(utilizations) if utilizations else None,
        gpus_summary=rows,
        total_memory_usage_percent=100.0 * used / total if total else None,
        timestamp=sample.timestamp,
        sample_age_seconds=age_seconds,
    )
