"""Parses and prints quantities: 8GiB, 8G, 24GB, 90s, 5m, `0,2`. Errors show an example."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

from gpu_worker_pool.durations import parse_seconds
from gpu_worker_pool.wording import spoken_mb as spoken_mb
from gpu_worker_pool.wording import spoken_seconds as spoken_seconds

if TYPE_CHECKING:
    # Older versions of click have no types for these.
    _Number = click.ParamType[float]
    _Names = click.ParamType[tuple[str, ...]]
else:
    _Number = _Names = click.ParamType

#: In the driver's MB, which are 2**20 bytes: `8000MB` means `memory_mb=8000`.
#: A letter alone is a power of 1024, as for docker and java.
_SIZES: Final = (
    {"m": 1.0, "mb": 1.0, "mib": 1.0}
    | {"g": 1024.0, "gb": 1000.0, "gib": 1024.0}
    | {"t": 1024.0**2, "tb": 1_000_000.0, "tib": 1024.0**2}
)
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", re.ASCII)
_PERCENT: Final = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%?\s*", re.ASCII)
#: `1-3` or `endpoint:1-3`.
_RANGE: Final = re.compile(r"(?P<endpoint>.*:)?(?P<first>\d{1,9})-(?P<last>\d{1,9})", re.ASCII)
_WRITTEN_OUT_AT_MOST: Final = 16
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
        if unit is None and float(match[1]) > 0:
            self.fail(f"{value!r} has no unit; write {match[1]}GiB, {match[1]}GB or {match[1]}MB.", param, ctx)
        size_mb = float(match[1]) * (unit or 0.0)
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
        seconds = parse_seconds(value)
        if seconds is None:
            self.fail(f"{value!r} is not a duration; write 90s, 5m, 1m30s, 2h or 1d.", param, ctx)
        if not self._shortest <= seconds <= self._longest:
            shortest = f"{self._shortest:g} {'second' if self._shortest == 1 else 'seconds'}"
            if self._longest == _LONGEST_SECONDS and seconds < self._shortest:
                self.fail(f"{value!r} is too short; write at least {shortest}.", param, ctx)
            self.fail(f"{value!r} is not from {self._shortest:g} to {self._longest:g} seconds.", param, ctx)
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
        if len(written_out := [each for name in names for each in _written_out(name)]) > len(names):
            self.fail(f"{value!r} has a range, which is not understood; write {','.join(written_out)}.", param, ctx)
        if not names or not all(map(_may_name_gpu, names)):
            self.fail(f"{value!r} does not name a GPU; write indices or UUIDs such as 0,2 or GPU-6ec5c1a2.", param, ctx)
        return names


def _written_out(name: str) -> list[str]:
    """The GPUs of a range, if it is a short one; else the name itself."""
    match = _RANGE.fullmatch(name)
    if match is None:
        return [name]
    first, last = sorted((int(match["first"]), int(match["last"])))
    if not 0 < last - first < _WRITTEN_OUT_AT_MOST:
        return [name]
    return [f"{match['endpoint'] or ''}{index}" for index in range(first, last + 1)]


def _may_name_gpu(name: str) -> bool:
    # Other users see it on their terminals. A dash without letters is what is left of a range.
    is_dashed = "-" in name and not any(char.isalpha() for char in name.rpartition(":")[2])
    return len(name) <= 80 and name.isascii() and name.isprintable() and not is_dashed
