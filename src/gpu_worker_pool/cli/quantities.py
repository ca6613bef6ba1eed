"""Parses and prints quantities: 8GiB, 24GB, 90s, 5m, `0,2`. Errors show an example."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    # Older versions of click have no types for these.
    _Number = click.ParamType[float]
    _Names = click.ParamType[tuple[str, ...]]
else:
    _Number = _Names = click.ParamType

#: In the driver's MB, which are 2**20 bytes: `8000MB` means `memory_mb=8000`.
_SIZES: Final = {"mb": 1.0, "mib": 1.0, "gb": 1000.0, "gib": 1024.0, "tb": 1_000_000.0, "tib": 1024.0**2}
_DURATIONS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", re.ASCII)
_PERCENT: Final = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%?\s*", re.ASCII)
#: Several parts such as 1m30s; each needs its unit.
_PARTS: Final = re.compile(r"\s*(?:\d{1,12}(?:\.\d{1,6})?\s*[A-Za-z]+\s*){2,4}", re.ASCII)
_LARGEST_MB: Final = 1e9
_LONGEST_SECONDS: Final = 1e9


class MemorySize(_Number):
    """A number of MB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _NUMBER_AND_UNIT.fullmatch(value)
        unit = _SIZES.get(match[2].lower()) if match else None
        if match is None or (unit is None and match[2]):
            self.fail(f"{value!r} is not a memory size; write 8GiB, 24GB or 8000MB.", param, ctx)
        if unit is None:
            self.fail(f"{value!r} has no unit; write {match[1]}GiB, {match[1]}GB or {match[1]}MB.", param, ctx)
        size_mb = float(match[1]) * unit
        if not 0 < size_mb <= _LARGEST_MB:
            self.fail(f"{value!r} is out of range; write a size such as 8GiB.", param, ctx)
        return size_mb


class Duration(_Number):
    """A number of seconds."""

    name = "TIME"

    def __init__(self, shortest: float = 0.0, longest: float = _LONGEST_SECONDS) -> None:
        self._shortest, self._longest = shortest, longest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        is_one = _NUMBER_AND_UNIT.fullmatch(value) or _PARTS.fullmatch(value)
        parts = _NUMBER_AND_UNIT.findall(value) if is_one else []
        units = [_DURATIONS.get(unit.lower()) for _, unit in parts]
        known = [unit for unit in units if unit is not None]
        if not parts or len(known) < len(parts):
            self.fail(f"{value!r} is not a duration; write 90s, 5m, 1m30s, 2h or 1d.", param, ctx)
        seconds = sum(float(number) * unit for (number, _), unit in zip(parts, known, strict=True))
        if not self._shortest <= seconds <= self._longest:
            limits = f"from {self._shortest:g} to {self._longest:g} seconds"
            if self._longest == _LONGEST_SECONDS:
                limits = f"of at least {self._shortest:g} seconds"
            self.fail(f"{value!r} is not {limits}.", param, ctx)
        return seconds


class Percent(_Number):
    """From 0 to 100, with or without the sign."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _PERCENT.fullmatch(value)
        if match is None or float(match[1]) > 100:
            self.fail(f"{value!r} is not a percentage; write 50 or 50%.", param, ctx)
        return float(match[1])


class GPUNames(_Names):
    """Indices or UUIDs, separated by commas; the option may be given several times."""

    name = "GPU"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name for name in re.split(r"[,\s]+", value) if name)
        # Other users see them on their terminals.
        if not names or any(len(name) > 80 or not (name.isascii() and name.isprintable()) for name in names):
            self.fail(f"{value!r} does not name a GPU; write indices or UUIDs such as 0,2 or GPU-6ec5c1a2.", param, ctx)
        return names


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
