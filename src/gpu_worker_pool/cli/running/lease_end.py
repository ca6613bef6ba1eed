"""How a lease process ends a lease: at once, when nothing of its command is left, or by letting it expire."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import StaleAssignmentError
from gpu_worker_pool.leases.processes import processes_of_lease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gpu_worker_pool.leases.engine import LeaseEngine
    from gpu_worker_pool.leases.lease import HeldLease

#: Interval between checks for processes that a command inside a lease has left behind.
LEFT_SECONDS: Final = 0.5


async def end_lease(
    engine: LeaseEngine, lease: HeldLease, *, is_clean: bool, go_on_alone: Callable[[], object]
) -> None:
    """`is_clean`: nothing of its command is left. `go_on_alone` is called if this takes longer than a moment."""
    if not (is_clean or lease.is_inherited):
        if lease.within is None:
            # What still runs may use the GPU, so it stays in quarantine until readings show nothing of that. Its owner,
            # who may know better, can still end it.
            engine.let_expire(lease)
            return
        # Readings do not show which part of the lease around it is in use: renew it until nothing of it is left.
        go_on_alone()
        await first_of(until_nothing_is_left(lease.lease_id), lease.wait())
    with suppress(StaleAssignmentError):
        await engine.release(lease)
    if engine.is_releasing:
        # `gpu-pool` need not wait for a server that is down.
        go_on_alone()
        await engine.until_released(lease.ttl_seconds)


async def until_nothing_is_left(lease_id: str, variable: str = "") -> None:
    while processes_of_lease(lease_id, variable):  # noqa: ASYNC110  # there is nothing to wait for
        await asyncio.sleep(LEFT_SECONDS)


async def first_of(*ends: Awaitable[object]) -> None:
    """Until one of them is done; ends the others, except tasks and futures, which belong to the caller."""
    waiting = [asyncio.ensure_future(each) for each in ends]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for mine, given in zip(waiting, ends, strict=True):
            if mine is not given:
                mine.cancel()


def leave_the_terminal() -> None:
    """Close what we could write to, so that its reader need not wait for our end; a closed terminal must not end us."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    os.close(nothing)
    with suppress(OSError):  # it is one already
        os.setsid()
    os.chdir("/")
