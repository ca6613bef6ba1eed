"""A ledger in memory, for one process: what every ledger must answer as, and quicker to make than a file."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_worker_pool.clocks import LoopClock
from gpu_worker_pool.core import Effect, Event, Pool, PoolSettings, Ticked, WakeAt
from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.ledger import Committed, OnCommit, Question
from gpu_worker_pool.ledger.change_tracker import ChangeTracker
from gpu_worker_pool.ledger.policy_file import PolicyInForce
from gpu_worker_pool.ledger.usage_files import UsageRead

if TYPE_CHECKING:
    from gpu_worker_pool.clocks import Clock, Timer
    from gpu_worker_pool.core import Lease, Outcome, Waiter

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MemoryLedger:
    """Belongs to the event loop it was made in."""

    def __init__(self, settings: PoolSettings, on_commit: OnCommit, clock: Clock | None = None) -> None:
        self.secret = secrets.token_hex(16)
        self._clock = clock or LoopClock(asyncio.get_running_loop())
        self._on_commit = on_commit
        self._requests: ChangeTracker[str, Waiter | Lease | Outcome] = ChangeTracker()
        self._pool = Pool(settings, self._requests)
        self._timer: Timer | None = None
        self._is_closed = False

    @property
    def problem(self) -> str | None:
        return None

    @property
    def policy(self) -> PolicyInForce:
        return PolicyInForce()

    async def totals(self) -> dict[str, Any]:
        return {}

    async def usage(self, begin: float, keep: object = None) -> UsageRead:  # noqa: ARG002
        return UsageRead()

    async def submit(self, event: Event) -> tuple[Effect, ...]:
        return self._apply(event)

    def _apply(self, event: Event) -> tuple[Effect, ...]:
        self._check_open()
        pool = self._pool
        effects = pool.apply(event, self._clock.now())
        reported = tuple(effect for effect in effects if not isinstance(effect, WakeAt))
        committed = Committed(reported, self._requests.take_changes(), False, pool.fence, dict(pool.tally))
        try:
            self._on_commit(committed)
        except Exception:
            logger.exception("the commit listener failed")
        self._set_timer()
        return reported

    def _set_timer(self) -> None:
        at = self._pool.timers.next_at()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at < float("inf") and not self._is_closed:
            self._timer = self._clock.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(Ticked())

    async def look(self, question: Question[T]) -> T:
        self._check_open()
        return question(self._pool, self._clock.now())

    def _check_open(self) -> None:
        if self._is_closed:
            raise LedgerUnavailableError("the ledger was closed")

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
