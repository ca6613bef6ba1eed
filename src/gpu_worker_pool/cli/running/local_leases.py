"""Leases of this host's GPUs without a server, for a process that lives for one of them."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.cli.running.proc import ancestors_of
from gpu_worker_pool.cli.visible import visible_names, within_visible_devices
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.errors import LedgerUnavailableError, ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.hardware.processes import is_gone, name_of_this_process
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.suitable import check_suitable
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU, StillWaiting
from gpu_worker_pool.ledger.host import open_host_ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.leases.values import LeaseAsk
    from gpu_worker_pool.ledger import Ledger, Tell

#: A driver that does not answer for so long is trouble worth telling.
FIRST_SAMPLE_SECONDS: Final = 3.0
#: Readings older than this are worth nothing.
OLDEST_SECONDS: Final = 15.0
#: So long after it was noticed that a holder has gone its GPU is usually read, and seen to be free.
DEAD_SECONDS: Final = 1.0
#: Whoever holds something leaves a sign of life in the ledger so often; else nobody seems to serve it (rule 10).
LONGEST_SILENCE_SECONDS: Final = 8.0
#: There is nothing here to wait for.
NO_DRIVER: Final = frozenset({"nvidia_smi_not_found", "nvml_not_found"})

_SETTINGS: Final = PoolSettings(poll_seconds=1.0)


def local_user() -> str:
    """How leases without a server name whose they are."""
    return f"user:{os.getuid()}"


class LocalLeaseService:
    """Opened by the first who asks; belongs to one event loop."""

    endpoint_id = "local"
    longest_silence_seconds = LONGEST_SILENCE_SECONDS

    def __init__(self, backend: str, state_dir: str, *, inherited_lease_id: str | None = None) -> None:
        self._backend = backend
        self._state_dir = state_dir
        self._inherited_lease_id = inherited_lease_id
        self._opening: asyncio.Task[LocalBroker] | None = None
        self._process = name_of_this_process()
        self._sampled = asyncio.Event()
        self._is_first_over = False
        self._request: Request | None = None

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        host = await self._host()
        gpus = await self._gpus(host)
        await self._until_the_dead_are_noticed(host)
        if not self._inherited_lease_id:
            self._inherited_lease_id = _lease_of_our_shell(await host.broker.held(), gpus)
        if self._inherited_lease_id and (inherited := await self._inherited(host, ask)) is not None:
            return inherited
        sent_at = boot_time()
        if self._request is None or self._request.request_id != ask.request_id:
            self._request = self._make_request(ask, gpus)
        found = await host.broker.acquire(self._request, wait_seconds=wait_seconds, may_reserve=may_reserve)
        if isinstance(found, Lease):
            return _held(found, _gpus_of(found), ask, sent_at)
        return StillWaiting(found.position, _with_limit(found.reasons, ask, self._request))

    async def rest(self) -> None:
        """A hundred programs that hold a GPU for days need not look at it, nor at the ledger, all the time."""
        if self._opening is not None:
            host = await self._opening
            self._opening = None
            await host.stop()

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        async with asyncio.timeout(timeout_seconds), self._ledger() as broker:
            await broker.renew(lease.lease_id, local_user())

    async def release(self, lease: HeldLease) -> None:
        async with self._ledger() as broker:
            await broker.release(lease.lease_id, local_user())

    async def cancel(self, ask: LeaseAsk) -> None:
        async with self._ledger() as broker:
            await broker.cancel(ask.request_id, local_user())

    async def close(self) -> None:
        await self.rest()

    def forget(self) -> None:
        pass  # who may end it is a matter of the user's own id

    @asynccontextmanager
    async def _ledger(self) -> AsyncIterator[LeaseBroker]:
        """The desk, if it is open; else one without readings, for a moment."""
        if self._opening is not None:
            yield (await self._host()).broker
            return
        broker = LeaseBroker(self._open_ledger, lambda _: None)
        await broker.start()
        try:
            yield broker
        finally:
            await broker.stop()

    def _open_ledger(self, tell: Tell) -> Ledger:
        try:
            return open_host_ledger(self._backend, _SETTINGS, tell, state_dir=self._state_dir)
        except (LedgerUnavailableError, OSError) as error:
            # Not as the desk expects it, which would log it at every try: whoever tries tells it once.
            raise ServiceRetryableError(str(error)) from None

    # --- opening ---

    async def _host(self) -> LocalBroker:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> LocalBroker:
        host = LocalBroker(
            self._backend,
            settings=_SETTINGS,
            state_dir=self._state_dir,
            on_sample=self._take,
        )
        await host.start()
        return host

    def _take(self, _sample: HostSample) -> None:
        self._sampled.set()

    async def _gpus(self, host: LocalBroker) -> tuple[GPUReading, ...]:
        """Nothing is granted without readings: whoever waits for what cannot come is told so."""
        try:
            async with asyncio.timeout(FIRST_SAMPLE_SECONDS):
                await self._sampled.wait()
        except TimeoutError:
            raise ServiceRetryableError("the driver does not answer") from None
        last, good = host.seen.last, host.seen.good
        answer = None if last is None else last.answer
        if isinstance(answer, DriverFailure):
            if answer.code in NO_DRIVER:
                raise ServiceRefusedError(answer.message)
            if good is None or boot_time() - good.begun_at > OLDEST_SECONDS:
                raise ServiceRetryableError(answer.message)
        assert good is not None  # it was that, or a failure
        assert isinstance(good.answer, DriverAnswer)
        if not good.answer.gpus:
            raise ServiceRefusedError("this host has no GPU; GPU_BACKEND=simulated:4 pretends to have four")
        return good.answer.gpus

    async def _until_the_dead_are_noticed(self, host: LocalBroker) -> None:
        """Whoever does not want to wait must not be told that somebody has the GPU who was killed a moment ago."""
        if self._is_first_over:
            return
        self._is_first_over = True
        deadline = boot_time() + DEAD_SECONDS
        while any(is_gone(lease.request.process) for lease in await host.broker.held() if lease.request.process):
            if boot_time() > deadline:
                return
            await asyncio.sleep(0.02)

    # --- asking ---

    def _make_request(self, ask: LeaseAsk, gpus: tuple[GPUReading, ...]) -> Request:
        """Once: it must be the same every time, also if other GPUs are seen meanwhile."""
        user, requirements = local_user(), within_visible_devices(ask.requirements, gpus)
        return Request(
            ask.request_id, requirements, ask.worker_id, user, ask.label, ask.ttl_seconds, user, self._process
        )

    async def _inherited(self, host: LocalBroker, ask: LeaseAsk) -> HeldLease | None:
        """Whoever runs inside a lease has it already, and must not wait for itself."""
        lease = await host.broker.lease(self._inherited_lease_id or "")
        if lease is None or not lease.is_live or lease.request.account != local_user():
            return None
        gpus = tuple(check_suitable(lease.lease_id, _gpus_of(lease), ask.requirements)[: ask.requirements.count])
        return _held(lease, gpus, ask, boot_time(), is_inherited=True)


def _held(
    lease: Lease, gpus: tuple[LeasedGPU, ...], ask: LeaseAsk, sent_at: float, *, is_inherited: bool = False
) -> HeldLease:
    life = LeaseLife(ask.ttl_seconds, sent_at)
    return HeldLease("local", lease.lease_id, lease.fence, gpus, ask, life, is_inherited)


def _gpus_of(lease: Lease) -> tuple[LeasedGPU, ...]:
    return tuple(LeasedGPU(held.index, held.uuid, held.name) for held in lease.held)


def _lease_of_our_shell(held: Iterable[Lease], gpus: tuple[GPUReading, ...]) -> str | None:
    """`CUDA_VISIBLE_DEVICES=$(gpu-pool wait)` tells which GPUs a shell has, and not by which lease."""
    visible = visible_names(gpus)
    if visible is None:
        return None
    ancestors = tuple(f":{pid}" for pid in ancestors_of(os.getpid()))
    for lease in held:
        is_ours = lease.is_live and lease.request.account == local_user()
        if is_ours and lease.request.worker_id.endswith(ancestors) and set(lease.gpu_ids) == set(visible):
            return lease.lease_id
    return None


def _with_limit(reasons: tuple[str, ...], ask: LeaseAsk, request: Request) -> tuple[str, ...]:
    """Where a limit comes from the environment, whoever typed none is told so."""
    if not reasons or request.requirements == ask.requirements:
        return reasons
    limit = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} allows no other"
    return (f"{reasons[0]}; {limit}", *reasons[1:])
