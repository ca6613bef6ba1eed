"""Reads durations as people write them: 90s, 5m, 1m30s, 2h or 1d."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART: Final = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", re.ASCII)
#: Several parts such as 1m30s; each needs its unit.
_PARTS: Final = re.compile(r"\s*(?:\d{1,12}(?:\.\d{1,6})?\s*[A-Za-z]+\s*){2,4}", re.ASCII)


def parse_seconds(text: str) -> float | None:
    """None for what is no duration."""
    if not (_PART.fullmatch(text) or _PARTS.fullmatch(text)):
        return None
    seconds = 0.0
    for number, unit in _PART.findall(text):
        size = _UNITS.get(unit.lower())
        if size is None:
            return None
        seconds += float(number) * size
    return seconds
