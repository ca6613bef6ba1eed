"""The desk: where leases of this host's GPUs are asked for, by a server's routes or by programs using `local://`.

It turns calls into events for the ledger, wakes those who wait when something was committed for them, whoever
committed it, and decides nothing itself. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.broker.usage import LeaseUsages
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    GPUsVanished,
    Granted,
    HolderGone,
    Lease,
    LeaseState,
    Observed,
    Outcome,
    PollAbandoned,
    QuarantineEnded,
    ReadingWanted,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Waiter,
    explain,
    explain_requirements,
)
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LedgerUnavailableError,
    PoolStoppedError,
    RequestEndedError,
)
from gpu_worker_pool.hardware.leasable import readings_of, vanished_devices
from gpu_worker_pool.hardware.processes import is_gone
from gpu_worker_pool.hardware.samples import DriverAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from gpu_worker_pool.broker.usage import LeaseUsage
    from gpu_worker_pool.core import Effect, Event, Explanation, Pool, Requirements
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.ledger import Committed, Ledger, Tell

logger = logging.getLogger(__name__)

#: A grant is meant for one who listens; so long after it said it would, news that was on its way still reaches it.
LISTENING_MARGIN_SECONDS: Final = 0.25
#: How often to look whether the processes that hold and wait are still there.
WATCH_SECONDS: Final = 0.2
WATCHED_WAITERS: Final = 32
#: Explaining takes the ledger's time, and everybody may look.
EXPLAINED_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits."""

    request: Request
    #: 1 is next.
    position: int
    waiting_seconds: float
    #: One sentence on the whole, then one for each GPU.
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What was committed of one request; None where nothing was known of it."""

    before: Waiter | Lease | None
    after: Waiter | Lease | Outcome


def owner_of(token: str) -> str:
    """What the ledger knows instead of the secret that lets somebody renew and release."""
    return f"token:{hashlib.sha256(token.encode()).hexdigest()}"


class LeaseBroker:
    """`want_reading` is called when a reading begun after that moment is worth taking.

    `on_leases` is called with all leases whenever one has changed, and when they are first known, or cannot be.
    """

    def __init__(
        self,
        open_ledger: Callable[[Tell], Ledger],
        want_reading: Callable[[float], object],
        *,
        on_leases: Callable[[Iterable[Lease]], object] | None = None,
        idle_after_seconds: float = 1800.0,
        reopen_seconds: float = 5.0,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """`reopen_seconds`: how long to leave alone a ledger that could not be opened."""
        #: Called with everything that is committed, by whichever process.
        self.on_change: Callable[[Change], object] | None = None
        #: To look at, as far as this process was told: offered, held and in quarantine, by lease id, oldest first.
        self.leases: dict[str, Lease] = {}
        #: Whether that is all there is: not before the ledger could be read, and written, for the first time.
        self.is_informed = False
        #: Those who wait, by request id.
        self.waiting: dict[str, Waiter] = {}
        #: How many grants there were, and how requests and leases have ended, since the ledger was made.
        self.fence = 0
        self.tally: Mapping[RequestState | LeaseState, int] = {}
        self.usages = LeaseUsages(idle_after_seconds)
        self._open_ledger = open_ledger
        self._want_reading = want_reading
        self._on_leases = on_leases or (lambda _: None)
        self._reopen_seconds = reopen_seconds
        self._clock = clock
        self._ledger: Ledger | None = None
        self._why_closed = "the ledger is not open yet"
        self._is_stopping = False
        #: Those who wait here for an answer, by request id.
        self._listeners: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpus: tuple[GPUReading, ...] = ()
        #: MIG devices that ceased to exist, as long as the ledger does not know it.
        self._vanished: set[str] = set()
        self._unsubmitted: HostSample | None = None
        self._is_observing = False
        self._watched_waiters = 0

    # --- life ---

    async def start(self) -> None:
        """Succeeds also where the ledger cannot be opened: then everything says why, and it is tried again."""
        self._is_stopping = False
        self._open()
        self._keep(self._watch())

    async def stop(self) -> None:
        """Those who wait here are told so; in the ledger they keep their places."""
        self.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await ledger.close()

    def stop_listening(self) -> None:
        """Whoever waits here for an answer gets a `PoolStoppedError` now."""
        self._is_stopping = True
        self._why_closed = "the desk is closed"
        for request_id in list(self._listeners):
            self._wake(request_id)

    @property
    def problem(self) -> str | None:
        """Why nothing can be leased at all; None while the ledger is open."""
        return self._why_closed if self._ledger is None else None

    def _open(self) -> None:
        try:
            self._ledger = self._open_ledger(self._committed)
        except (LedgerUnavailableError, OSError) as error:
            problem = str(error)
        else:
            return
        self._on_leases(())  # as far as they will be known
        if self._why_closed != problem:
            self._why_closed = problem
            logger.error("no leases: %s", problem)

    def _opened(self) -> Ledger:
        if self._ledger is None:
            raise LedgerUnavailableError(self._why_closed)
        return self._ledger

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- asking ---

    async def acquire(
        self, request: Request, *, wait_seconds: float, may_reserve: bool = True, poll_id: str = ""
    ) -> Lease | Waiting:
        """The lease, or after `wait_seconds` why not yet. Asking again with an equal request goes on waiting.

        `poll_id` names this one asking, for `poll_abandoned`. Raises `ImpossibleRequestError`, `RequestMismatchError`,
        `RequestEndedError`, `TooManyWaitingError`, `LedgerUnavailableError`, or `PoolStoppedError` when the desk
        closes.
        """
        poll_deadline = self._clock() + wait_seconds
        listener = self._listen(request.request_id)
        try:
            lease = await self._ask(request, poll_deadline, may_reserve=may_reserve, poll_id=poll_id)
            while lease is None and (left := poll_deadline + LISTENING_MARGIN_SECONDS - self._clock()) > 0:
                if wait_seconds <= 0 or self._is_stopping:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await listener
                if listener.done():
                    self._unlisten(request.request_id, listener)
                    listener = self._listen(request.request_id)
                    lease = await self._news_of(request, poll_deadline, may_reserve=may_reserve, poll_id=poll_id)
            while lease is None:
                if self._is_stopping:
                    raise PoolStoppedError("the server is stopping; ask again with the same request id")
                waiting = await self._opened().look(lambda pool, now: _waiting(pool, request.request_id, now))
                if waiting is not None:
                    return waiting
                # It was granted, or has ended, in this very moment.
                lease = await self._ask(request, self._clock(), may_reserve=may_reserve, poll_id=poll_id)
            return lease
        finally:
            self._unlisten(request.request_id, listener)

    async def _ask(self, request: Request, poll_deadline: float, *, may_reserve: bool, poll_id: str) -> Lease | None:
        event = Requested(request, poll_deadline=poll_deadline, may_reserve=may_reserve, poll_id=poll_id)
        return self._answer_in(await self._submit(event), request.request_id)

    async def _news_of(
        self, request: Request, poll_deadline: float, *, may_reserve: bool, poll_id: str
    ) -> Lease | None:
        if request.request_id in self.waiting:
            return None
        lease = next((lease for lease in self.leases.values() if lease.request.request_id == request.request_id), None)
        # What another asking of the same request brought about may not have reached it, and be only offered soon.
        if lease is not None and lease.state is LeaseState.HELD and lease.poll_id == poll_id:
            return lease
        if self._is_stopping:
            return None
        return await self._ask(request, poll_deadline, may_reserve=may_reserve, poll_id=poll_id)

    def _answer_in(self, effects: Iterable[Effect], request_id: str) -> Lease | None:
        for effect in effects:
            if isinstance(effect, Granted) and effect.lease.request.request_id == request_id:
                return effect.lease
            if isinstance(effect, Ended) and effect.request_id == request_id:
                if effect.state is RequestState.REJECTED:
                    raise ImpossibleRequestError(reasons=effect.reasons)
                raise RequestEndedError(state=effect.state.value, reasons=effect.reasons)
        return None

    async def poll_abandoned(self, request_id: str, poll_id: str, *, is_gone: bool = True) -> None:
        """Nobody hears the answer to this asking: it keeps its place, and what it was or will be granted is offered.

        `is_gone`: its asker is; else nobody is here to answer.
        """
        await self._submit_quietly(PollAbandoned(request_id, poll_id, is_gone))

    async def cancel(self, request_id: str, by: str | None) -> bool:
        """Take a request back, and what it was granted in the same instant; whether there was anything to take back."""
        # Not by what was told here: it may have come in elsewhere a moment ago.
        is_there = await self._opened().look(lambda pool, _: _is_open(pool, request_id))
        await self._submit(Cancelled(request_id, by))
        return is_there

    # --- holding ---

    def is_held(self, request_id: str) -> bool:
        """Whether it was granted, and its asker was told."""
        return any(
            lease.state is LeaseState.HELD and lease.request.request_id == request_id for lease in self.leases.values()
        )

    async def held(self) -> list[Lease]:
        """Offered, held and in quarantine, as the ledger has them; also while nothing can be written to it."""
        return await self._opened().look(lambda pool, _: list(pool.leases))

    async def lease(self, lease_id: str) -> Lease | None:
        """One of `held`."""
        return await self._opened().look(lambda pool, _: pool.leases.lookup(lease_id))

    async def renew(self, lease_id: str, by: str | None) -> Lease:
        effects = await self._submit(Renewed(lease_id, by))
        # Others may have been granted something in the same moment.
        leases = (effect.lease for effect in effects if isinstance(effect, Granted))
        return next(lease for lease in leases if lease.lease_id == lease_id)

    async def release(self, lease_id: str, by: str | None) -> None:
        """Give it back; twice is harmless. `by=None`: an administrator, who may also end a quarantine."""
        lease = self.leases.get(lease_id)
        if by is None and lease is not None and lease.state is LeaseState.QUARANTINED:
            await self._submit(QuarantineEnded(lease_id))
        else:
            await self._submit(Released(lease_id, by))

    # --- looking ---

    async def explain(self, request_id: str) -> Explanation | None:
        """Why it waits, GPU by GPU; None if it does not."""
        return await self._opened().look(lambda pool, now: explain(pool, request_id, now))

    async def explain_requirements(self, requirements: Requirements) -> Explanation:
        """Why somebody who asked for this now would wait."""
        return await self._opened().look(lambda pool, now: explain_requirements(pool, requirements, now))

    async def queue(self) -> list[Waiting]:
        """All who wait, in order."""
        return await self._opened().look(_queue)

    async def requirements_of(self, request_id: str) -> Requirements | None:
        """What it was asked with, if it waits, holds, or has just ended."""
        known = await self._opened().look(lambda pool, _: pool.requests.get(request_id))
        return None if known is None else known.request.requirements

    def index_of(self, gpu_id: str) -> int | None:
        """The number that a GPU, or the GPU of a MIG device, has now."""
        for gpu in self._gpus:
            if gpu.identity == gpu_id or any(device.uuid == gpu_id for device in gpu.mig_devices):
                return gpu.index
        return None

    def usage_of(self, lease: Lease) -> LeaseUsage:
        return self.usages.of(lease, self._clock())

    def token_for(self, request_id: str) -> str:
        """The secret of one who brought none of its own: always the same for the same request."""
        return hmac.new(self._opened().secret.encode(), request_id.encode(), "sha256").hexdigest()[:40]

    # --- readings ---

    def take(self, sample: HostSample) -> None:
        """What the host's GPUs show; called for every sample, in order."""
        if not isinstance(sample.answer, DriverAnswer):
            return
        self._vanished.update(vanished_devices(self._gpus, sample.answer.gpus))
        self._vanished.difference_update(device.uuid for gpu in sample.answer.gpus for device in gpu.mig_devices)
        self._gpus = sample.answer.gpus
        self.usages.take(sample, self.leases.values())
        # Of several that wait to be submitted only the newest is worth it.
        self._unsubmitted = sample
        if not self._is_observing:
            self._is_observing = True
            self._keep(self._observe())

    async def _observe(self) -> None:
        try:
            while (sample := self._unsubmitted) is not None:
                self._unsubmitted = None
                assert isinstance(sample.answer, DriverAnswer)
                if self._vanished and await self._submit_quietly(GPUsVanished(gone := tuple(self._vanished))):
                    self._vanished.difference_update(gone)
                await self._submit_quietly(Observed("", readings_of(sample.answer.gpus), sample.begun_at))
        finally:
            self._is_observing = False

    # --- the ledger ---

    async def _submit(self, event: Event) -> tuple[Effect, ...]:
        return await self._opened().submit(event)

    async def _submit_quietly(self, event: Event) -> bool:
        """On nobody's behalf. What is wrong with the ledger, it has logged; the next reading tries again."""
        try:
            await self._submit(event)
        except GPUWorkerPoolError:
            return False
        return True

    def _committed(self, committed: Committed) -> None:
        self.is_informed = True
        self.fence, self.tally = committed.fence, committed.tally
        changed: list[Change] = []
        if committed.is_everything:
            self._forget_all_but(committed.changes)
        for request_id, after in committed.changes.items():
            before = self._update(request_id, after)
            changed.append(Change(before, after))
        if committed.is_everything or any(
            isinstance(change.after, Lease) or isinstance(change.before, Lease) for change in changed
        ):
            self._on_leases(self.leases.values())
        for request_id in committed.changes:
            self._wake(request_id)
        if any(isinstance(effect, ReadingWanted) for effect in committed.effects):
            self._want_reading(self._clock())
        if self.on_change is not None:
            for change in changed:
                self.on_change(change)

    def _update(self, request_id: str, after: Waiter | Lease | Outcome) -> Waiter | Lease | None:
        before: Waiter | Lease | None = self.waiting.pop(request_id, None)
        if isinstance(after, Waiter):
            self.waiting[request_id] = after
        elif isinstance(after, Lease):
            before = self.leases.get(after.lease_id, before)
            self.leases[after.lease_id] = after
        elif after.lease is not None:
            before = self.leases.pop(after.lease.lease_id, before)
        return before

    def _forget_all_but(self, known: Mapping[str, Waiter | Lease | Outcome]) -> None:
        """While this process could not look, others may have ended what it knew of."""
        for lease in list(self.leases.values()):
            if lease.request.request_id not in known:
                del self.leases[lease.lease_id]
        for request_id in list(self.waiting):
            if request_id not in known:
                del self.waiting[request_id]
                self._wake(request_id)

    # --- those who wait here ---

    def _listen(self, request_id: str) -> asyncio.Future[None]:
        listener: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners.setdefault(request_id, []).append(listener)
        return listener

    def _unlisten(self, request_id: str, listener: asyncio.Future[None]) -> None:
        listeners = self._listeners.get(request_id, [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._listeners.pop(request_id, None)

    def _wake(self, request_id: str) -> None:
        for listener in self._listeners.get(request_id, ()):
            if not listener.done():
                listener.set_result(None)

    # --- rule 10: a process that is provably gone holds nothing, and waits for nothing ---

    async def _watch(self) -> None:
        reopen_at = self._clock() + self._reopen_seconds
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._ledger is None:
                if self._clock() >= reopen_at:
                    reopen_at = self._clock() + self._reopen_seconds
                    self._open()
                continue
            try:
                await asyncio.gather(*map(self._submit_quietly, self._left_behind()))
            except Exception:  # whoever does not look any more would leave GPUs to the gone
                logger.exception("could not look who is gone; trying again")

    def _left_behind(self) -> list[Event]:
        """What ends because its process has. All who hold are looked at, and some who wait: others look too."""
        waiting = list(self.waiting.values())
        begin = self._watched_waiters if self._watched_waiters < len(waiting) else 0
        self._watched_waiters = begin + WATCHED_WAITERS
        gone: dict[str, bool] = {"": False}
        events: list[Event] = []
        everybody: list[Lease | Waiter] = [*self.leases.values(), *waiting[begin : begin + WATCHED_WAITERS]]
        for known in everybody:
            process = known.request.process
            if process not in gone:
                gone[process] = is_gone(process)
            if not gone[process]:
                continue
            if isinstance(known, Waiter):
                events.append(Cancelled(known.request.request_id))
            elif known.is_live:
                events.append(HolderGone(known.lease_id, is_proven=True))
        return events


def _is_open(pool: Pool, request_id: str) -> bool:
    known = pool.requests.get(request_id)
    return isinstance(known, Waiter) or (isinstance(known, Lease) and known.is_live)


def _waiting(pool: Pool, request_id: str, now: float) -> Waiting | None:
    explanation, waiter = explain(pool, request_id, now), pool.requests.get(request_id)
    if explanation is None or not isinstance(waiter, Waiter):
        return None
    reasons = (explanation.summary, *_gpu_reasons(pool, explanation))
    return Waiting(waiter.request, explanation.position, explanation.waiting_seconds, reasons)


def _queue(pool: Pool, now: float) -> list[Waiting]:
    explained: dict[int, tuple[Explanation, tuple[str, ...]] | None] = {}
    rows = []
    for position, waiter in enumerate(pool.queue.in_order(), start=1):
        request_class = id(waiter.request_class)
        if request_class not in explained:
            # Whoever asks for the same waits for the same: once for each line is enough. With very many different
            # wishes the first of them are; whoever wants to know more asks for one of them.
            explanation = explain(pool, waiter.request.request_id, now) if len(explained) < EXPLAINED_LINES else None
            explained[request_class] = None if explanation is None else (explanation, _gpu_reasons(pool, explanation))
        reasons: tuple[str, ...] = ()
        if (known := explained[request_class]) is not None:
            explanation, gpu_reasons = known
            # Its place is its own.
            reasons = (explanation.summary_at(position), *gpu_reasons)
        rows.append(Waiting(waiter.request, position, now - waiter.enqueued_at, reasons))
    return rows


def _gpu_reasons(pool: Pool, explanation: Explanation) -> tuple[str, ...]:
    return tuple(
        f"{_name(pool, gpu.gpu_id)}: {'; '.join(map(str, gpu.obstacles)) or 'could serve it'}"
        for gpu in explanation.gpus
    )


def _name(pool: Pool, gpu_id: str) -> str:
    """By the number of the GPU; MIG devices of one GPU have the same, so these are told apart by their UUIDs."""
    gpu = pool.allocator.gpus[gpu_id]
    if gpu.last_seen is None or not gpu.last_seen.is_mig_device:
        return f"GPU {gpu.index}"
    # Older drivers put the GPU's first, and the same for all, and the device's last.
    return f"GPU {gpu.index} {gpu_id if '/' in gpu_id else gpu_id[:12]}"
