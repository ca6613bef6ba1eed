"""The pool in one process: turns calls into events, performs the effects, and decides nothing itself.

It belongs to one event loop and may be called from that loop's thread only. Readings come from whoever has them:
`update_stats` and `observe` take them by hand, `on_reading_wanted` is called when a fresh one is worth taking.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from gpu_worker_pool.config import EnvironmentConfigurationManager
from gpu_worker_pool.core import (
    PLAIN,
    Cancelled,
    Ended,
    Granted,
    HolderGone,
    LeaseEnded,
    LeaseState,
    Observed,
    Pool,
    PoolSettings,
    Reading,
    ReadingWanted,
    Released,
    Request,
    Requested,
    RequestState,
    Stopped,
    Ticked,
    Unreachable,
    WakeAt,
    Wishes,
    explain_wishes,
)
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    ImpossibleRequestError,
    InvalidAssignmentError,
    LeaseEndedError,
    NotStartedError,
    PoolStoppedError,
    RequestCancelledError,
    RequestGivenUpError,
    ServiceUnavailableTimeoutError,
    StaleAssignmentError,
    WorkerTimeoutError,
    WrongThreadError,
)
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, PoolStatus, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from gpu_worker_pool.config import ConfigurationManager
    from gpu_worker_pool.core import Effect, Event, Explanation, Lease
    from gpu_worker_pool.core.wishes import Policy
    from gpu_worker_pool.models import GPUId, GPUStats

__all__ = ["StaleAssignmentError", "WorkerPoolManager", "WorkerTimeoutError"]

_log = logging.getLogger(__name__)

#: Within one process ids are never chosen twice, so only late messages need a memory.
REMEMBERED_OUTCOMES = 1000


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """What a manager needs of time; `gpu_worker_pool.testing.FakeClock` is one for tests."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer: ...


class _LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time
        self.call_at = loop.call_at


@dataclass(slots=True)
class _Waiting:
    """Somebody who has been told nothing yet."""

    request: Request
    #: None for a worker that is called back.
    answer: asyncio.Future[Lease] | None
    worker: WorkerInfo | None = None


@dataclass(slots=True)
class _Holder:
    """Somebody who was given GPUs."""

    lease: Lease
    worker: WorkerInfo | None = None
    #: Tells when nothing refers to the assignment any more.
    assignment: weakref.ref[GPUAssignment] | None = None
    task: weakref.ref[asyncio.Task[Any]] | None = None


class WorkerPoolManager:
    """Hands out GPUs to the workers of one process, first come first served.

    >>> manager = WorkerPoolManager()
    """

    def __init__(
        self,
        config: ConfigurationManager | None = None,
        *,
        settings: PoolSettings | None = None,
        worker_timeout: float | None = 300.0,
        max_assignment_age_seconds: float | None = None,
        on_reading_wanted: Callable[[str], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`settings` decides everything that `config` would, and more; `worker_timeout=None` waits for ever.

        `max_assignment_age_seconds` takes GPUs back from workers that have had them for longer, once readings show
        them empty. It is off unless given: training runs for days.
        """
        if settings is None:
            config = config or EnvironmentConfigurationManager()
            settings = PoolSettings(
                memory_threshold_percent=config.get_memory_threshold(),
                utilization_threshold_percent=config.get_utilization_threshold(),
                poll_seconds=config.get_polling_interval(),
                remember_at_most=REMEMBERED_OUTCOMES,
            )
        self._settings = settings
        self._worker_timeout = worker_timeout
        self._max_assignment_age_seconds = max_assignment_age_seconds
        self._on_reading_wanted = on_reading_wanted
        self._given_clock = clock
        self._pool: Pool | None = None
        # Names that no other pool gives, so that its assignments are not mistaken for ours.
        self._name = secrets.token_hex(3)
        self._serial = 0

    # ---- Life

    async def start(self) -> None:
        if self._pool is not None:
            raise AlreadyStartedError
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock: Clock = self._given_clock or _LoopClock(self._loop)
        self._now = self._clock.now
        self._waiting: dict[str, _Waiting] = {}
        self._holders: dict[str, _Holder] = {}
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._pool = Pool(self._settings)

    async def stop(self) -> None:
        """End every request that waits. Does nothing to a manager that is not started."""
        if self._pool is None:
            return
        self._check_thread()
        self._apply(Stopped())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = [f"{holder.lease.request.worker_id} ({_shown(holder.lease)})" for holder in self._holders.values()]
        if held:
            _log.warning("stopped while GPUs were still assigned: %s", ", ".join(held))
        self._holders.clear()
        self._pool = None

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    async def __aenter__(self) -> WorkerPoolManager:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- Asking

    async def request_gpu(
        self,
        timeout: float | None = None,
        *,
        count: int = 1,
        memory_mb: float | None = None,
        share: bool = False,
        min_free_memory_mb: float | None = None,
        gpu_model: str | None = None,
        only: Iterable[int | str] | None = None,
        exclude: Iterable[int | str] | None = None,
        priority: int = 0,
        policy: Policy = "thresholds",
        label: str | None = None,
    ) -> GPUAssignment:
        """Wait for a GPU, or several of one host, and have it until `release_gpu`.

        Raises `WorkerTimeoutError` after `timeout` seconds (the pool's `worker_timeout` if None),
        `ImpossibleRequestError` at once if no GPU can ever serve it, `PoolStoppedError` if the pool stops meanwhile.
        """
        pool = self._running_pool()
        is_plain = count == 1 and not (memory_mb or share or min_free_memory_mb or gpu_model or exclude or priority)
        if is_plain and only is None and policy == "thresholds" and memory_mb is None and min_free_memory_mb is None:
            wishes = PLAIN
        else:
            wishes = _wishes(count, memory_mb, share, min_free_memory_mb, gpu_model, only, exclude, priority, policy)
        request = self._request(wishes, label)
        now = self._now()
        lease: Lease | None = None
        error: Exception | None = None
        for effect in pool.apply(Requested(request, self._deadline(timeout, now)), now):
            if type(effect) is Granted and effect.lease.request is request:
                lease = effect.lease
            elif type(effect) is Ended and effect.request_id == request.request_id:
                error = self._error_of(request, effect)
            else:
                self._perform(effect)
        if error is not None:
            raise error
        if lease is None:
            lease = await self._answer(pool, request)
        return self._hand_over(lease)

    def enqueue_worker(self, worker: WorkerInfo, timeout: float | None = None, wishes: Wishes = PLAIN) -> None:
        """Ask on behalf of a worker that wants to be called back; `release_worker` gives its GPU back."""
        pool = self._running_pool()
        known = {waiting.request.worker_id for waiting in self._waiting.values()} | self._holders.keys()
        if worker.id in known:
            raise ValueError(f"worker {worker.id!r} waits or holds a GPU already")
        request = self._request(wishes, None, worker.id)
        self._waiting[request.request_id] = _Waiting(request, None, worker)
        now = self._now()
        for effect in pool.apply(Requested(request, self._deadline(timeout, now)), now):
            self._perform(effect)

    async def _answer(self, pool: Pool, request: Request) -> Lease:
        waiting = _Waiting(request, self._loop.create_future())
        assert waiting.answer is not None
        self._waiting[request.request_id] = waiting
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s waits: %s", request.worker_id, explain_wishes(pool, request.wishes, pool.now).summary)
        try:
            lease = await waiting.answer
        except asyncio.CancelledError:
            # Whether it was granted in this very step or not: the pool knows, and takes either back.
            self._waiting.pop(request.request_id, None)
            if self._pool is pool:
                self._apply(Cancelled(request.request_id))
            raise
        if self._pool is not pool:
            raise PoolStoppedError
        return lease

    def _request(self, wishes: Wishes, label: str | None, worker_id: str | None = None) -> Request:
        self._serial += 1
        request_id = f"{self._name}-{self._serial}"
        return Request(
            request_id, wishes, worker_id or f"worker-{request_id}", "", label, self._max_assignment_age_seconds
        )

    def _deadline(self, timeout: float | None, now: float) -> float | None:
        if timeout is None:
            timeout = self._worker_timeout
        elif not timeout >= 0:
            raise ValueError(f"timeout must not be negative, but is {timeout!r}")
        return None if timeout is None else now + timeout

    def _hand_over(self, lease: Lease) -> GPUAssignment:
        assignment = self._assignment(lease)
        worker_id = lease.request.worker_id
        task = asyncio.current_task(self._loop)
        self._holders[worker_id] = _Holder(
            lease,
            None,
            weakref.ref(assignment, lambda _: self._dropped(worker_id)),
            None if task is None else weakref.ref(task),
        )
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s was assigned %s", worker_id, _shown(lease))
        return assignment

    def _assignment(self, lease: Lease) -> GPUAssignment:
        worker_id = lease.request.worker_id
        readings = [self._reading(gpu_id) for gpu_id in lease.gpu_ids]
        uuids = [reading.uuid for reading in readings if reading.uuid is not None]
        gpu_uuids: Sequence[str] = uuids if len(uuids) == len(readings) else ()
        if lease.endpoint_id:
            return GlobalGPUAssignment(
                lease.gpu_ids[0],
                lease.endpoint_id,
                readings[0].index,
                worker_id,
                datetime.now(),
                gpu_ids=lease.gpu_ids,
                gpu_uuids=gpu_uuids,
                fence=lease.fence,
            )
        index = readings[0].index
        indices = [reading.index for reading in readings] if len(readings) > 1 else ()
        return GPUAssignment(index, worker_id, datetime.now(), gpu_ids=indices, gpu_uuids=gpu_uuids, fence=lease.fence)

    def _reading(self, gpu_id: str) -> Reading:
        reading = self._running_pool().allocator.gpus[gpu_id].last_seen
        assert reading is not None  # nothing is granted that was never read
        return reading

    # ---- Giving back

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Give a GPU back. Twice is harmless; `StaleAssignmentError` if it was taken back before."""
        pool = self._running_pool()
        worker_id = assignment.worker_id
        holder = self._holders.get(worker_id)
        if holder is None:
            self._check_already_released(pool, assignment)
            return
        if assignment.fence not in (None, holder.lease.fence) or not self._is_of(holder.lease, assignment):
            raise InvalidAssignmentError(f"{worker_id} holds {_shown(holder.lease)}, not GPU {assignment.gpu_id}")
        self._release(holder)

    def release_worker(self, worker_id: str) -> None:
        """Give back what a worker has that was enqueued to be called back."""
        self._running_pool()
        holder = self._holders.get(worker_id)
        if holder is None:
            raise InvalidAssignmentError(f"worker {worker_id!r} holds no GPU of this pool")
        self._release(holder)

    def _release(self, holder: _Holder) -> None:
        lease = holder.lease
        try:
            self._apply(Released(lease.lease_id))
        except LeaseEndedError as error:
            raise StaleAssignmentError(f"{lease.request.worker_id}: {error}") from None
        del self._holders[lease.request.worker_id]
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s released %s", lease.request.worker_id, _shown(lease))

    def _check_already_released(self, pool: Pool, assignment: GPUAssignment) -> None:
        outcome = None if assignment.fence is None else pool.outcomes.of_lease(f"lease-{assignment.fence}")
        if outcome is None or outcome.request.worker_id != assignment.worker_id:
            raise InvalidAssignmentError(
                f"{assignment.worker_id} holds no GPU of this pool: another pool's, or released long ago"
            )
        if outcome.lease_state is not LeaseState.RELEASED:
            raise StaleAssignmentError(
                f"{assignment.worker_id} no longer holds GPU {assignment.gpu_id}: {'; '.join(outcome.reasons)}"
            )

    def _is_of(self, lease: Lease, assignment: GPUAssignment) -> bool:
        if lease.endpoint_id:
            return tuple(assignment.gpu_ids) == lease.gpu_ids
        return tuple(assignment.gpu_ids) == tuple(self._reading(gpu_id).index for gpu_id in lease.gpu_ids)

    def _dropped(self, worker_id: str) -> None:
        # Garbage is collected at any moment and in any thread; what it means is looked at in the loop's own time.
        with suppress(RuntimeError):  # the loop is closed, and with it the pool
            self._loop.call_soon_threadsafe(self._abandoned, worker_id)

    def _abandoned(self, worker_id: str) -> None:
        """Nothing refers to an assignment any more. Its worker may still use the GPU, knowing only its number."""
        holder = self._holders.get(worker_id)
        if holder is None or self._pool is None:
            return
        _log.warning(
            "%s dropped its assignment of %s without release_gpu(); it is taken back when the task that asked for it"
            " has finished and readings show the GPU empty",
            worker_id,
            _shown(holder.lease),
        )
        pool, lease_id = self._pool, holder.lease.lease_id

        def finished(_: object = None) -> None:
            if self._pool is pool:
                self._apply(HolderGone(lease_id))

        task = holder.task() if holder.task is not None else None
        if task is None or task.done():
            finished()
        else:
            task.add_done_callback(finished)

    # ---- Readings

    def update_stats(self, stats: GPUStats, *, endpoint_id: str = "") -> None:
        """Take in what a GPU statistics server said just now."""
        readings = [
            Reading(
                gpu_id=f"{endpoint_id}:{info.gpu_id}" if endpoint_id else str(info.gpu_id),
                index=info.gpu_id,
                name=info.name,
                uuid=info.uuid,
                memory_total_mb=info.memory_total_mb,
                memory_used_mb=info.memory_used_mb,
                memory_usage_percent=info.memory_usage_percent,
                utilization_percent=info.utilization_percent,
                reports_utilization=info.reports_utilization,
                fault=info.fault,
                is_promised_elsewhere=info.leased,
            )
            for info in stats.gpus_summary
        ]
        self.observe(readings, endpoint_id=endpoint_id, age_seconds=stats.sample_age_seconds)

    def observe(self, readings: Iterable[Reading], *, endpoint_id: str = "", age_seconds: float = 0.0) -> None:
        """Take in readings of all GPUs of an endpoint, begun so many seconds ago."""
        self._running_pool()
        self._apply(Observed(endpoint_id, tuple(readings), self._now() - age_seconds))

    def endpoint_lost(self, endpoint_id: str = "") -> None:
        """An endpoint does not answer: nothing is assigned there until it is read again."""
        self._running_pool()
        self._apply(Unreachable(endpoint_id))

    # ---- Looking

    def get_pool_status(self) -> PoolStatus:
        pool = self._running_pool()
        now, wall = self._now(), datetime.now()
        assignments: dict[GPUId, list[WorkerInfo]] = {}
        active = 0
        for lease in sorted(pool.leases, key=lambda lease: lease.fence):
            if not lease.is_live:
                continue
            active += 1
            holder = self._holders.get(lease.request.worker_id)
            worker = holder.worker if holder is not None else None
            if worker is None:
                worker = WorkerInfo(lease.request.worker_id, wall - timedelta(seconds=now - lease.requested_at))
            for gpu_id in lease.gpu_ids:
                name: GPUId = gpu_id if lease.endpoint_id else self._reading(gpu_id).index
                assignments.setdefault(name, []).append(worker)
        return PoolStatus(
            total_gpus=sum(endpoint.present for endpoint in pool.allocator.endpoints.values()),
            available_gpus=pool.allocator.available(now),
            active_workers=active,
            blocked_workers=len(pool.queue),
            gpu_assignments=assignments,
        )

    def explain(self, **wishes: Any) -> Explanation:
        """Why somebody who asked for this now would wait: GPU by GPU, with the numbers."""
        return explain_wishes(self._running_pool(), Wishes(**wishes), self._now())

    # ---- Effects

    def _apply(self, event: Event) -> None:
        pool = self._running_pool()
        for effect in pool.apply(event, self._now()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Granted):
            self._tell_granted(effect.lease)
        elif isinstance(effect, Ended):
            self._tell_ended(effect)
        elif isinstance(effect, WakeAt):
            self._wake_at(effect.at)
        elif isinstance(effect, ReadingWanted):
            if self._on_reading_wanted is not None:
                self._on_reading_wanted(effect.endpoint_id)
        elif isinstance(effect, LeaseEnded):
            self._tell_lost(effect)

    def _tell_granted(self, lease: Lease) -> None:
        waiting = self._waiting.pop(lease.request.request_id)
        if waiting.answer is not None:
            # One that was cancelled meanwhile gives the GPU back itself, as soon as it runs.
            if not waiting.answer.done():
                waiting.answer.set_result(lease)
        elif waiting.worker is not None:
            self._holders[waiting.worker.id] = _Holder(lease, waiting.worker)
            self._loop.call_soon(waiting.worker.callback, self._assignment(lease).gpu_id)

    def _tell_ended(self, effect: Ended) -> None:
        waiting = self._waiting.pop(effect.request_id, None)
        if waiting is None:
            return  # it was cancelled, and knows
        error = self._error_of(waiting.request, effect)
        if waiting.answer is not None:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        elif waiting.worker is not None:
            self._loop.call_soon(waiting.worker.on_error, error)

    def _tell_lost(self, effect: LeaseEnded) -> None:
        worker_id = effect.lease.request.worker_id
        if effect.state is LeaseState.QUARANTINED:
            _log.warning("%s lost %s: %s", worker_id, _shown(effect.lease), effect.reason)
        else:
            _log.warning("%s taken back from %s: %s", _shown(effect.lease), worker_id, effect.reason)
            self._holders.pop(worker_id, None)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._clock.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._pool is not None:
            self._apply(Ticked())

    def _error_of(self, request: Request, effect: Ended) -> Exception:
        if effect.state is RequestState.REJECTED:
            return ImpossibleRequestError(reasons=effect.reasons)
        if effect.state is RequestState.STOPPED:
            return PoolStoppedError(f"the pool was stopped while {request.worker_id} waited for {request.wishes}")
        if effect.state is RequestState.CANCELLED:
            return RequestCancelledError()
        if effect.state is RequestState.GIVEN_UP:
            return RequestGivenUpError()
        pool = self._running_pool()
        told = explain_wishes(pool, request.wishes, pool.now)
        gpus = "".join(f"\n  {gpu}" for gpu in told.gpus[:16])
        message = f"no GPU in time for {request.worker_id}, which waited for {request.wishes}"
        if any(endpoint.is_answering for endpoint in pool.allocator.endpoints.values()):
            return WorkerTimeoutError(f"{message}:{gpus}" if gpus else f"{message}: there are no GPUs")
        return ServiceUnavailableTimeoutError(f"{message}: no GPU service answered")

    # ---- Whether it may be called at all

    def _running_pool(self) -> Pool:
        pool = self._pool
        if pool is None:
            raise NotStartedError
        self._check_thread()
        return pool

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise WrongThreadError


def _wishes(
    count: int,
    memory_mb: float | None,
    share: bool,
    min_free_memory_mb: float | None,
    gpu_model: str | None,
    only: Iterable[int | str] | None,
    exclude: Iterable[int | str] | None,
    priority: int,
    policy: Policy,
) -> Wishes:
    return Wishes(
        count=count,
        memory_mb=memory_mb,
        share=share,
        min_free_memory_mb=min_free_memory_mb,
        gpu_model=gpu_model,
        only=None if only is None else tuple(map(str, only)),
        exclude=() if exclude is None else tuple(map(str, exclude)),
        priority=priority,
        policy=policy,
    )


def _shown(lease: Lease) -> str:
    return f"GPU{'s' if len(lease.gpu_ids) > 1 else ''} {', '.join(lease.gpu_ids)}"
