"""Leases of this host's GPUs without a server, `local://`: all programs that use it share a ledger.

A program that runs inside a lease, as `gpu-pool run` starts it, is given the GPUs of that lease, or a part of them.
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
from gpu_worker_pool.core.accounts import uid_of
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.origins import vouched
from gpu_worker_pool.core.settings import host_settings
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    LedgerUnavailableError,
    LedgerUnusableError,
    PoolStoppedError,
    ServiceRefusedError,
    ServiceRetryableError,
)
from gpu_worker_pool.hardware.leasable import readings_of, within_visible
from gpu_worker_pool.hardware.origin import origin_of_this_process
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.hardware.readers.choose import check_backend, complete_backend, read_outsiders
from gpu_worker_pool.hardware.samples import DriverAnswer
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.leases.around import LiveLease, lease_around
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting, YieldNotice, with_visibility_limit
from gpu_worker_pool.ledger.host import open_host_ledger
from gpu_worker_pool.state_directory import announce_privacy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from gpu_worker_pool.core.events import Origin, Request
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.ledger import Ledger, OnCommit

logger: logging.Logger = logging.getLogger(__name__)

#: Renewal interval while the broker is closed: without renewals the ledger would look unserved (rule 10).
RESTING_SILENCE_SECONDS = 8.0
NO_GPU = "this host has no GPU; GPU_BACKEND=simulated:4 simulates four"

_SETTINGS = host_settings(poll_seconds=1.0)


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
        backend = env.get("GPU_BACKEND", cls.backend, check_backend)
        return cls(
            complete_backend(backend, read_outsiders(backend, env)),
            env.text("GPU_POOL_STATE_DIR") or None,
            variables.get("CUDA_VISIBLE_DEVICES"),
            env.text("GPU_POOL_LEASE_ID") or None,
        )


class LocalLeaseService:
    """Opens the broker with the first request. Belongs to one event loop."""

    url = LOCAL_ENDPOINT

    def __init__(self, endpoint_id: str, settings: LocalSettings, *, divides_lease: bool = False) -> None:
        """`divides_lease`: inside a lease, each request is granted a part of it, and waits for the others inside it.

        The commands of a shell are for that: each of them runs one program. Otherwise the GPUs go to the workers of
        this program at once, whatever else runs inside the lease: it is the program that the lease was acquired for.
        """
        self.endpoint_id = endpoint_id
        self._divides_lease = divides_lease
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
        #: The lease inside which this program runs, once it was looked for.
        self._around: LiveLease | None = None
        self._is_around_known = False
        self._has_awaited_dead_holders = False

    @property
    def longest_silence_seconds(self) -> float:
        return RESTING_SILENCE_SECONDS if self._is_resting else math.inf

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        async with self._host() as host:
            gpus = _gpus_in(await host.sample())
            if not gpus:
                raise ServiceRefusedError(NO_GPU)
            if not self._has_awaited_dead_holders:
                self._has_awaited_dead_holders = True
                # A request that does not wait must not be refused because of a holder that was killed a moment ago.
                await host.until_dead_holders_are_noticed(and_their_gpus_seen=True)
            around = await self._lease_around(host, gpus)
            if (inherited := self._inherit(around)) is not None:
                inherited.check(await host.broker.lease(inherited.lease_id))
                return await inherited.take(request, wait_seconds)
            asked = self._requests.get(request.request_id) or self._as_sent(request, gpus, around)
            self._requests[request.request_id] = asked
            sent_at = boot_time()
            try:
                found = await host.broker.acquire(asked, wait_seconds=wait_seconds, may_reserve=may_reserve)
            except ImpossibleRequestError:
                del self._requests[request.request_id]
                raise
        if isinstance(found, Lease):
            self._requests.pop(request.request_id, None)
            return HeldLease(
                self,
                request,
                found.lease_id,
                found.fence,
                _leased(found, gpus),
                sent_at,
                within=found.within,
                ends_at=found.ends_at,
            )
        reasons = with_visibility_limit(found.reasons, request, asked, self._settings.visible_devices)
        return StillWaiting(found.position, reasons)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        async with asyncio.timeout(timeout_seconds), self._ledger() as broker:
            if self._inherited is not None and lease.is_inherited:
                self._inherited.check(await broker.lease(lease.lease_id))
                return None
            asked = (await broker.renew(lease.lease_id, self._user)).asked
            if asked is None:
                return None
            return YieldNotice(asked.reason, None if asked.ends_at is None else max(asked.ends_at - boot_time(), 0.0))

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

    async def has_waiting(self) -> bool:
        async with self._ledger() as broker:
            return bool(await broker.queue())

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
            inherited = self._inherit(await self._lease_around(host, _gpus_in(sample)))
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
            opening = self._opening
            try:
                host = await asyncio.shield(opening)
            except LedgerUnusableError:
                if self._opening is opening:
                    self._opening = None  # the next request looks again
                raise
            yield host

    async def _open(self) -> LocalBroker:
        announce_privacy(self._settings.state_dir)
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

    # --- the request ---

    def _as_sent(self, request: Request, gpus: Sequence[GPUReading], around: LiveLease | None) -> Request:
        requirements = request.requirements
        if around is None:
            requirements = within_visible(requirements, gpus, self._visibility)
        return replace(
            request,
            requirements=requirements,
            within=None if around is None else around.lease_id,
            owner=self._user,
            account=self._user,
            process=request.process or self._process,
            origin=self._origin(request),
        )

    def _origin(self, request: Request) -> Origin:
        """Of this process; or of the one for which it holds the GPU, as `gpu-pool` does for a command or a shell."""
        mine = origin_of_this_process()
        said = request.origin or mine
        return vouched(said, user=mine.user, host=mine.host, pid=said.pid)

    # --- the lease that this program runs in ---

    def _inherit(self, around: LiveLease | None) -> InheritedLease | None:
        if self._inherited is None and around is not None and not self._divides_lease:
            self._inherited = InheritedLease(self, around.lease_id, around.fence, around.gpus)
        return self._inherited

    async def _lease_around(self, host: LocalBroker, gpus: Sequence[GPUReading]) -> LiveLease | None:
        if self._is_around_known:
            return self._around
        settings = self._settings
        lease = lease_around(live_leases(await host.broker.held()), settings.lease_id, settings.visible_devices, gpus)
        if lease is None:
            # Outside a lease, CUDA_VISIBLE_DEVICES limits which GPUs this program can use.
            self._visibility = VisibilityFilter(settings.visible_devices)
        self._around, self._is_around_known = lease, True
        return lease


@asynccontextmanager
async def _retryable() -> AsyncIterator[None]:
    try:
        yield
    except LedgerUnusableError:
        raise
    except (LedgerUnavailableError, PoolStoppedError, OSError) as error:  # TimeoutError is an OSError
        text = str(error) or "the ledger did not answer in time"
        raise ServiceRetryableError(text, is_lease_held=getattr(error, "lease", "") == "held") from error


def _gpus_in(sample: HostSample) -> tuple[GPUReading, ...]:
    assert isinstance(sample.answer, DriverAnswer)  # as `LocalBroker.sample` promises
    return sample.answer.gpus


def live_leases(held: Iterable[Lease]) -> list[LiveLease]:
    found = []
    for lease in held:
        account = lease.request.account
        is_ours = None if uid_of(account) is None else account == local_user()
        if lease.is_live:
            origin = lease.request.origin
            pid = None if origin is None else origin.pid
            found.append(LiveLease(lease.lease_id, lease.fence, lease.request.worker_id, _leased(lease), is_ours, pid))
    return found


def _leased(lease: Lease, gpus: Sequence[GPUReading] = ()) -> tuple[LeasedGPU, ...]:
    totals = {reading.gpu_id: reading.memory_total_mb for reading in readings_of(gpus)}
    return tuple(LeasedGPU(held.index, held.uuid, held.name, totals.get(held.gpu_id)) for held in lease.held)
