"""Describes and identifies processes of this host by what /proc says about their pids."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.hardware.proc import process_stat, user_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.events import Request

#: A constant of the kernel.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


def describe_process(pid: int, *, name: str | None = None, memory_used_mb: float | None = None) -> ProcessReading:
    """`name` comes from the driver; it is all we know about a process that our /proc does not show."""
    stat = user = None
    if _sees_the_hosts_pids():
        with suppress(OSError):
            user = user_name(Path("/proc", str(pid)).stat().st_uid)
            stat = process_stat(pid)
    if stat is None:
        return ProcessReading(pid, name=name, memory_used_mb=memory_used_mb)
    return ProcessReading(
        pid, started_at=stat.started_at, name=name or stat.command, user=user, memory_used_mb=memory_used_mb
    )


def process_identity() -> dict[str, Any]:
    """Identifies this process among all processes of the host, past and future."""
    stat = process_stat(os.getpid())
    return {"pid": os.getpid(), "started_at": stat and stat.started_at, "namespace": _pid_namespace()}


def name_of_this_process() -> str:
    """The same as one word, with the boot id, for `is_gone`."""
    return _name(process_identity())


def name_of_process(pid: int) -> str:
    """The name of another process, by its pid in our pid namespace; empty where it cannot be known."""
    stat = process_stat(pid) if pid > 0 else None
    if stat is None:
        return ""
    return _name({"pid": pid, "started_at": stat.started_at, "namespace": _pid_namespace()})


def _name(identity: Mapping[str, Any]) -> str:
    return f"{boot_id()}/{identity['namespace']}/{identity['pid']}/{identity['started_at']}"


def is_gone(name: str) -> bool:
    """Whether the process of that name has certainly ended; False if unknown."""
    boot, _, rest = name.partition("/")
    namespace, _, rest = rest.partition("/")
    number, _, started_at = rest.partition("/")
    # First: in another namespace the same pid is another process, and a container may have another boot id.
    if namespace != str(_pid_namespace()) or not number.isdecimal():
        return False
    if boot != boot_id():
        return True
    pid = int(number)
    try:
        os.kill(pid, 0)  # sends nothing, and also finds processes that /proc hides from us
    except ProcessLookupError:
        return True
    except OSError:
        pass
    stat = process_stat(pid)
    if stat is None:
        return False  # hidden, or gone at this moment: the next check will tell
    if str(stat.started_at) != started_at:
        return True
    # A zombie has ended; but with other threads left, only its first thread has.
    with suppress(OSError):
        return stat.state == "Z" and len(list(Path("/proc", number, "task").iterdir())) == 1
    return False


def is_holder_gone(request: Request) -> bool:
    """Whether nothing is left of those that hold the lease of this request: then no new process can come onto its GPUs.

    Killed alone, the lease process of `gpu-pool run` leaves a command behind which may not have touched its GPU yet, so
    that no reading shows it. The process that started both is named as the origin of the request, and lives as long.
    """
    return is_gone(request.process) and not _is_survived(request)


def _is_survived(request: Request) -> bool:
    holder, pid = request.process.split("/"), None if request.origin is None else request.origin.pid
    if pid is None or str(pid) == holder[-2]:
        return False
    stat = process_stat(pid)
    with suppress(ValueError):
        # What started the holder is older; a younger one has got its number since.
        return stat is not None and stat.state != "Z" and stat.started_at <= float(holder[-1])
    return False


def is_stopped(identity: Mapping[str, Any]) -> bool:
    """Whether the process exists and is stopped, as by Ctrl-Z; False if unknown."""
    pid = identity.get("pid")
    if type(pid) is not int or identity.get("namespace") != _pid_namespace():
        return False
    stat = process_stat(pid)
    return stat is not None and stat.started_at == identity.get("started_at") and stat.state in ("T", "t")


@lru_cache(maxsize=1)
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def _sees_the_hosts_pids() -> bool:
    """The driver reports pids of the host; in a container with its own pids they would be other processes."""
    return _pid_namespace() == _INITIAL_PID_NAMESPACE


@lru_cache(maxsize=1)
def _pid_namespace() -> int | None:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None
