"""Events: everything that can happen to a pool. Its driver turns calls, messages and signals into these."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.requirements import ANY_GPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.assignments import LeaseUse
    from gpu_worker_pool.core.fleet_order import FleetOrder
    from gpu_worker_pool.core.policy import Policy
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.requirements import Requirements


@record
class Origin:
    """Where a request comes from, so that other users see who holds a GPU and who waits."""

    user: str | None = None
    host: str | None = None
    pid: int | None = None
    #: The name of a script or a program, never its arguments.
    program: str | None = None
    #: Whether the kernel has confirmed the user and the pid; otherwise they are only what the client said.
    is_verified: bool = False


@record
class Request:
    """Who requests what. A request that is repeated under its id must be equal."""

    request_id: str
    requirements: Requirements = ANY_GPU
    worker_id: str = ""
    #: Who may cancel, renew and release it; compared, never interpreted.
    owner: str = field(default="", repr=False)
    #: For others to read.
    label: str | None = None
    #: How long a grant lives without renewal; None: until it is released (an assignment within one process).
    ttl_seconds: float | None = None
    #: For whom (`core/accounts.py`); empty: no account. That of the first poll is kept: a key may get a name
    #: while its requests wait, and `owner` says whose request it is.
    account: str = field(default="", compare=False)
    #: The requesting process, where other processes of its host can see whether it is still there (rule 10).
    process: str = ""
    #: Not compared: the process that polls may be another one each time. What the first poll said is kept.
    origin: Origin | None = field(default=None, compare=False)
    #: The lease inside which it runs, and which it divides with the other requests inside it; None: outside any.
    within: str | None = None
    #: The groups of its user that the policy named when it was made. What the first poll said is kept.
    groups: tuple[str, ...] | None = field(default=None, compare=False)
    #: True: holders in its way are asked to give their GPUs back; None: they are not.
    asks: bool | None = None
    #: How long it will use its GPUs, as far as it knows: never enforced.
    expected_seconds: float | None = None
    #: When its lease ends at the latest, counted from the grant.
    max_seconds: float | None = None

    @property
    def worker(self) -> str:
        """The id of its worker; `name_of` makes its name for people."""
        return self.worker_id or self.request_id

    @property
    def declared_seconds(self) -> float | None:
        """How long it is expected to take; a limit counts as an expectation."""
        if self.expected_seconds is None or self.max_seconds is None:
            return self.max_seconds if self.expected_seconds is None else self.expected_seconds
        return min(self.expected_seconds, self.max_seconds)


@record
class Requested:
    """A client requests GPUs, or polls for a request it made before (rule 9)."""

    request: Request
    #: When to stop waiting.
    deadline: float | None = None
    #: Until when the client waits for the answer; None: until it has one.
    poll_deadline: float | None = None
    #: Whether GPUs may be reserved for it: a client that waits at several servers may reserve at one only (rule 4).
    may_reserve: bool = True
    #: Names this poll, for `PollAbandoned`.
    poll_id: str = ""
    #: False: it is granted now or refused, whoever else waits; a fleet's dispatcher has decided that it is its turn.
    may_wait: bool = True


@record
class GrantRefused:
    """The host of this grant refused it: its request waits again, in its place (in a fleet's dispatcher)."""

    lease_id: str
    #: Its order of arrival, and the rest of what it had while it waited.
    ticket: int
    deadline: float | None = None
    poll_deadline: float | None = None
    gives_up_at: float | None = None
    may_reserve: bool = True
    poll_id: str = ""


@record
class Cancelled:
    """A request is cancelled; if it was granted at that instant, the grant is released (rule 7)."""

    request_id: str
    #: The owner that cancels; None: an administrator.
    by: str | None = None
    #: Why the dispatcher of its fleet refuses it for good: then it is rejected.
    refused: tuple[str, ...] = ()


@record
class FleetOrdered:
    """The dispatcher of this host's fleet is heard: for a while, it says whose turn it is here."""

    order: FleetOrder


@record
class TurnCame:
    """The dispatcher says that it is the turn of a waiting request: it is granted these GPUs now, or waits on."""

    request_id: str
    gpu_ids: tuple[str, ...]
    #: When its lease ends at the latest, counted from the grant, by the fleet's policy.
    max_seconds: float | None = None


@record
class Released:
    """A holder is done."""

    lease_id: str
    by: str | None = None
    #: The fence the holder knows, if it says one; an outdated one changes nothing.
    fence: int | None = None
    #: Its use as the releasing process has observed it; None: not observed.
    use: LeaseUse | None = None


@record
class Renewed:
    """A holder is still there."""

    lease_id: str
    by: str | None = None
    fence: int | None = None
    #: Its holder says that it is not idle, whatever readings show.
    is_busy: bool = False


@record
class LeaveRequested:
    """A user asks a holder to give its GPUs back; it need not."""

    lease_id: str
    #: Who, or why, for the holder to read.
    reason: str


@record
class PollAbandoned:
    """The answer to this poll will not be read: a grant becomes an offer (rule 9)."""

    request_id: str
    #: Which poll. If the client has polled again since, nothing changes.
    poll_id: str
    #: Whether the client hung up; else the server stops.
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
    """All GPUs of one endpoint were read; GPUs not among them are missing now."""

    endpoint_id: str
    readings: tuple[Reading, ...]
    #: When the reading began: it may not show what happened since.
    begun_at: float


@record
class UseSeen:
    """How held leases were used, by their ids; what another process has seen later is kept."""

    uses: Mapping[str, LeaseUse]


@record
class PolicyRead:
    """The policy of the ledger, which replaces the one before. It is not stored in the pool."""

    policy: Policy


@record
class Unreachable:
    """An endpoint does not answer, or not yet: its GPUs are not counted, and its leases stay."""

    endpoint_id: str
    #: It is no longer used: its GPUs no longer count as possible.
    is_removed: bool = False


@record
class GPUsVanished:
    """GPUs no longer exist, as happens to MIG devices; a GPU that is missing from a reading still exists."""

    gpu_ids: tuple[str, ...]


@record
class Ticked:
    """Time passed."""


@record
class Resumed:
    """No process served the ledger for a while, which counts for no lease and no waiter (rule 10).

    The ledger knows that from its last stamp (`core/service.py`), and submits this before anything else.
    """

    #: None: unknown, as after a reboot.
    unserved_seconds: float | None


@record
class Stopped:
    """The pool stops: every waiting request ends."""


Event = (
    Requested
    | GrantRefused
    | Cancelled
    | FleetOrdered
    | TurnCame
    | Released
    | Renewed
    | LeaveRequested
    | PollAbandoned
    | Resumed
    | HolderGone
    | QuarantineEnded
    | Observed
    | UseSeen
    | PolicyRead
    | Unreachable
    | GPUsVanished
    | Ticked
    | Stopped
)
