"""The pool in one process: turns calls into events, performs the effects, and decides nothing itself.

It belongs to one event loop and may be called from that loop's thread only. Callers pass readings to
`update_stats` or `observe`; `on_reading_wanted` is called when a fresh one would help.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from inspect import iscoroutinefunction
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.client import pool_events, pool_metrics
from gpu_worker_pool.client.arguments import checked_timeout, is_duration, refused_when_awaited
from gpu_worker_pool.client.holders import AssignmentHolder, Holders, shown_gpus
from gpu_worker_pool.client.refusals import Refusals
from gpu_worker_pool.client.stats_readings import readings_from_stats
from gpu_worker_pool.clocks import LoopClock
from gpu_worker_pool.config import (
    EnvironmentConfigurationManager,
    MultiEndpointConfigurationManager,
    validate_gpu_names,
)
from gpu_worker_pool.core import (
    ANY_GPU,
    Cancelled,
    Ended,
    Granted,
    HolderGone,
    Lease,
    LeaseEnded,
    LeaseState,
    Observed,
    Outcome,
    Pool,
    PoolSettings,
    ReadingWanted,
    Released,
    Request,
    Requested,
    Requirements,
    Stopped,
    Ticked,
    Unreachable,
    WakeAt,
    explain_requirements,
)
from gpu_worker_pool.core.requirements import NOTHING_DECLARED, Declared, make_declared, make_requirements
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    InvalidAssignmentError,
    LeaseEndedError,
    NotStartedError,
    PoolStoppedError,
    StaleAssignmentError,
    WorkerTimeoutError,
    WrongThreadError,
)
from gpu_worker_pool.models import GPUAssignment, WorkerInfo, make_global_gpu_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import TracebackType

    from gpu_worker_pool.clocks import Clock, Timer
    from gpu_worker_pool.config import ConfigurationManager
    from gpu_worker_pool.core import Effect, Event, Explanation, Reading
    from gpu_worker_pool.core.requirements import Policy
    from gpu_worker_pool.lease_variables import GPUNaming
    from gpu_worker_pool.models import GPUStats, PoolStatus

__all__ = ["StaleAssignmentError", "WorkerPoolManager", "WorkerTimeoutError"]

_log = logging.getLogger("gpu_worker_pool.worker_pool_manager")

REMEMBERED_OUTCOMES = 1000


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
        gpu_names: GPUNaming = "index",
        on_reading_wanted: Callable[[str], object] | None = None,
        failing_endpoints: Callable[[], str] = str,
        clock: Clock | None = None,
    ) -> None:
        """`settings` replaces `config`, and can set more. With `worker_timeout=None` requests wait for ever.

        `max_assignment_age_seconds` takes GPUs back from workers that have had them for longer, once readings show
        them empty. It is off by default: training runs for days. `gpu_names` ("index" or "uuid"):
        how `assignment.env` names GPUs. `failing_endpoints` lists the endpoints that do not answer, with their errors,
        for error messages.
        """
        if settings is None:
            config = config or EnvironmentConfigurationManager()
            settings = PoolSettings(
                memory_threshold_percent=config.get_memory_threshold(),
                utilization_threshold_percent=config.get_utilization_threshold(),
                poll_seconds=config.get_polling_interval(),
            )
            if isinstance(config, MultiEndpointConfigurationManager):
                settings = replace(settings, strategy=config.get_load_balancing_strategy())
        # Ids never repeat within one process, so only failures are remembered, for late calls.
        at_most = settings.remember_at_most or REMEMBERED_OUTCOMES
        settings = replace(settings, remember_at_most=at_most, remembers_releases=False)
        if worker_timeout is not None and not worker_timeout >= 0:
            raise ValueError(f"worker_timeout must be a number of seconds, 0 or more, not {worker_timeout!r}")
        if max_assignment_age_seconds is not None and not max_assignment_age_seconds > 0:
            raise ValueError(f"max_assignment_age_seconds must be above 0, not {max_assignment_age_seconds!r}")
        self._settings = settings
        self._worker_timeout = worker_timeout
        self._max_assignment_age_seconds = max_assignment_age_seconds
        self._gpu_names: GPUNaming = validate_gpu_names(gpu_names)
        self._on_reading_wanted = on_reading_wanted
        self._refusals = Refusals(failing_endpoints)
        self._given_clock = clock
        self._pool: Pool | None = None

    # ---- Life

    async def start(self) -> None:
        if self._pool is not None:
            raise AlreadyStartedError
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._clock: Clock = self._given_clock or LoopClock(self._loop)
        self._now = self._clock.now
        #: By request id: the futures awaited in `request_gpu`, and the workers that get a callback.
        self._answers: dict[str, asyncio.Future[Lease | Ended]] = {}
        self._workers: dict[str, tuple[Request, WorkerInfo, float]] = {}
        self._waiting_workers: set[str] = set()
        self._holders = Holders(self._loop, self._is_held, self._holder_gone, gpu_names=self._gpu_names)
        self._timer: Timer | None = None
        self._timer_at = 0.0
        #: Whether events are logged. Checked at each reading, not at each request, to save time.
        self._logs_events = pool_events.is_wanted()
        self._pool = Pool(self._settings)
        #: Number of grants by endpoint id.
        self.grants: dict[str, int] = {}

    async def stop(self) -> None:
        """End every waiting request. Does nothing if the manager is not started."""
        if self._pool is None:
            return
        self._running_pool()
        self._apply(Stopped())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = [f"{holder.lease.request.worker_id} ({shown_gpus(holder.lease)})" for holder in self._holders.values()]
        if held:
            _log.warning("stopped while GPUs were still assigned: %s", ", ".join(held))
        self._holders.clear()
        self._refusals.forget()
        self._pool = None

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether the event loop it was started in was closed without stopping it."""
        return self._pool is not None and self._loop.is_closed()

    def forget(self) -> None:
        """Drop everything without notifying waiters: their loop is closed, or they are in the parent process."""
        self._holders.clear()
        self._pool = None

    def check_thread(self) -> None:
        """Raise `WrongThreadError` in another thread or event loop, before anything has changed."""
        if self._pool is None:
            return
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # no loop is running, so it is not a wrong one
            loop = None
        if get_ident() != self._thread or loop not in (None, self._loop):
            raise WrongThreadError

    async def __aenter__(self) -> WorkerPoolManager:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- Requesting

    def request_gpu(
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
        expected_seconds: float | None = None,
        max_seconds: float | None = None,
    ) -> Coroutine[Any, Any, GPUAssignment]:
        """Wait for a GPU, or several on one host, and hold it until `release_gpu`.

        Raises `WorkerTimeoutError` after `timeout` seconds (the pool's `worker_timeout` if None),
        `ImpossibleRequestError` at once if no GPU can ever serve it, `PoolStoppedError` if the pool stops meanwhile.
        """
        try:
            requirements = make_requirements(
                count, memory_mb, share, min_free_memory_mb, gpu_model, only, exclude, priority, policy
            )
            declared = make_declared(expected_seconds, max_seconds)
        except ValueError as error:
            return refused_when_awaited(error)
        return self.acquire(requirements, timeout, label, declared)

    async def acquire(
        self,
        requirements: Requirements,
        timeout: float | None,
        label: str | None,
        declared: Declared = NOTHING_DECLARED,
    ) -> GPUAssignment:
        pool = self._pool
        if pool is None or get_ident() != self._thread:
            raise self._unusable()
        name = self._holders.new_worker_id()
        request = Request(name, requirements, name, "", label, self._max_assignment_age_seconds)
        if declared is not NOTHING_DECLARED:
            request = replace(request, **declared._asdict())
        now = self._now()
        deadline = self._deadline(timeout, now)
        effects = pool.apply(Requested(request, deadline), now)
        if len(effects) == 1 and type(granted := effects[0]) is Granted and granted.lease.request is request:
            return self._hand_over(granted.lease)
        self._answers[request.request_id] = answer = self._loop.create_future()
        try:
            self._perform_all(effects)
            if self._logs_events and not answer.done():
                pool_events.blocked(name, requirements, len(pool.queue) - 1, pool.allocator.available(now))
            answered = await answer
        except BaseException:
            # Cancelled, or the coroutine was closed. If it was granted at the same moment, the pool takes the GPU back.
            self._answers.pop(name, None)
            self._take_back(pool, name)
            raise
        if isinstance(answered, Ended):
            raise self._refusals.error_of(pool, request, answered, self._now() - now)
        if self._pool is not pool:
            raise PoolStoppedError
        return self._hand_over(answered)

    def _take_back(self, pool: Pool, request_id: str) -> None:
        if self._pool is pool:
            with suppress(RuntimeError):  # the loop is closed: no waiter is left to notify
                self._apply(Cancelled(request_id))

    def enqueue_worker(
        self,
        worker: WorkerInfo,
        timeout: float | None = None,
        requirements: Requirements = ANY_GPU,
        *,
        wishes: Requirements | None = None,
    ) -> None:
        """Request a GPU for a worker that is notified by a callback; `release_worker` gives the GPU back."""
        requirements = wishes or requirements  # its former name
        pool = self._running_pool()
        if iscoroutinefunction(worker.callback) or iscoroutinefunction(worker.on_error):
            raise ValueError(f"the callbacks of worker {worker.id!r} are called, not awaited: use plain functions")
        if worker.id in self._holders or worker.id in self._waiting_workers:
            raise ValueError(f"worker {worker.id!r} already waits for a GPU or holds one")
        name = self._holders.new_worker_id()
        request = Request(name, requirements, worker.id, "", None, self._max_assignment_age_seconds)
        now = self._now()
        deadline = self._deadline(timeout, now)
        self._workers[request.request_id] = (request, worker, now)
        self._waiting_workers.add(worker.id)
        self._perform_all(pool.apply(Requested(request, deadline), now))

    def _deadline(self, timeout: float | None, now: float) -> float | None:
        if timeout is None:
            timeout = self._worker_timeout
        elif not is_duration(timeout):
            checked_timeout(timeout)
        return None if timeout is None else now + timeout

    def _hand_over(self, lease: Lease, worker: WorkerInfo | None = None) -> GPUAssignment:
        assignment = self._holders.hand_over(lease, worker=worker)
        if endpoint_id := lease.endpoint_id:
            self.grants[endpoint_id] = self.grants.get(endpoint_id, 0) + 1
        if self._logs_events:
            pool_events.assigned(lease)
        return assignment

    def passed_on(self, assignment: GPUAssignment) -> None:
        """The task that asked did so for the current one."""
        self._holders.passed_on(assignment)

    # ---- Giving back

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Give a GPU back. Releasing twice is harmless; `StaleAssignmentError` if it was taken back before."""
        pool = self._pool
        if pool is None or get_ident() != self._thread:
            raise self._unusable()
        holder = self._holders.holder_of(assignment)
        if holder is None:
            self._check_already_released(pool, assignment)
        else:
            self._release(pool, holder)

    def release_worker(self, worker_id: str) -> None:
        """Give back the GPU of a worker that was enqueued by `enqueue_worker`."""
        pool = self._running_pool()
        holder = self._holders.get(worker_id)
        if holder is None:
            raise InvalidAssignmentError(f"worker {worker_id!r} holds no GPU of this pool")
        self._release(pool, holder)

    def _release(self, pool: Pool, holder: AssignmentHolder) -> None:
        lease = holder.lease
        self._holders.remove(holder)
        try:
            effects = pool.apply(Released(lease.lease_id), self._now())
        except LeaseEndedError as error:
            raise StaleAssignmentError(f"{lease.request.worker_id}: {error}") from None
        if effects:
            self._perform_all(effects)
        if self._logs_events:
            pool_events.released(lease, self._now() - lease.granted_at)

    def _check_already_released(self, pool: Pool, assignment: GPUAssignment) -> None:
        """For an assignment without a holder: harmless if it was released, an error if it was lost or never ours."""
        worker_id = assignment.worker_id
        known = pool.requests.get(worker_id)
        if isinstance(known, Outcome) and known.lease_state in (LeaseState.RECLAIMED, LeaseState.LOST):
            why = "; ".join(known.reasons)
            raise StaleAssignmentError(f"{worker_id} no longer holds GPU {assignment.gpu_id}: {why}")
        if isinstance(known, Lease) and known.quarantine is not None:
            raise StaleAssignmentError(f"{worker_id} lost GPU {assignment.gpu_id}: {known.quarantine.reason}")
        was_granted = known is None or (isinstance(known, Outcome) and known.lease is not None)
        if not was_granted or (assignment.fence or 0) > pool.fence:
            raise InvalidAssignmentError(f"{worker_id} holds no GPU of this pool; was it assigned by another one?")
        self._holders.check_ours(worker_id)

    def _is_held(self, holder: AssignmentHolder) -> bool:
        """False if it was already taken back; that has been reported."""
        known = None if self._pool is None else self._pool.leases.lookup(holder.lease.lease_id)
        return known is not None and known.is_live

    def _holder_gone(self, holder: AssignmentHolder) -> None:
        if self._pool is not None and holder.lease.lease_id in self._pool.leases.by_id:
            self._apply(HolderGone(holder.lease.lease_id))

    # ---- Readings

    def update_stats(self, stats: GPUStats, *, endpoint_id: str = "", age_seconds: float = 0.0) -> None:
        """Take in the answer of a GPU statistics server to a request sent `age_seconds` ago."""
        readings = readings_from_stats(stats, endpoint_id)
        self.observe(readings, endpoint_id=endpoint_id, age_seconds=age_seconds + stats.sample_age_seconds)

    def observe(self, readings: Iterable[Reading], *, endpoint_id: str = "", age_seconds: float = 0.0) -> None:
        """Take in readings of all GPUs of an endpoint; reading them began `age_seconds` ago."""
        self._running_pool()
        if not age_seconds >= 0:
            raise ValueError(f"age_seconds must be 0 or more, not {age_seconds!r}")
        readings = tuple(readings)
        for reading in readings:
            # Assignments use these ids: better to reject the reading now than to fail a worker later.
            if endpoint_id and reading.gpu_id != (name := make_global_gpu_id(endpoint_id, reading.index)):
                raise ValueError(f"gpu_id must be endpoint and index, {name!r}, not {reading.gpu_id!r}")
        self._logs_events = pool_events.is_wanted()
        self._refusals.forget()
        self._apply(Observed(endpoint_id, readings, self._now() - age_seconds))

    def endpoint_lost(self, endpoint_id: str = "", *, is_removed: bool = False) -> None:
        """An endpoint does not answer, or not yet: nothing is assigned there until its readings arrive.

        Until then its GPUs are unknown, so no request is rejected as impossible, unless the endpoint is removed.
        """
        self._running_pool()
        self._apply(Unreachable(endpoint_id, is_removed))

    # ---- Queries

    def get_pool_status(self) -> PoolStatus:
        pool = self._running_pool()
        enqueued = {name: holder.worker[0] for name, holder in self._holders.items() if holder.worker is not None}
        return pool_metrics.pool_status(pool, self._now(), len(pool.queue), enqueued)

    @property
    def pool(self) -> Pool:
        """The pool as it is now, for reading only: only the manager changes it."""
        return self._running_pool()

    @property
    def now(self) -> float:
        return self._now()

    def explain(self, **requirements: Any) -> Explanation:
        """Why a request with these requirements would wait now: GPU by GPU, with the numbers."""
        return explain_requirements(self._running_pool(), Requirements(**requirements), self._now())

    # ---- Effects

    def _apply(self, event: Event) -> None:
        assert self._pool is not None  # every caller has checked
        self._perform_all(self._pool.apply(event, self._now()))

    def _perform_all(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                self._notify_granted(effect.lease)
            elif isinstance(effect, Ended):
                self._notify_ended(effect)
            elif isinstance(effect, WakeAt):
                self._wake_at(effect.at)
            elif isinstance(effect, ReadingWanted):
                self._want_reading(effect.endpoint_id)
            elif isinstance(effect, LeaseEnded):
                self._tell_lost(effect)

    def _want_reading(self, endpoint_id: str) -> None:
        if self._on_reading_wanted is not None:
            try:
                self._on_reading_wanted(endpoint_id)
            except Exception:
                # The callback may fail, but the other effects, such as grants, must still be performed.
                _log.exception("could not request a fresh reading of %s", endpoint_id or "the GPUs")

    def _notify_granted(self, lease: Lease) -> None:
        request_id = lease.request.request_id
        answer = self._answers.pop(request_id, None)
        if answer is None:
            _, worker, _ = self._workers.pop(request_id)
            self._waiting_workers.discard(worker.id)
            assignment = self._hand_over(lease, worker)
            self._loop.call_soon(worker.callback, assignment.gpu_id)
        elif not answer.done():
            answer.set_result(lease)
        # else it was cancelled, and gives the GPU back itself as soon as it runs

    def _notify_ended(self, ended: Ended) -> None:
        answer = self._answers.pop(ended.request_id, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(ended)
        elif ended.request_id in self._workers:
            request, worker, asked_at = self._workers.pop(ended.request_id)
            self._waiting_workers.discard(worker.id)
            waited = self._now() - asked_at
            error = self._refusals.error_of(self._running_pool(), request, ended, waited)
            self._loop.call_soon(worker.on_error, error)
        # else it was cancelled, and its caller knows

    def _tell_lost(self, effect: LeaseEnded) -> None:
        worker_id = effect.lease.request.worker_id
        if effect.state is LeaseState.QUARANTINED:
            _log.warning("%s lost %s: %s", worker_id, shown_gpus(effect.lease), effect.reason)
        else:
            _log.warning("%s taken back from %s: %s", shown_gpus(effect.lease), worker_id, effect.reason)
            holder = self._holders.get(worker_id)
            if holder is not None and holder.lease.lease_id == effect.lease.lease_id:
                self._holders.remove(holder)

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
            # Event loops round times: a timer may fire a little early, and must still count as due.
            self._perform_all(self._pool.apply(Ticked(), max(self._now(), self._timer_at)))

    # ---- Checks

    def _running_pool(self) -> Pool:
        if self._pool is None or get_ident() != self._thread:
            raise self._unusable()
        return self._pool

    def _unusable(self) -> NotStartedError | WrongThreadError:
        return NotStartedError() if self._pool is None else WrongThreadError()
