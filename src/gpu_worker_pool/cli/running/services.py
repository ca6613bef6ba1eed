"""Makes a lease service for each endpoint of a command, and the request that is sent to it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.endpoints import is_local, local_backend
from gpu_worker_pool.cli.local_state import granting_state_directory
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.hardware.origin import origin
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.lease import requirements_at, with_new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.leases.lease import LeaseService


def requests_for(spec: LeaseSpec, endpoints: Sequence[EndpointConfig]) -> list[tuple[LeaseService, Request]]:
    """Raises `ValueError` for invalid requirements, and `ImpossibleRequestError` if no endpoint could grant them."""
    environment = MultiEndpointConfigurationManager()
    ttl_seconds = spec.ttl_seconds or environment.get_lease_ttl()
    requirements = requirements_of(spec.requirement_options, environment)
    user = None if spec.pid is None else origin(spec.program, spec.pid)
    found: list[tuple[LeaseService, Request]] = []
    if spec.is_private and not all(map(is_local, endpoints)):
        raise ValueError("--private is for this host's GPUs without a server: use it with local:// alone")
    for endpoint in endpoints:
        here = requirements_at(endpoint.endpoint_id, requirements)
        if here is not None:
            request = Request("", here, spec.worker_id, label=spec.label, ttl_seconds=ttl_seconds, origin=user)
            found.append((_service(endpoint, environment), with_new_id(request)))
    if not found:
        raise ImpossibleRequestError(reasons=(f"no endpoint has a GPU called {', '.join(requirements.only or ())}",))
    return found


def requirements_of(
    requirement_options: dict[str, Any], environment: MultiEndpointConfigurationManager
) -> Requirements:
    requirements = Requirements(**requirement_options)
    if not requirements.has_default_thresholds:
        return requirements
    memory, utilization = requirements.memory_threshold, requirements.utilization_threshold
    return replace(
        requirements,
        memory_threshold=environment.get_memory_threshold() if memory is None else memory,
        utilization_threshold=environment.get_utilization_threshold() if utilization is None else utilization,
    )


def _service(endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager) -> LeaseService:
    if is_local(endpoint) and (path := socket_path()) is not None:
        from gpu_worker_pool.leases.unix_socket import SocketLeaseService

        seconds = environment.get_endpoint_timeout()
        return SocketLeaseService(endpoint.endpoint_id, path, timeout_seconds=seconds, divides_lease=True)
    if is_local(endpoint):
        from gpu_worker_pool.leases.local import LocalLeaseService, LocalSettings

        directory = granting_state_directory()
        settings = LocalSettings(
            local_backend(),
            str(directory),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            os.environ.get("GPU_POOL_LEASE_ID", "").strip() or None,
        )
        return LocalLeaseService(endpoint.endpoint_id, settings, divides_lease=True)
    # The HTTP client takes longer to import than everything else, so it is imported only when needed.
    from gpu_worker_pool.cli.running.remembered_leases import server_leases

    return server_leases(endpoint, environment)
