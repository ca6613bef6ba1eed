"""Waiting for something that happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], within_seconds: float = 30.0) -> T:
    """What `look` returns once that is true; it may also assert, and is asked again until it no longer fails."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            if found := look():
                return found
            problem: str = f"still {found!r}"
        except (AssertionError, OSError) as error:
            problem = repr(error)
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {problem}"
        time.sleep(0.02)
