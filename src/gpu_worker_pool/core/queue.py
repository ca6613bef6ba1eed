"""Rule 4, the order: priority, then arrival. Waiters with equal requirements form a class; only its head is tried."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements


@dataclass(slots=True)
class Waiter:
    """A request that waits."""

    request: Request
    #: The order of arrival.
    ticket: int
    enqueued_at: float
    deadline: float | None = None
    #: Until when its client polls; None: until it has an answer.
    poll_deadline: float | None = None
    #: When it is given up unless its client polls again; None: never.
    gives_up_at: float | None = None
    may_reserve: bool = True
    #: The last poll, whose answer will be the grant.
    poll_id: str = ""
    #: The GPUs reserved for it; only `Pool.reserved_for` has any.
    reserved: tuple[str, ...] = ()
    #: When the readings began that this was last decided by; a process with older readings does not change it.
    reserved_at: float | None = None
    state: RequestState = RequestState.WAITING
    #: Accepted by another process, which may see other GPUs than this one.
    is_replicated: bool = field(default=False, repr=False, compare=False, init=False)
    #: None for a request that is rejected at once.
    request_class: RequestClass | None = field(default=None, repr=False, compare=False, init=False)

    @property
    def worker(self) -> str:
        """Its name in explanations to others."""
        return self.request.worker_id or self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.requirements.priority, self.ticket)


@dataclass(slots=True, eq=False)
class RequestClass:
    """Waiters with equal requirements: if the first cannot be served, none of them can."""

    requirements: Requirements
    #: Whether any free GPU serves it, so that the index of free GPUs answers for it.
    is_any_gpu: bool = False
    # Not a dict: finding its first entry walks over all entries that were removed from its front.
    waiters: OrderedDict[str, Waiter] = field(default_factory=OrderedDict)
    #: Whether no GPU could serve it when it was last tried; then only GPUs that changed since are looked at.
    tried: bool = False

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


class WorkerQueue:
    """All waiters. Belongs to one thread."""

    def __init__(self) -> None:
        self._classes: dict[Requirements, RequestClass] = {}
        #: How many waiters there are.
        self.waiting = 0
        #: How many of each account.
        self._of_account: Counter[str] = Counter()

    def enqueue(self, waiter: Waiter, request_class: RequestClass | None = None) -> None:
        """Add it at the end of its class; `request_class` is that class, or a new one if there is none yet."""
        requirements = waiter.request.requirements
        request_class = request_class or self._classes.get(requirements) or RequestClass(requirements)
        if not request_class.waiters:
            self._classes[requirements] = request_class
        request_class.waiters[waiter.request.request_id] = waiter
        waiter.request_class = request_class
        self.waiting += 1
        if waiter.request.account:
            self._of_account[waiter.request.account] += 1

    def dequeue(self) -> Waiter | None:
        """Remove the first in order."""
        for _, waiter in self.heads():
            self.remove(waiter)
            return waiter
        return None

    def remove(self, waiter: Waiter) -> None:
        request_class = waiter.request_class
        assert request_class is not None  # it was enqueued
        del request_class.waiters[waiter.request.request_id]
        self.waiting -= 1
        if not request_class.waiters:
            del self._classes[request_class.requirements]
        if account := waiter.request.account:
            self._of_account[account] -= 1
            if not self._of_account[account]:
                del self._of_account[account]

    def clear(self) -> list[Waiter]:
        """Remove all of them, in order."""
        waiters = self.in_order()
        self._classes.clear()
        self._of_account.clear()
        self.waiting = 0
        return waiters

    def of_account(self, account: str) -> int:
        """How many requests of this account wait."""
        return self._of_account[account]

    def size(self) -> int:
        return self.waiting

    def request_class(self, requirements: Requirements) -> RequestClass | None:
        return self._classes.get(requirements)

    def only_class(self) -> RequestClass | None:
        """The class of all waiters, if there is just one."""
        return next(iter(self._classes.values())) if len(self._classes) == 1 else None

    def request_classes(self) -> list[RequestClass]:
        return list(self._classes.values())

    def heads(self) -> Iterator[tuple[RequestClass, Waiter]]:
        """The head of each class, in order. A head that was removed meanwhile is followed by the next of its class."""
        heads = [(request_class.head.order, request_class) for request_class in self._classes.values()]
        heapify(heads)
        while heads:
            request_class = heads[0][1]
            head = request_class.head
            yield request_class, head
            if request_class.waiters and request_class.head is not head:
                heapreplace(heads, (request_class.head.order, request_class))
            else:
                heappop(heads)

    def in_order(self) -> list[Waiter]:
        waiters = [waiter for request_class in self._classes.values() for waiter in request_class.waiters.values()]
        return sorted(waiters, key=lambda waiter: waiter.order)

    def position(self, order: tuple[int, int]) -> int:
        """The place of a waiter of this order; 1 is next."""
        return 1 + sum(
            waiter.order < order
            for request_class in self._classes.values()
            for waiter in request_class.waiters.values()
        )

    def __len__(self) -> int:
        return self.waiting
