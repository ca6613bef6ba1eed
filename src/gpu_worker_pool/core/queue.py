"""Rule 4, the order: priority, then arrival. Waiters with equal requirements form a class; only its head is tried."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.core.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.core.events import Request


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
        """The id of its worker; `name_of` makes its name for people."""
        return self.request.worker_id or self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.requirements.priority, self.ticket)


@dataclass(slots=True, eq=False)
class RequestClass:
    """Waiters with equal requirements, all inside one lease or none: if the first cannot be served, none can."""

    requirements: Requirements
    #: The lease inside which they run; requests inside another one form another class.
    within: str | None = None
    #: Whether any free GPU serves it, so that the index of free GPUs answers for it.
    is_any_gpu: bool = False
    # Not a dict: finding its first entry walks over all entries that were removed from its front.
    waiters: OrderedDict[str, Waiter] = field(default_factory=OrderedDict)
    #: Whether no GPU could serve it when it was last tried; then only GPUs that changed since are looked at.
    tried: bool = False

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


_Key = Requirements | tuple[Requirements, str]


def _key(requirements: Requirements, within: str | None) -> _Key:
    # Not always a tuple: nearly all requests run outside, and the key is hashed for each.
    return requirements if within is None else (requirements, within)


class WorkerQueue:
    """All waiters. Belongs to one thread."""

    def __init__(self) -> None:
        self._classes: dict[_Key, RequestClass] = {}
        #: How many waiters there are.
        self.waiting = 0
        #: How many of each account.
        self._of_account: Counter[str] = Counter()
        #: How many inside each lease.
        self._inside: Counter[str] = Counter()

    def enqueue(self, waiter: Waiter, request_class: RequestClass | None = None) -> None:
        """Add it at the end of its class; `request_class` is that class, or a new one if there is none yet."""
        requirements, within = waiter.request.requirements, waiter.request.within
        request_class = request_class or self.request_class(requirements, within) or RequestClass(requirements, within)
        if not request_class.waiters:
            self._classes[_key(requirements, within)] = request_class
        request_class.waiters[waiter.request.request_id] = waiter
        waiter.request_class = request_class
        self.waiting += 1
        if waiter.request.account:
            self._of_account[waiter.request.account] += 1
        if within is not None:
            self._inside[within] += 1

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
            del self._classes[_key(request_class.requirements, request_class.within)]
        if (within := waiter.request.within) is not None:
            self._inside[within] -= 1
            if not self._inside[within]:
                del self._inside[within]
        if account := waiter.request.account:
            self._of_account[account] -= 1
            if not self._of_account[account]:
                del self._of_account[account]

    def clear(self) -> list[Waiter]:
        """Remove all of them, in order."""
        waiters = self.in_order()
        self._classes.clear()
        self._of_account.clear()
        self._inside.clear()
        self.waiting = 0
        return waiters

    def of_account(self, account: str) -> int:
        """How many requests of this account wait."""
        return self._of_account[account]

    def inside(self, lease_id: str) -> list[Waiter]:
        """Those that run inside this lease, in order."""
        if lease_id not in self._inside:
            return []
        classes = (each for each in self._classes.values() if each.within == lease_id)
        return sorted((waiter for each in classes for waiter in each.waiters.values()), key=lambda waiter: waiter.order)

    def size(self) -> int:
        return self.waiting

    def request_class(self, requirements: Requirements, within: str | None = None) -> RequestClass | None:
        return self._classes.get(_key(requirements, within))

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

    def position(self, order: tuple[int, int], within: str | None = None) -> int:
        """The place of a waiter of this order among those inside the same lease, or outside any; 1 is next."""
        return 1 + sum(
            waiter.order < order
            for request_class in self._classes.values()
            if request_class.within == within
            for waiter in request_class.waiters.values()
        )

    def __len__(self) -> int:
        return self.waiting
