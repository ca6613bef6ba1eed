"""Leases as a client sees them: what is asked, what is held, and what a service that gives them can do.

Values and a protocol; nothing here sends anything. What a server says is checked as hostile input.
"""

from __future__ import annotations

import re
import secrets
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.replies import cleaned

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.wishes import Wishes

#: One poll waits no longer than a server lets it.
LONGEST_WAIT_SECONDS = 30.0

_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_UUID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """One request at one service: the same every time it is asked again, so that it is one request (rule 9)."""

    request_id: str
    #: Ours alone, so that nobody who knows or guesses the id gets the lease.
    token: str = field(repr=False)
    worker_id: str
    wishes: Wishes
    label: str | None
    ttl_seconds: float

    @classmethod
    def new(cls, worker_id: str, wishes: Wishes, label: str | None, ttl_seconds: float) -> LeaseAsk:
        return cls(uuid.uuid4().hex, secrets.token_urlsafe(24), worker_id, wishes, label, ttl_seconds)

    def anew(self) -> LeaseAsk:
        """The same wishes as another request, where the first one has ended without us."""
        return replace(self, request_id=uuid.uuid4().hex, token=secrets.token_urlsafe(24))

    @property
    def poll_seconds(self) -> float:
        """A grant counts from when the poll was sent that brings it, and must have most of its life before it then."""
        return min(LONGEST_WAIT_SECONDS, self.ttl_seconds / 3)


@dataclass(frozen=True, slots=True)
class LeasedGPU:
    index: int
    uuid: str | None
    name: str


@dataclass(frozen=True, slots=True)
class HeldLease:
    endpoint_id: str
    lease_id: str
    fence: int
    gpus: tuple[LeasedGPU, ...]
    ask: LeaseAsk
    life: LeaseLife = field(repr=False, compare=False)

    @property
    def shown(self) -> str:
        gpus = ", ".join(str(gpu.index) for gpu in self.gpus)
        return f"GPU{'s' if len(self.gpus) > 1 else ''} {gpus} of {self.endpoint_id} ({self.lease_id})"


@dataclass(frozen=True, slots=True)
class StillWaiting:
    #: 1 is next.
    position: int | None
    reasons: tuple[str, ...]


class LeaseService(Protocol):
    """Gives leases on the GPUs of one endpoint. Belongs to the thread and event loop of a `LeaseKeeper`.

    Every method may raise a `RetryableError`, after which nobody knows whether it was done, or a `ServiceRefusedError`.
    """

    @property
    def endpoint_id(self) -> str: ...

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_keep: bool) -> HeldLease | StillWaiting:
        """Ask, or ask again. `ImpossibleRequestError`, `RequestEndedError`, `TooManyWaitingError` too."""

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        """`UnknownLeaseError`, `NotYourLeaseError` or `LeaseEndedError`: it is lost."""

    async def release(self, lease: HeldLease) -> None:
        """Twice is harmless; the errors of `renew` where it was lost before."""

    async def cancel(self, ask: LeaseAsk) -> None:
        """Give up a place, or, if it was granted in this instant, the lease; harmless if there is neither."""

    async def close(self) -> None: ...


# --- what a server answers ---


@dataclass(frozen=True, slots=True)
class Problem:
    """The body of an error: what it is for programs, and what for people."""

    error: str
    detail: str
    reasons: tuple[str, ...]
    #: Of a request that has ended: how.
    state: str


def read_problem(reply: object) -> Problem:
    found: dict[str, Any] = reply if isinstance(reply, dict) else {}
    return Problem(_text(found, "error", 64), _text(found, "detail", 1000), _reasons(found), _text(found, "state", 64))


def read_waiting(reply: object) -> StillWaiting:
    found: dict[str, Any] = reply if isinstance(reply, dict) else {}
    position = found.get("position")
    return StillWaiting(position if _is_count(position) else None, _reasons(found))


def read_lease(
    reply: object, endpoint_id: str, ask: LeaseAsk, sent_at: float, now: Callable[[], float] = boot_time
) -> HeldLease:
    """A `ServiceRetryableError` for what is no lease: it can be asked for again, and given back by its request's id."""
    if not isinstance(reply, dict):
        raise ServiceRetryableError("the lease must be a JSON object")
    lease_id, fence, rows = reply.get("lease_id"), reply.get("fence"), reply.get("gpus")
    if not (isinstance(lease_id, str) and _ID.fullmatch(lease_id)):
        raise ServiceRetryableError("the lease has no lease_id that can be one")
    if not _is_count(fence):
        raise ServiceRetryableError("the lease has no fence that can be one")
    if reply.get("request_id") != ask.request_id:
        raise ServiceRetryableError("the lease is that of another request")
    if not isinstance(rows, list) or len(rows) != ask.wishes.count:
        raise ServiceRetryableError(f"the lease must have {ask.wishes.count} gpus")
    gpus = tuple(_read_gpu(row) for row in rows)
    life = LeaseLife(ask.ttl_seconds, sent_at, now)
    # Its `env` is not looked at: it follows from the rest, and whoever chooses what is in the environment of programs
    # chooses what they run.
    return HeldLease(endpoint_id, lease_id, fence, gpus, ask, life)


def _read_gpu(row: object) -> LeasedGPU:
    found: dict[str, Any] = row if isinstance(row, dict) else {}
    index, uuid_ = found.get("gpu_id"), found.get("uuid")
    if not _is_count(index):
        raise ServiceRetryableError("a GPU of the lease has no gpu_id that can be one")
    if uuid_ is not None and not (isinstance(uuid_, str) and _UUID.fullmatch(uuid_)):
        raise ServiceRetryableError("a GPU of the lease has a uuid that cannot be one")
    return LeasedGPU(index, uuid_, _text(found, "name", 128))


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LARGEST


def _text(where: dict[str, Any], key: str, longest: int) -> str:
    value = where.get(key)
    return cleaned(value, longest) if isinstance(value, str) else ""


def _reasons(where: dict[str, Any]) -> tuple[str, ...]:
    reasons = where.get("reasons")
    if not isinstance(reasons, list):
        return ()
    return tuple(cleaned(reason, 500) for reason in reasons[:64] if isinstance(reason, str))


# --- wishes at one of several endpoints ---


def wishes_at(endpoint_id: str, wishes: Wishes) -> Wishes | None:
    """As that endpoint understands them, for which its GPUs are numbers; None where they name only others' GPUs."""
    only = None if wishes.only is None else _names_at(endpoint_id, wishes.only)
    if only == ():
        return None
    exclude = _names_at(endpoint_id, wishes.exclude)
    if only == wishes.only and exclude == wishes.exclude:
        return wishes
    return replace(wishes, only=only, exclude=exclude)


def _names_at(endpoint_id: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`endpoint:3` is 3 there, and nothing elsewhere; numbers and UUIDs are the same everywhere."""
    ours = []
    for name in names:
        endpoint, colon, index = name.rpartition(":")
        if not colon:
            ours.append(name)
        elif endpoint == endpoint_id:
            ours.append(index)
    return tuple(ours)
