"""Finds and watches other processes: their end, those of a lease, and the shell that called us."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from gpu_worker_pool.hardware.proc import ProcessStat, ancestors_of, process_stat

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


def processes_of_lease(lease_id: str) -> list[int]:
    """The processes with this lease, or one inside it, in their environment, as far as we may read it."""
    wanted = f"GPU_POOL_LEASE_ID={lease_id}".encode()
    around, name = b"GPU_POOL_OUTER_LEASES=", lease_id.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            variables = environment.split(b"\0")
            if wanted in variables or any(
                each.startswith(around) and name in each.removeprefix(around).split(b",") for each in variables
            ):
                found.append(int(entry.name))
    return found


def calling_shell() -> int:
    """The nearest ancestor that is not a subshell: a shell forks one for `$(…)`, and it ends too early.

    A fork without exec has its parent's memory, so both have the same addresses in `auxv`.
    """
    pid = os.getppid()
    for parent in ancestors_of(pid):
        if not _is_fork_of(pid, parent):
            break
        pid = parent
    return pid


def _is_fork_of(pid: int, parent: int) -> bool:
    def facts(of: int) -> tuple[bytes, ...]:
        return tuple(Path(f"/proc/{of}/{name}").read_bytes() for name in ("auxv", "cmdline"))

    try:
        ours = facts(pid)
        return bool(ours[0]) and ours == facts(parent)
    except OSError:
        return False
