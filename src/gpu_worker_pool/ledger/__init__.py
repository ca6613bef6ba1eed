"""The ledger: where leases and waiters are kept. Events go in; what they brought about comes out once it is safe.

Whatever keeps it (memory, a SQLite file, later PostgreSQL) stands behind the same two methods, and nothing outside
this package knows which one it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.effects import Effect
    from gpu_worker_pool.core.events import Event
    from gpu_worker_pool.core.moves import LeaseState, RequestState
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.queue import Waiter
    from gpu_worker_pool.core.remembered import Outcome

T = TypeVar("T")

logger = logging.getLogger(__name__)


@record
class Committed:
    """What is true from now on, and will be after a crash. Some of it may be another process's doing."""

    #: Of everything this process decided, also on behalf of others; wake-ups are the ledger's own business.
    effects: tuple[Effect, ...]
    #: Every request that has changed, whoever changed it, as it is now.
    changes: Mapping[str, Waiter | Lease | Outcome]
    #: Whether `changes` holds all that wait and hold: what is not in it has ended.
    is_everything: bool
    #: The number of grants there have been, and how requests and leases have ended.
    fence: int
    tally: Mapping[RequestState | LeaseState, int]


Tell: TypeAlias = Callable[[Committed], object]
Question: TypeAlias = "Callable[[Pool, float], T]"


def tell_of(committed: Committed, tell: Tell) -> None:
    """What is committed is committed: a listener that fails must not keep whoever asked from its answer."""
    try:
        tell(committed)
    except Exception:
        logger.exception("whoever was told of a commit failed")


class Ledger(Protocol):
    """One process's access to it. `Tell`, given when it is made, is called before whoever submitted is answered."""

    async def submit(self, event: Event) -> tuple[Effect, ...]:
        """Let one thing happen, and be told of it once it cannot be lost any more.

        Raises `IllegalEventError` if it may not happen, `LedgerUnavailableError` if it could not be kept: then it has
        not happened.
        """

    async def look(self, question: Question[T]) -> T:
        """Ask something of the pool as it is now; `question` must change nothing, and gets the time as well."""

    async def close(self) -> None:
        """What was submitted before is finished first."""

    #: Made with the ledger, known to whoever can read it.
    secret: str
