"""Leases of this host's GPUs without a server, `local://`: the host's own desk, in the thread of the `LeaseThread`.

All programs that use it meet in the ledger of the state directory. A program that runs inside a lease, as
`gpu-pool run` starts it, is given the GPUs of that lease and waits for no others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from gpu_worker_pool.api.http_client import Fetched
from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import LOCAL_ENDPOINT
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    LedgerUnavailableError,
    PoolStoppedError,
    ServiceRefusedError,
    ServiceRetryableError,
)
from gpu_worker_pool.hardware.leasable import within_visible
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.hardware.readers.choose import check_backend
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU, StillWaiting
from gpu_worker_pool.models import GPUInfo, GPUStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from gpu_worker_pool.client.lease_thread import LeaseThread
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.leases.values import LeaseAsk

logger = logging.getLogger(__name__)

#: How long the driver has for its first answer before that is told.
FIRST_SAMPLE_SECONDS = 3.0
#: Readings older than this are worth nothing (rule 1).
OLDEST_SAMPLE_SECONDS = 15.0
#: Where the driver is not even installed there is nothing to wait for.
NO_DRIVER = frozenset({"nvidia_smi_not_found", "nvml_not_found"})


@dataclass(frozen=True)
class LocalSettings:
    """What the environment says about this host's GPUs."""

    backend: str = "auto"
    #: None: where the programs of this host usually meet.
    state_dir: str | None = None
    #: Which GPUs this program may see, as CUDA reads it; None: all of them.
    visible_devices: str | None = None
    #: The lease inside which this program runs.
    lease_id: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        variables = os.environ if environ is None else environ
        env = Environment(variables, logger.error)
        return cls(
            env.get("GPU_BACKEND", cls.backend, check_backend),
            env.text("GPU_POOL_STATE_DIR") or None,
            variables.get("CUDA_VISIBLE_DEVICES"),
            env.text("GPU_POOL_LEASE_ID") or None,
        )


class LocalLeaseService:
    """Opened by the first who asks. Everything but `fetch` belongs to the keeper's event loop."""

    url = LOCAL_ENDPOINT

    def __init__(self, endpoint_id: str, settings: LocalSettings, thread: LeaseThread) -> None:
        self.endpoint_id = endpoint_id
        self._settings = settings
        self._thread_ = thread
        # Inside a lease that variable says what was leased.
        self._visibility = VisibilityFilter(None if settings.lease_id else settings.visible_devices)
        self._opening: asyncio.Task[LocalBroker] | None = None
        self._sampled = asyncio.Event()
        self._process = name_of_this_process()
        self._user = f"user:{os.getuid()}"
        #: By request id: a request must be the same every time, also if other GPUs are seen meanwhile.
        self._requests: dict[str, Request] = {}
        self._inherited: InheritedLease | None = None

    # --- readings, for the client's own loop ---

    async def fetch(self) -> Fetched:
        try:
            return await asyncio.wrap_future(self._thread_.do(self._fetch))
        except PoolStoppedError as error:  # which is no fault of the readings
            raise ServiceRetryableError(str(error)) from error

    async def _fetch(self) -> Fetched:
        begun = time.monotonic()
        async with self._local_broker() as host:
            sample = await self._good_sample(host)
            inherited = await self._inherit(host, sample)
            promised = {gpu_id for lease in await host.broker.held() for gpu_id in lease.gpu_ids}
        assert isinstance(sample.answer, DriverAnswer)  # else it is not good
        gpus = self._visibility.apply(sample.answer.gpus).gpus
        if inherited is not None:
            # There are no others for this program, and these are not somebody else's.
            gpus, promised = tuple(gpu for gpu in gpus if gpu.index in inherited.indices), set()
        stats = _stats_of(sample, gpus, promised, max(boot_time() - sample.begun_at, 0.0))
        return Fetched(stats, (), time.monotonic(), time.monotonic() - begun)

    async def _good_sample(self, host: LocalBroker) -> HostSample:
        try:
            async with asyncio.timeout(FIRST_SAMPLE_SECONDS):
                await self._sampled.wait()
        except TimeoutError:
            raise ServiceRetryableError(f"the driver has not answered for {FIRST_SAMPLE_SECONDS:g} s") from None
        good, last = host.seen.good, host.seen.last
        if good is not None and boot_time() - good.begun_at <= OLDEST_SAMPLE_SECONDS:
            return good
        answer = None if last is None else last.answer
        message = answer.message if isinstance(answer, DriverFailure) else "the driver does not answer any more"
        if isinstance(answer, DriverFailure) and answer.code in NO_DRIVER:
            raise ServiceRefusedError(message)
        raise ServiceRetryableError(message)

    # --- leases ---

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        async with self._local_broker() as host:
            sample = await self._good_sample(host)
            if (inherited := await self._inherit(host, sample)) is not None:
                inherited.check(await host.broker.lease(inherited.lease_id))
                return await inherited.take(ask, wait_seconds)
            request = self._requests.get(ask.request_id) or self._request(ask, sample)
            self._requests[ask.request_id] = request
            sent_at = boot_time()
            try:
                found = await host.broker.acquire(request, wait_seconds=wait_seconds, may_reserve=may_reserve)
            except ImpossibleRequestError:
                del self._requests[ask.request_id]
                raise
        if isinstance(found, Lease):
            self._requests.pop(ask.request_id, None)
            return self._held(found, ask, sent_at)
        return StillWaiting(found.position, found.reasons)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        async with self._local_broker() as host:
            if self._inherited is not None and self._inherited.has(lease):
                self._inherited.check(await host.broker.lease(lease.lease_id))
                return
            async with asyncio.timeout(timeout_seconds):
                await host.broker.renew(lease.lease_id, self._user)

    async def release(self, lease: HeldLease) -> None:
        if self._inherited is not None and self._inherited.give_back(lease):
            return
        async with self._local_broker() as host:
            await host.broker.release(lease.lease_id, self._user)

    async def cancel(self, ask: LeaseAsk) -> None:
        self._requests.pop(ask.request_id, None)
        if self._inherited is None:
            async with self._local_broker() as host:
                await host.broker.cancel(ask.request_id, self._user)

    async def close(self) -> None:
        if self._opening is not None:
            await (await self._opening).stop()

    # --- inside ---

    @asynccontextmanager
    async def _local_broker(self) -> AsyncIterator[LocalBroker]:
        try:
            yield await self._host()
        except (LedgerUnavailableError, PoolStoppedError, OSError) as error:  # of which TimeoutError is one
            raise ServiceRetryableError(str(error) or "the ledger does not answer in time") from error

    async def _host(self) -> LocalBroker:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> LocalBroker:
        settings = self._settings
        host = LocalBroker(
            settings.backend,
            settings=PoolSettings(poll_seconds=1.0),
            state_dir=settings.state_dir,
            on_sample=lambda _: self._sampled.set(),
        )
        await host.start()
        return host

    def _request(self, ask: LeaseAsk, sample: HostSample) -> Request:
        assert isinstance(sample.answer, DriverAnswer)  # else it is not good
        return Request(
            ask.request_id,
            within_visible(ask.requirements, sample.answer.gpus, self._visibility),
            ask.worker_id,
            owner=self._user,
            label=ask.label,
            ttl_seconds=ask.ttl_seconds,
            account=self._user,
            process=self._process,
        )

    def _held(self, lease: Lease, ask: LeaseAsk, sent_at: float) -> HeldLease:
        gpus = tuple(LeasedGPU(held.index, held.uuid, held.name) for held in lease.held)
        life = LeaseLife(ask.ttl_seconds, sent_at)
        return HeldLease(self.endpoint_id, lease.lease_id, lease.fence, gpus, ask, life)

    async def _inherit(self, host: LocalBroker, sample: HostSample) -> InheritedLease | None:
        if self._settings.lease_id is None:
            return None
        if self._inherited is None:
            lease = await host.broker.lease(self._settings.lease_id)
            if lease is None or not lease.is_live or not self._is_around_us(lease, sample):
                lost = "GPU_POOL_LEASE_ID is %s, which is no lease of yours that lives: asking for GPUs without it"
                logger.warning(lost, self._settings.lease_id)
                # What CUDA shows this program is all that it can use of what it gets.
                self._visibility = VisibilityFilter(self._settings.visible_devices)
                self._settings = replace(self._settings, lease_id=None)
                return None
            self._inherited = InheritedLease(self.endpoint_id, lease)
        return self._inherited

    def _is_around_us(self, lease: Lease, sample: HostSample) -> bool:
        """Ids are counters: one of another ledger may name somebody's lease here, and is told by its GPUs."""
        if lease.request.account == self._user:
            return True
        if lease.request.account.startswith("user:") or self._settings.visible_devices is None:
            return False
        assert isinstance(sample.answer, DriverAnswer)  # else it is not good
        visible = VisibilityFilter(self._settings.visible_devices).apply(sample.answer.gpus).gpus
        names = {gpu.identity for gpu in visible} | {device.uuid for gpu in visible for device in gpu.mig_devices}
        return len(visible) <= len(lease.gpu_ids) and set(lease.gpu_ids) <= names


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
