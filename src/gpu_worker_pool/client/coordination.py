"""Finds out which endpoints give leases, and so what assigns a client's GPUs: servers, this process, or both.

Each endpoint is asked once, before its first readings are used, and its answer is final: an endpoint that gave leases
and no longer does counts as failing, and its GPUs are never assigned without leases.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from enum import Enum
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.api.replies import FLEET_FEATURE
from gpu_worker_pool.client import pool_metrics
from gpu_worker_pool.client.lease_pool import LeasePool
from gpu_worker_pool.client.stats_readings import readings_from_stats
from gpu_worker_pool.config import LOCAL_ENDPOINT, is_loopback_url, is_private_url
from gpu_worker_pool.core import Requirements
from gpu_worker_pool.errors import ServiceRefusedError
from gpu_worker_pool.forks import Forked
from gpu_worker_pool.host_socket import socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.api.client import APIClient
    from gpu_worker_pool.api.http_client import AsyncGPUStatsHTTPClient, MultiEndpointHTTPClientPool
    from gpu_worker_pool.api.replies import Fetched
    from gpu_worker_pool.client.default_endpoint import StatsClientWithURL
    from gpu_worker_pool.client.endpoints import Endpoint
    from gpu_worker_pool.client.manager import WorkerPoolManager
    from gpu_worker_pool.client.same_gpus import SameGPUs
    from gpu_worker_pool.config import Coordination, EndpointConfig, PoolConfig
    from gpu_worker_pool.core import Explanation, Pool, PoolSettings, Waiter
    from gpu_worker_pool.leases.http import HTTPLeaseService
    from gpu_worker_pool.leases.lease import LeaseService
    from gpu_worker_pool.leases.lease_thread import LeaseThread
    from gpu_worker_pool.leases.local import LocalLeaseService
    from gpu_worker_pool.leases.unix_socket import SocketLeaseService
    from gpu_worker_pool.models import GPUAssignment, GPUStats, PoolStatus

logger: logging.Logger = logging.getLogger("gpu_worker_pool.coordination")

NOT_ONE_OF_SEVERAL = "local:// cannot be one of several endpoints: use it alone, as service_endpoint, or use servers"
#: The feature that a server lists if it gives leases to this caller.
LEASES = "leases"


class Kind(Enum):
    """How the GPUs of an endpoint are assigned."""

    #: It has not answered yet.
    UNDECIDED = "undecided"
    LEASES = "leases"
    #: It gives no leases: this process assigns its GPUs, and sees other users only by their load.
    IN_PROCESS = "in_process"
    #: It gives no leases, and must not be used without them.
    REFUSED = "refused"


class FeatureDetectingClient:
    """Fetches an endpoint's readings. With the first ones, calls `decided` with its URL and its features."""

    def __init__(
        self, client: AsyncGPUStatsHTTPClient, decided: Callable[[str, frozenset[str] | None], object]
    ) -> None:
        self._client = client
        self.url: str = client.url
        self._decided: Callable[[str, frozenset[str] | None], object] | None = decided

    async def fetch(self) -> Fetched:
        if self._decided is None:
            return await self._client.fetch()
        features = await self._client.features()
        fetched = await self._client.fetch()
        # Only now: an endpoint that lists its features but sends no readings counts as down.
        self._decided(self.url, features)
        self._decided = None
        return fetched


def _decide(coordination: Coordination, endpoint_id: str, url: str, features: frozenset[str] | None) -> Kind:
    if features is not None and LEASES in features:
        return Kind.LEASES
    if coordination == "leases":
        logger.error("%s", _refusal(endpoint_id, url, features))
        return Kind.REFUSED
    # No warning for an older server: there is no setting that would make it give leases.
    level = logging.INFO if features is None else logging.WARNING
    logger.log(
        level,
        "%s gives no leases%s: this program assigns its GPUs itself, and sees other programs only by their load",
        endpoint_id,
        _why(url, features),
    )
    return Kind.IN_PROCESS


def _refusal(endpoint_id: str, url: str, features: frozenset[str] | None) -> ServiceRefusedError:
    return ServiceRefusedError(
        f'{endpoint_id} ({url}) gives no leases{_why(url, features)}; with coordination="auto" its GPUs would be '
        "assigned within this program"
    )


def _why(url: str, features: frozenset[str] | None) -> str:
    if features is None:
        return " (it is an older server, or not a gpu-worker-pool server)"
    return "" if is_loopback_url(url) else " to other hosts unless GPU_POOL_API_KEYS is set there"


class Coordinator:
    """Belongs to the client's event loop, from its start to its stop."""

    def __init__(
        self,
        config: PoolConfig,
        settings: PoolSettings,
        manager: WorkerPoolManager,
        *,
        timeout_seconds: float,
        failing_endpoints: Callable[[], str],
        want_reading: Callable[[str], object],
        on_lease_lost: Callable[[GPUAssignment], object] | None,
        on_yield_asked: Callable[[GPUAssignment], object] | None,
        environ: Mapping[str, str] | None,
    ) -> None:
        _check_callback("on_lease_lost", on_lease_lost)
        _check_callback("on_yield_asked", on_yield_asked)
        _check_key(config)
        _check_local(config)
        #: What hands out GPUs: the manager alone while no endpoint gives leases.
        self.assigner: WorkerPoolManager | LeasePool | Forked = manager
        self._config = config
        self._environ = environ
        self._manager = manager
        self._timeout_seconds = timeout_seconds
        self._make_pool = partial(
            LeasePool,
            config,
            settings,
            manager,
            failing_endpoints=failing_endpoints,
            want_reading=want_reading,
            on_lease_lost=on_lease_lost,
            on_yield_asked=on_yield_asked,
        )
        self._pool: LeasePool | None = None
        self._local: LocalLeaseService | SocketLeaseService | None = None
        #: The services of servers; and by fleet, the endpoint whose service has all its servers.
        self._services: dict[str, HTTPLeaseService] = {}
        self._fleets: dict[str, str] = {}
        #: By endpoint id: how its GPUs are assigned.
        self._kinds: dict[str, Kind] = {}

    # --- life ---

    def start(self) -> None:
        for known in (self._kinds, self._services, self._fleets):
            known.clear()
        self._local = None
        self._pool = None if self._config.coordination == "local" else self._make_pool()
        self.assigner = self._pool or self._manager

    async def stop(self) -> None:
        pool, self._pool = self._pool, None
        self.assigner = self._manager
        if pool is not None:
            await pool.stop()

    def forget(self) -> None:
        """The event loop is closed, and everything that ran in it is gone."""
        if self._pool is not None:
            self._pool.forget()
        self._pool = None
        self.assigner = self._manager

    def forked(self, pid: int) -> None:
        if self._pool is not None:
            self._pool.forked()
        self._pool = None
        self.assigner = Forked(pid)

    # --- endpoints ---

    def added(self, endpoint: Endpoint) -> None:
        self._kinds[endpoint.endpoint_id] = Kind.UNDECIDED
        self._manager.endpoint_lost(self._config.pool_id(endpoint.endpoint_id))  # its GPUs are not known yet
        self._choose_assigner()
        if endpoint.config.url == LOCAL_ENDPOINT:
            self._decided(endpoint, LOCAL_ENDPOINT, frozenset({LEASES}))

    def removed(self, endpoint: Endpoint) -> None:
        self._kinds.pop(endpoint.endpoint_id, None)
        self._manager.endpoint_lost(self._config.pool_id(endpoint.endpoint_id), is_removed=True)
        if self._pool is not None:
            self._pool.view.lost(self._config.pool_id(endpoint.endpoint_id), is_removed=True)
            self._pool.removed(endpoint.endpoint_id)
        self._choose_assigner()

    def stats_client(
        self, endpoint: Endpoint, config: EndpointConfig, http_pool: Callable[[], MultiEndpointHTTPClientPool]
    ) -> StatsClientWithURL:
        """A client for the endpoint's readings that first finds out which features the endpoint offers."""
        if config.url == LOCAL_ENDPOINT:
            if self._config.multi_endpoint:
                raise ValueError(NOT_ONE_OF_SEVERAL)
            from gpu_worker_pool.client.local_readings import LocalReadings

            assert self._pool is not None  # as `_check_local` made sure
            return LocalReadings(self._local_service(endpoint.endpoint_id), self._pool.start_thread())
        client = http_pool().client_for(config)
        return client if self._pool is None else FeatureDetectingClient(client, partial(self._decided, endpoint))

    def _local_service(self, endpoint_id: str) -> LocalLeaseService | SocketLeaseService:
        if self._local is not None:
            return self._local
        # Imported here: a client that uses only servers does not need the code for hardware and ledgers.
        if (path := socket_path(self._environ)) is not None:
            from gpu_worker_pool.leases.unix_socket import SocketLeaseService

            self._local = SocketLeaseService(
                endpoint_id, path, timeout_seconds=self._timeout_seconds, environ=self._environ
            )
        else:
            from gpu_worker_pool.leases.local import LocalLeaseService, LocalSettings

            self._local = LocalLeaseService(endpoint_id, LocalSettings.from_environment(self._environ))
        return self._local

    def _decided(self, endpoint: Endpoint, url: str, features: frozenset[str] | None) -> None:
        endpoint_id, pool = endpoint.endpoint_id, self._pool
        if pool is None or endpoint_id not in self._kinds:
            return  # the endpoint was removed or the client stopped meanwhile
        kind = self._kinds[endpoint_id] = _decide(self._config.coordination, endpoint_id, url, features)
        if kind is not Kind.IN_PROCESS:
            self._manager.endpoint_lost(self._config.pool_id(endpoint.endpoint_id), is_removed=True)
            pool.view.lost(self._config.pool_id(endpoint.endpoint_id))
        fleet_id = next((each for each in features or () if each.startswith(FLEET_FEATURE)), "")
        first = self._fleets.setdefault(fleet_id, endpoint_id) if fleet_id else endpoint_id
        if kind is Kind.LEASES and first != endpoint_id:
            # Several servers of one fleet are one service: its next address when one is silent.
            pool.start_thread().call(self._services[first].add, self._api(url, pool.start_thread()))
        elif kind is Kind.LEASES:
            make_service = partial(self._lease_service, endpoint_id, url)
            pool.offered(endpoint_id, make_service, is_fleet=bool(fleet_id))
        elif kind is Kind.REFUSED:
            pool.refused(endpoint_id, _refusal(endpoint_id, url, features))
        self._choose_assigner()

    def _choose_assigner(self) -> None:
        """Choose what assigns GPUs: the manager alone, unless an endpoint gives leases or may turn out to."""
        if self._pool is None:
            return
        kinds = self._kinds.values()
        self._pool.set_in_process(has_endpoints=Kind.UNDECIDED in kinds or Kind.IN_PROCESS in kinds)
        is_needed = self._pool.is_needed or Kind.UNDECIDED in kinds
        self.assigner = self._pool if is_needed else self._manager

    def _lease_service(self, endpoint_id: str, url: str, thread: LeaseThread) -> LeaseService:
        if url == LOCAL_ENDPOINT:
            return self._local_service(endpoint_id)
        from gpu_worker_pool.leases.http import HTTPLeaseService

        service = self._services[endpoint_id] = HTTPLeaseService(endpoint_id, self._api(url, thread))
        return service

    def _api(self, url: str, thread: LeaseThread) -> APIClient:
        from gpu_worker_pool.api.client import APIClient

        return APIClient(
            url,
            thread.session,
            timeout_seconds=self._timeout_seconds,
            api_key=self._config.api_key,
            allow_insecure_key=self._config.allow_insecure_key,
        )

    # --- readings ---

    def is_in_process(self, endpoint: Endpoint) -> bool:
        return self._kinds.get(endpoint.endpoint_id) not in (Kind.LEASES, Kind.REFUSED)

    def take(self, endpoint: Endpoint, stats: GPUStats, sent_at: float, same_gpus: SameGPUs) -> None:
        pool, pool_id, endpoint_id = self._pool, self._config.pool_id(endpoint.endpoint_id), endpoint.endpoint_id
        if pool is None or self.is_in_process(endpoint):
            self._manager.update_stats(stats, endpoint_id=pool_id, age_seconds=time.monotonic() - sent_at)
            return
        if self._kinds[endpoint_id] is Kind.REFUSED:
            rows = [replace(row, fault=row.fault or "its server gives no leases") for row in stats.gpus_summary]
            stats = replace(stats, gpus_summary=rows)
        pool.view.observe(pool_id, readings_from_stats(stats, pool_id), sent_at - stats.sample_age_seconds)
        pool.set_shadow(endpoint_id, is_shadow=same_gpus.is_shadow(endpoint_id, stats))
        pool.answered(endpoint_id)

    def lose(self, endpoint: Endpoint) -> None:
        if self._pool is None or self.is_in_process(endpoint):
            self._manager.endpoint_lost(self._config.pool_id(endpoint.endpoint_id))
        else:
            self._pool.view.lost(self._config.pool_id(endpoint.endpoint_id))

    # --- queries ---

    @property
    def pools(self) -> list[Pool]:
        """The pools that contain the client's GPUs; each GPU is in only one."""
        mine = self._manager.pool
        return [mine] if self._pool is None else [mine, self._pool.view]

    @property
    def waiting(self) -> list[Waiter]:
        here = self._manager.pool.queue.in_order()
        return here if self._pool is None else [*here, *self._pool.waiting]

    def get_pool_status(self) -> PoolStatus:
        status = self._manager.get_pool_status()
        return status if self._pool is None else pool_metrics.added(status, self._pool.get_pool_status())

    def explain(self, **requirements: Any) -> Explanation:
        explained = self._manager.explain(**requirements)
        if self._pool is None:
            return explained
        return pool_metrics.explained(self._pool.explain(Requirements(**requirements)), explained)


def _check_callback(name: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        raise ValueError(f"{name} must be a function, not {callback!r}")
    if iscoroutinefunction(callback):
        raise ValueError(f"{name} is called, not awaited: use a plain function")


def _check_local(config: PoolConfig) -> None:
    if all(endpoint.url != LOCAL_ENDPOINT for endpoint in config.endpoints):
        return
    if config.multi_endpoint:
        raise ValueError(NOT_ONE_OF_SEVERAL)
    if config.coordination == "local":
        raise ValueError('local:// works with leases, which coordination="local" turns off: remove that argument')


def _check_key(config: PoolConfig) -> None:
    """Reject a key that would certainly be needed but never be sent."""
    if config.api_key is None or config.allow_insecure_key or config.coordination != "leases":
        return
    for endpoint in config.endpoints:
        if not is_private_url(endpoint.url):
            raise ValueError(
                f"api_key would be sent to {endpoint.url} over plain http, where others can read it: use https://, or, "
                "in a network you trust, pass allow_insecure_key=True"
            )
