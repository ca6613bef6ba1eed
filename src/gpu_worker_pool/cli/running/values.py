"""What the command line wants of a service beyond what the client does: it holds one lease, and for long."""

from __future__ import annotations

from typing import Protocol

from gpu_worker_pool.leases.values import LeaseService


class Service(LeaseService, Protocol):
    """Of one event loop."""

    @property
    def longest_silence_seconds(self) -> float:
        """So often at least it must hear of a lease, however long that lives."""

    async def rest(self) -> None:
        """A lease was granted: until it is renewed, nothing need be looked at."""

    def forget(self) -> None:
        """What was noted of a request so that another `gpu-pool` might end it: it has ended."""
