"""Who a process is: what this host's /proc tells of a pid, one that the driver named or that holds a lock."""

from __future__ import annotations

import os
import pwd
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.proc import ProcessStat, process_stat

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The kernel's own number for it.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def describe_process(pid: int, *, name: str | None = None, memory_used_mb: float | None = None) -> ProcessReading:
    """`name` is what the driver calls it, and all that is known of a process that our /proc does not show."""
    if not _sees_the_hosts_pids():
        return ProcessReading(pid, name=name, memory_used_mb=memory_used_mb)
    stat = process_stat(pid)
    try:
        user = _user_name(Path("/proc", str(pid)).stat().st_uid)
    except OSError:
        stat, user = None, None
    if stat is None:
        return ProcessReading(pid, name=name, memory_used_mb=memory_used_mb)
    return ProcessReading(
        pid, started_at=_started_at(stat), name=name or stat.command, user=user, memory_used_mb=memory_used_mb
    )


def process_identity() -> dict[str, Any]:
    """What tells this process from every other one of the host, past and future, for others to read."""
    stat = process_stat(os.getpid())
    started_at = None if stat is None else _started_at(stat)
    return {"pid": os.getpid(), "started_at": started_at, "namespace": _pid_namespace()}


def name_of_this_process() -> str:
    """The same as one word, with the boot it lives in; `is_gone` reads it."""
    identity = process_identity()
    return f"{boot_id()}/{identity['namespace']}/{identity['pid']}/{identity['started_at']}"


def is_gone(name: str) -> bool:
    """Whether the process of that name has certainly ended; False also where that cannot be known."""
    boot, _, rest = name.partition("/")
    namespace, _, rest = rest.partition("/")
    number, _, started_at = rest.partition("/")
    # First: in another namespace the same number is another process, and a container may have a boot id of its own.
    if namespace != str(_pid_namespace()) or not number.isdecimal():
        return False
    if boot != boot_id():
        return True
    pid = int(number)
    try:
        os.kill(pid, 0)  # harms nobody, and finds processes that /proc may hide from us
    except ProcessLookupError:
        return True
    except OSError:
        pass
    stat = process_stat(pid)
    if stat is None:
        return False  # hidden, or gone in this very moment: the next look tells
    if str(_started_at(stat)) != started_at:
        return True
    try:
        # Ended, and its parent has not looked yet; unless it is only its first thread that has.
        return stat.state == "Z" and len(list(Path("/proc", number, "task").iterdir())) == 1
    except OSError:
        return False


def is_stopped(identity: Mapping[str, Any]) -> bool:
    """Whether the process is there and stopped, as by Ctrl-Z; False also where that cannot be known."""
    pid = identity.get("pid")
    if type(pid) is not int or identity.get("namespace") != _pid_namespace():
        return False
    stat = process_stat(pid)
    return stat is not None and _started_at(stat) == identity.get("started_at") and stat.state in ("T", "t")


def _started_at(stat: ProcessStat) -> float:
    """Seconds since the host booted."""
    return stat.started_ticks / _TICKS_PER_SECOND


@lru_cache(maxsize=1)
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def _sees_the_hosts_pids() -> bool:
    """The driver tells pids of the host; in a container with numbers of its own they would name somebody else."""
    return _pid_namespace() == _INITIAL_PID_NAMESPACE


@lru_cache(maxsize=1)
def _pid_namespace() -> int | None:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


@lru_cache(maxsize=256)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
