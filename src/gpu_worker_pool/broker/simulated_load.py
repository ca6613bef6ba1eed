"""Tells the reader of simulated GPUs who holds them, so that it can show their load."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import LeaseState
from gpu_worker_pool.hardware.readers.simulated import SimulatedHolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.core import Lease

#: How long a locked ledger may delay the first reading.
LEDGER_WAIT_SECONDS: Final = 2.0
#: How many ended leases are remembered: their holders may have left memory in use.
MOST_ENDED: Final = 1000


class SimulatedLoad:
    """The broker sets the leases; the sampler's thread reads the holders."""

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._ended: deque[SimulatedHolder] = deque(maxlen=MOST_ENDED)
        #: Replaced as a whole, so that any thread may read it.
        self._holders: tuple[SimulatedHolder, ...] = ()
        self._is_known = threading.Event()

    @classmethod
    def of(cls, backend: str) -> SimulatedLoad | None:
        """None for real GPUs."""
        return cls() if backend.startswith("simulated") else None

    def take(self, leases: Iterable[Lease]) -> None:
        """All leases; called when one has changed, and when they are first known."""
        known = {lease.lease_id: lease for lease in leases if lease.state is not LeaseState.OFFERED}
        # A lease stands for those inside it, until its holder has lost it.
        held = {
            lease.lease_id: lease
            for lease in known.values()
            if lease.within not in known or known[lease.within].quarantine is not None
        }
        for lease_id, lease in self._leases.items():
            if lease_id not in held:
                self._ended.extend(_holders_of(lease, until=self._until(lease) or self._clock()))
        self._leases = held
        holding = [holder for lease in held.values() for holder in _holders_of(lease, until=self._until(lease))]
        self._holders = (*self._ended, *holding)
        self._is_known.set()

    def holders(self) -> tuple[SimulatedHolder, ...]:
        """For the sampler's thread. Waits until the leases are known: until then, every GPU would look idle."""
        self._is_known.wait(LEDGER_WAIT_SECONDS)
        return self._holders

    def _until(self, lease: Lease) -> float | None:
        return lease.quarantine.since if lease.quarantine else None


def _holders_of(lease: Lease, until: float | None) -> list[SimulatedHolder]:
    return [
        SimulatedHolder(
            held.uuid or held.gpu_id,
            lease.granted_at,
            until,
            lease.request.requirements.memory_mb,
            # A different pid for each lease: rule 11 recognises processes by it.
            pid=100_000 + lease.fence,
            name=lease.worker,
        )
        for held in lease.held
    ]
