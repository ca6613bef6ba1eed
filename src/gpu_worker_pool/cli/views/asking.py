"""What `yield` and `keep` do: ask holders to give leases back, or report that leases are needed, at any endpoint."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.exits import Status, status_of
from gpu_worker_pool.cli.output import print_line, printable
from gpu_worker_pool.cli.views.queries import open_hosts, opened
from gpu_worker_pool.errors import GPUWorkerPoolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gpu_worker_pool.cli.views.queries import Host


def ask_holders(endpoints: Sequence[str], lease_ids: Sequence[str], reason: str | None) -> int:
    def ask(host: Host, lease_id: str) -> Awaitable[bool]:
        return host.ask_holder(lease_id, reason)

    return asyncio.run(_each(endpoints, lease_ids, ask, "the holder of {} is asked to give it back"))


def keep_leases(endpoints: Sequence[str], lease_ids: Sequence[str]) -> int:
    def keep(host: Host, lease_id: str) -> Awaitable[bool]:
        return host.keep_lease(lease_id)

    return asyncio.run(_each(endpoints, lease_ids, keep, "{} counts as used now"))


async def _each(
    endpoints: Sequence[str], lease_ids: Sequence[str], act: Callable[[Host, str], Awaitable[bool]], done: str
) -> int:
    status = 0
    async with open_hosts(endpoints) as hosts:
        for lease_id in lease_ids:
            errors, failed = [], Status.FAILED
            for host in hosts:
                try:
                    if await act(opened(host), lease_id):
                        print_line(done.format(lease_id))
                        break
                except GPUWorkerPoolError as error:
                    errors.append(str(error))
                    failed = status_of(error)
            else:
                what = "; ".join(errors) or f"there is no lease {lease_id!r}; gpu-pool leases lists what there is"
                sys.stderr.write(f"gpu-pool: {printable(what)}\n")
                status = status or int(failed)
    return status
