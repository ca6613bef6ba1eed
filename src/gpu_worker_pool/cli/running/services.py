"""Makes the requests of a command: one for each endpoint, with the lease service it is sent to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.hardware.origin import origin
from gpu_worker_pool.leases.endpoint_choice import is_local, lease_service
from gpu_worker_pool.leases.lease import requirements_at, with_new_id
from gpu_worker_pool.leases.places import complete_requirements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.leases.lease import LeaseService


def requests_for(spec: LeaseSpec, endpoints: Sequence[EndpointConfig]) -> list[tuple[LeaseService, Request]]:
    """Raises `ValueError` for invalid requirements, and `ImpossibleRequestError` if no endpoint could grant them."""
    environment = MultiEndpointConfigurationManager()
    ttl_seconds = spec.ttl_seconds or environment.get_lease_ttl()
    requirements = complete_requirements(spec.requirement_options, environment)
    user = None if spec.pid is None else origin(spec.program, spec.pid)
    found: list[tuple[LeaseService, Request]] = []
    if spec.is_private and not all(map(is_local, endpoints)):
        raise ValueError("--private is for this host's GPUs without a server: use it with local:// alone")
    for endpoint in endpoints:
        here = requirements_at(endpoint.endpoint_id, requirements)
        if here is not None:
            request = Request(
                "",
                here,
                spec.worker_id,
                label=spec.label,
                ttl_seconds=ttl_seconds,
                origin=user,
                expected_seconds=spec.expected_seconds,
                max_seconds=spec.max_seconds,
                asks=spec.asks or None,
            )
            found.append((lease_service(endpoint, environment, is_command=True), with_new_id(request)))
    if not found:
        raise ImpossibleRequestError(reasons=(f"no endpoint has a GPU called {', '.join(requirements.only or ())}",))
    return found
