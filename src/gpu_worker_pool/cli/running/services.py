"""Makes a lease service for each endpoint of a command, and the request that is sent to it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.endpoints import chosen_endpoints, is_local, local_backend
from gpu_worker_pool.cli.local_state import local_state_directory, new_privacy_warning
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.leases.lease import requirements_at, with_new_id

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.leases.lease import LeaseService

logger = logging.getLogger(__name__)


def requests_for(spec: LeaseSpec) -> list[tuple[LeaseService, Request]]:
    """Raises `ValueError` for invalid requirements, and `ImpossibleRequestError` if no endpoint could grant them."""
    environment = MultiEndpointConfigurationManager()
    ttl_seconds = spec.ttl_seconds or environment.get_lease_ttl()
    requirements = requirements_of(spec.requirement_options, environment)
    found: list[tuple[LeaseService, Request]] = []
    for endpoint in chosen_endpoints(spec.endpoints):
        here = requirements_at(endpoint.endpoint_id, requirements)
        if here is not None:
            request = Request("", here, spec.worker_id, label=spec.label, ttl_seconds=ttl_seconds)
            found.append((_service(endpoint, environment), with_new_id(request)))
    if not found:
        raise ImpossibleRequestError(reasons=(f"no endpoint has a GPU called {', '.join(requirements.only or ())}",))
    return found


def requirements_of(
    requirement_options: dict[str, Any], environment: MultiEndpointConfigurationManager
) -> Requirements:
    requirements = Requirements(**requirement_options)
    if requirements.share:  # a sharing request has only the thresholds that it sets itself
        return requirements
    memory, utilization = requirements.memory_threshold, requirements.utilization_threshold
    return replace(
        requirements,
        memory_threshold=environment.get_memory_threshold() if memory is None else memory,
        utilization_threshold=environment.get_utilization_threshold() if utilization is None else utilization,
    )


def _service(endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager) -> LeaseService:
    if is_local(endpoint):
        from gpu_worker_pool.leases.local import LocalLeaseService, LocalSettings

        directory = local_state_directory()
        if (warning := new_privacy_warning(directory)) is not None:
            logger.error("%s", warning)
        settings = LocalSettings(
            local_backend(),
            str(directory),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            os.environ.get("GPU_POOL_LEASE_ID", "").strip() or None,
        )
        return LocalLeaseService(endpoint.endpoint_id, settings)
    # The HTTP client takes longer to import than everything else, so it is imported only when needed.
    from gpu_worker_pool.cli.running.remembered_leases import server_leases

    return server_leases(endpoint, environment)
