"""A service that gives leases in memory; a test decides when and what it answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import ANY_GPU, Request
from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, StillWaiting, YieldNotice, with_new_id


@dataclass
class FakeLeaseService:
    endpoint_id: str = "fake"
    longest_silence_seconds: float = math.inf
    #: Request ids of those to grant; all others wait.
    granting: bool = True
    #: What is raised instead of an answer, by method.
    failing: dict[str, Exception] = field(default_factory=dict)
    #: Called in the engine's loop before anything else.
    before: Callable[[str], object] = lambda _: None
    #: Everything that was asked: method and request id.
    calls: list[tuple[str, str]] = field(default_factory=list)
    polls: list[tuple[float, bool]] = field(default_factory=list)
    held: dict[str, HeldLease] = field(default_factory=dict)
    delay_seconds: float = 0.0
    #: Of one request after the other, before it arrives.
    on_the_way_seconds: Iterator[float] = field(default_factory=lambda: iter(()))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        sent_at = boot_time()
        await asyncio.sleep(next(self.on_the_way_seconds, 0.0))
        self.polls.append((wait_seconds, may_reserve))
        await self._called("acquire", request.request_id)
        if not self.granting and wait_seconds:
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass
        if "acquire" in self.failing:
            raise self.failing["acquire"]
        if not self.granting:
            return StillWaiting(1, ("all are busy",))
        return self.lease(request, sent_at)

    def lease(self, request: Request, sent_at: float) -> HeldLease:
        if request.request_id not in self.held:
            number = len(self.calls)
            gpus = (LeasedGPU(0, "GPU-0", "Fake"),)
            self.held[request.request_id] = HeldLease(self, request, f"lease-{number}", number, gpus, sent_at)
        return self.held[request.request_id]

    def wake(self) -> None:
        """Those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> YieldNotice | None:
        assert timeout_seconds > 0
        await self._called("renew", lease.request.request_id)
        return None

    async def release(self, lease: HeldLease) -> None:
        await self._called("release", lease.request.request_id)
        self.held.pop(lease.request.request_id, None)

    async def cancel(self, request: Request) -> None:
        await self._called("cancel", request.request_id)
        self.held.pop(request.request_id, None)

    async def has_waiting(self) -> bool:
        return not self.granting

    async def rest(self) -> None:
        self.calls.append(("rest", ""))

    async def close(self) -> None:
        self.calls.append(("close", ""))

    async def _called(self, method: str, request_id: str) -> None:
        self.calls.append((method, request_id))
        self.before(method)
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if method in self.failing and method != "acquire":
            raise self.failing[method]

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)


def new_request(ttl_seconds: float = 60.0) -> Request:
    return with_new_id(Request("", ANY_GPU, "worker-1", ttl_seconds=ttl_seconds))
