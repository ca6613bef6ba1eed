"""Rule 10: finds the leases and requests of processes that have ended, so that their GPUs are not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core import Cancelled, HolderGone, Waiter
from gpu_worker_pool.hardware.processes import is_gone, is_holder_gone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpu_worker_pool.core import Event, Lease

#: How many waiters are checked at a time; other processes check too.
WATCHED_WAITERS: Final = 32


class ProcessWatch:
    def __init__(self) -> None:
        self._next_waiter = 0

    def events(self, leases: Iterable[Lease], waiters: Mapping[str, Waiter]) -> list[Event]:
        """What to submit for processes that are gone. Checks all holders, and the waiters in turns."""
        waiting = list(waiters.values())
        begin = self._next_waiter if self._next_waiter < len(waiting) else 0
        self._next_waiter = begin + WATCHED_WAITERS
        gone: dict[str, bool] = {"": False}
        events: list[Event] = []
        everyone: list[Lease | Waiter] = [*leases, *waiting[begin : begin + WATCHED_WAITERS]]
        for known in everyone:
            process = known.request.process
            if process not in gone:
                gone[process] = is_gone(process)
            if not gone[process]:
                continue
            if isinstance(known, Waiter):
                events.append(Cancelled(known.request.request_id))
            elif known.is_live and is_holder_gone(known.request):
                events.append(HolderGone(known.lease_id, is_proven=True))
        return events
