"""Leases of this host's GPUs from its server, over the Unix socket: what `local://` is where there is such a server.

As without a server, `CUDA_VISIBLE_DEVICES` limits a request, and a program inside a lease is given that lease's GPUs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.gpu_rows import summary_totals
from gpu_worker_pool.api.lease_decoder import read_lease_row
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.api.unix_socket import SOCKET_URL
from gpu_worker_pool.config import LOCAL_ENDPOINT
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.hardware.leasable import within_visible
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.leases.around import LiveLease, lease_around
from gpu_worker_pool.leases.http import HTTPLeaseService
from gpu_worker_pool.leases.inherited import InheritedLease
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting, YieldNotice, with_visibility_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from gpu_worker_pool.api.replies import Fetched
    from gpu_worker_pool.core.events import Request

_LIVE: Final = ("held", "offered")


class SocketLeaseService(HTTPLeaseService):
    """Belongs to one event loop, in which it opens its connections."""

    url = LOCAL_ENDPOINT

    def __init__(
        self,
        endpoint_id: str,
        path: str,
        *,
        timeout_seconds: float,
        environ: Mapping[str, str] | None = None,
        divides_lease: bool = False,
    ) -> None:
        """`divides_lease`: as for `LocalLeaseService`."""
        super().__init__(endpoint_id, APIClient(SOCKET_URL, self._session, timeout_seconds=timeout_seconds))
        self._path = path
        self._opened: aiohttp.ClientSession | None = None
        variables = os.environ if environ is None else environ
        self._visible_devices = variables.get("CUDA_VISIBLE_DEVICES")
        self._lease_id = Environment(variables).text("GPU_POOL_LEASE_ID") or None
        # Inside a lease, CUDA_VISIBLE_DEVICES lists what was leased, and is not a limit.
        self._visibility = VisibilityFilter(None if self._lease_id else self._visible_devices)
        #: By request id: every poll must send the same request, even if the visible GPUs change meanwhile.
        self._requests: dict[str, Request] = {}
        self._inherited: InheritedLease | None = None
        self._divides_lease = divides_lease
        #: The lease inside which this program runs, once it was looked for.
        self._around: LiveLease | None = None
        self._is_around_known = self._lease_id is None and self._visible_devices is None

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        if (inherited := await self._inherit()) is not None:
            await self._check(inherited)
            return await inherited.take(request, wait_seconds)
        asked = self._requests.get(request.request_id) or await self._as_sent(request)
        self._requests[request.request_id] = asked
        try:
            found = await super().acquire(asked, wait_seconds=wait_seconds, may_reserve=may_reserve)
        except ImpossibleRequestError:
            del self._requests[request.request_id]
            raise
        if isinstance(found, HeldLease):
            self._requests.pop(request.request_id, None)
            found.request = request
            return found
        return replace(found, reasons=with_visibility_limit(found.reasons, request, asked, self._visible_devices))

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        if self._inherited is not None and lease.is_inherited:
            await self._check(self._inherited)  # a process around this one renews it
            return None
        return await super().renew(lease, timeout_seconds=timeout_seconds)

    async def release(self, lease: HeldLease) -> None:
        if self._inherited is not None and lease.is_inherited:
            self._inherited.give_back(lease.request)
        else:
            await super().release(lease)

    async def cancel(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        if self._inherited is not None:
            self._inherited.give_back(request)
        else:
            await super().cancel(request)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def readings(self) -> Fetched:
        """Of the GPUs that this program may use."""
        inherited = await self._inherit()
        fetched = await self._api.summary()
        if inherited is None and self._visibility.value is None:
            return fetched
        rows = fetched.stats.gpus_summary
        if inherited is not None:
            rows = [replace(row, leased=False) for row in rows if row.gpu_id in inherited.indices]
        else:
            visible = {gpu.index for gpu in self._visibility.apply(await self._api.devices()).gpus}
            rows = [row for row in rows if row.gpu_id in visible]
        return replace(fetched, stats=replace(fetched.stats, gpus_summary=rows, **summary_totals(rows)))

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = make_session(limit_per_host=0, unix_socket=self._path)
        return self._opened

    async def _as_sent(self, request: Request) -> Request:
        if (around := await self._lease_around()) is not None:
            return replace(request, within=around.lease_id)
        if self._visibility.value is None:
            return request
        gpus = await self._api.devices()
        return replace(request, requirements=within_visible(request.requirements, gpus, self._visibility))

    # --- the lease that this program runs in ---

    async def _inherit(self) -> InheritedLease | None:
        around = None if self._divides_lease else await self._lease_around()
        if self._inherited is None and around is not None:
            self._inherited = InheritedLease(self, around.lease_id, around.fence, around.gpus)
        return self._inherited

    async def _lease_around(self) -> LiveLease | None:
        if self._is_around_known:
            return self._around
        rows = [row for row in (await self._api.leases())["leases"] if row["state"] in _LIVE]
        lease = lease_around(
            [_live(row) for row in rows], self._lease_id, self._visible_devices, await self._api.devices()
        )
        if lease is None:
            # Outside a lease, CUDA_VISIBLE_DEVICES limits which GPUs this program can use.
            self._visibility = VisibilityFilter(self._visible_devices)
        self._around, self._is_around_known = lease, True
        return lease

    async def _check(self, inherited: InheritedLease) -> None:
        found = await self._api.lease(inherited.lease_id)
        if found is None or found.state not in _LIVE:
            raise inherited.ended()


def _live(row: dict[str, Any]) -> LiveLease:
    found = read_lease_row(row)
    # The server says whose it is by the kernel's word.
    is_ours = None if row["user"] is None else row["user"] == user_name(os.getuid())
    gpus = tuple(LeasedGPU(*gpu) for gpu in found.gpus)
    pid = None if row["holder"] is None else row["holder"]["pid"]
    return LiveLease(found.lease_id, found.fence, row["worker_id"] or "", gpus, is_ours, pid)
