"""Leases for a client's workers: each request becomes an acquisition, each assignment holds a lease until its release.

Runs in the client's event loop; the acquisitions run in the lease thread, which is started when it is first needed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpu_worker_pool.client import pool_events, pool_metrics
from gpu_worker_pool.client.arguments import checked_timeout
from gpu_worker_pool.client.assigned_leases import AssignedLeases
from gpu_worker_pool.client.in_process import NAME as IN_PROCESS
from gpu_worker_pool.client.in_process import InProcessService
from gpu_worker_pool.client.refusals import MOST_GPUS_LISTED, Refusals
from gpu_worker_pool.core import Ended, Request, RequestState, Waiter, explain_requirements
from gpu_worker_pool.core.balancing import balancer_for
from gpu_worker_pool.core.mirror import MirrorPool
from gpu_worker_pool.core.origins import OWN_PROCESS
from gpu_worker_pool.core.requirements import NOTHING_DECLARED, Declared
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    PoolStoppedError,
    ServiceUnavailableTimeoutError,
    WorkerTimeoutError,
)
from gpu_worker_pool.forks import leave_alone
from gpu_worker_pool.hardware.origin import is_interactive, origin_of_this_process
from gpu_worker_pool.leases.acquisition import Acquisition, Candidate
from gpu_worker_pool.leases.lease import requirements_at, with_new_id
from gpu_worker_pool.leases.lease_thread import LeaseThread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from gpu_worker_pool.client.manager import WorkerPoolManager
    from gpu_worker_pool.config import PoolConfig
    from gpu_worker_pool.core import Explanation, PoolSettings, Requirements
    from gpu_worker_pool.core.allocator import GPUAllocator
    from gpu_worker_pool.core.gpus import EndpointState
    from gpu_worker_pool.leases.endpoint import LeaseEndpoint
    from gpu_worker_pool.leases.lease import HeldLease, LeaseService, StillWaiting
    from gpu_worker_pool.models import GPUAssignment, PoolStatus


class LeasePool:
    """Exists from a client's start to its stop. `manager` assigns GPUs of endpoints that give no leases, or not yet."""

    def __init__(
        self,
        config: PoolConfig,
        settings: PoolSettings,
        manager: WorkerPoolManager,
        *,
        failing_endpoints: Callable[[], str],
        want_reading: Callable[[str], object],
        on_lease_lost: Callable[[GPUAssignment], object] | None,
        on_yield_asked: Callable[[GPUAssignment], object] | None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._manager = manager
        self._pool_id = config.pool_id
        self._refusals = Refusals(failing_endpoints)
        self._loop = asyncio.get_running_loop()
        self.thread: LeaseThread | None = None
        #: What is known of the servers that give leases: their readings, and the leases held there.
        self.view: MirrorPool = MirrorPool(settings)
        self._balancer = balancer_for(settings.strategy)
        #: By endpoint id, in the order in which they were found to give leases.
        self._endpoints: dict[str, LeaseEndpoint] = {}
        #: Those that are servers of a fleet.
        self._fleets: set[str] = set()
        #: By endpoint id: why an endpoint cannot be used at all.
        self._refused: dict[str, GPUWorkerPoolError] = {}
        #: Each request that waits, as its worker made it, in the order of arrival.
        self._acquisitions: dict[Acquisition, Request] = {}
        self._leases = AssignedLeases(
            self.view,
            now=lambda: manager.now,
            pool_id=config.pool_id,
            want_reading=want_reading,
            gpu_names=config.gpu_names,
            on_lease_lost=on_lease_lost,
            on_yield_asked=on_yield_asked,
        )
        #: Endpoints that list only GPUs of other endpoints: two servers on one host would grant each GPU twice.
        self._shadows: set[str] = set()
        #: Whether this process assigns, or may have to assign, the GPUs of any endpoint.
        self._has_in_process = True
        self._has_given_leases = False
        self._in_process = InProcessService(manager, self._loop)
        self._is_stopped = False

    # --- life ---

    async def stop(self) -> None:
        """End every waiting request, and give back every lease."""
        thread = self.thread
        self._leases.stop()
        if thread is not None:
            self._is_stopped = True  # a lease may be on its way to its worker, which must not get it any more
            over = asyncio.wrap_future(thread.request_stop())
            try:
                await asyncio.shield(over)
            finally:
                if over.done():
                    thread.join()

    def forget(self) -> None:
        """The event loop is closed: give back the leases of its tasks, without waiting for that."""
        self._leases.forget()
        if self.thread is not None:
            self.thread.request_stop()

    def forked(self) -> None:
        """In a forked child: the parent keeps the leases and continues its requests."""
        leave_alone(self)
        self._leases.forget()

    # --- endpoints ---

    def start_thread(self) -> LeaseThread:
        if self.thread is None:
            self.thread = self._leases.thread = LeaseThread(
                self._leases.lost_in_thread, self._leases.ending_in_thread, self._leases.asked_in_thread
            )
            self.thread.close_with(self._leases.stop_reporting_losses)
            self.thread.start()
            self._in_process_endpoint = self.thread.engine.endpoint(self._in_process)
        return self.thread

    def offered(
        self, endpoint_id: str, make_service: Callable[[LeaseThread], LeaseService], *, is_fleet: bool = False
    ) -> None:
        """An endpoint gives leases; nothing else assigns its GPUs from now on. `is_fleet`: and those of other hosts."""
        (self._fleets.add if is_fleet else self._fleets.discard)(endpoint_id)
        thread, self._has_given_leases = self.start_thread(), True
        service = make_service(thread)
        thread.close_with(service.close)
        self._endpoints[endpoint_id] = thread.engine.endpoint(service)
        self._refused.pop(endpoint_id, None)
        for acquisition, request in self._acquisitions.items():
            self._join(acquisition, endpoint_id, request)

    def refused(self, endpoint_id: str, error: GPUWorkerPoolError) -> None:
        """An endpoint gives no leases, and must not be used without them."""
        self._refused[endpoint_id] = error
        for acquisition in self._acquisitions:
            self.start_thread().call(acquisition.refuse, endpoint_id, error)

    def removed(self, endpoint_id: str) -> None:
        """It gets no more requests; leases held there stay until they are released."""
        self._endpoints.pop(endpoint_id, None)
        self._refused.pop(endpoint_id, None)
        for acquisition in self._acquisitions:
            self.start_thread().call(acquisition.leave, endpoint_id)

    def answered(self, endpoint_id: str) -> None:
        """It has sent its readings: a failing endpoint may be asked again."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is not None and endpoint.is_failing and self.thread is not None:
            self.thread.call(endpoint.returned)

    def set_shadow(self, endpoint_id: str, *, is_shadow: bool) -> None:
        """Whether it lists only GPUs of other endpoints."""
        (self._shadows.add if is_shadow else self._shadows.discard)(endpoint_id)

    def set_in_process(self, *, has_endpoints: bool) -> None:
        """Whether this process assigns, or may have to assign, the GPUs of any endpoint."""
        self._has_in_process = has_endpoints
        for acquisition, request in self._acquisitions.items():
            if has_endpoints:
                self._join(acquisition, IN_PROCESS, request)
            else:
                self.start_thread().call(acquisition.leave, IN_PROCESS)

    def _join(self, acquisition: Acquisition, endpoint_id: str, request: Request) -> None:
        candidate = self._candidate(endpoint_id, request)
        if isinstance(candidate, Candidate):
            self.start_thread().call(acquisition.join, candidate)
        else:
            self.start_thread().call(acquisition.refuse, endpoint_id, candidate)

    @property
    def is_needed(self) -> bool:
        """Whether any endpoint gives leases, gave some before it was removed, or must not be used without them."""
        return self._has_given_leases or bool(self._refused)

    # --- requesting ---

    async def acquire(
        self,
        requirements: Requirements,
        timeout: float | None,
        label: str | None,
        declared: Declared = NOTHING_DECLARED,
    ) -> GPUAssignment:
        manager = self._manager
        _ = manager.pool  # raises if it cannot be used
        seconds = self._config.worker_timeout if timeout is None else checked_timeout(timeout)
        name = self._leases.new_worker_id()
        origin, ttl = origin_of_this_process(), self._config.lease_ttl
        request = Request(name, requirements, name, "", label, ttl, origin=origin, **declared._asdict())
        begun_at = manager.now
        thread = self.start_thread()
        while True:
            acquisition = self._acquisition(thread, request, begun_at, seconds)
            self._acquisitions[acquisition] = request
            try:
                held = await asyncio.wrap_future(thread.do(partial(self._run, acquisition)))
            except TimeoutError as error:
                if isinstance(error, GPUWorkerPoolError):
                    raise
                raise self._timeout_error(acquisition, request, manager.now - begun_at) from None
            except PoolStoppedError:
                raise self._stopped_error(request, begun_at) from None
            except asyncio.CancelledError:
                # It may have been granted at the same moment.
                thread.call(acquisition.withdraw)
                raise
            finally:
                self._acquisitions.pop(acquisition, None)
            if self._is_stopped:
                raise self._stopped_error(request, begun_at)
            if held.assignment is not None:
                return self._in_process.hand_over(held, held.assignment)
            if not (held.is_lost or held.has_ended):  # else it ended before it was handed over
                pool_id = held.host or self._pool_id(held.endpoint_id)
                manager.grants[pool_id] = manager.grants.get(pool_id, 0) + 1
                return self._leases.hand_over(held, request, begun_at, was_blocked=acquisition.was_blocked)

    async def _run(self, acquisition: Acquisition) -> HeldLease:
        """In the lease thread."""
        held = await acquisition.run()
        if self._loop.is_closed():
            acquisition.withdraw()  # its caller has gone and cannot give it back
        return held

    def _acquisition(
        self, thread: LeaseThread, request: Request, begun_at: float, timeout_seconds: float
    ) -> Acquisition:
        requirements, now = request.requirements, self._manager.now
        able = _able_endpoints(self.view.allocator, requirements, now)
        if self._has_in_process:
            able += _able_endpoints(self._manager.pool.allocator, requirements, now)
        names = {self._pool_id(name): name for name in self._endpoints if name not in self._shadows}
        # All endpoints assigned in process are one candidate, ranked as the best of them.
        ranked = dict.fromkeys(names.get(state.endpoint_id, IN_PROCESS) for state in self._in_order(able))
        first = [name for name in ranked if name != IN_PROCESS or self._has_in_process]
        then = [name for name in names.values() if name not in ranked]
        if self._has_in_process and IN_PROCESS not in ranked:
            then.append(IN_PROCESS)
        candidates = {name: self._candidate(name, request, first) for name in (*first, *then)}
        acquisition = Acquisition(
            thread.engine,
            [found for name in first if isinstance(found := candidates[name], Candidate)],
            [found for name in then if isinstance(found := candidates[name], Candidate)],
            begun_at=begun_at,
            timeout_seconds=timeout_seconds,
            on_blocked=partial(self._loop.call_soon_threadsafe, self._report_blocked, request),
        )
        impossible = {name: error for name, error in candidates.items() if not isinstance(error, Candidate)}
        acquisition.refused.update(impossible | self._refused)
        return acquisition

    def _in_order(self, endpoints: Iterable[EndpointState]) -> list[EndpointState]:
        """Best first, by the balancing strategy; equals, perhaps from different pools, keep their order."""
        return sorted(endpoints, key=lambda endpoint: self._balancer.rank(endpoint)[:-1])

    def _candidate(self, name: str, request: Request, free: Collection[str] = ()) -> Candidate | GPUWorkerPoolError:
        """The endpoint and the request as it is sent there, or why it cannot be sent there."""
        if name == IN_PROCESS:
            return Candidate(self._in_process_endpoint, replace(request, ttl_seconds=None))
        is_fleet = name in self._fleets  # which knows what its GPUs are called
        requirements = request.requirements if is_fleet else requirements_at(name, request.requirements)
        if requirements is None:
            named = ", ".join(request.requirements.only or ())
            return ImpossibleRequestError(reasons=(f"{name}: none of its GPUs is among {named}",))
        if requirements.has_default_thresholds:
            requirements = replace(
                requirements,
                memory_threshold=self._settings.memory_threshold_percent,
                utilization_threshold=self._settings.utilization_threshold_percent,
            )
        return Candidate(
            self._endpoints[name],
            with_new_id(request, requirements),
            is_busy=name not in free,
            is_answering=self._is_answering(name),
        )

    def _is_answering(self, name: str) -> bool:
        state = self.view.allocator.endpoints.get(self._pool_id(name))
        return state is not None and state.is_answering

    def _report_blocked(self, request: Request) -> None:
        is_attended = is_interactive()
        if not self._endpoints or not (is_attended or pool_events.is_wanted()):
            return
        acquisition = next((each for each, waiting in self._acquisitions.items() if waiting is request), None)
        if acquisition is None:
            return
        answers = (each.waiting for each in list(acquisition.requests.values()) if each.waiting is not None)
        why = "; ".join(reason for waiting in answers for reason in waiting.reasons[1:])
        # A cell that is run again waits for what its first run holds: its user must see why.
        level = logging.WARNING if is_attended and OWN_PROCESS in why else logging.INFO
        free = self.view.allocator.available(self._manager.now)
        pool_events.blocked(request.worker_id, request.requirements, len(self.waiting) - 1, free, why, level)

    def _stopped_error(self, request: Request, begun_at: float) -> Exception:
        ended = Ended(request.request_id, RequestState.STOPPED)
        return self._refusals.error_of(self.view, request, ended, self._manager.now - begun_at)

    def _timeout_error(self, acquisition: Acquisition, request: Request, waited_seconds: float) -> Exception:
        self.view.advance(self._manager.now)
        pool = self.view if self._endpoints else self._manager.pool
        ended = Ended(request.request_id, RequestState.TIMED_OUT)
        requests = dict(acquisition.requests)  # which may change in the lease thread
        # The server's reasons are better: it knows the holders.
        is_explained = any(each.waiting is not None and each.waiting.reasons for each in requests.values())
        error = self._refusals.error_of(pool, request, ended, waited_seconds, "" if is_explained else None)
        has_answer, details = IN_PROCESS in requests, ""
        if has_answer and self._endpoints:
            here = explain_requirements(self._manager.pool, request.requirements, self._manager.now)
            details = "".join(f"\n  {gpu}" for gpu in here.gpus[:MOST_GPUS_LISTED])
        details += "".join(f"\n  {name}: {why}" for name, why in acquisition.refused.items())
        if not (requests or acquisition.refused) and self._endpoints:
            details += "\n  it was not sent yet: the servers are slow to answer the requests before it"
        for name, each in requests.items():
            said = each.error or each.trouble or each.endpoint.last_error
            if said is not None and not isinstance(said, WorkerTimeoutError):
                details += f"\n  {name}: {said}"
            elif each.waiting is not None:
                has_answer = True
                details += f"\n  {name}: {_shown(each.waiting)}" if name != IN_PROCESS else ""
            elif self._is_answering(name):
                details += f"\n  {name}: does not answer lease requests"
        is_unanswered = (requests or acquisition.refused) and not has_answer
        return (ServiceUnavailableTimeoutError if is_unanswered else type(error))(f"{error}{details}")

    # --- giving back ---

    async def release_gpu(self, assignment: GPUAssignment) -> None:
        """Releasing twice is harmless; raises `StaleAssignmentError` if it was lost before."""
        _ = self._manager.pool  # raises if it cannot be used
        if getattr(assignment, "lease_id", None) is None:
            await self._manager.release_gpu(assignment)
        else:
            await self._leases.release(assignment)

    # --- queries ---

    @property
    def waiting(self) -> list[Waiter]:
        """The requests that do not wait in this process's own queue, in order."""
        waiters = [
            Waiter(request, ticket, acquisition.begun_at)
            for ticket, (acquisition, request) in enumerate(self._acquisitions.items())
            if not self._in_process.is_waiting(request.request_id)
        ]
        return sorted(waiters, key=lambda waiter: waiter.order)

    def explain(self, requirements: Requirements) -> Explanation:
        request = Request("", requirements, origin=origin_of_this_process())
        explained = explain_requirements(self.view, requirements, self._manager.now, request)
        waiting = (request.requirements.priority for request in self._acquisitions.values())
        return replace(explained, position=1 + sum(priority >= requirements.priority for priority in waiting))

    def get_pool_status(self) -> PoolStatus:
        return pool_metrics.pool_status(self.view, self._manager.now, len(self.waiting))


def _able_endpoints(allocator: GPUAllocator, requirements: Requirements, now: float) -> list[EndpointState]:
    """Endpoints whose readings meet the requirements; only their servers know whether they can grant the request."""
    if allocator.is_any_gpu(requirements):
        return [each for each in allocator.endpoints.values() if len(each.free) and allocator.is_fresh(each, now)]
    return [
        endpoint
        for endpoint in allocator.endpoints.values()
        if sum(allocator.is_eligible(gpu, requirements, now) for gpu in endpoint.gpus.values()) >= requirements.count
    ]


def _shown(waiting: StillWaiting) -> str:
    """The place in the queue, and why, GPU by GPU."""
    place = f"number {waiting.position} in line" if waiting.position else ""
    summary, gpus = waiting.reasons[:1], waiting.reasons[1 : 1 + MOST_GPUS_LISTED]
    return "\n    ".join(["; ".join(filter(None, (place, *summary))), *gpus])
