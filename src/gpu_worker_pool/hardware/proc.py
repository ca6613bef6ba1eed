"""Reads /proc/<pid>/stat. Loads fast, because the command line needs it before anything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    command: str
    #: One letter: `T` and `t` are stopped, `Z` is a zombie.
    state: str
    parent: int
    #: Seconds since the host booted: with the pid it identifies a process for good.
    started_at: float


def process_stat(pid: int) -> ProcessStat | None:
    """None if the process is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command is in brackets, and may contain brackets and blanks.
    command, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessStat(command, fields[0], int(fields[1]), int(fields[19]) / _TICKS_PER_SECOND)
