"""A lease for this very process: acquired, given back, and acquired again, by whichever of its threads needs a GPU.

Blocking, for programs without an event loop. All that is sent is sent by a lease thread.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ServiceUnavailableTimeoutError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.hardware.origin import origin, worker_name
from gpu_worker_pool.lease_variables import memory_caps
from gpu_worker_pool.leases.acquisition import Acquisition
from gpu_worker_pool.leases.handed_over import assignment_of, variables_of
from gpu_worker_pool.leases.lease_thread import LeaseThread
from gpu_worker_pool.leases.places import candidates_at, checked, complete_requirements, places_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.leases.places import LeasePlace
    from gpu_worker_pool.models import GPUAssignment

#: A waiting thread wakes this often, so that Ctrl-C reaches it and its caller can say that it waits.
WAKE_SECONDS: Final = 0.5
#: If the answer to whether others wait does not come within this time, it counts as yes.
QUEUE_SECONDS: Final = 2.0


class OwnLeases:
    """One lease at a time. Only one thread at a time may call it.

    The endpoints are those of the environment at the first request: what the leases put into the environment
    later does not count.
    """

    def __init__(self, program: str, label: str | None = None) -> None:
        self._program = program
        self._label = label
        self._environment = MultiEndpointConfigurationManager()
        self._thread = LeaseThread(lambda _: None)
        self._thread.start()
        self._places: list[LeasePlace] | None = None

    @property
    def is_here(self) -> bool:
        """False in a fork, which must make its own."""
        return self._thread.is_here

    def acquire(
        self,
        options: dict[str, Any],
        timeout_seconds: float = math.inf,
        *,
        endpoint_id: str | None = None,
        on_waiting: Callable[[float, str], object] = lambda _seconds, _why: None,
    ) -> HeldLease:
        """`options`: of `Requirements`. `endpoint_id`: ask only there. `on_waiting` is called now and then.

        Raises a `WorkerTimeoutError` in time, an `ImpossibleRequestError` or another `GPUWorkerPoolError` or
        `ValueError` at once.
        """
        begun_at = boot_time()
        acquisitions: list[Acquisition] = []
        done = self._thread.do(partial(self._acquire, options, timeout_seconds, endpoint_id, acquisitions))
        try:
            while True:
                try:
                    return done.result(WAKE_SECONDS)
                except concurrent.futures.TimeoutError:  # also what the request itself ends with
                    if done.done():
                        error = done.exception()
                        if error is None:
                            return done.result()
                        if isinstance(error, GPUWorkerPoolError):
                            raise error from None
                        raise _timeout_error(acquisitions, boot_time() - begun_at) from None
                    on_waiting(boot_time() - begun_at, _why(acquisitions))
        except BaseException:
            for acquisition in acquisitions:
                self._thread.call(acquisition.withdraw)
            # It may not have begun yet, or be granted at this moment.
            done.add_done_callback(self._give_back_unwanted)
            raise

    def _give_back_unwanted(self, done: concurrent.futures.Future[HeldLease]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._thread.do(partial(self._thread.engine.release, done.result()))

    async def _acquire(
        self, options: dict[str, Any], timeout_seconds: float, endpoint_id: str | None, found: list[Acquisition]
    ) -> HeldLease:
        requirements = complete_requirements(options, self._environment)
        if self._places is None:
            self._places = await places_here(self._thread.engine, (), self._environment)
            for place in self._places:
                self._thread.close_with(place.endpoint.service.close)
        request = Request(
            "",
            requirements,
            worker_name(self._program),
            label=self._label,
            ttl_seconds=self._environment.get_lease_ttl(),
            origin=origin(self._program, os.getpid()),
        )
        places = [place for place in self._places if endpoint_id in (None, place.config.endpoint_id)]
        acquisition = Acquisition(self._thread.engine, candidates_at(places, request), timeout_seconds=timeout_seconds)
        found.append(acquisition)
        return await checked(await acquisition.run(), self._places, self._thread.engine)

    def release(self, lease: HeldLease) -> None:
        """Harmless if it was lost."""
        with suppress(StaleAssignmentError):
            self._thread.do(partial(self._thread.engine.release, lease)).result()

    def has_others_waiting(self, lease: HeldLease) -> bool:
        """Whether any request waits where this lease was granted. True if that cannot be known."""
        try:
            return self._thread.do(lease.service.has_waiting).result(QUEUE_SECONDS)
        except (GPUWorkerPoolError, concurrent.futures.TimeoutError):
            return True

    def variables_of(self, lease: HeldLease) -> dict[str, str]:
        """What shows a program these GPUs and no others."""
        caps = {}
        if lease.share_mb is not None:
            caps = memory_caps(lease.share_mb, [gpu.memory_total_mb for gpu in lease.gpus])
        return caps | variables_of(lease, self._places or (), self._environment.get_gpu_names())

    def assignment_of(self, lease: HeldLease) -> GPUAssignment:
        return assignment_of(lease, "", self._environment.get_gpu_names())

    def rest(self) -> None:
        """Nothing is held, and the next request may be far: read neither GPUs nor the ledger until then."""
        with suppress(Exception):  # what cannot be opened says so to the next request
            self._thread.do(self._rest).result()

    async def _rest(self) -> None:
        for place in self._places or ():
            await place.endpoint.service.rest()

    def stop(self) -> None:
        """Give back what is held."""
        if self._thread.is_here:
            self._thread.request_stop().result()
            self._thread.join()


def _why(acquisitions: list[Acquisition]) -> str:
    for acquisition in acquisitions:
        for request in list(acquisition.requests.values()):
            if request.trouble is not None:
                return f"{request.name}: {request.trouble}"
            if request.waiting is not None:
                return next(iter(request.waiting.reasons), "")
    return ""


def _timeout_error(acquisitions: list[Acquisition], waited_seconds: float) -> WorkerTimeoutError:
    requests = [request for acquisition in acquisitions for request in list(acquisition.requests.values())]
    why = _why(acquisitions)
    text = f"no GPU became free in {waited_seconds:.1f} s{f': {why}' if why else ''}"
    if not any(request.waiting is not None and request.trouble is None for request in requests):
        return ServiceUnavailableTimeoutError(text)
    return WorkerTimeoutError(text)
