"""The requests of a lease process: to which endpoints they go, what is reported of them, and what was granted."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.exits import Status, status_of
from gpu_worker_pool.cli.running.services import requests_for
from gpu_worker_pool.cli.running.whereabouts import check_places, endpoints_of_jobs, place_of
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.lease_variables import outer_leases
from gpu_worker_pool.leases.acquisition import FIRST_ANSWER_SECONDS, Acquisition, Candidate
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints
from gpu_worker_pool.leases.lease import with_new_id
from gpu_worker_pool.leases.places import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.whereabouts import CommandPlace
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.leases.channel import Channel
    from gpu_worker_pool.leases.endpoint import EndpointRequest
    from gpu_worker_pool.leases.engine import LeaseEngine
    from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, LeaseService

#: A host with more GPUs is explained by its summary.
MOST_REASONS: Final = 32
#: The interval of progress reports; a grant does not wait for it.
POLL_SECONDS: Final = 2.0
#: With `--no-wait`: how long to wait for the first answers.
NO_WAIT_SECONDS: Final = 5.0


def _row_of(gpu: LeasedGPU) -> dict[str, Any]:
    return {"gpu_id": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory_total_mb": gpu.memory_total_mb}


class LeaseRequests:
    """All requests of one lease process: the same requirements at the same endpoints, one request for each lease."""

    def __init__(self, channel: Channel, spec: LeaseSpec, engine: LeaseEngine) -> None:
        self._channel = channel
        self._spec = spec
        self._engine = engine
        self._endpoints: dict[str, EndpointConfig] = {}
        self._candidates: list[Candidate] = []

    async def prepare(self) -> None:
        """Raises `ValueError` or a `GPUWorkerPoolError` if the spec cannot be served."""
        endpoints: Sequence[EndpointConfig] = chosen_endpoints(self._spec.endpoints)
        if self._spec.most_leases is not None:
            chosen, endpoints = endpoints, await endpoints_of_jobs(endpoints, self._spec)
            if others := [each for each in chosen if each not in endpoints]:
                text = f"{named(others)}: jobs run here, and {'it is' if len(others) == 1 else 'they are'} not asked"
                self._channel.report("told", text=text, lease=None)
        await check_places(endpoints, self._spec)
        self._endpoints = {each.endpoint_id: each for each in endpoints}
        self._candidates = [
            Candidate(self._engine.endpoint(service), request)
            for service, request in requests_for(self._spec, endpoints)
        ]

    def begin(self, *, is_patient: bool = False) -> Acquiring:
        """Ask for one lease. `is_patient`: without a time limit, whatever the spec says."""
        candidates = [candidate._replace(request=with_new_id(candidate.request)) for candidate in self._candidates]
        return Acquiring(self, self._engine, self._spec, candidates, is_patient=is_patient)

    @property
    def services(self) -> list[LeaseService]:
        return [candidate.endpoint.service for candidate in self._candidates]

    # --- what is reported ---

    async def place_of(self, lease: HeldLease) -> CommandPlace:
        """Raises a `ValueError` if that is another host, which was not known before."""
        return await place_of(self._endpoints[lease.endpoint_id], self._spec)

    def report_granted(self, held: HeldLease, place: CommandPlace, **more: Any) -> None:
        self._channel.send(
            "granted",
            lease_id=held.lease_id,
            endpoint=held.endpoint_id,
            gpus=[_row_of(gpu) for gpu in held.gpus],
            share_mb=held.share_mb,
            gpu_names=MultiEndpointConfigurationManager().get_gpu_names(),
            url=self._endpoints[held.endpoint_id].url,
            ttl_seconds=held.ttl_seconds,
            **place._asdict(),
            outer_leases=outer_leases(held.within),
            **more,
        )

    def report_waiting(self, request: EndpointRequest) -> None:
        if request.trouble is not None:
            self._channel.report("trouble", endpoint=request.name, text=str(request.trouble))
        elif request.waiting is not None and request.lease is None and request.error is None:
            summary, *reasons = request.waiting.reasons or ("waiting",)
            self._channel.report(
                "waiting",
                endpoint=request.name,
                position=request.waiting.position,
                summary=summary,
                reasons=reasons[:MOST_REASONS],
            )

    def fail(self, error: object, status: Status = Status.USAGE) -> None:
        # Some of these errors are a ValueError, too.
        status = status_of(error) if isinstance(error, GPUWorkerPoolError) else status
        self._channel.send("failed", status=int(status), text=str(error))


class Acquiring:
    """One request that is under way."""

    def __init__(
        self,
        requests: LeaseRequests,
        engine: LeaseEngine,
        spec: LeaseSpec,
        candidates: list[Candidate],
        *,
        is_patient: bool,
    ) -> None:
        self._requests = requests
        self._is_no_wait = spec.is_no_wait and not is_patient
        self._timeout_seconds = None if is_patient else spec.timeout_seconds
        self._summary = ""
        patience_seconds = math.inf if self._timeout_seconds is None else self._timeout_seconds
        self._acquisition = Acquisition(
            engine,
            candidates,
            timeout_seconds=0.0 if self._is_no_wait else patience_seconds,
            first_answer_seconds=NO_WAIT_SECONDS if self._is_no_wait else FIRST_ANSWER_SECONDS,
            poll_seconds=POLL_SECONDS,
            on_news=self._report,
        )
        self.task: asyncio.Task[HeldLease] = asyncio.create_task(self._acquisition.run())

    async def result(self) -> HeldLease | None:
        """None if it was not granted yet, and is withdrawn; or not in time, which was reported."""
        if not self.task.done():
            self._acquisition.withdraw()
            with suppress(GPUWorkerPoolError):
                await self.task
            return None
        try:
            return self.task.result()
        except TimeoutError as error:
            if isinstance(error, GPUWorkerPoolError):
                raise
            self._fail_in_time()
            return None

    def _report(self, request: EndpointRequest) -> None:
        if request.waiting is not None and request.trouble is None:
            self._summary = next(iter(request.waiting.reasons), self._summary)
        if not self._is_no_wait:
            self._requests.report_waiting(request)

    def _fail_in_time(self) -> None:
        requests = self._acquisition.requests.values()
        if not any(request.waiting is not None and request.trouble is None for request in requests):
            details = "; ".join(
                f"{request.name}: {request.error or request.trouble or 'has not answered'}" for request in requests
            )
            self._requests.fail(f"no endpoint answered the request: {details}", Status.UNAVAILABLE)
        elif self._is_no_wait:
            self._requests.fail(f"nothing is free now: {self._summary}", Status.NOT_NOW)
        else:
            why = f": {self._summary}" if self._summary else ""
            when = f"in {self._timeout_seconds:g} s" if self._timeout_seconds else "at once"
            self._requests.fail(f"no GPU became free {when}{why}", Status.TIMED_OUT)
