"""The events and effects of a fleet's dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from gpu_worker_pool.core.policy import Policy
    from gpu_worker_pool.fleet.messages import FromHost, Message

# --- what happens to it ---


@record
class Received:
    """A message came over the link of this host (its own server has one, too, in memory)."""

    sender: str
    message: FromHost


@record
class LinkLost:
    """The link of this host is closed."""

    host: str


@record
class Stored:
    """What `take_changes` returned under this number is committed."""

    batch: int


@record
class StoreLost:
    """The database does not answer; what was not stored is offered again by `take_changes`."""

    reason: str


@record
class StoreBack:
    """The database answers again."""


@record
class NewPolicy:
    """The policy of the dispatcher's host governs the fleet."""

    policy: Policy


@record
class TimePassed:
    """Time passed: `next_due` has come."""


Event = Received | LinkLost | Stored | StoreLost | StoreBack | NewPolicy | TimePassed

# --- what it wants done ---


@record
class Send:
    """Send this over the link of this host; if there is none, forget it."""

    to: str
    message: Message


@record
class StepDown:
    """A host obeys another dispatcher: step down, and stand for election again only above this epoch."""

    epoch: int
    epoch_owner: str


Effect = Send | StepDown
