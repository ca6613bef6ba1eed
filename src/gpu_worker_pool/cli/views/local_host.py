"""This host without a server as a `Host` of the views: its samples and its ledger, in the bodies of the HTTP API."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from gpu_worker_pool.api.gpu_rows import stats_body
from gpu_worker_pool.api.lease_rows import explanation_body, lease_row, promises_of, queue_row
from gpu_worker_pool.broker.local import LocalBroker, local_user
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.accounts import uid_of
from gpu_worker_pool.core.origins import name_of
from gpu_worker_pool.errors import (
    LedgerUnavailableError,
    NotYourLeaseError,
    RetryableError,
    ServiceRefusedError,
    UnknownLeaseError,
)
from gpu_worker_pool.hardware.leasable import within_visible
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.hardware.samples import DriverAnswer
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.leases.around import lease_around
from gpu_worker_pool.leases.endpoint_choice import local_backend, local_state_directory
from gpu_worker_pool.leases.local import live_leases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from gpu_worker_pool.broker.broker import Waiting
    from gpu_worker_pool.cli.views.queries import Body
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.hardware.samples import HostSample

T = TypeVar("T")

FIRST_SAMPLE_SECONDS: Final = 5.0
LEDGER_SECONDS: Final = 10.0


@asynccontextmanager
async def open_local_host(endpoint: EndpointConfig) -> AsyncIterator[LocalHost]:
    try:
        backend = local_backend()
    except ValueError as error:
        raise ServiceRefusedError(str(error)) from None
    broker = LocalBroker(backend, state_dir=str(local_state_directory()))
    await broker.start()
    try:
        yield LocalHost(endpoint, broker)
    finally:
        await broker.stop()


class LocalHost:
    def __init__(self, endpoint: EndpointConfig, host: LocalBroker) -> None:
        self.endpoint = endpoint
        self._host = host

    async def stats(self) -> Body:
        sample = await self._host.sample(FIRST_SAMPLE_SECONDS)
        assert isinstance(sample.answer, DriverAnswer)
        body = stats_body(sample, sample.answer.gpus, promises_of(await self._leases()))
        return {**body, "sample_age_seconds": round(max(boot_time() - sample.begun_at, 0.0), 3)}

    async def leases(self) -> Body:
        leases, broker = await self._leases(), self._host.broker
        if leases and (sample := await self._known_sample()) is not None:
            broker.usages.take(sample, leases)  # the sample may have come before the leases were known
        return {"leases": [lease_row(lease, broker.usage_of(lease)) for lease in leases]}

    async def queue(self) -> Body:
        await self._known_sample()
        return {"queue": [queue_row(waiting) for waiting in await self._queue()]}

    async def explain_request(self, request_id: str) -> Body | None:
        await self._known_sample()
        broker = self._host.broker
        explanation = await _in_time(broker.explain(request_id))
        return None if explanation is None else explanation_body(request_id, explanation, broker.index_of)

    async def explain_requirements(self, requirements: Requirements) -> Body:
        sample = await self._host.sample(FIRST_SAMPLE_SECONDS)
        assert isinstance(sample.answer, DriverAnswer)
        broker, gpus, visible = self._host.broker, sample.answer.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")
        lease_id = os.environ.get("GPU_POOL_LEASE_ID", "").strip() or None
        around = lease_around(live_leases(await self._leases()), lease_id, visible, gpus)
        if around is None:
            requirements = within_visible(requirements, gpus, VisibilityFilter(visible))
        within = None if around is None else around.lease_id
        explanation = await _in_time(broker.explain_requirements(requirements, within, local_user()))
        return explanation_body("", explanation, broker.index_of)

    async def end_lease(self, lease_id: str) -> bool:
        lease = next((lease for lease in await self._leases() if lease.lease_id == lease_id), None)
        if lease is None:
            return False
        _check_ours(lease.request, f"lease {lease_id}")
        try:
            # The owner was checked above; None also allows ending a quarantine.
            await self._host.broker.release(lease_id, None)
        except UnknownLeaseError:
            return False
        return True

    async def ask_holder(self, lease_id: str, reason: str | None) -> bool:
        who = f"{user_name(os.getuid())} asks for it"
        try:
            await self._host.broker.ask_to_leave(lease_id, f"{who}: {reason}" if reason else who)
        except UnknownLeaseError:
            return False
        return True

    async def keep_lease(self, lease_id: str) -> bool:
        lease = next((lease for lease in await self._leases() if lease.lease_id == lease_id), None)
        if lease is None:
            return False
        _check_ours(lease.request, f"lease {lease_id}")
        await self._host.broker.renew(lease_id, None, is_busy=True)
        return True

    async def end_request(self, request_id: str) -> bool:
        broker = self._host.broker
        waiting = next((each for each in await self._queue() if each.request.request_id == request_id), None)
        if waiting is None:
            return False
        _check_ours(waiting.request, f"request {request_id}")
        return await broker.cancel(request_id, None)

    # --- what the answers are made from ---

    async def _leases(self) -> list[Lease]:
        await _in_time(self._host.until_dead_holders_are_noticed())
        return await _in_time(self._host.broker.held())

    async def _queue(self) -> list[Waiting]:
        return list(await _in_time(self._host.broker.queue()))

    async def _known_sample(self) -> HostSample | None:
        """Wait for readings; a list or an explanation also works without them."""
        with suppress(ServiceRefusedError, RetryableError):
            return await self._host.sample(FIRST_SAMPLE_SECONDS)
        return None


async def _in_time(reading: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(LEDGER_SECONDS):
            return await reading
    except TimeoutError:
        raise LedgerUnavailableError(
            f"the ledger has not answered for {LEDGER_SECONDS:g} s; run gpu-pool doctor"
        ) from None


def _check_ours(request: Request, what: str) -> None:
    if os.getuid() == 0 or request.account == local_user():
        return
    is_over_tcp = uid_of(request.account) is None
    whose = "that of a program that asked a server for it" if is_over_tcp else "another user's"
    raise NotYourLeaseError(f"{what} is {whose}: ask them ({name_of(request, host_name())}), or root")
