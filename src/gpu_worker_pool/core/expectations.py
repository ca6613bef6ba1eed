"""How long leases and requests are expected to take. What is declared is believed, until it has passed; never enforced.

Without a declared time, a lease is expected to run for as long again as it has run: run times differ so much that a
lease that has run for long will run for long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease


def expected_end(lease: Lease, now: float) -> float:
    """When it is expected to end; the present, at the earliest."""
    declared = declared_end(lease)
    if declared is not None and declared > now:
        return declared
    return now + (now - lease.granted_at)


def declared_end(lease: Lease) -> float | None:
    """When it will end by what its request declared."""
    seconds = lease.request.declared_seconds
    return None if seconds is None else lease.granted_at + seconds


def sure_seconds(leases: Iterable[Lease], now: float) -> float:
    """How long the longest of these will run by its declared time; 0 if none declared one."""
    ends = [end for lease in leases if (end := declared_end(lease)) is not None]
    return max(max(ends, default=now) - now, 0.0)
