"""Who a process on a GPU is: what this host's /proc tells of a pid that the driver named."""

from __future__ import annotations

import os
import pwd
from functools import lru_cache
from pathlib import Path

from gpu_worker_pool.core.readings import ProcessReading

#: The kernel's own number for it.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def describe_process(pid: int, *, name: str | None = None, memory_used_mb: float | None = None) -> ProcessReading:
    """`name` is what the driver calls it, and all that is known of a process that our /proc does not show."""
    folder = Path("/proc", str(pid))
    try:
        if not _sees_the_hosts_pids():
            return ProcessReading(pid, name=name, memory_used_mb=memory_used_mb)
        user = _user_name(folder.stat().st_uid)
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return ProcessReading(pid, name=name, memory_used_mb=memory_used_mb)
    # The command stands in brackets and may hold brackets and blanks of its own.
    command, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    started_at = int(fields[19]) / _TICKS_PER_SECOND if len(fields) > 19 else None
    return ProcessReading(pid, started_at=started_at, name=name or command, user=user, memory_used_mb=memory_used_mb)


@lru_cache(maxsize=1)
def _sees_the_hosts_pids() -> bool:
    """The driver tells pids of the host; in a container with numbers of its own they would name somebody else."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


@lru_cache(maxsize=256)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
