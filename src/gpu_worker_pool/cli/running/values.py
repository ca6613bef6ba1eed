"""What is asked of a service, and what it answers, in as few words as one lease needs: they must load in no time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.core.wishes import Wishes


@dataclass(frozen=True)
class Ask:
    """One request at one service: the same every time it is asked again, so that it is one request."""

    worker_id: str
    wishes: Wishes
    label: str | None
    ttl_seconds: float
    request_id: str = field(default_factory=lambda: os.urandom(16).hex())
    #: Ours alone, so that nobody who knows or guesses the id gets the lease.
    token: str = field(default_factory=lambda: os.urandom(24).hex(), repr=False)

    def anew(self) -> Ask:
        """The same wishes as another request, where the first one has ended without us."""
        return replace(self, request_id=os.urandom(16).hex(), token=os.urandom(24).hex())


@dataclass(frozen=True)
class HeldGPU:
    index: int
    uuid: str | None
    name: str


class Held(NamedTuple):
    """A lease that was granted."""

    endpoint_id: str
    lease_id: str
    gpus: tuple[HeldGPU, ...]
    ask: Ask
    #: When the message was sent whose answer says that it is held, on the clock that runs also while we sleep.
    sent_at: float
    #: The one inside which this runs: neither renewed nor released here.
    is_inherited: bool = False


class Waiting(NamedTuple):
    #: 1 is next.
    position: int | None
    #: One sentence on the whole, then one for each GPU.
    reasons: tuple[str, ...]


class Service(Protocol):
    """Gives leases on the GPUs of one endpoint; every method may raise a `GPUWorkerPoolError`. Of one event loop."""

    @property
    def endpoint_id(self) -> str: ...

    @property
    def longest_silence_seconds(self) -> float:
        """So often at least it must hear of a lease, however long that lives."""

    async def rest(self) -> None:
        """A lease was granted: until it is renewed, nothing need be looked at."""

    async def acquire(self, ask: Ask, *, wait_seconds: float, may_keep: bool) -> Held | Waiting:
        """Ask, or ask again. `may_keep`: whether GPUs may be kept free for it there."""

    async def renew(self, lease: Held, *, timeout_seconds: float) -> None: ...

    async def release(self, lease: Held) -> None:
        """Twice is harmless."""

    async def cancel(self, ask: Ask) -> None:
        """Give up a place, or, if it was granted in this instant, the lease; harmless if there is neither."""

    def forget(self) -> None:
        """What was noted of a request so that another `gpu-pool` might end it: it has ended."""
