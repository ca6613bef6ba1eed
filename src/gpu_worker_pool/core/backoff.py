"""How long to wait before the next try: full jitter, which spreads many clients best. The draw is given."""

from __future__ import annotations

#: 2 to this power times any sensible base is beyond every sensible limit, and still a float.
_LARGEST_EXPONENT = 64


def backoff_seconds(attempt: int, draw: float, base: float = 0.5, longest: float = 10.0) -> float:
    """`draw` is from 0 to below 1; `attempt` is 0 before the first retry."""
    if attempt < 0:
        raise ValueError(f"attempt must not be negative, but is {attempt!r}")
    if not 0 <= draw < 1:
        raise ValueError(f"draw must be from 0 to below 1, not {draw!r}")
    return draw * min(longest, base * 2.0 ** min(attempt, _LARGEST_EXPONENT))
