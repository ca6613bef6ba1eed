"""Holding a lease for as long as somebody needs it: renewed in time, and said what becomes of it.

A service that is away is asked until it is back, also when the lease may be lost by then: whoever uses the GPU goes on,
and a server that was away itself still has the lease.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import GPUWorkerPoolError, LeaseEndedError, NotYourLeaseError, UnknownLeaseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.cli.running.values import Service
    from gpu_worker_pool.leases.values import HeldLease

#: It is not ours any more, says who must know.
LOST: Final = (UnknownLeaseError, NotYourLeaseError, LeaseEndedError)
#: Timers do not count the time in which the machine sleeps; so they are short.
LONGEST_SLEEP_SECONDS: Final = 5.0
LONGEST_RENEWAL_SECONDS: Final = 10.0
LONGEST_PAUSE_SECONDS: Final = 5.0
#: A service that is away for a moment is not worth a word.
UNTOLD_SECONDS: Final = 5.0


class Holding:
    """`tell` is called with sentences for whoever uses the GPU, `lost` when it may be somebody else's."""

    def __init__(
        self, service: Service, lease: HeldLease, tell: Callable[[str], object], lost: Callable[[str], object]
    ) -> None:
        self._service = service
        self._lease = lease
        self._tell = tell
        self._lost = lost
        self._ttl_seconds = lease.ask.ttl_seconds
        self._renew_seconds = min(self._ttl_seconds / 3, service.longest_silence_seconds)
        #: Since when it could not be renewed.
        self._failing_since: float | None = None
        self._has_told = self._has_lost = False

    async def keep(self) -> None:
        """Until it is lost for good; cancel it before."""
        while True:
            due_in = self._lease.life.held_until - self._ttl_seconds + self._renew_seconds - boot_time()
            if due_in > 0:
                await asyncio.sleep(min(due_in, LONGEST_SLEEP_SECONDS))
            elif not await self._renew():
                return

    async def _renew(self) -> bool:
        """Whether it is still, or again, worth keeping."""
        attempt = 0
        while True:
            sent_at = boot_time()
            seconds = min(max(self._ttl_seconds / 6, 0.5), LONGEST_RENEWAL_SECONDS)
            try:
                async with asyncio.timeout(seconds + 1.0):
                    await self._service.renew(self._lease, timeout_seconds=seconds)
            except LOST as error:
                self._lost(str(error))
                return False
            except (GPUWorkerPoolError, TimeoutError) as error:
                self._failed(error)
            else:
                self._succeeded(sent_at)
                return True
            longest = min(LONGEST_PAUSE_SECONDS, self._ttl_seconds / 10)
            pause = backoff_seconds(attempt, random.random(), base=0.2, longest=longest)  # noqa: S311
            attempt += 1
            await asyncio.sleep(pause + 0.05)

    def _failed(self, error: Exception) -> None:
        now = boot_time()
        if self._failing_since is None:
            self._failing_since = now
        if not self._has_told and now - self._failing_since >= min(UNTOLD_SECONDS, self._ttl_seconds / 3):
            self._has_told = True
            self._tell(f"the lease cannot be renewed, and is tried on: {str(error) or 'no answer in time'}")
        if not self._has_lost and self._lease.life.is_overdue:
            self._has_lost = True
            self._lost(f"it could not be renewed for {self._ttl_seconds:g} s")

    def _succeeded(self, sent_at: float) -> None:
        self._lease.life.renewed(sent_at)
        if self._has_told:
            self._tell("the lease is renewed again")
        self._failing_since = None
        self._has_told = self._has_lost = False
