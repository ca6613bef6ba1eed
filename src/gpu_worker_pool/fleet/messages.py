"""The messages of a fleet: between its hosts, its servers and its dispatcher. `message_json.py` writes and reads them.

Each is known by the name of its class, also to other versions.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.events import Request

#: The version of the messages. Peers with this version or the previous one are understood.
FORMAT: Final = 1
OLDEST_FORMAT: Final = 1

#: Between the name of a host and the number of a lease there, in the id that is good in the whole fleet.
SEPARATOR: Final = ":"
#: How a lease ended that a dispatcher withdrew before a client learned of it: its request waits, or is elsewhere.
WITHDRAWN: Final = "withdrawn"


def fleet_lease_id(host: str, lease_id: str) -> str:
    """The id of a host's lease that every server of the fleet accepts."""
    return f"{host}{SEPARATOR}{lease_id}"


def host_and_lease(fleet_id: str) -> tuple[str, str]:
    """The host of a lease, and its id there; the host is empty where the id names none."""
    host, separator, lease_id = fleet_id.partition(SEPARATOR)
    return (host, lease_id) if separator else ("", fleet_id)


# --- parts of messages ---


@record
class GPURow:
    """One GPU of a host, or a MIG device, as the host last read it: what `core.Reading` holds, without processes."""

    #: Its id in the host's own ledger.
    gpu_id: str
    index: int
    name: str
    uuid: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_usage_percent: float | None = None
    utilization_percent: float | None = None
    reports_utilization: bool = True
    fault: str | None = None
    #: How many processes compute there that hold no lease; None where they cannot be seen.
    foreign_processes: int | None = None
    reports_processes: bool = True
    has_unified_memory: bool = False
    is_mig_device: bool = False
    #: Several hosts may have simulated GPUs with the same UUID.
    is_simulated: bool = False


@record
class HostLease:
    """One lease of a host that is held, offered or in quarantine."""

    #: At its host.
    lease_id: str
    request: Request
    gpu_ids: tuple[str, ...]
    #: "held", "offered" or "quarantined".
    state: str
    held_seconds: float
    waited_seconds: float = 0.0
    #: Until it expires if it is not renewed; None: never.
    expires_in_seconds: float | None = None
    #: The fence at its host.
    fence: int = 0


@record
class HostWaiter:
    """A request that waits in the ledger of a host, such as one of a program that uses `local://`."""

    request: Request
    may_reserve: bool = True


@record
class EndedRow:
    """A request that a host granted, and whose lease has ended: it must not be granted again."""

    request_id: str
    lease_id: str
    #: How the lease ended: "released", "reclaimed", "lost", …
    state: str
    reasons: tuple[str, ...] = ()


# --- from a host, which every server of a fleet is ---


@record
class Join:
    """The first message on a link: who the host is, and the highest epoch it has seen."""

    name: str
    #: The id of its ledger, which identifies the host.
    ledger_id: str
    #: Where others reach its server.
    url: str
    version: str
    format: int = FORMAT
    #: The highest epoch that it has obeyed, and the name of that dispatcher; both are durable at the host.
    epoch: int = 0
    epoch_owner: str = ""
    is_candidate: bool = False


@record
class Report:
    """What has changed at a host since its last report on this link; the first one there is whole.

    One without changes says that the readings are fresh. Reports are numbered, and one that is missing is asked for.
    """

    number: int
    is_whole: bool = False
    #: How long ago the reading began; None: nothing was read since the last report.
    age_seconds: float | None = None
    gpus: tuple[GPURow, ...] = ()
    #: GPUs that the last reading no longer showed.
    missing: tuple[str, ...] = ()
    leases: tuple[HostLease, ...] = ()
    #: Leases that have ended; in a whole report also what the host remembers of requests of the fleet.
    ended: tuple[EndedRow, ...] = ()
    #: Requests that wait in its ledger, in order of arrival; and the ids of those that do not any more.
    waiting: tuple[HostWaiter, ...] = ()
    not_waiting: tuple[str, ...] = ()


@record
class Placed:
    """The host has granted what it was told to place, in its ledger: the promise is made."""

    #: Of the `Place` that this answers.
    number: int
    request_id: str
    lease: HostLease
    #: The lease as it is sent to the client (`api.lease_rows.lease_body`), without a token.
    body: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the client may hold it at once; else it was offered.
    is_held: bool = True


@record
class PlaceRefused:
    """The host did not grant it: the request keeps its place, and waits for another GPU."""

    number: int
    request_id: str
    reasons: tuple[str, ...] = ()
    #: Where the request had a lease here that has ended: it must not be granted again.
    ended: EndedRow | None = None


@record
class EpochRefused:
    """The host obeys a higher epoch, or another dispatcher of the same epoch: the receiver is no longer dispatcher."""

    epoch: int
    epoch_owner: str


@record
class Ask:
    """A client requests GPUs of the fleet, or polls again; its server has authenticated it."""

    #: Names this poll.
    poll_id: str
    request: Request
    wait_seconds: float = 0.0
    may_reserve: bool = True


@record
class AskAbandoned:
    """The answer to this poll will not be read."""

    request_id: str
    poll_id: str
    #: Whether the client hung up; else its server stops.
    is_gone: bool = True


@record
class Cancel:
    """A client cancels its request; a lease that it was granted is released."""

    call_id: str
    request_id: str
    #: The owner; None: an administrator.
    by: str | None = None


@record
class Query:
    """Looks at the fleet: "fleet", "queue", "leases", or "explain" with a request id or with requirements."""

    call_id: str
    what: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@record
class Administer:
    """Changes which hosts the fleet uses: "drain", "undrain" or "remove"."""

    call_id: str
    what: str
    host: str


@record
class Call:
    """Something for one host, passed on by a candidate: "renew" or "release" of a lease, and what else its API has."""

    call_id: str
    host: str
    what: str
    #: Of "renew" and "release": `lease_id` at the host, and `by`, the owner (None: an administrator).
    arguments: Mapping[str, Any] = field(default_factory=dict)


# --- to a host ---


@record
class Welcome:
    """Who is dispatcher, as far as the candidate knows: the answer to `Join`, and sent again when it changes."""

    fleet_id: str
    #: 0 and empty: there is none.
    epoch: int
    dispatcher: str
    dispatcher_url: str
    #: Where the candidates are; a host keeps a link to each.
    candidates: tuple[str, ...] = ()
    format: int = FORMAT
    #: Whether the sender is the dispatcher; otherwise it says what it has heard.
    is_own: bool = False
    #: Tokens of clients that sent none are derived from it; it is the same on all servers.
    secret: str = field(default="", repr=False)
    #: Whether this dispatcher serves what waits in the ledgers of hosts. One of an older version does not.
    serves_hosts: bool = False


@record
class TurnedAway:
    """The host cannot join."""

    reason: str


@record
class Place:
    """Grant these GPUs to this request now, or refuse; never queue it. Repeated, it returns the same lease."""

    epoch: int
    dispatcher: str
    #: Grows with every `Place` and `End` of this epoch for this host; an older one that arrives later is ignored.
    number: int
    request: Request
    #: The host's ids. If the request already has a lease there, on any GPUs, that lease is the answer.
    gpu_ids: tuple[str, ...]
    poll_id: str = ""
    #: Whether its client waits for the answer: then it is held at once, otherwise offered.
    is_listening: bool = True
    #: Whether it waits in the ledger of this host: it is refused where it does not any more.
    waits_there: bool = False


@record
class End:
    """End the lease of this request, if it has one, and place nothing of an older number for it."""

    epoch: int
    dispatcher: str
    number: int
    request_id: str
    reason: str = ""
    #: Why it is refused for good, where it waits in the ledger of this host.
    refused: tuple[str, ...] = ()


@record
class HostOrder:
    """What the requests that wait in the ledger of this host are told of the fleet's order."""

    epoch: int
    dispatcher: str
    #: By request id, the places in the whole queue.
    positions: Mapping[str, int] = field(default_factory=dict)
    #: GPUs of this host that are reserved, at the host; for which request, and what it is called.
    reserved: tuple[str, ...] = ()
    reserved_for: str = ""
    reserved_name: str = ""
    #: Why nothing is granted at this host at all.
    note: str = ""


@record
class PollEnded:
    """The client that polled for this placement is gone: a lease that was not reported to it becomes an offer."""

    epoch: int
    dispatcher: str
    request_id: str
    poll_id: str
    is_gone: bool = True


@record
class ReportWanted:
    """Read the GPUs now and report; `is_whole`: everything."""

    epoch: int
    dispatcher: str
    is_whole: bool = False


@record
class Answer:
    """The answer to an `Ask`."""

    poll_id: str
    request_id: str
    #: "granted", "waiting", "ended" or "refused".
    state: str
    #: Granted: the host, its address, and the lease as the host says it.
    host: str = ""
    url: str = ""
    #: At its host.
    lease_id: str = ""
    #: Of its GPUs in the whole fleet, in the order of `body["gpus"]`.
    global_ids: tuple[int, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    #: Waiting.
    position: int = 0
    waiting_seconds: float = 0.0
    #: Of a request that waits or has ended, or the reasons of a refusal.
    reasons: tuple[str, ...] = ()
    #: Ended: how, as `core.RequestState` has it. Refused: the name of an error of `errors.py`.
    error: str = ""
    text: str = ""


@record
class CallAnswer:
    """The answer to a `Cancel`, `Query`, `Administer` or `Call`."""

    call_id: str
    body: Mapping[str, Any] = field(default_factory=dict)
    #: Empty, or the name of an error of `errors.py` (`UnknownHostError` where there is no such host).
    error: str = ""
    text: str = ""


FromHost = (
    Join
    | Report
    | Placed
    | PlaceRefused
    | EpochRefused
    | Ask
    | AskAbandoned
    | Cancel
    | Query
    | Administer
    | Call
    | CallAnswer
)
ToHost = Welcome | TurnedAway | Place | End | HostOrder | PollEnded | ReportWanted | Answer | CallAnswer | Call
Message = FromHost | ToHost
