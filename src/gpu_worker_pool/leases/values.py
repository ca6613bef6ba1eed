"""Leases as a client sees them: what is asked, what is held, and what a service that gives them can do.

Values and a protocol; nothing here sends anything, and it loads in no time, for which the command line waits.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.leases.lifetime import LeaseLife

#: One poll waits no longer than a server lets it.
LONGEST_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """One request at one service: the same every time it is asked again, so that it is one request (rule 9)."""

    request_id: str
    #: Ours alone, so that nobody who knows or guesses the id gets the lease.
    token: str = field(repr=False)
    worker_id: str
    requirements: Requirements
    label: str | None
    ttl_seconds: float

    @classmethod
    def new(cls, worker_id: str, requirements: Requirements, label: str | None, ttl_seconds: float) -> LeaseAsk:
        return cls(secrets.token_hex(16), secrets.token_urlsafe(24), worker_id, requirements, label, ttl_seconds)

    def anew(self) -> LeaseAsk:
        """The same wishes as another request, where the first one has ended without us."""
        return replace(self, request_id=secrets.token_hex(16), token=secrets.token_urlsafe(24))

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
    #: Whether somebody around this program has it: they renew it and give it back.
    is_inherited: bool = False

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
    """Gives leases on the GPUs of one endpoint. Belongs to the thread and event loop of a `LeaseThread`.

    Every method may raise a `RetryableError`, after which nobody knows whether it was done, or a `ServiceRefusedError`.
    """

    @property
    def endpoint_id(self) -> str: ...

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        """Ask, or ask again. `ImpossibleRequestError`, `RequestEndedError`, `TooManyWaitingError` too."""

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        """`UnknownLeaseError`, `NotYourLeaseError` or `LeaseEndedError`: it is lost."""

    async def release(self, lease: HeldLease) -> None:
        """Twice is harmless; the errors of `renew` where it was lost before."""

    async def cancel(self, ask: LeaseAsk) -> None:
        """Give up a place, or, if it was granted in this instant, the lease; harmless if there is neither."""

    async def close(self) -> None: ...


# --- wishes at one of several endpoints ---


def requirements_at(endpoint_id: str, requirements: Requirements) -> Requirements | None:
    """As that endpoint understands them, for which its GPUs are numbers; None where they name only others' GPUs."""
    only = None if requirements.only is None else _names_at(endpoint_id, requirements.only)
    if only == ():
        return None
    exclude = _names_at(endpoint_id, requirements.exclude)
    if only == requirements.only and exclude == requirements.exclude:
        return requirements
    return replace(requirements, only=only, exclude=exclude)


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
