"""Writes sizes and durations for people: 15.0 GiB, 3 h 20 min. Loads fast: the command line needs it first."""

from __future__ import annotations


def spoken_seconds(seconds: float) -> str:
    """7 s, 2 min 5 s, 3 h 20 min, 2 d 3 h."""
    whole = max(int(seconds), 0)
    for size, unit, part_size, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part_size
            return f"{whole // size} {unit} {rest} {part}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def spoken_mb(megabytes: float | None) -> str:
    if megabytes is None:
        return "?"
    return f"{megabytes / 1024:.1f} GiB" if megabytes >= 1024 else f"{megabytes:.0f} MB"
