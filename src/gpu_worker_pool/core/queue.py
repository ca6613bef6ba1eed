"""Rule 4, the order: priority, then arrival. Waiters with equal requirements form a class; only its head is tried."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from threading import RLock
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.moves import RequestState
from gpu_worker_pool.core.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.fair_share import FairShare


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
        return self.request.worker

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.requirements.priority, self.ticket)


@dataclass(slots=True, eq=False)
class RequestClass:
    """Waiters with equal requirements, all inside one lease or none: if the first cannot be served, none can."""

    requirements: Requirements
    #: The lease inside which they run; requests inside another one form another class.
    within: str | None = None
    #: The account of all of them, if classes are separated by account.
    account: str = ""
    #: Whether any free GPU serves it, so that the index of free GPUs answers for it.
    is_any_gpu: bool = False
    # Not a dict: finding its first entry walks over all entries that were removed from its front.
    waiters: OrderedDict[str, Waiter] = field(default_factory=OrderedDict)
    #: Those of them that declared how long they take, for backfill.
    declared: OrderedDict[str, Waiter] = field(default_factory=OrderedDict)
    #: With fair share, the waiters of each account.
    lines: dict[str, OrderedDict[str, Waiter]] = field(default_factory=dict)
    #: Whether no GPU could serve it when it was last tried; then only GPUs that changed since are looked at.
    tried: bool = False

    def first_declared(self, most: int) -> list[Waiter]:
        return [waiter for _, waiter in zip(range(most), self.declared.values(), strict=False)]

    @property
    def head(self) -> Waiter:
        """The first by arrival; `WorkerQueue.head` knows whose turn it is."""
        return next(iter(self.waiters.values()))


_Key = Requirements | tuple[Requirements, str | None, str]


def _key(requirements: Requirements, within: str | None, account: str) -> _Key:
    # Not always a tuple: in a client, nearly all requests run outside, and the key is hashed for each.
    return requirements if within is None and not account else (requirements, within, account)


class WaiterQueue:
    """All waiters. Belongs to one thread."""

    def __init__(self, fair_share: FairShare | None = None, *, tells_accounts_apart: bool = False) -> None:
        self._fair_share = fair_share
        self._tells_accounts_apart = tells_accounts_apart
        self._classes: dict[_Key, RequestClass] = {}
        #: How many waiters there are.
        self.waiting: int = 0
        #: How many of each account.
        self._of_account: Counter[str] = Counter()
        #: How many inside each lease.
        self._inside: Counter[str] = Counter()
        #: Those that ask holders to leave.
        self._asking: dict[str, Waiter] = {}

    def asking(self) -> list[Waiter]:
        """Those that ask holders to leave, in order of arrival."""
        return list(self._asking.values())

    def enqueue(self, waiter: Waiter, request_class: RequestClass | None = None) -> None:
        """Add it at the end of its class; `request_class` is that class, or a new one if there is none yet."""
        request, within = waiter.request, waiter.request.within
        request_class = request_class or self.class_of(request) or self.new_class(request)
        if not request_class.waiters:
            self._classes[_key(request.requirements, within, request_class.account)] = request_class
        request_class.waiters[waiter.request.request_id] = waiter
        if self._fair_share is not None:
            request_class.lines.setdefault(waiter.request.account, OrderedDict())[waiter.request.request_id] = waiter
        if request.expected_seconds is not None or request.max_seconds is not None:
            request_class.declared[waiter.request.request_id] = waiter
        waiter.request_class = request_class
        self.waiting += 1
        if waiter.request.asks and within is None:
            self._asking[waiter.request.request_id] = waiter
        if waiter.request.account:
            self._of_account[waiter.request.account] += 1
        if within is not None:
            self._inside[within] += 1

    def put_back(self, waiter: Waiter, request_class: RequestClass) -> None:
        """Add one that waited before, in its place by arrival."""
        self.enqueue(waiter, request_class)
        lines = [request_class.waiters]
        if self._fair_share is not None:
            lines.append(request_class.lines[waiter.request.account])
        if waiter.request.declared_seconds is not None:
            lines.append(request_class.declared)
        for line in lines:
            # Few came before it, or none: it was the head of its class when it was granted.
            before = []
            for each in line.values():
                if each.ticket >= waiter.ticket:
                    break
                before.append(each)
            for each in (waiter, *reversed(before)):
                line.move_to_end(each.request.request_id, last=False)

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
        if request_class.declared:
            request_class.declared.pop(waiter.request.request_id, None)
        if self._fair_share is not None:
            line = request_class.lines[waiter.request.account]
            del line[waiter.request.request_id]
            if not line:
                del request_class.lines[waiter.request.account]
        self.waiting -= 1
        if self._asking:
            self._asking.pop(waiter.request.request_id, None)
        if not request_class.waiters:
            del self._classes[_key(request_class.requirements, request_class.within, request_class.account)]
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
        self._asking.clear()
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
        return sorted((waiter for each in classes for waiter in each.waiters.values()), key=self.order)

    def size(self) -> int:
        return self.waiting

    def class_of(self, request: Request) -> RequestClass | None:
        """The class that it is or would be in; None if there is none yet."""
        account = request.account if self._tells_accounts_apart else ""
        return self._classes.get(_key(request.requirements, request.within, account))

    def new_class(self, request: Request, *, is_any_gpu: bool = False) -> RequestClass:
        return RequestClass(request.requirements, request.within, self._account_of(request), is_any_gpu)

    def _account_of(self, request: Request) -> str:
        return request.account if self._tells_accounts_apart else ""

    def only_class(self) -> RequestClass | None:
        """The class of all waiters, if there is just one."""
        return next(iter(self._classes.values())) if len(self._classes) == 1 else None

    def request_classes(self) -> list[RequestClass]:
        return list(self._classes.values())

    def order(self, waiter: Waiter) -> tuple[Any, ...]:
        """The sort key: the lowest is served first. With fair share it changes as accounts use GPUs."""
        return waiter.order if self._fair_share is None else self._fair_share.order(waiter)

    def head(self, request_class: RequestClass) -> Waiter:
        """Whose turn it is in this class."""
        if len(request_class.lines) < 2:
            return request_class.head
        # The first by arrival of each account: its others can only come later.
        return min((next(iter(line.values())) for line in request_class.lines.values()), key=self.order)

    def heads(self, reserved_for: Waiter | None = None) -> Iterator[tuple[RequestClass, Waiter]]:
        """The head of each class, in order. A head that was removed meanwhile is followed by the next of its class.

        Also the one for which GPUs are reserved, if others of its class come first by now.
        """
        heads = []
        for request_class in self._classes.values():
            head = self.head(request_class)
            heads.append((self.order(head), request_class, head, True))
            if reserved_for is not None and reserved_for.request_class is request_class and reserved_for is not head:
                heads.append((self.order(reserved_for), request_class, reserved_for, False))
        heapify(heads)
        while heads:
            _, request_class, head, is_head = heads[0]
            if head.state is RequestState.WAITING:
                yield request_class, head
            if head.state is not RequestState.WAITING and request_class.waiters and is_head:
                head = self.head(request_class)
                heapreplace(heads, (self.order(head), request_class, head, True))
            else:
                heappop(heads)

    def in_order(self) -> list[Waiter]:
        waiters = [waiter for request_class in self._classes.values() for waiter in request_class.waiters.values()]
        return sorted(waiters, key=self.order)

    def position(self, order: tuple[Any, ...], within: str | None = None) -> int:
        """The place of a waiter of this order among those inside the same lease, or outside any; 1 is next."""
        return 1 + sum(
            self.order(waiter) < order
            for request_class in self._classes.values()
            if request_class.within == within
            for waiter in request_class.waiters.values()
        )

    def __len__(self) -> int:
        return self.waiting


class WorkerQueue(WaiterQueue):
    """The same for several threads at once: each operation is one step for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()

    def enqueue(self, waiter: Waiter, request_class: RequestClass | None = None) -> None:
        with self._lock:
            super().enqueue(waiter, request_class)

    def dequeue(self) -> Waiter | None:
        with self._lock:
            return super().dequeue()

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            super().remove(waiter)

    def clear(self) -> list[Waiter]:
        with self._lock:
            return super().clear()

    def size(self) -> int:
        with self._lock:
            return super().size()

    def in_order(self) -> list[Waiter]:
        with self._lock:
            return super().in_order()
