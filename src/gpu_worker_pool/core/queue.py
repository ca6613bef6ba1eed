"""Rule 4, the order: priority, then arrival. Equal wishes stand in one line, so only heads are ever looked at."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.moves import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.wishes import Wishes


@dataclass(slots=True)
class Waiter:
    """A request that waits."""

    request: Request
    #: Arrival: the lower, the earlier.
    ticket: int
    enqueued_at: float
    deadline: float | None = None
    #: Until when its asker listens; None: until it has an answer.
    asking_until: float | None = None
    #: When it is given up unless its asker asks again; None: never.
    gives_up_at: float | None = None
    may_keep: bool = True
    #: The last asking; its answer will be the grant.
    ask: str = ""
    #: The GPUs kept for it, while it is the one for whom GPUs are kept.
    kept: tuple[str, ...] = ()
    #: When the readings began by which that was last decided: who knows only older ones leaves it as it is.
    kept_at: float | None = None
    state: RequestState = RequestState.WAITING
    #: Taken in by another process, which may know of GPUs that this one cannot see.
    is_adopted: bool = field(default=False, repr=False, compare=False, init=False)
    #: Where it stands; None for one that is rejected as soon as it comes.
    line: Line | None = field(default=None, repr=False, compare=False, init=False)

    @property
    def worker(self) -> str:
        """Who waits, as others are told."""
        return self.request.worker_id or self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.wishes.priority, self.ticket)


class Line:
    """Waiters with equal wishes. If its head cannot be served, none of them can."""

    __slots__ = ("is_plain", "tried", "waiters", "wishes")

    def __init__(self, wishes: Wishes, *, is_plain: bool) -> None:
        self.wishes = wishes
        #: Whether the index of free GPUs answers for it.
        self.is_plain = is_plain
        # Not a dict: taking the first entry off a dict over and over walks along all that were taken before.
        self.waiters: OrderedDict[str, Waiter] = OrderedDict()
        #: Whether no GPU could serve it, as they last were; then only GPUs that changed since are worth a look.
        self.tried = False

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters.values()))


class WorkerQueue:
    """All waiters. Belongs to one thread."""

    def __init__(self) -> None:
        self._lines: dict[Wishes, Line] = {}
        #: How many they are.
        self.waiting = 0
        #: How many of each account, where there is one.
        self._of_account: Counter[str] = Counter()

    def enqueue(self, waiter: Waiter, line: Line | None = None) -> None:
        """Let it wait at the end of its line; `line` is that, or one to begin if there is none for these wishes."""
        wishes = waiter.request.wishes
        line = line or self._lines.get(wishes) or Line(wishes, is_plain=False)
        if not line.waiters:
            self._lines[wishes] = line
        line.waiters[waiter.request.request_id] = waiter
        waiter.line = line
        self.waiting += 1
        if waiter.request.account:
            self._of_account[waiter.request.account] += 1

    def dequeue(self) -> Waiter | None:
        """Take the first in order off the queue."""
        for _, waiter in self.heads():
            self.remove(waiter)
            return waiter
        return None

    def remove(self, waiter: Waiter) -> None:
        line = waiter.line
        assert line is not None  # it was enqueued
        del line.waiters[waiter.request.request_id]
        self.waiting -= 1
        if not line.waiters:
            del self._lines[line.wishes]
        if account := waiter.request.account:
            self._of_account[account] -= 1
            if not self._of_account[account]:
                del self._of_account[account]

    def clear(self) -> list[Waiter]:
        """Take all of them off, in order."""
        waiters = self.in_order()
        self._lines.clear()
        self._of_account.clear()
        self.waiting = 0
        return waiters

    def of_account(self, account: str) -> int:
        """How many of these wait."""
        return self._of_account[account]

    def size(self) -> int:
        return self.waiting

    def line(self, wishes: Wishes) -> Line | None:
        return self._lines.get(wishes)

    def only_line(self) -> Line | None:
        """The line in which all stand, if all stand in one."""
        if len(self._lines) != 1:
            return None
        for line in self._lines.values():
            return line
        return None

    def lines(self) -> list[Line]:
        return list(self._lines.values())

    def heads(self) -> Iterator[tuple[Line, Waiter]]:
        """The head of each line, in order. A head that was removed meanwhile is followed by the next of its line."""
        heads = [(line.head.order, line) for line in self._lines.values()]
        heapify(heads)
        while heads:
            line = heads[0][1]
            head = line.head
            yield line, head
            if line.waiters and line.head is not head:
                heapreplace(heads, (line.head.order, line))
            else:
                heappop(heads)

    def in_order(self) -> list[Waiter]:
        waiters = [waiter for line in self._lines.values() for waiter in line.waiters.values()]
        return sorted(waiters, key=lambda waiter: waiter.order)

    def position(self, order: tuple[int, int]) -> int:
        """The place of a waiter of this order; 1 is next."""
        return 1 + sum(waiter.order < order for line in self._lines.values() for waiter in line.waiters.values())

    def __bool__(self) -> bool:
        return self.waiting > 0

    def __len__(self) -> int:
        return self.waiting
