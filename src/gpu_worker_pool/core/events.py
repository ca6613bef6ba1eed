"""Events: everything that can happen to a pool. Whoever drives it turns calls, messages and signals into these."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.requirements import ANY_GPU

if TYPE_CHECKING:
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.requirements import Requirements


@record
class Request:
    """Who asks for what. Asking twice under one id must mean the same request."""

    request_id: str
    requirements: Requirements = ANY_GPU
    worker_id: str = ""
    #: Who may cancel, renew and release it; compared, never interpreted.
    owner: str = field(default="", repr=False)
    #: For others to read.
    label: str | None = None
    #: How long a grant lives without renewal; None: until it is released (an assignment within one process).
    ttl_seconds: float | None = None
    #: Whose waiting requests are counted together; empty: nobody's.
    account: str = ""
    #: Names the process that asks, where others on its host can see whether it is still there (rule 10).
    process: str = ""


@record
class Requested:
    """Somebody asks, for the first time or again (rule 9)."""

    request: Request
    #: When to stop waiting.
    deadline: float | None = None
    #: Until when the asker listens for the answer; None: until it has one.
    poll_deadline: float | None = None
    #: Whether GPUs may be kept for it here: one that waits in several places may have them kept in one only (rule 4).
    may_reserve: bool = True
    #: Names this one asking, for `PollAbandoned`.
    poll_id: str = ""


@record
class Cancelled:
    """A request is taken back; if it was granted in that instant, so is the grant (rule 7)."""

    request_id: str
    #: Whoever says so; None: somebody who may do anything.
    by: str | None = None


@record
class Released:
    """A holder is done."""

    lease_id: str
    by: str | None = None
    #: The fence the holder knows, if it says one; an outdated one changes nothing.
    fence: int | None = None


@record
class Renewed:
    """A holder is still there."""

    lease_id: str
    by: str | None = None
    fence: int | None = None


@record
class PollAbandoned:
    """Nobody is there any more to hear the answer to this asking: what it is granted is only offered (rule 9)."""

    request_id: str
    #: Which asking. Its asker may have asked again since: what another asking waits for, or was told, stays as it is.
    poll_id: str
    #: Whether it is the asker who went, and not whoever would have answered, as when a server stops.
    is_gone: bool = True


@record
class HolderGone:
    """A holder will not come back: its process ended, or nothing refers to its assignment any more (rules 10, 11)."""

    lease_id: str
    #: Whether that is certain; if not, the GPU stays in quarantine for the usual time at least.
    is_proven: bool = False


@record
class QuarantineEnded:
    """An administrator says that a quarantined GPU may be used (rule 11)."""

    lease_id: str


@record
class Observed:
    """All GPUs of one endpoint were read; those that are missing are not there now."""

    endpoint_id: str
    readings: tuple[Reading, ...]
    #: When the reading began: whatever happened since may not show in it.
    begun_at: float


@record
class Unreachable:
    """An endpoint does not answer, or not yet: its GPUs leave the counts, its assignments are kept."""

    endpoint_id: str
    #: It will not be asked any more either: what it had says nothing about what can be had.
    is_removed: bool = False


@record
class GPUsVanished:
    """GPUs ceased to exist, as MIG devices do; a GPU that is only missing from a reading has not."""

    gpu_ids: tuple[str, ...]


@record
class Ticked:
    """Time passed."""


@record
class Resumed:
    """Nobody served the ledger for so long: every lease and every waiter gets one full TTL (rule 10).

    Whoever keeps the ledger knows that, by the stamp the last one to serve it left; it says so before anything else.
    """

    unserved_seconds: float


@record
class Stopped:
    """Everybody who waits is told that nobody will be served."""


Event = (
    Requested
    | Cancelled
    | Released
    | Renewed
    | PollAbandoned
    | Resumed
    | HolderGone
    | QuarantineEnded
    | Observed
    | Unreachable
    | GPUsVanished
    | Ticked
    | Stopped
)
