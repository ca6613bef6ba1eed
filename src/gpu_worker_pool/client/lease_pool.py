"""Leases for a client's workers: each request becomes a race for one, each assignment keeps one until it is released.

In the client's event loop; what is said to servers is said in the thread of the `LeaseThread`, which exists from the
first endpoint that gives leases on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpu_worker_pool.client import pool_events, pool_metrics
from gpu_worker_pool.client.assigned_leases import AssignedLeases
from gpu_worker_pool.client.endpoint_view import EndpointView, able_endpoints
from gpu_worker_pool.client.lease_thread import LeaseThread
from gpu_worker_pool.client.manager import checked_timeout
from gpu_worker_pool.client.refusals import MOST_GPUS_TOLD, Refusals
from gpu_worker_pool.core import ANY_GPU, Ended, Request, RequestState, Requirements, explain_requirements
from gpu_worker_pool.core.requirements import as_names
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    PoolStoppedError,
    ServiceUnavailableTimeoutError,
    WorkerTimeoutError,
)
from gpu_worker_pool.forks import leave_alone
from gpu_worker_pool.leases.acquisition import Race
from gpu_worker_pool.leases.endpoint import LeaseEndpoint, Polls
from gpu_worker_pool.leases.endpoint_request import Place
from gpu_worker_pool.leases.values import LeaseAsk, StillWaiting, requirements_at

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import CodeType

    from gpu_worker_pool.client.manager import WorkerPoolManager
    from gpu_worker_pool.core import PoolSettings, Waiter
    from gpu_worker_pool.core.requirements import Policy
    from gpu_worker_pool.leases.values import LeaseService
    from gpu_worker_pool.models import GPUAssignment, PoolStatus

logger = logging.getLogger(__name__)

#: Whoever can ask only one endpoint waits there for so long at once: enough to read a GPU again that is free.
FIRST_WAIT_SECONDS = 0.5


class LeasePool:
    """From a client's start to its stop. `manager` assigns the GPUs of endpoints that give no leases, or not yet."""

    def __init__(
        self,
        manager: WorkerPoolManager,
        settings: PoolSettings,
        *,
        lease_ttl: float,
        worker_timeout: float,
        pool_id: Callable[[str], str],
        tell_endpoints: Callable[[], str],
        want_reading: Callable[[str], object],
        on_lease_lost: Callable[[GPUAssignment], object] | None,
        also_asking: Iterable[CodeType] = (),
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._lease_ttl = lease_ttl
        self._worker_timeout = worker_timeout
        self._pool_id = pool_id
        self._refusals = Refusals(tell_endpoints)
        self._loop = asyncio.get_running_loop()
        self.thread: LeaseThread | None = None
        self.view = EndpointView(settings)
        #: By endpoint id, in the order in which they were found to give leases.
        self._endpoints: dict[str, LeaseEndpoint] = {}
        #: Why the others cannot be used at all.
        self._refused: dict[str, GPUWorkerPoolError] = {}
        self._races: dict[Race, Waiter] = {}
        self._kept = AssignedLeases(
            self.view,
            now=lambda: manager.now,
            pool_id=pool_id,
            asking=frozenset({LeasePool.request_gpu.__code__, *also_asking}),
            want_reading=want_reading,
            on_lease_lost=on_lease_lost,
        )
        self._polls = Polls.of_a_process()
        #: Endpoints that show only GPUs of others: two servers of one host would promise each of them twice.
        self._shadows: set[str] = set()
        #: Whether there is anything, or may be, that is assigned in process.
        self._has_in_process = True
        self._releasing: set[asyncio.Task[None]] = set()

    # --- life ---

    async def stop(self) -> None:
        """End every request that waits, and give back whatever is held."""
        for race in self._races:
            race.stop()
        thread = self.thread
        self._kept.stop()
        if thread is not None:
            over = asyncio.wrap_future(thread.want_stop())
            try:
                await asyncio.shield(over)
            finally:
                if over.done():
                    thread.join()

    def forget(self) -> None:
        """The event loop is closed; what was held for its tasks is given back without anybody waiting for that."""
        self._kept.forget()
        if self.thread is not None:
            self.thread.want_stop()

    def forked(self) -> None:
        """In a child process: what is held is held by the parent, and everything that was begun goes on there."""
        leave_alone(self)
        self._kept.forget()

    # --- endpoints ---

    def offered(self, endpoint_id: str, make_service: Callable[[LeaseThread], LeaseService]) -> None:
        """An endpoint gives leases; from now on its GPUs are had by nothing else."""
        thread = self.start_thread()
        service = make_service(thread)
        thread.close_with(service.close)
        self._endpoints[endpoint_id] = LeaseEndpoint(thread, service, self._polls)
        self._refused.pop(endpoint_id, None)
        for race in self._races:
            race.join(endpoint_id)

    def start_thread(self) -> LeaseThread:
        if self.thread is None:
            self.thread = LeaseThread(self._kept.lost_in_thread)
            self.thread.close_with(self._kept.no_more_losses)
            self.thread.start()
        return self.thread

    def refused(self, endpoint_id: str, error: GPUWorkerPoolError) -> None:
        """An endpoint gives none, and must not be used without."""
        self._refused[endpoint_id] = error
        for race in self._races:
            race.refuse(endpoint_id, error)

    def removed(self, endpoint_id: str) -> None:
        """It is not asked any more; what is held there stays so until it is released."""
        self._endpoints.pop(endpoint_id, None)
        self._refused.pop(endpoint_id, None)
        for race in self._races:
            race.leave(endpoint_id)

    def answered(self, endpoint_id: str) -> None:
        """It has told its readings: whoever waits for it to answer may ask it again."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is not None and endpoint.is_failing:
            endpoint.thread.call(endpoint.is_back)

    def set_shadow(self, endpoint_id: str, *, is_shadow: bool) -> None:
        """Whether it shows only GPUs of others."""
        (self._shadows.add if is_shadow else self._shadows.discard)(endpoint_id)

    def set_in_process(self, *, has_endpoints: bool) -> None:
        """Whether there is anything, or may be, that is assigned in process."""
        self._has_in_process = has_endpoints
        for race in self._races:
            if has_endpoints:
                race.join(None)
            else:
                race.leave(None)

    @property
    def is_needed(self) -> bool:
        return self.thread is not None or bool(self._refused)

    # --- asking ---

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
        manager, view = self._manager, self.view
        _ = manager.pool  # which says why it cannot be used
        seconds = self._worker_timeout if timeout is None else checked_timeout(timeout)
        requirements = Requirements(
            count=count,
            memory_mb=memory_mb,
            share=share,
            min_free_memory_mb=min_free_memory_mb,
            gpu_model=gpu_model,
            only=None if only is None else as_names("only", only),
            exclude=() if exclude is None else as_names("exclude", exclude),
            priority=priority,
            policy=policy,
        )
        name = self._kept.new_worker_id()
        request = Request(name, ANY_GPU if requirements == ANY_GPU else requirements, name, "", label, self._lease_ttl)
        now = manager.now
        waiter = view.wait(request, now)
        try:
            while True:
                race = self._race(request, max(now + seconds - manager.now, 0.0))
                self._races[race] = waiter
                try:
                    won = await race.run()
                except TimeoutError as error:
                    if isinstance(error, GPUWorkerPoolError):
                        raise
                    raise self._timeout_error(race, request, manager.now - now) from None
                except PoolStoppedError:
                    ended = Ended(name, RequestState.STOPPED)
                    raise self._refusals.error_of(view.pool, request, ended, manager.now - now) from None
                finally:
                    self._races.pop(race, None)
                    race.entries.clear()
                if won.task is not None:
                    return won.task.result()
                held, place = won.won, won.place
                # One that was lost before anybody had it is as good as none.
                if held is not None and place is not None and not held.life.is_lost:
                    pool_id = self._pool_id(held.endpoint_id)
                    manager.grants[pool_id] = manager.grants.get(pool_id, 0) + 1
                    return self._kept.hand_over(held, place.endpoint, waiter, was_blocked=race.was_blocked)
        finally:
            view.wait_no_more(waiter)

    def _race(self, request: Request, timeout_seconds: float) -> Race:
        requirements, now = request.requirements, self._manager.now
        able = self.view.able(requirements, now)
        if self._has_in_process:
            able += able_endpoints(self._manager.pool.allocator, requirements, now)
        names = {self._pool_id(name): name for name in self._endpoints if name not in self._shadows}
        # What is assigned in process is one place, whichever of its endpoints is best.
        first = list(dict.fromkeys(names.get(state.endpoint_id) for state in self.view.in_order(able)))
        then: list[str | None] = [name for name in names.values() if name not in first]
        if self._has_in_process and None not in first:
            then.append(None)
        is_alone = len(first) + len(then) == 1
        first_wait_seconds = min(FIRST_WAIT_SECONDS, timeout_seconds) if is_alone else 0.0
        race = Race(
            partial(self._make_place, request, frozenset(first), first_wait_seconds),
            partial(self._ask_in_process, request, timeout_seconds),
            self._give_back_in_process,
            timeout_seconds=timeout_seconds,
            is_answering=self._is_answering,
            on_blocked=partial(self._tell_blocked, request),
        )
        race.line_up([name for name in first if name is not None or self._has_in_process], then)
        for name, error in self._refused.items():
            race.refuse(name, error)
        return race

    def _is_answering(self, name: str) -> bool:
        state = self.view.pool.allocator.endpoints.get(self._pool_id(name))
        return state is not None and state.is_answering

    def _tell_blocked(self, request: Request, why: tuple[str, ...]) -> None:
        if pool_events.is_wanted() and self._endpoints:
            free = self.view.pool.allocator.available(self._manager.now)
            pool_events.blocked(request.worker_id, request.requirements, len(self.waiting) - 1, free, "; ".join(why))

    def _make_place(
        self,
        request: Request,
        free: Collection[str | None],
        first_wait_seconds: float,
        name: str,
        tell: Callable[[Place, object], object],
    ) -> Place:
        requirements = requirements_at(name, request.requirements)
        if requirements is None:
            named = ", ".join(request.requirements.only or ())
            raise ImpossibleRequestError(reasons=(f"{name}: none of its GPUs is among {named}",))
        if not requirements.share:  # for those, thresholds count only where they are named
            requirements = replace(
                requirements,
                memory_threshold=self._settings.memory_threshold_percent,
                utilization_threshold=self._settings.utilization_threshold_percent,
            )
        ask = LeaseAsk.new(request.worker_id, requirements, request.label, self._lease_ttl)
        endpoint, is_busy = self._endpoints[name], name not in free
        return Place(endpoint, ask, tell, expects_to_wait=is_busy, first_wait_seconds=first_wait_seconds)

    def _ask_in_process(self, request: Request, timeout_seconds: float) -> asyncio.Task[GPUAssignment]:
        requirements = request.requirements
        asking = self._manager.request_gpu(
            timeout_seconds,
            count=requirements.count,
            memory_mb=requirements.memory_mb,
            share=requirements.share,
            min_free_memory_mb=requirements.min_free_memory_mb,
            gpu_model=requirements.gpu_model,
            only=requirements.only,
            exclude=requirements.exclude,
            priority=requirements.priority,
            policy=requirements.policy,
            label=request.label,
        )
        return self._loop.create_task(asking)

    def _give_back_in_process(self, assignment: GPUAssignment) -> None:
        releasing = self._loop.create_task(self._manager.release_gpu(assignment))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    def _timeout_error(self, race: Race, request: Request, waited_seconds: float) -> Exception:
        pool = self.view.at(self._manager.now) if self._endpoints else self._manager.pool
        ended = Ended(request.request_id, RequestState.TIMED_OUT)
        # Who keeps the ledger knows who holds what, and has said so.
        is_explained = any(entry.waiting is not None and entry.waiting.reasons for entry in race.entries.values())
        error = self._refusals.error_of(pool, request, ended, waited_seconds, "" if is_explained else None)
        told, is_heard = "", None in race.entries
        if is_heard and self._endpoints:
            here = explain_requirements(self._manager.pool, request.requirements, self._manager.now).gpus[
                :MOST_GPUS_TOLD
            ]
            told = "".join(f"\n  {gpu}" for gpu in here)
        for entry in race.entries.values():
            if (said := entry.error or entry.trouble) is not None and not isinstance(said, WorkerTimeoutError):
                told += f"\n  {entry.name}: {said}"
            elif entry.waiting is not None:
                is_heard = True
                told += f"\n  {entry.name}: {_told(entry.waiting)}"
            elif self._is_answering(entry.name):
                told += f"\n  {entry.name}: does not answer when it is asked for a lease"
        if race.entries and not is_heard and not isinstance(error, ServiceUnavailableTimeoutError):
            return ServiceUnavailableTimeoutError(f"{error}{told}")
        return type(error)(f"{error}{told}")

    # --- giving back ---

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Twice is harmless; `StaleAssignmentError` if it was lost before."""
        _ = self._manager.pool  # which says why it cannot be used
        if getattr(assignment, "lease_id", None) is None:
            await self._manager.release_gpu(assignment)
            return
        await self._kept.release(assignment)

    # --- looking ---

    @property
    def waiting(self) -> list[Waiter]:
        """Those who wait in no queue of this process, in order."""
        waiters = [waiter for race, waiter in self._races.items() if not race.is_in_process]
        return sorted(waiters, key=lambda waiter: waiter.order)

    def get_pool_status(self) -> PoolStatus:
        return pool_metrics.pool_status(self.view.pool, self._manager.now, len(self.waiting))


def _told(waiting: StillWaiting) -> str:
    """The place, and why, GPU by GPU."""
    place = f"number {waiting.position} in line" if waiting.position else ""
    summary, gpus = waiting.reasons[:1], waiting.reasons[1 : 1 + MOST_GPUS_TOLD]
    return "\n    ".join(["; ".join(filter(None, (place, *summary))), *gpus])
