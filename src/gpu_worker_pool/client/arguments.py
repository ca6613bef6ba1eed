"""Checks arguments of requests that are not requirements: how long to wait, and when a wrong argument is reported."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker_pool.models import GPUAssignment


async def refused_when_awaited(error: ValueError) -> GPUAssignment:
    """Not when it is called: a request among several in `asyncio.gather` must fail alone."""
    raise error


def checked_timeout(timeout: float) -> float:
    if not is_duration(timeout):
        raise ValueError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")
    return timeout


def is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= sys.float_info.max or value == math.inf
