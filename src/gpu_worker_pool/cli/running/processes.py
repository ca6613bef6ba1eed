"""Finds the shell that called us."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_worker_pool.hardware.proc import ancestors_of


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
