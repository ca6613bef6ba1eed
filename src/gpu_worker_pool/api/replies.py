"""What clients and servers say to each other, as far as it needs no HTTP library: that takes longest to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpu_worker_pool.models import GPUStats

#: Among the features of a server whose leases can be divided (`within` in `POST /leases`).
INNER_LEASES: Final = "inner_leases"
#: Among the features of a server in a fleet, with the id of that fleet.
FLEET_FEATURE: Final = "fleet:"


@dataclass(frozen=True, slots=True)
class Fetched:
    """Readings of one endpoint."""

    stats: GPUStats
    #: What was wrong with the reply, one sentence each, although it could be used.
    problems: tuple[str, ...]
    #: Monotonic. The readings are from `sent_at - stats.sample_age_seconds` or later.
    sent_at: float
    #: Until the last byte of the reply.
    took_seconds: float
