"""The broker of this host's GPUs: takes requests for leases from a server's routes and from programs using `local://`.

It turns calls into events for the ledger, and wakes the callers that wait for a request when any process has committed
a change of it. It decides nothing itself. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.broker.known import KnownRequests, Listeners
from gpu_worker_pool.broker.process_watch import ProcessWatch
from gpu_worker_pool.broker.shared_view import SharedView
from gpu_worker_pool.broker.usage import LeaseUsages
from gpu_worker_pool.broker.waiting import Waiting, describe, describe_queue
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import (
    Cancelled,
    Ended,
    FleetOrder,
    FleetOrdered,
    GPUsVanished,
    Granted,
    Lease,
    LeaseState,
    LeaveRequested,
    Observed,
    Origin,
    Outcome,
    PollAbandoned,
    QuarantineEnded,
    ReadingWanted,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    TurnCame,
    UseSeen,
    Waiter,
    explain,
    explain_requirements,
)
from gpu_worker_pool.core.accounts import uid_of
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LedgerUnavailableError,
    LedgerUnusableError,
    PoolStoppedError,
    RequestEndedError,
)
from gpu_worker_pool.hardware.leasable import readings_of, vanished_devices
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.hardware.samples import DriverAnswer
from gpu_worker_pool.ledger.policy_file import PolicyInForce, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from gpu_worker_pool.broker.usage import LeaseUsage
    from gpu_worker_pool.core import Effect, Event, Explanation, Pool, Requirements
    from gpu_worker_pool.hardware.samples import GPUReading, HostSample
    from gpu_worker_pool.ledger import Committed, Ledger, OnCommit
    from gpu_worker_pool.ledger.usage_files import UsageRead

logger: logging.Logger = logging.getLogger(__name__)

__all__ = ["Change", "LeaseBroker", "Waiting", "owner_of"]

#: How long a poll is still answered after its deadline, so that a grant which is on its way reaches it.
POLL_MARGIN_SECONDS: Final = 0.25
#: How many reasons a fleet's dispatcher is told.
MOST_REASONS: Final = 8
#: How often to check whether the processes of holders and waiters are still there.
WATCH_SECONDS: Final = 0.2


@frozen
class Change:
    """A committed change of one request; `before` is None where it was not known."""

    before: Waiter | Lease | None
    after: Waiter | Lease | Outcome


def owner_of(token: str) -> str:
    """The owner that the ledger stores instead of the secret token that renews and releases."""
    return f"token:{hashlib.sha256(token.encode()).hexdigest()}"


class LeaseBroker:
    """`want_reading` is called with a time when a reading that begins after it is wanted.

    `on_leases` is called with all leases when one has changed, when they are first known, and when they cannot be read.
    """

    def __init__(
        self,
        open_ledger: Callable[[OnCommit], Ledger],
        want_reading: Callable[[float], object],
        *,
        on_leases: Callable[[Iterable[Lease]], object] | None = None,
        idle_after_seconds: float = 1800.0,
        reopen_seconds: float = 5.0,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """`reopen_seconds`: how long to wait before a ledger that could not be opened is tried again."""
        #: Called with every committed change, whichever process made it.
        self.on_change: Callable[[Change], object] | None = None
        self._known = KnownRequests()
        #: Whether `leases` are all: only after the first transaction.
        self.is_informed: bool = False
        #: Numbers of grants, and of ended requests and leases, since the ledger was made.
        self.grants: int = 0
        self.tally: Mapping[RequestState | LeaseState, int] = {}
        self.usages: LeaseUsages = LeaseUsages(idle_after_seconds)
        self._open_ledger = open_ledger
        self._want_reading = want_reading
        self._on_leases = on_leases or (lambda _: None)
        self._reopen_seconds = reopen_seconds
        self._clock = clock
        self._ledger: Ledger | None = None
        self._why_closed = LedgerUnavailableError("the ledger is not open yet")
        self._is_stopping = False
        #: Callers of `acquire` that wait for an answer.
        self._listeners = Listeners()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpus: tuple[GPUReading, ...] = ()
        #: MIG devices that no longer exist, until the ledger knows it.
        self._vanished: set[str] = set()
        self._unsubmitted: HostSample | None = None
        self._is_observing = False
        self._process_watch = ProcessWatch()
        self._queue_view = SharedView(self._build_queue)

    # --- start and stop ---

    async def start(self, *, is_unusable_final: bool = False) -> None:
        """Also succeeds where the ledger cannot be opened: then every method says why, and it is tried again.

        `is_unusable_final`: raise a `LedgerUnusableError` instead, since trying again cannot help.
        """
        self._is_stopping = False
        self._open(is_unusable_final=is_unusable_final)
        self._run_task(self._watch())

    async def stop(self) -> None:
        """Callers that wait get a `PoolStoppedError`; their requests keep their place in the queue."""
        self.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await ledger.close()

    def stop_listening(self) -> None:
        """Callers that wait for an answer get a `PoolStoppedError` now."""
        self._is_stopping = True
        self._why_closed = LedgerUnavailableError("the broker is closed")
        self._listeners.wake_all()

    @property
    def leases(self) -> Mapping[str, Lease]:
        """Offered, held and quarantined leases that this process knows of, by lease id, oldest first."""
        return self._known.leases

    @property
    def waiting(self) -> Mapping[str, Waiter]:
        """Waiters that this process knows of, by request id."""
        return self._known.waiting

    @property
    def policy(self) -> PolicyInForce:
        """What limits the accounts of the ledger."""
        return PolicyInForce() if self._ledger is None else self._ledger.policy

    async def totals(self) -> dict[str, Any]:
        """What is counted over the whole life of the ledger."""
        return await self._opened().totals()

    async def usage(self, begin: float, keep: Callable[[dict[str, Any]], bool] = lambda _: True) -> UsageRead:
        """Records of what ended after `begin`, in seconds since 1970, and of the leases that are held now.

        `keep` is called with each of the former, in another thread, and says whether it is among them.
        """
        return await self._opened().usage(begin, keep)

    @property
    def problem(self) -> str | None:
        """Why nothing can be leased; None while the ledger can be written."""
        return str(self._why_closed) if self._ledger is None else self._ledger.problem

    def _open(self, *, is_unusable_final: bool = False) -> None:
        try:
            self._ledger = self._open_ledger(self._committed)
        except (LedgerUnavailableError, OSError) as error:
            if is_unusable_final and isinstance(error, LedgerUnusableError):
                raise
            kind = type(error) if isinstance(error, LedgerUnavailableError) else LedgerUnavailableError
            problem = kind(str(error))  # without the traceback
        else:
            return
        self._on_leases(())  # no leases will be known
        if str(self._why_closed) != str(problem):
            logger.error("no leases: %s", problem)
        self._why_closed = problem

    def _opened(self) -> Ledger:
        if self._ledger is None:
            raise type(self._why_closed)(str(self._why_closed))
        return self._ledger

    def _run_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests ---

    async def acquire(
        self, request: Request, *, wait_seconds: float, may_reserve: bool = True, poll_id: str = ""
    ) -> Lease | Waiting:
        """The lease, or after `wait_seconds` why not yet. Call it again with an equal request to keep waiting.

        `poll_id` names this call, for `poll_abandoned`. Raises `ImpossibleRequestError`, `RequestMismatchError`,
        `RequestEndedError`, `TooManyWaitingError`, `LedgerUnavailableError`, or `PoolStoppedError` when the broker
        stops.
        """
        if (groups := await self._groups_of(request.account)) is not None:
            request = replace(request, groups=groups)
        poll_deadline = self._clock() + wait_seconds
        poll = partial(self._poll, request, may_reserve=may_reserve, poll_id=poll_id)
        listener = self._listeners.add(request.request_id)
        try:
            lease = await poll(poll_deadline)
            while lease is None and (left := poll_deadline + POLL_MARGIN_SECONDS - self._clock()) > 0:
                if wait_seconds <= 0 or self._is_stopping:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await listener
                if listener.done():
                    self._listeners.remove(request.request_id, listener)
                    listener = self._listeners.add(request.request_id)
                    held = self.held_by(request.request_id)
                    # One that was granted to another poll may soon become an offer.
                    lease = held if held is not None and held.poll_id == poll_id else None
                    if lease is None and request.request_id not in self.waiting and not self._is_stopping:
                        lease = await poll(poll_deadline)
            while lease is None:
                if self._is_stopping:
                    raise PoolStoppedError("the server is stopping; ask again with the same request id")
                waiting = await self._opened().look(lambda pool, now: describe(pool, request.request_id, now))
                if waiting is not None:
                    return waiting
                # It was granted, or has ended, just now.
                lease = await poll(self._clock())
            return lease
        finally:
            self._listeners.remove(request.request_id, listener)

    async def place(self, request: Request, *, poll_id: str = "", is_offer: bool = False) -> Lease:
        """Grant it now, or raise an `ImpossibleRequestError` and forget it: its fleet says whose turn it is.

        Once it has a lease here, it is that lease. `is_offer`: no client polls, so it must be claimed like any offer.
        """
        poll_deadline = self._clock() - 1.0 if is_offer else None
        event = Requested(request, poll_deadline=poll_deadline, poll_id=poll_id, may_wait=False)
        lease = self._answer_in(await self._submit(event), request.request_id)
        if lease is None:
            raise RequestEndedError(state=RequestState.REJECTED.value)
        return lease

    async def turn_came(self, request_id: str, gpu_ids: tuple[str, ...], max_seconds: float | None = None) -> Lease:
        """Grant these GPUs to a waiting request now, or raise an `ImpossibleRequestError`; then it waits on."""
        lease = self._answer_in(await self._submit(TurnCame(request_id, gpu_ids, max_seconds)), request_id)
        if lease is None:
            known = await self.known(request_id)
            if isinstance(known, Lease) and known.is_live:
                return known  # granted in the same moment
            raise ImpossibleRequestError(reasons=await self._opened().look(partial(_why_not_its_turn, request_id)))
        return lease

    async def follow_fleet(self, order: FleetOrder) -> None:
        """A fleet's dispatcher says whose turn it is, to all processes that use this ledger."""
        await self._submit(FleetOrdered(replace(order, process=name_of_this_process())))

    async def _groups_of(self, account: str) -> tuple[str, ...] | None:
        policy = self._opened().policy.policy
        # The system's database of groups may be far away.
        return await asyncio.to_thread(groups_of, account, policy) if policy.groups else None

    async def _poll(self, request: Request, poll_deadline: float, *, may_reserve: bool, poll_id: str) -> Lease | None:
        event = Requested(request, poll_deadline=poll_deadline, may_reserve=may_reserve, poll_id=poll_id)
        return self._answer_in(await self._submit(event), request.request_id)

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
        """The answer to this poll will not be read: the request keeps its place, and its grant becomes an offer.

        `is_gone`: the client hung up; else the server stops.
        """
        await self._submit_quietly(PollAbandoned(request_id, poll_id, is_gone))

    async def cancel(self, request_id: str, by: str | None, *, refused: tuple[str, ...] = ()) -> bool:
        """Cancel a request, and release its grant; whether there was anything to cancel.

        `refused`: why its fleet refuses it for good; then that is its answer.
        """
        # Not by `self.waiting`: another process may have accepted it a moment ago.
        is_there = await self._opened().look(lambda pool, _: _is_open(pool, request_id))
        await self._submit(Cancelled(request_id, by, refused))
        return is_there

    # --- leases ---

    def held_by(self, request_id: str) -> Lease | None:
        """The lease that this request was granted, if its client knows of it."""
        lease = self._known.lease_of(request_id)
        return lease if lease is not None and lease.state is LeaseState.HELD else None

    async def held(self) -> list[Lease]:
        """Offered, held and quarantined leases of the ledger; also while it cannot be written."""
        return await self._opened().look(lambda pool, _: list(pool.leases))

    async def held_and_waiting(self) -> tuple[list[Lease], list[Waiter]]:
        """The same, and those who wait outside any lease, in order of arrival: as both are at one moment."""

        def look(pool: Pool, _: float) -> tuple[list[Lease], list[Waiter]]:
            outside = (each for each in pool.queue.request_classes() if each.within is None)
            waiters = (waiter for each in outside for waiter in each.waiters.values())
            return list(pool.leases), sorted(waiters, key=lambda waiter: waiter.ticket)

        return await self._opened().look(look)

    async def lease(self, lease_id: str) -> Lease | None:
        """One of `held`."""
        return await self._opened().look(lambda pool, _: pool.leases.lookup(lease_id))

    async def renew(self, lease_id: str, by: str | None, *, is_busy: bool = False) -> Lease:
        """`is_busy`: its holder says that it is not idle, whatever readings show."""
        try:
            effects = await self._submit(Renewed(lease_id, by, is_busy=is_busy))
        except LedgerUnavailableError as error:
            error.lease = error.lease or "unknown"
            raise
        # Others may have been granted something at the same moment.
        leases = (effect.lease for effect in effects if isinstance(effect, Granted))
        return next(lease for lease in leases if lease.lease_id == lease_id)

    async def ask_to_leave(self, lease_id: str, reason: str) -> None:
        """Ask the holder of a lease to give it back; it need not. It learns that when it renews the lease."""
        await self._submit(LeaveRequested(lease_id, reason))

    async def release(self, lease_id: str, by: str | None) -> None:
        """Twice is harmless. `by=None`: an administrator, who may also end a quarantine."""
        lease = self.leases.get(lease_id)
        if by is None and lease is not None and lease.state is LeaseState.QUARANTINED:
            await self._submit(QuarantineEnded(lease_id))
        else:
            await self._submit(Released(lease_id, by, use=self.usages.use_of(lease_id)))

    # --- views ---

    async def explain(self, request_id: str) -> Explanation | None:
        """Why it waits, GPU by GPU; None if it does not."""
        return await self._opened().look(lambda pool, now: explain(pool, request_id, now))

    async def explain_requirements(
        self, requirements: Requirements, within: str | None = None, account: str = ""
    ) -> Explanation:
        """Why a request of this account with these requirements, inside this lease, would wait now."""
        request = None
        if account:
            uid, groups = uid_of(account), await self._groups_of(account)
            origin = None if uid is None else Origin(user_name(uid), is_verified=True)
            request = Request("", requirements, account=account, within=within, origin=origin, groups=groups)
        return await self._opened().look(
            lambda pool, now: explain_requirements(pool, requirements, now, request, within)
        )

    async def queue(self) -> tuple[Waiting, ...]:
        """All waiting requests, in order: the same object until something changes."""
        self._opened()
        return await self._queue_view.get()

    async def _build_queue(self) -> tuple[Waiting, ...]:
        return tuple(await self._opened().look(describe_queue))

    async def known(self, request_id: str) -> Waiter | Lease | Outcome | None:
        """What has become of a request: it waits, has a lease, or ended recently."""
        return await self._opened().look(lambda pool, _: pool.requests.get(request_id))

    async def granted_and_ended(self, most: int) -> list[Outcome]:
        """The last requests whose leases have ended."""
        return await self._opened().look(
            lambda pool, _: [found for found in pool.outcomes if found.lease is not None][-most:]
        )

    @property
    def ledger_id(self) -> str:
        """Identifies this ledger."""
        return hashlib.sha256(f"ledger {self._opened().secret}".encode()).hexdigest()[:32]

    async def request_of(self, request_id: str) -> Request | None:
        """A request that waits, holds a lease, or ended recently."""
        known = await self.known(request_id)
        return None if known is None else known.request

    async def request_of_lease(self, lease_id: str) -> Request | None:
        """The request that was granted this lease, which may have ended recently."""

        def find(pool: Pool, now: float) -> Lease | Outcome | None:
            return pool.leases.lookup(lease_id) or pool.outcomes.of_lease(lease_id, now)

        known = await self._opened().look(find)
        return None if known is None else known.request

    def index_of(self, gpu_id: str) -> int | None:
        """The present index of a GPU, or of the GPU of a MIG device."""
        for gpu in self._gpus:
            if gpu.identity == gpu_id or any(device.uuid == gpu_id for device in gpu.mig_devices):
                return gpu.index
        return None

    def usage_of(self, lease: Lease) -> LeaseUsage:
        return self.usages.of(lease, self._clock())

    def token_for(self, request_id: str) -> str:
        """The token for a client that sent none: always the same for the same request."""
        return hmac.new(self._opened().secret.encode(), request_id.encode(), "sha256").hexdigest()[:40]

    # --- readings ---

    def take(self, sample: HostSample) -> None:
        """Must be called for every sample, in order."""
        if not isinstance(sample.answer, DriverAnswer):
            return
        self._vanished.update(vanished_devices(self._gpus, sample.answer.gpus))
        self._vanished.difference_update(device.uuid for gpu in sample.answer.gpus for device in gpu.mig_devices)
        self._gpus = sample.answer.gpus
        self._queue_view.outdate()
        self.usages.take(sample, self.leases.values())
        # Of several samples that wait to be submitted only the newest matters.
        self._unsubmitted = sample
        if not self._is_observing:
            self._is_observing = True
            self._run_task(self._observe())

    async def _observe(self) -> None:
        try:
            while (sample := self._unsubmitted) is not None:
                self._unsubmitted = None
                assert isinstance(sample.answer, DriverAnswer)
                if self._vanished and await self._submit_quietly(GPUsVanished(gone := tuple(self._vanished))):
                    self._vanished.difference_update(gone)
                await self._submit_quietly(Observed("", readings_of(sample.answer.gpus), sample.begun_at))
                if uses := self.usages.to_store(self.leases.values(), self.policy.policy.idle):
                    await self._submit_quietly(UseSeen(uses))
        finally:
            self._is_observing = False

    # --- the ledger ---

    async def _submit(self, event: Event) -> tuple[Effect, ...]:
        return await self._opened().submit(event)

    async def _submit_quietly(self, event: Event) -> bool:
        """Without a caller to answer: the ledger has logged its errors, and the next reading tries again."""
        try:
            await self._submit(event)
        except GPUWorkerPoolError:
            return False
        return True

    def _committed(self, committed: Committed) -> None:
        self.is_informed = True
        self._queue_view.outdate()
        self.grants, self.tally = committed.grants, committed.tally
        changed: list[Change] = []
        if committed.is_everything:
            for request_id in self._known.forget_all_but(committed.changes):
                self._listeners.wake(request_id)
        for request_id, after in committed.changes.items():
            changed.append(Change(self._known.update(request_id, after), after))
        if committed.is_everything or any(
            isinstance(change.after, Lease) or isinstance(change.before, Lease) for change in changed
        ):
            self._on_leases(self.leases.values())
        for request_id in committed.changes:
            self._listeners.wake(request_id)
        if any(isinstance(effect, ReadingWanted) for effect in committed.effects):
            self._want_reading(self._clock() if committed.decided_at is None else committed.decided_at)
        if self.on_change is not None:
            for change in changed:
                self.on_change(change)

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
                events = self._process_watch.events(self.leases.values(), self.waiting)
                await asyncio.gather(*map(self._submit_quietly, events))
            except Exception:  # without the watch, processes that are gone would keep their GPUs
                logger.exception("could not check which processes are gone; trying again")


def _why_not_its_turn(request_id: str, pool: Pool, now: float) -> tuple[str, ...]:
    found = describe(pool, request_id, now)
    return ("it does not wait here any more",) if found is None else found.reasons[:MOST_REASONS]


def _is_open(pool: Pool, request_id: str) -> bool:
    known = pool.requests.get(request_id)
    return isinstance(known, Waiter) or (isinstance(known, Lease) and known.is_live)
