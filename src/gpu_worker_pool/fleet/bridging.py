"""Chooses the leases that a host renews itself while it has no link: those whose renewals came over the lost links.

Their holders cannot reach it, so without this a short outage of its links would end leases that are in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.moves import LeaseState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_worker_pool.core.assignments import Lease

#: How much later a lease may end because of this.
LONGEST_SECONDS: Final = 60.0
#: A lease is renewed when it would end within this time.
EARLY_SECONDS: Final = 2.0


class Bridge:
    """`now` is the clock of the leases."""

    def __init__(self) -> None:
        #: By lease, when it was last renewed over a link.
        self._renewed_at: dict[str, float] = {}
        self._lost_at: float | None = None

    def renewed(self, lease_id: str, now: float) -> None:
        """Its holder has renewed it through another server."""
        self._renewed_at.pop(lease_id, None)
        self._renewed_at[lease_id] = now

    def ended(self, lease_id: str) -> None:
        self._renewed_at.pop(lease_id, None)

    def lost(self, now: float) -> None:
        """The last link to another host is closed."""
        self._lost_at = now

    def linked(self) -> None:
        """A link is open again: holders renew their leases themselves."""
        self._lost_at = None

    def is_needed(self, now: float) -> bool:
        return self._lost_at is not None and now < self._lost_at + LONGEST_SECONDS and bool(self._renewed_at)

    def due(self, leases: Iterable[Lease], now: float) -> list[str]:
        """The ids of the leases to renew now."""
        if not self.is_needed(now):
            return []
        return [
            lease.lease_id
            for lease in leases
            if lease.state is LeaseState.HELD
            and lease.expires_at is not None
            and lease.expires_at <= now + EARLY_SECONDS
            and now < self._renewed_at.get(lease.lease_id, -LONGEST_SECONDS) + LONGEST_SECONDS
        ]
