"""Leases of this host's GPUs without a server, `local://`: all programs that use it share a ledger.

A program that runs inside a lease, as `gpu-pool run` starts it, is given the GPUs of that lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.local import LocalBroker, local_user
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import LOCAL_ENDPOINT
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    LedgerUnavailableError,
    PoolStoppedError,
    ServiceRefusedError,
    ServiceRetryableError,
)
from gpu_worker_pool.hardware.leasable import readings_of, within_visible
from gpu_worker_pool.hardware.proc import ancestors_of
from gpu_worker_pool.hardware.processes import is_gone, name_of_this_process
from gpu_worker_pool.hardware.readers.choose import check_backend
from gpu_worker_pool.hardware.samples import DriverAnswer
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting
from gpu_worker_pool.ledger.host import open_host_ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.ledger import Ledger, OnCommit

logger = logging.getLogger(__name__)

#: How long the first poll waits until the leases of holders that have just died are ended.
DEAD_HOLDER_SECONDS = 1.0
#: Renewal interval while the broker is closed: without renewals the ledger would look unserved (rule 10).
RESTING_SILENCE_SECONDS = 8.0
NO_GPU = "this host has no GPU; GPU_BACKEND=simulated:4 simulates four"

_SETTINGS = PoolSettings(poll_seconds=1.0)


@dataclass(frozen=True)
class LocalSettings:
    """What the environment says about this host's GPUs."""

    backend: str = "auto"
    #: None: the usual state directory.
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
    """Opens the broker with the first request. Belongs to one event loop."""

    url = LOCAL_ENDPOINT

    def __init__(self, endpoint_id: str, settings: LocalSettings) -> None:
        self.endpoint_id = endpoint_id
        self._settings = settings
        # Inside a lease, CUDA_VISIBLE_DEVICES lists what was leased, and is not a limit.
        self._visibility = VisibilityFilter(None if settings.lease_id else settings.visible_devices)
        self._opening: asyncio.Task[LocalBroker] | None = None
        self._is_resting = False
        self._process = name_of_this_process()
        self._user = local_user()
        #: By request id: every poll must send the same request, even if the visible GPUs change meanwhile.
        self._requests: dict[str, Request] = {}
        self._inherited: InheritedLease | None = None
        self._is_outside_lease = False
        self._has_awaited_dead_holders = False

    @property
    def longest_silence_seconds(self) -> float:
        return RESTING_SILENCE_SECONDS if self._is_resting else math.inf

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        async with self._host() as host:
            gpus = _gpus_in(await host.sample())
            if not gpus:
                raise ServiceRefusedError(NO_GPU)
            await self._until_dead_holders_are_noticed(host)
            if (inherited := await self._inherit(host, gpus)) is not None:
                inherited.check(await host.broker.lease(inherited.lease_id))
                return await inherited.take(request, wait_seconds)
            asked = self._requests.get(request.request_id) or self._as_sent(request, gpus)
            self._requests[request.request_id] = asked
            sent_at = boot_time()
            try:
                found = await host.broker.acquire(asked, wait_seconds=wait_seconds, may_reserve=may_reserve)
            except ImpossibleRequestError:
                del self._requests[request.request_id]
                raise
        if isinstance(found, Lease):
            self._requests.pop(request.request_id, None)
            return HeldLease(self, request, found.lease_id, found.fence, _leased(found), sent_at)
        return StillWaiting(found.position, self._with_limit(found.reasons, request, asked))

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        async with asyncio.timeout(timeout_seconds), self._ledger() as broker:
            if self._inherited is not None and lease.is_inherited:
                self._inherited.check(await broker.lease(lease.lease_id))
            else:
                await broker.renew(lease.lease_id, self._user)

    async def release(self, lease: HeldLease) -> None:
        if self._inherited is not None and lease.is_inherited:
            self._inherited.give_back(lease.request)
            return
        async with self._ledger() as broker:
            await broker.release(lease.lease_id, self._user)

    async def cancel(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        if self._inherited is not None:
            self._inherited.give_back(request)
            return
        async with self._ledger() as broker:
            await broker.cancel(request.request_id, self._user)

    async def rest(self) -> None:
        """Close the broker until there is another request: a holder need not read GPUs, nor watch the ledger."""
        if self._opening is not None:
            host, self._opening, self._is_resting = await self._opening, None, True
            await host.stop()

    async def close(self) -> None:
        await self.rest()

    async def readings(self) -> tuple[HostSample, tuple[GPUReading, ...], Sequence[Lease]]:
        """The sample, those of its GPUs that this program may use, and the leases that block them."""
        async with self._host() as host:
            sample = await host.sample()
            inherited = await self._inherit(host, _gpus_in(sample))
            held = await host.broker.held()
        gpus = self._visibility.apply(_gpus_in(sample)).gpus
        if inherited is None:
            return sample, gpus, held
        return sample, tuple(gpu for gpu in gpus if gpu.index in inherited.indices), ()

    # --- the broker ---

    @asynccontextmanager
    async def _host(self) -> AsyncIterator[LocalBroker]:
        async with _retryable():
            if self._opening is None:
                self._is_resting = False
                self._opening = asyncio.get_running_loop().create_task(self._open())
            yield await asyncio.shield(self._opening)

    async def _open(self) -> LocalBroker:
        host = LocalBroker(self._settings.backend, settings=_SETTINGS, state_dir=self._settings.state_dir)
        await host.start()
        return host

    @asynccontextmanager
    async def _ledger(self) -> AsyncIterator[LeaseBroker]:
        """The broker, if it is open; else a temporary one without readings."""
        if self._opening is not None:
            async with self._host() as host:
                yield host.broker
            return
        async with _retryable():
            broker = LeaseBroker(self._open_ledger, lambda _: None)
            await broker.start()
            try:
                yield broker
            finally:
                await broker.stop()

    def _open_ledger(self, on_commit: OnCommit) -> Ledger:
        try:
            return open_host_ledger(self._settings.backend, _SETTINGS, on_commit, state_dir=self._settings.state_dir)
        except (LedgerUnavailableError, OSError) as error:
            # A different error than the broker expects, as it would log every attempt: the caller reports it once.
            raise ServiceRetryableError(str(error)) from None

    async def _until_dead_holders_are_noticed(self, host: LocalBroker) -> None:
        """A request that does not wait must not be refused because of a holder that was killed a moment ago."""
        if self._has_awaited_dead_holders:
            return
        self._has_awaited_dead_holders = True
        deadline = boot_time() + DEAD_HOLDER_SECONDS
        while any(is_gone(lease.request.process) for lease in await host.broker.held() if lease.request.process):
            if boot_time() > deadline:
                return
            await asyncio.sleep(0.02)

    # --- the request ---

    def _as_sent(self, request: Request, gpus: Sequence[GPUReading]) -> Request:
        return replace(
            request,
            requirements=within_visible(request.requirements, gpus, self._visibility),
            owner=self._user,
            account=self._user,
            process=self._process,
        )

    def _with_limit(self, reasons: tuple[str, ...], request: Request, asked: Request) -> tuple[str, ...]:
        """Mention the variable that limits the request, since its user may not know of it."""
        if not reasons or asked.requirements == request.requirements:
            return reasons
        return (f"{reasons[0]}; CUDA_VISIBLE_DEVICES={self._settings.visible_devices} limits the choice", *reasons[1:])

    # --- the lease that this program runs in ---

    async def _inherit(self, host: LocalBroker, gpus: Sequence[GPUReading]) -> InheritedLease | None:
        if self._inherited is not None or self._is_outside_lease:
            return self._inherited
        lease = None
        if self._settings.lease_id is not None:
            lease = await host.broker.lease(self._settings.lease_id)
            if lease is None or not (lease.is_live and self._encloses_this_program(lease, gpus)):
                lost = "GPU_POOL_LEASE_ID is %s, which is not one of your active leases: requesting GPUs without it"
                logger.warning(lost, self._settings.lease_id)
                # Outside a lease, CUDA_VISIBLE_DEVICES limits which GPUs this program can use.
                self._visibility = VisibilityFilter(self._settings.visible_devices)
                lease = None
        if lease is None:
            lease = self._lease_of_our_shell(await host.broker.held(), gpus)
        if lease is None:
            self._is_outside_lease = True
            return None
        self._inherited = InheritedLease(self, lease.lease_id, lease.fence, _leased(lease))
        return self._inherited

    def _encloses_this_program(self, lease: Lease, gpus: Sequence[GPUReading]) -> bool:
        """Lease ids are counters, so another ledger may have a different lease with this id: compare the GPUs."""
        if lease.request.account == self._user:
            return True
        if lease.request.account.startswith("user:") or self._settings.visible_devices is None:
            return False
        visible = VisibilityFilter(self._settings.visible_devices).apply(gpus).gpus
        names = {gpu.identity for gpu in visible} | {device.uuid for gpu in visible for device in gpu.mig_devices}
        return len(visible) <= len(lease.gpu_ids) and set(lease.gpu_ids) <= names

    def _lease_of_our_shell(self, held: Iterable[Lease], gpus: Sequence[GPUReading]) -> Lease | None:
        """`CUDA_VISIBLE_DEVICES=$(gpu-pool wait)` says which GPUs a shell has, but not by which lease."""
        visible = VisibilityFilter(self._settings.visible_devices).apply(gpus)
        if not visible.is_filtering:
            return None
        names = {reading.gpu_id for reading in readings_of(visible.gpus)}
        ancestors = tuple(f":{pid}" for pid in ancestors_of(os.getpid()))
        for lease in held:
            is_ours = lease.is_live and lease.request.account == self._user
            if is_ours and lease.request.worker_id.endswith(ancestors) and set(lease.gpu_ids) == names:
                return lease
        return None


@asynccontextmanager
async def _retryable() -> AsyncIterator[None]:
    try:
        yield
    except (LedgerUnavailableError, PoolStoppedError, OSError) as error:  # TimeoutError is an OSError
        raise ServiceRetryableError(str(error) or "the ledger did not answer in time") from error


def _gpus_in(sample: HostSample) -> tuple[GPUReading, ...]:
    assert isinstance(sample.answer, DriverAnswer)  # as `LocalBroker.sample` promises
    return sample.answer.gpus


def _leased(lease: Lease) -> tuple[LeasedGPU, ...]:
    return tuple(LeasedGPU(held.index, held.uuid, held.name) for held in lease.held)
