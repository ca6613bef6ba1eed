"""Whom to ask for a lease, and in which words: the services behind the endpoints that a command means."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.endpoints import chosen_endpoints, is_local, local_backend
from gpu_worker_pool.cli.local_state import local_state_directory, new_privacy_warning
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.leases.values import LeaseAsk, requirements_at

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.values import Service
    from gpu_worker_pool.config import EndpointConfig

logger = logging.getLogger(__name__)


def asks_for(asked: LeaseSpec) -> list[tuple[Service, LeaseAsk]]:
    """Raises a `ValueError` for what makes no sense, and `ImpossibleRequestError` where nobody could grant it."""
    environment = MultiEndpointConfigurationManager()
    ttl_seconds = asked.ttl_seconds or environment.get_lease_ttl()
    requirements = requirements_of(asked.requirement_options, environment)
    asks: list[tuple[Service, LeaseAsk]] = []
    for endpoint in chosen_endpoints(asked.endpoints):
        here = requirements_at(endpoint.endpoint_id, requirements)
        if here is None:
            continue
        service = _service(endpoint, environment)
        asks.append((service, LeaseAsk.new(asked.worker_id, here, asked.label, ttl_seconds)))
    if not asks:
        raise ImpossibleRequestError(reasons=(f"no endpoint has a GPU called {', '.join(requirements.only or ())}",))
    return asks


def requirements_of(
    requirement_options: dict[str, Any], environment: MultiEndpointConfigurationManager
) -> Requirements:
    requirements = Requirements(**requirement_options)
    if requirements.share:  # for those, thresholds count only where they are named
        return requirements
    memory, utilization = requirements.memory_threshold, requirements.utilization_threshold
    return replace(
        requirements,
        memory_threshold=environment.get_memory_threshold() if memory is None else memory,
        utilization_threshold=environment.get_utilization_threshold() if utilization is None else utilization,
    )


def load_local() -> None:
    """Beforehand, so that it need not be waited for later."""
    from gpu_worker_pool.cli.running import local_leases  # noqa: F401


def _service(endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager) -> Service:
    if is_local(endpoint):
        from gpu_worker_pool.cli.running.local_leases import LocalLeaseService

        directory = local_state_directory()
        if (warning := new_privacy_warning(directory)) is not None:
            logger.error("%s", warning)
        return LocalLeaseService(
            local_backend(), str(directory), inherited_lease_id=os.environ.get("GPU_POOL_LEASE_ID")
        )
    # HTTP takes longer to load than all the rest: it is not for those who need none.
    from gpu_worker_pool.cli.running.http_leases import http_leases

    return http_leases(endpoint, environment)
