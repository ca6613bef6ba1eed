"""Leases as those who request and hold them see them: what a service can do, and whether a lease is still held.

The clock alone decides whether a lease is held: one that was not renewed for its TTL is lost, also in a process that
was suspended and has just woken up. Nothing here sends anything.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.models import GPUAssignment


@frozen
class LeasedGPU:
    index: int
    uuid: str | None
    name: str
    #: None where it is not known: an older server does not say.
    memory_total_mb: float | None = None


@frozen
class StillWaiting:
    #: 1 is next.
    position: int | None
    #: A summary, then one reason per GPU.
    reasons: tuple[str, ...]


class YieldNotice(NamedTuple):
    """The holder of a lease is asked to give it back."""

    reason: str
    #: When the lease ends if it stays idle; None: it may be kept.
    ends_in_seconds: float | None

    @property
    def sentence(self) -> str:
        if self.ends_in_seconds is None:
            return f"you are asked to give it back: {self.reason}"
        return f"the lease ends in {spoken_seconds(self.ends_in_seconds)} unless the GPU is used: {self.reason}"


class LeaseService(Protocol):
    """Gives leases on the GPUs of one endpoint. Belongs to one event loop.

    Every method may raise a `RetryableError`, after which it is unknown whether the call took effect, or a
    `ServiceRefusedError`.
    """

    @property
    def endpoint_id(self) -> str: ...

    @property
    def longest_silence_seconds(self) -> float:
        """The longest interval between renewals, however long the TTL."""

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        """Poll: repeating an equal request continues it (rule 9).

        Also raises `ImpossibleRequestError`, `RequestEndedError` and `TooManyWaitingError`.
        """

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        """What its holder is asked, if it is asked to give the lease back.

        Raises `UnknownLeaseError`, `NotYourLeaseError` or `LeaseEndedError` if the lease is lost.
        """

    async def release(self, lease: HeldLease) -> None:
        """Releasing twice is harmless. Raises the errors of `renew` if the lease was lost before."""

    async def cancel(self, request: Request) -> None:
        """Withdraw a request, and the lease if it was granted meanwhile; harmless if there is neither."""

    async def has_waiting(self) -> bool:
        """Whether any request waits there, of this program or of another."""

    async def rest(self) -> None:
        """Stop reading GPUs and the ledger until the next request: the only lease just needs renewals."""

    async def close(self) -> None: ...


class LeaseEnd(Enum):
    """How a lease ended."""

    #: By its holder, or on its behalf.
    RELEASED = "released"
    LOST = "lost"


class _Ending(NamedTuple):
    how: LeaseEnd
    reason: str


class HeldLease:
    """Shared by the assignment, which asks whether it is held, and the loop that renews it."""

    def __init__(
        self,
        service: LeaseService,
        request: Request,
        lease_id: str,
        fence: int,
        gpus: tuple[LeasedGPU, ...],
        certain_at: float,
        *,
        is_inherited: bool = False,
        within: str | None = None,
        assignment: GPUAssignment | None = None,
        ends_at: float | None = None,
        host: str = "",
        now: Callable[[], float] = boot_time,
    ) -> None:
        """`certain_at`, on the clock `now`: from when on it is certain to be held for its TTL. That is when the message
        was sent whose answer says so, or later, if the answer says that it took the service some time.

        `ends_at`: when its time limit ends it; None: it has none. `host`: of its GPUs, where a fleet says it.
        """
        self.service = service
        self.request = request
        self.lease_id = lease_id
        self.fence = fence
        self.gpus = gpus
        self.host = host
        #: A process around this program holds it, renews it and releases it.
        self.is_inherited = is_inherited
        #: The lease of which it is a part.
        self.within = within
        #: Granted by the pool of this process, which needs no renewal.
        self.assignment = assignment
        #: Infinite for a lease that lasts until it is released.
        self.ttl_seconds: float = math.inf if request.ttl_seconds is None else request.ttl_seconds
        self._now = now
        self._pid = os.getpid()
        #: Until when it is certain to be held, and how it ended. Each is written in one step of the interpreter, so
        #: that no lock is needed, which a fork might copy while it is taken.
        self.ends_at: float = math.inf if ends_at is None else ends_at
        self.held_until: float = min(certain_at + self.ttl_seconds, self.ends_at)
        self._endings: list[_Ending] = []
        self._listeners: list[Callable[[], object]] = []

    @property
    def endpoint_id(self) -> str:
        return self.service.endpoint_id

    @property
    def share_mb(self) -> float | None:
        """The memory of each GPU that is its holder's; None: all of it."""
        requirements = self.request.requirements
        return requirements.memory_mb if requirements.share else None

    @property
    def shown(self) -> str:
        gpus = ", ".join(str(gpu.index) for gpu in self.gpus)
        return f"GPU{'s' if len(self.gpus) > 1 else ''} {gpus} of {self.host or self.endpoint_id} ({self.lease_id})"

    def __repr__(self) -> str:
        return f"<HeldLease {self.shown}>"

    # --- for the holder ---

    @property
    def is_lost(self) -> bool:
        # A forked child cannot know: the parent holds the lease and renews it.
        if not self._endings and self.is_overdue and self._pid == os.getpid():
            # For good: a later renewal must not contradict what the holder was told.
            self.end(LeaseEnd.LOST, self.overdue_reason)
        return bool(self._endings) and self._endings[0].how is LeaseEnd.LOST

    @property
    def is_released(self) -> bool:
        return bool(self._endings) and self._endings[0].how is LeaseEnd.RELEASED

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self._endings[0].reason if self._endings else ""

    async def wait(self) -> None:
        """Until it is lost; forever if it never is."""
        import asyncio  # loaded anyway where this is called, and too slow to load where it is not

        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if lost.done() else lost.set_result(None))

        self._listeners.append(wake)
        try:
            if not self.is_lost:
                await lost
        finally:
            self._listeners.remove(wake)

    # --- for the loop that renews it ---

    @property
    def is_overdue(self) -> bool:
        """It was not renewed for its TTL, so its GPUs may have another holder by now."""
        return self._now() >= self.held_until

    @property
    def overdue_reason(self) -> str:
        if self._now() >= self.ends_at:
            return f"it reached its time limit of {spoken_seconds(self.request.max_seconds or 0.0)}"
        return f"it could not be renewed for {self.ttl_seconds:g} s, its TTL"

    @property
    def has_ended(self) -> bool:
        return bool(self._endings)

    def renewed(self, sent_at: float) -> None:
        self.held_until = min(max(self.held_until, sent_at + self.ttl_seconds), self.ends_at)

    def end(self, how: LeaseEnd, reason: str = "") -> bool:
        """Whether this call ended it: the first one counts."""
        ending = _Ending(how, reason)
        self._endings.append(ending)
        is_first = self._endings[0] is ending
        if is_first and how is LeaseEnd.LOST:
            for wake in list(self._listeners):
                wake()
        return is_first

    # --- a copied assignment shares its lease; a pickled one has none ---

    def __copy__(self) -> HeldLease:
        return self

    def __deepcopy__(self, memo: object) -> HeldLease:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_lease, ()


def _no_lease() -> None:
    """What is unpickled instead."""


def with_new_id(request: Request, requirements: Requirements | None = None) -> Request:
    """The same request, or with other requirements, under an id and a token that only this sender knows."""
    return replace(
        request,
        request_id=os.urandom(16).hex(),
        owner=os.urandom(24).hex(),
        requirements=requirements or request.requirements,
    )


def with_visibility_limit(
    reasons: tuple[str, ...], request: Request, asked: Request, visible_devices: str | None
) -> tuple[str, ...]:
    """Mention the variable that limits what was asked for, since its user may not know of it."""
    if not reasons or asked.requirements == request.requirements:
        return reasons
    return (f"{reasons[0]}; CUDA_VISIBLE_DEVICES={visible_devices} limits the choice", *reasons[1:])


def requirements_at(endpoint_id: str, requirements: Requirements) -> Requirements | None:
    """The requirements for one endpoint, with its GPUs as plain indices; None if they name only GPUs of others."""
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
