"""Watches the processes that use leases: their end, and which of them a lease has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from gpu_worker_pool.hardware.proc import ProcessStat, environment_of, process_stat

#: Interval between checks for a process, if the kernel cannot report its end.
LOOK_SECONDS: Final = 0.5


async def until_gone(pid: int) -> None:
    """Return when the process that has this pid now has ended."""
    found = process_stat(pid)
    if found is None or found.state == "Z":
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel
        while _is_same(process_stat(pid), found):  # noqa: ASYNC110  # there is nothing to wait for
            await asyncio.sleep(LOOK_SECONDS)
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _is_same(now: ProcessStat | None, then: ProcessStat) -> bool:
    return now is not None and now.started_at == then.started_at and now.state != "Z"


def processes_of_lease(lease_id: str, variable: str = "") -> list[int]:
    """The processes with this lease, or one inside it, in their environment, as far as we may read it.

    `variable`: `NAME=VALUE` that they must have, too. Without it, processes in a lease of another ledger, which has the
    same id, are found as well.
    """
    wanted = f"GPU_POOL_LEASE_ID={lease_id}".encode()
    around, name = b"GPU_POOL_OUTER_LEASES=", lease_id.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            variables = environment_of(int(entry.name))
            if variable and variable.encode() not in variables:
                continue
            if wanted in variables or any(
                each.startswith(around) and name in each.removeprefix(around).split(b",") for each in variables
            ):
                found.append(int(entry.name))
    return found
