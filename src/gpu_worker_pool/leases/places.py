"""The endpoints at which a program of this host acquires GPUs for itself: those it names, as far as they are here."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_worker_pool.config import host_of
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.errors import ImpossibleRequestError, StaleAssignmentError
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
    from gpu_worker_pool.leases.lease import HeldLease

logger: logging.Logger = logging.getLogger(__name__)


class LeasePlace(NamedTuple):
    config: EndpointConfig
    endpoint: LeaseEndpoint
    #: False: its name could not be resolved yet.
    is_known: bool = True


async def places_here(
    engine: LeaseEngine, given: Sequence[str], environment: MultiEndpointConfigurationManager
) -> list[LeasePlace]:
    """Other hosts are left out, such as those of a fleet, whose addresses are alike on all its hosts.

    Raises a `ValueError` or a `GPUWorkerPoolError` that says what to do.
    """
    chosen = chosen_endpoints(given, environment, "service_endpoints")
    others = await others_of(chosen)
    if len(others) == len(chosen):
        raise ValueError(_refusal(others))
    if others:
        logger.info("%s: not asked for GPUs of worker processes, which run here", named(others))
    return [
        LeasePlace(config, engine.endpoint(lease_service(config, environment)), await _is_here(config) is not None)
        for config in chosen
        if config not in others
    ]


async def checked(lease: HeldLease, places: Sequence[LeasePlace], engine: LeaseEngine) -> HeldLease:
    """Raises a `ValueError` if its endpoint is another host after all, whose name could not be resolved before."""
    place = next(each for each in places if each.endpoint.endpoint_id == lease.endpoint_id)
    if place.is_known or await _is_here(place.config):
        return lease
    with suppress(StaleAssignmentError):
        await engine.release(lease)
    raise ValueError(_refusal([place.config]))


async def others_of(endpoints: Sequence[EndpointConfig]) -> list[EndpointConfig]:
    """Those that are other hosts; one whose name cannot be resolved is not known to be one."""
    return [each for each in endpoints if await _is_here(each) is False]


async def _is_here(endpoint: EndpointConfig) -> bool | None:
    return True if is_local(endpoint) else await is_this_host(host_of(endpoint.url))


def _refusal(others: Sequence[EndpointConfig]) -> str:
    return f"{named(others)}, and a worker process runs where its GPU is: use the endpoint of this host, or local://"


def named(others: Sequence[EndpointConfig]) -> str:
    """For messages."""
    are = "is another host" if len(others) == 1 else "are other hosts"
    return f"{', '.join(each.url for each in others)} {are}"


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
