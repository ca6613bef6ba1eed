"""The ledger stores leases and waiters: it takes events, and reports their effects once they are safely stored.

Nothing outside this package depends on where they are stored: `Ledger` is all that is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.effects import Effect
    from gpu_worker_pool.core.events import Event
    from gpu_worker_pool.core.moves import LeaseState, RequestState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.remembered import Outcome
    from gpu_worker_pool.ledger.policy_file import PolicyInForce
    from gpu_worker_pool.ledger.usage_files import UsageRead

T = TypeVar("T")


@record
class Committed:
    """What was stored, and survives a crash. Other processes may have caused some of it."""

    #: Of everything this process decided, also for waiters of others; without wake-ups, which the ledger handles.
    effects: tuple[Effect, ...]
    #: Every request that has changed, as it is now, whichever process changed it.
    changes: Mapping[str, Waiter | Lease | Outcome]
    #: Whether `changes` holds all waiters and leases: a request that is not in it has ended.
    is_everything: bool
    #: The number of grants there have been, and how requests and leases have ended.
    grants: int
    tally: Mapping[RequestState | LeaseState, int]
    #: When it was decided: a reading that is wanted must begin after this, and may have begun before it was stored.
    decided_at: float | None = field(default=None, compare=False)


OnCommit: TypeAlias = Callable[[Committed], object]
Question: TypeAlias = "Callable[[Pool, float], T]"


class Ledger(Protocol):
    """One process's access to it. The `OnCommit` it is made with is called before `submit` returns."""

    async def submit(self, event: Event) -> tuple[Effect, ...]:
        """Apply one event; returns its effects once they cannot be lost.

        Raises `IllegalEventError` if the event is refused, and `LedgerUnavailableError` if it could not be stored: then
        nothing has happened.
        """

    async def look(self, question: Question[T]) -> T:
        """The answer of `question(pool, now)`, which must not change the pool."""

    async def close(self) -> None:
        """Finishes what was submitted before."""

    @property
    def problem(self) -> str | None:
        """Why the last attempt to store something failed; None if it succeeded."""

    @property
    def policy(self) -> PolicyInForce:
        """What limits its accounts."""

    async def totals(self) -> dict[str, Any]:
        """What is counted over the whole life of the ledger: `records.add_to_totals`."""

    async def usage(self, begin: float, keep: Callable[[dict[str, Any]], bool] = ...) -> UsageRead:
        """Records of what ended after `begin`, in seconds since 1970, and of the leases that are held now.

        `keep` is called with each of the former, in another thread, and says whether it is among them.
        """

    #: Made with the ledger, readable by everyone who can read the ledger.
    secret: str
