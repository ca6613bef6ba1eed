"""Reads this host's memory, which stands in for that of a GPU with unified memory (GB10, Jetson, Grace)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_LINE: Final = re.compile(r"^(MemTotal|MemAvailable):\s+(\d{1,15}) kB$", re.MULTILINE)


class HostMemory(NamedTuple):
    """None where it is unknown."""

    total_mb: int | None = None
    used_mb: int | None = None
    free_mb: int | None = None


def read_host_memory(path: Path = Path("/proc/meminfo")) -> HostMemory:
    """Free is what programs could still have: page cache counts as free."""
    try:
        found = {match[1]: int(match[2]) >> 10 for match in _LINE.finditer(path.read_text())}
    except OSError:
        return HostMemory()
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    if total is None or available is None or available > total:
        return HostMemory(total)
    return HostMemory(total, total - available, available)
