"""The endpoints at which a program of this host acquires GPUs for itself: those it names, as far as they are here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_worker_pool.config import host_of
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ImpossibleRequestError
from gpu_worker_pool.leases.acquisition import Candidate
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints, is_local, lease_service
from gpu_worker_pool.leases.lease import requirements_at, with_new_id
from gpu_worker_pool.leases.this_host import is_this_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.leases.endpoint import LeaseEndpoint
    from gpu_worker_pool.leases.engine import LeaseEngine


class LeasePlace(NamedTuple):
    config: EndpointConfig
    endpoint: LeaseEndpoint


async def places_here(
    engine: LeaseEngine, given: Sequence[str], environment: MultiEndpointConfigurationManager
) -> list[LeasePlace]:
    """Raises a `ValueError` or a `GPUWorkerPoolError` that says what to do."""
    places = []
    for config in chosen_endpoints(given, environment, "service_endpoints"):
        if not is_local(config) and await is_this_host(host_of(config.url)) is False:
            raise ValueError(
                f"{config.url} is another host, and a worker process runs where its GPU is: use the endpoint of this "
                "host, or local://"
            )
        places.append(LeasePlace(config, engine.endpoint(lease_service(config, environment))))
    return places


def complete_requirements(options: dict[str, Any], environment: MultiEndpointConfigurationManager) -> Requirements:
    """With the thresholds of the environment. Raises a `ValueError`."""
    requirements = Requirements(**options)
    if not requirements.has_default_thresholds:
        return requirements
    memory, utilization = requirements.memory_threshold, requirements.utilization_threshold
    return replace(
        requirements,
        memory_threshold=environment.get_memory_threshold() if memory is None else memory,
        utilization_threshold=environment.get_utilization_threshold() if utilization is None else utilization,
    )


def candidates_at(places: Sequence[LeasePlace], request: Request) -> list[Candidate]:
    """The request as it is sent to each of them. Raises an `ImpossibleRequestError` if it names GPUs of none."""
    found = []
    for place in places:
        here = requirements_at(place.config.endpoint_id, request.requirements)
        if here is not None:
            found.append(Candidate(place.endpoint, with_new_id(request, here)))
    if not found:
        names = ", ".join(request.requirements.only or ())
        raise ImpossibleRequestError(reasons=(f"no endpoint has a GPU called {names}",))
    return found
