"""What the dispatcher's store must do: keep the fleet's rows durably, fence every write, and elect a dispatcher.

`postgres.PostgresStore` is the store of a fleet. Calls are synchronous; one thread of the office makes them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from gpu_worker_pool.core.record import record
from gpu_worker_pool.errors import GPUWorkerPoolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: A row of one of these is a JSON document under a key. The dispatcher decides what is in it.
REQUESTS: Final = "requests"
OUTCOMES: Final = "outcomes"
HOSTS: Final = "hosts"
ACCOUNTS: Final = "accounts"
TABLES: Final = (REQUESTS, OUTCOMES, HOSTS, ACCOUNTS)


class StoreUnavailable(GPUWorkerPoolError):  # noqa: N818  # the word of the design
    """The fleet's database does not answer."""

    retryable = True

    #: A COMMIT was sent, and its outcome is not known: `look().revision` settles it.
    is_unknown: bool

    def __init__(self, message: str | None = None, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


class Deposed(GPUWorkerPoolError):  # noqa: N818
    """Another dispatcher is in office."""

    #: The epoch of the database now.
    epoch: int

    def __init__(self, message: str | None = None, *, epoch: int = 0) -> None:
        super().__init__(message)
        self.epoch = epoch


class CommitsLost(GPUWorkerPoolError):  # noqa: N818
    """A failover of the database lost commits: everything must be written again."""

    #: The revision of the database now, lower than the one that was committed.
    revision: int

    def __init__(self, message: str | None = None, *, revision: int = 0) -> None:
        super().__init__(message)
        self.revision = revision


class StoreMismatch(GPUWorkerPoolError):  # noqa: N818
    """The database cannot be used: another version, no schema, no privileges. The message says what to do."""


@record
class FleetState:
    """The one row of the fleet, as it is now."""

    fleet_id: str
    epoch: int
    revision: int
    #: The name and the URL of the dispatcher; None: there is none.
    dispatcher: tuple[str, str] | None
    #: Until its term ends, by the database's clock; below 0 it has ended.
    remaining_seconds: float
    #: In seconds since 1970.
    database_time: float
    schema_version: int
    #: Tokens are derived from it.
    secret: str = ""


@record
class Office:
    """A dispatcher's term; every write is fenced by it."""

    epoch: int
    revision: int


@record
class Put:
    table: str
    key: str
    document: Mapping[str, Any]


@record
class Delete:
    table: str
    key: str


class FleetStore(Protocol):
    """Each method may raise `StoreUnavailable` or `StoreMismatch`; those with an office `Deposed` or `CommitsLost`."""

    def look(self) -> FleetState: ...

    def stand(self, name: str, url: str, lowest_epoch: int, office_seconds: float) -> Office | None:
        """Stand for election: the epoch becomes max(its epoch, lowest_epoch) + 1, if the term has ended; else None."""
        ...

    def renew(self, office: Office, name: str, office_seconds: float) -> None:
        """Only the dispatcher that the office names can renew it."""
        ...

    def load(self, office: Office) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """All rows, by table and key."""
        ...

    def write(self, office: Office, changes: Sequence[Put | Delete]) -> Office:
        """All of them or none, in one transaction with revision + 1."""
        ...

    def rewrite(self, office: Office, everything: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Office:
        """After `CommitsLost`: replaces all rows, also where the revision is lower than that of `office`."""
        ...

    def concede(self, office: Office) -> None:
        """End the term now."""
        ...

    def close(self) -> None: ...
