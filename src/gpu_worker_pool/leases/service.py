"""What a service that gives leases can do, and what it answers: values and a protocol that load in no time."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.leases.lease import HeldLease


@dataclass(frozen=True, slots=True)
class LeasedGPU:
    index: int
    uuid: str | None
    name: str


@dataclass(frozen=True, slots=True)
class StillWaiting:
    #: 1 is next.
    position: int | None
    #: A summary, then one reason per GPU.
    reasons: tuple[str, ...]


class LeaseService(Protocol):
    """Gives leases on the GPUs of one endpoint. Belongs to one event loop.

    Every method may raise a `RetryableError`, after which it is unknown whether the call took effect, or a
    `ServiceRefusedError`.
    """

    @property
    def endpoint_id(self) -> str: ...

    @property
    def longest_silence_seconds(self) -> float:
        """How often a lease must be renewed at least, however long its TTL."""

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        """Poll: repeating an equal request continues it (rule 9).

        Also raises `ImpossibleRequestError`, `RequestEndedError` and `TooManyWaitingError`.
        """

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        """`UnknownLeaseError`, `NotYourLeaseError` or `LeaseEndedError`: the lease is lost."""

    async def release(self, lease: HeldLease) -> None:
        """Twice is harmless; the errors of `renew` where it was lost before."""

    async def cancel(self, request: Request) -> None:
        """Withdraw a request, and the lease if it was granted meanwhile; harmless if there is neither."""

    async def rest(self) -> None:
        """Stop watching until the next call: the only lease is held and just needs renewals."""

    async def close(self) -> None: ...


def sent_as_new(request: Request) -> Request:
    """The same request under an id and a token that only this sender knows."""
    return replace(request, request_id=secrets.token_hex(16), owner=secrets.token_urlsafe(24))


def requirements_at(endpoint_id: str, requirements: Requirements) -> Requirements | None:
    """As one of several endpoints understands them, where GPUs are numbers; None if they name only other GPUs."""
    only = None if requirements.only is None else _names_at(endpoint_id, requirements.only)
    if only == ():
        return None
    exclude = _names_at(endpoint_id, requirements.exclude)
    if only == requirements.only and exclude == requirements.exclude:
        return requirements
    return replace(requirements, only=only, exclude=exclude)


def _names_at(endpoint_id: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`endpoint:3` is 3 at that endpoint and nothing elsewhere; numbers and UUIDs are the same everywhere."""
    ours = []
    for name in names:
        endpoint, colon, index = name.rpartition(":")
        if not colon:
            ours.append(name)
        elif endpoint == endpoint_id:
            ours.append(index)
    return tuple(ours)
