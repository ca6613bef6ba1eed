"""What people read: sizes and durations (15.0 GiB, 3 h 20 min), and what a text may hold. Loads fast, for the shell."""

from __future__ import annotations

from typing import Final

#: Not in texts that others see, as a part of a regular expression: control characters, which take effect on terminals,
#: line separators, and marks that change the direction of the text around them.
NOT_TEXT: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f"


def spoken_seconds(seconds: float) -> str:
    """7 s, 2 min 5 s, 3 h 20 min, 2 d 3 h."""
    whole = max(int(seconds), 0)
    for size, unit, part_size, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part_size
            return f"{whole // size} {unit} {rest} {part}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def spoken_gpus(count: int) -> str:
    return {0: "no GPU", 1: "one GPU"}.get(count, f"{count} GPUs")


def spoken_gpu_seconds(seconds: float) -> str:
    """41 GPU hours, 3.5 GPU hours, 12 GPU minutes, none."""
    if seconds < 60:
        return "less than a GPU minute" if seconds > 0 else "no GPU"
    if seconds < 3600:
        minutes = f"{seconds / 60:.0f}"
        return f"{minutes} GPU minute{'' if minutes == '1' else 's'}"
    hours = seconds / 3600
    number = f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}".removesuffix(".0")
    return f"{number} GPU hour{'' if number == '1' else 's'}"


def spoken_mb(megabytes: float | None) -> str:
    if megabytes is None:
        return "?"
    return f"{megabytes / 1024:.1f} GiB" if megabytes >= 1024 else f"{megabytes:.0f} MB"
