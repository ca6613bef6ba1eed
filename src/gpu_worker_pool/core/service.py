"""Rule 10: what the stamp in a ledger says about how long no process has served it, and what a lease gets for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker_pool.core.settings import PoolSettings


def unserved_seconds(stamped_at: float | None, now: float, settings: PoolSettings) -> float | None:
    """How long no process has served the ledger; None if processes may have served it all the time.

    A process that serves leaves a stamp every `stamp_seconds` while anything waits or is held. So no process served
    since the last stamp, except perhaps in the first `stamp_seconds` after it. All of the time since the stamp counts
    as unserved, once it is longer than a stamp may be late.
    """
    seconds = 0.0 if stamped_at is None else now - stamped_at
    return seconds if seconds > 2 * settings.stamp_seconds else None


def extended_end(end: float, ttl_seconds: float, unserved: float | None, now: float) -> float:
    """The end of something that lives for `ttl_seconds` unless it is renewed, after that outage.

    Its time stood still. If it must have missed a renewal, it gets one full TTL, as after an outage of unknown length.
    """
    full = now + ttl_seconds
    return max(end, full if unserved is None or unserved >= ttl_seconds / 3 else min(end + unserved, full))
