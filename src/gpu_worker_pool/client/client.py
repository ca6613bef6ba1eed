"""The client: a pool of the GPUs of one or many servers, for the asyncio workers of one process."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpu_worker_pool import forks
from gpu_worker_pool.client import pool_metrics, reports
from gpu_worker_pool.client.arguments import refused_when_awaited
from gpu_worker_pool.client.coordination import Coordinator
from gpu_worker_pool.client.default_endpoint import SERVER_DEFAULT, FirstThatAnswers
from gpu_worker_pool.client.endpoints import EndpointManager
from gpu_worker_pool.client.manager import WorkerPoolManager
from gpu_worker_pool.client.monitor import GPUMonitor, MultiEndpointGPUMonitor, coming_back
from gpu_worker_pool.client.processes import Processes
from gpu_worker_pool.client.same_gpus import SameGPUs
from gpu_worker_pool.config import LOCAL_ENDPOINT, PoolConfig
from gpu_worker_pool.core import PoolSettings
from gpu_worker_pool.core.requirements import make_declared, make_requirements
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    NotStartedError,
    PoolStoppedError,
    ServiceUnavailableError,
)
from gpu_worker_pool.models import EndpointInfo, GPUAssignment, MultiEndpointPoolStatus, PoolStatus, gpu_id_in_pool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
    from types import TracebackType

    from gpu_worker_pool.api.http_client import MultiEndpointHTTPClientPool
    from gpu_worker_pool.api.replies import Fetched
    from gpu_worker_pool.client.endpoints import Endpoint
    from gpu_worker_pool.client.monitor import StatsClient
    from gpu_worker_pool.core import Explanation
    from gpu_worker_pool.core.requirements import Policy
    from gpu_worker_pool.models import GPUStats

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

#: How long `start` waits for first answers, so that the status is useful at once. It succeeds without them too.
FIRST_ANSWERS_SECONDS = 2.0


class GPUWorkerPoolClient:
    """Hands out GPUs to workers, first come first served; use it as a context manager, or `start` and `stop` it.

    An argument wins over every variable; what is left out is read from the environment. It belongs to one event loop:
    `gpu_worker_pool.sync` is for threads.
    """

    def __init__(
        self,
        service_endpoint: str | None = None,
        service_endpoints: str | Iterable[str] | None = None,
        load_balancing_strategy: str | None = None,
        memory_threshold: float | None = None,
        utilization_threshold: float | None = None,
        polling_interval: float | None = None,
        worker_timeout: float = 300.0,
        request_timeout: float = 30.0,
        *,
        endpoint_timeout: float | None = None,
        endpoint_max_retries: int | None = None,
        endpoint_health_check_interval: float | None = None,
        coordination: str | None = None,
        lease_ttl: float | None = None,
        gpu_names: str | None = None,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        on_lease_lost: Callable[[GPUAssignment], object] | None = None,
        on_yield_asked: Callable[[GPUAssignment], object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        callbacks = ("self", "on_lease_lost", "on_yield_asked")
        arguments = {name: value for name, value in locals().items() if name not in (*callbacks, "callbacks")}
        self._config = config = PoolConfig.resolve(**arguments)
        if any(endpoint.url != LOCAL_ENDPOINT for endpoint in config.endpoints):
            # What `start` needs: it takes long to load, and would block the event loop.
            import gpu_worker_pool.api.http_client  # noqa: F401
        settings = PoolSettings(
            memory_threshold_percent=config.memory_threshold,
            utilization_threshold_percent=config.utilization_threshold,
            poll_seconds=config.polling_interval,
            strategy=config.load_balancing_strategy,
        )
        self._manager = WorkerPoolManager(
            settings=settings,
            worker_timeout=config.worker_timeout,
            gpu_names=config.gpu_names,
            on_reading_wanted=self._wake,
            failing_endpoints=self._failing_endpoints,
        )
        #: Which endpoints give leases, and so what hands out GPUs.
        self._coordinator = Coordinator(
            config,
            settings,
            self._manager,
            timeout_seconds=self._timeout_seconds,
            failing_endpoints=self._failing_endpoints,
            want_reading=self._wake,
            on_lease_lost=on_lease_lost,
            on_yield_asked=on_yield_asked,
            environ=environ,
        )
        self._pid = os.getpid()
        self._endpoints = EndpointManager(config.endpoints)
        self._callbacks: list[Callable[[GPUStats], object]] = []
        self._http: MultiEndpointHTTPClientPool | None = None
        self._monitors = MultiEndpointGPUMonitor(())
        self._endpoint_is_back = asyncio.Event()
        self._queued_requests = 0
        #: For endpoints that come back: the GPUs that were held throughout.
        self._in_use_at_return: dict[str, set[int]] = {}
        self._same_gpus = SameGPUs()
        self._processes = Processes(config, lambda: [endpoint.config for endpoint in self._endpoints], environ)

    # --- life ---

    async def start(self) -> None:
        """Begin to poll the endpoints. Succeeds even if none answers: requests then wait until one does."""
        if self._manager.is_running:
            if not self._manager.is_abandoned:
                raise AlreadyStartedError("the client is already started")
            self._forget()
        await self._manager.start()
        self._pid = os.getpid()
        forks.watch(self)
        self._coordinator.start()
        try:
            # Their state before an earlier stop says nothing about now.
            self._endpoints = EndpointManager(endpoint.config for endpoint in self._endpoints)
            self._monitors = MultiEndpointGPUMonitor(self._monitor(endpoint) for endpoint in self._endpoints)
            self._endpoint_is_back = asyncio.Event()
            self._in_use_at_return.clear()
            self._same_gpus = SameGPUs()
            for endpoint in self._endpoints:
                self._coordinator.added(endpoint)
            self._monitors.start()
            await self._monitors.next_fetches(FIRST_ANSWERS_SECONDS)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every waiting request and clean up. Does nothing if the client is not started."""
        if self._manager.is_abandoned:
            self._forget()
            return
        self._manager.check_thread()
        http, self._http = self._http, None
        try:
            await self._processes.stop()
            await self._manager.stop()
            self._endpoint_is_back.set()
            await self._coordinator.stop()
            await self._monitors.stop()
        finally:
            if http is not None:
                await http.close()

    def _forget(self) -> None:
        """Its event loop is closed, and everything that ran in it is gone; nothing is left to wait for."""
        self._manager.forget()
        self._coordinator.forget()
        self._monitors = MultiEndpointGPUMonitor(())
        self._http = None

    def _forked(self) -> None:
        """In a forked child, which has a copy of everything and must not use it."""
        if self._manager.is_running:
            forks.leave_alone(self._http, self._monitors)
            self._manager.forget()
            self._coordinator.forked(self._pid)
            self._monitors = MultiEndpointGPUMonitor(())
            self._http = None

    @property
    def is_running(self) -> bool:
        return self._manager.is_running

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # --- GPUs ---

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
        """Wait for a GPU, or several of one host, and hold it until `release_gpu`.

        Raises `WorkerTimeoutError` after `timeout` seconds (the client's `worker_timeout` if None), which is a
        `ServiceUnavailableError` too if no endpoint answered; `ImpossibleRequestError` at once if no GPU can ever
        serve it. From a server that gives leases, the assignment is a lease, which is renewed until it is released.

        `expected_seconds` says how long the GPU will be used: never enforced, and helps large requests to wait less.
        After `max_seconds` it is taken back; a server's lease cannot be renewed beyond that. `on_lease_lost` is called
        shortly before.
        """
        try:
            requirements = make_requirements(
                count, memory_mb, share, min_free_memory_mb, gpu_model, only, exclude, priority, policy
            )
            declared = make_declared(expected_seconds, max_seconds)
        except ValueError as error:
            return refused_when_awaited(error)
        return self._coordinator.assigner.acquire(requirements, timeout, label, declared)

    def release_gpu(self, assignment: GPUAssignment) -> Coroutine[Any, Any, None]:
        """Give a GPU back. Twice is harmless; `StaleAssignmentError` if it was taken back or lost before."""
        return self._coordinator.assigner.release_gpu(assignment)

    def explain(self, **requirements: Any) -> Explanation:
        """Why a request with these requirements would wait now: GPU by GPU, with the numbers."""
        return self._coordinator.explain(**requirements)

    async def run_in_gpu_process(self, fn: Callable[..., T], /, *args: Any, **requirements: Any) -> T:
        """Run a plain function in a worker process that has a GPU of its own; returns what it returns.

        `requirements` are those of `request_gpu`, and `policy` is "idle" unless they say otherwise; further ones of
        `GPUProcessPoolExecutor`, such as `max_workers`, too. Calls with the same ones share workers, which keep their
        GPUs for a minute after a call. The endpoints must give leases, and must be on this host.
        """
        self._check_started()
        executor = self._processes.executor(requirements)
        return await asyncio.wrap_future(executor.submit(fn, *args))

    # --- looking ---

    def is_multi_endpoint_mode(self) -> bool:
        return self._config.multi_endpoint

    def get_pool_status(self) -> PoolStatus:
        """A `MultiEndpointPoolStatus` with many endpoints."""
        status = self._coordinator.get_pool_status()
        if not self._config.multi_endpoint:
            return status
        return MultiEndpointPoolStatus(
            **vars(status),
            total_endpoints=len(self._endpoints),
            healthy_endpoints=len(self._endpoints.healthy),
            endpoints=self._endpoint_infos(),
        )

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """One dict per endpoint; None if the client is not started or has only one endpoint."""
        if not (self._manager.is_running and self._config.multi_endpoint):
            return None
        return [reports.as_dict(info) for info in self._endpoint_infos()]

    def get_detailed_metrics(self) -> dict[str, Any]:
        return reports.detailed_metrics(
            self._config,
            self.get_pool_status(),
            self._coordinator,
            [*zip(self._endpoint_infos(), self._endpoints, strict=True)],
            self._manager.grants,
            self._manager.now,
        )

    def get_health(self) -> dict[str, Any]:
        """`status` is healthy, degraded (some endpoints do not answer) or unhealthy (none does)."""
        self._check_started()
        healthy, degraded = self._endpoints.healthy, self._endpoints.degraded
        return {
            "status": "unhealthy" if not healthy else "degraded" if degraded else "healthy",
            "healthy_endpoints": healthy,
            "degraded_endpoints": degraded,
            "errors": {
                endpoint.endpoint_id: endpoint.last_error for endpoint in self._endpoints if endpoint.last_error
            },
            "timestamp": datetime.now().isoformat(),
        }

    def on_stats_update(self, callback: Callable[[GPUStats], object]) -> Callable[[], None]:
        """Call `callback` with new statistics of any endpoint; returns a function that unsubscribes."""
        if iscoroutinefunction(callback):
            raise TypeError("the callback is called, not awaited: use a plain function")
        self._callbacks.append(callback)

        def end() -> None:
            with suppress(ValueError):  # it has ended
                self._callbacks.remove(callback)

        return end

    # --- errors and recovery ---

    def get_error_recovery_status(self) -> dict[str, Any]:
        self._check_started()
        return self._endpoints.recovery_status(time.monotonic(), self._queued_requests)

    async def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Poll a failed endpoint now instead of waiting for its breaker; False if the id is unknown.

        Its URL or host name can be used instead if only one endpoint has it.
        """
        self._check_many()
        monitor = self._monitors.get(self._endpoints.id_of(endpoint_id) or endpoint_id)
        if monitor is None:
            return False
        monitor.recover()
        return True

    async def queue_request_for_retry(self, request_func: Callable[[], Awaitable[T]]) -> T:
        """Call it once an endpoint answers; again if it raises `ServiceUnavailableError`."""
        self._check_many()
        self._queued_requests += 1
        try:
            while True:
                if not self._endpoints.healthy:
                    self._endpoint_is_back.clear()
                    await self._endpoint_is_back.wait()
                if not self._manager.is_running:
                    raise PoolStoppedError("the client was stopped before an endpoint answered")
                try:
                    return await request_func()
                except ServiceUnavailableError:
                    if self._endpoints.healthy:
                        raise
        finally:
            self._queued_requests -= 1

    def print_error_recovery_summary(self) -> None:
        text = reports.recovery_summary(self.get_error_recovery_status(), self._endpoints)
        print(text)  # noqa: T201  # which is what it is for

    # --- endpoints that come and go ---

    async def add_endpoint(self, entry: str) -> str:
        """Add a server, `URL` or `name=URL`; returns its id."""
        self._check_many()
        endpoint = self._endpoints.add(entry)
        try:
            monitor = self._monitor(endpoint)
        except ValueError:
            self._endpoints.remove(endpoint.endpoint_id)
            raise
        self._coordinator.added(endpoint)
        self._monitors.add(monitor)
        return endpoint.endpoint_id

    async def remove_endpoint(self, endpoint_id: str) -> None:
        """Stop using its GPUs; existing assignments stay until they are released."""
        self._check_many()
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None:
            known = ", ".join(endpoint.endpoint_id for endpoint in self._endpoints)
            raise ValueError(f"there is no endpoint {endpoint_id!r}; there are {known or 'none'}")
        self._endpoints.remove(endpoint_id)
        monitor = self._monitors.remove(endpoint_id)
        self._coordinator.removed(endpoint)
        await monitor.stop()

    # --- what monitors tell ---

    def _http_pool(self) -> MultiEndpointHTTPClientPool:
        """Made for the first server: `local://` needs no HTTP library, which takes longer to load than all the rest."""
        from gpu_worker_pool.api.http_client import MultiEndpointHTTPClientPool

        if self._http is None:
            self._http = MultiEndpointHTTPClientPool(timeout_seconds=self._timeout_seconds)
        return self._http

    def _monitor(self, endpoint: Endpoint) -> GPUMonitor:
        configs = (endpoint.config, SERVER_DEFAULT) if self._config.endpoint_is_default else (endpoint.config,)
        clients = [self._coordinator.stats_client(endpoint, config, self._http_pool) for config in configs]
        client: StatsClient = clients[0] if len(clients) == 1 else FirstThatAnswers(clients, chosen=endpoint.moved_to)
        return GPUMonitor(
            endpoint,
            client,
            polling_interval=self._config.polling_interval,
            max_retries=self._config.endpoint_max_retries,
            health_check_interval=self._config.endpoint_health_check_interval,
            on_stats=self._take,
            on_lost=self._lose,
            callbacks=self._callbacks,
        )

    @property
    def _timeout_seconds(self) -> float:
        return self._config.endpoint_timeout if self._config.multi_endpoint else self._config.request_timeout

    def _take(self, endpoint: Endpoint, fetched: Fetched, since_return: float | None) -> None:
        if not self._manager.is_running:
            return
        stats, pool_id = fetched.stats, self._config.pool_id(endpoint.endpoint_id)
        if since_return is None:
            self._in_use_at_return.pop(pool_id, None)
        # A single endpoint needs no gradual return, and a server that gives leases orders its requests itself.
        elif len(self._endpoints.healthy) > 1 and self._coordinator.is_in_process(endpoint):
            in_use = self._in_use_at_return.setdefault(pool_id, pool_metrics.gpus_in_use(self._manager.pool, pool_id))
            stats = coming_back(stats, since_return, in_use)
        stats = self._same_gpus.marked(
            endpoint.endpoint_id,
            stats,
            pool_metrics.held_uuids(self._coordinator.pools),
            partial(gpu_id_in_pool, pool_id),
        )
        self._coordinator.take(endpoint, stats, fetched.sent_at, self._same_gpus)
        self._endpoint_is_back.set()

    def _lose(self, endpoint: Endpoint) -> None:
        self._same_gpus.forget(endpoint.endpoint_id)
        if not self._manager.is_running:
            return
        self._coordinator.lose(endpoint)

    def _wake(self, pool_id: str) -> None:
        for endpoint in self._endpoints:
            monitor = self._monitors.get(endpoint.endpoint_id)
            if monitor is not None and self._config.pool_id(endpoint.endpoint_id) == pool_id:
                monitor.wake()

    def _failing_endpoints(self) -> str:
        """The endpoints that do not answer, with their errors."""
        return "; ".join(endpoint.error_text() for endpoint in self._endpoints if not endpoint.is_healthy)

    def _endpoint_infos(self) -> list[EndpointInfo]:
        counts = pool_metrics.gpu_counts(self._coordinator.pools, self._manager.now)
        infos = []
        for endpoint in self._endpoints:
            total, available = counts.get(self._config.pool_id(endpoint.endpoint_id), (0, 0))
            infos.append(
                EndpointInfo(
                    endpoint.endpoint_id,
                    endpoint.config.url,
                    endpoint.is_healthy,
                    endpoint.last_seen,
                    total,
                    available,
                    endpoint.response_time_ms,
                )
            )
        return infos

    def _check_started(self) -> None:
        if not self._manager.is_running:
            raise NotStartedError("the client is not started: call start() or use it as a context manager")
        self._manager.check_thread()

    def _check_many(self) -> None:
        self._check_started()
        if not self._config.multi_endpoint:
            raise RuntimeError("this needs many endpoints: construct the client with service_endpoints=…")
