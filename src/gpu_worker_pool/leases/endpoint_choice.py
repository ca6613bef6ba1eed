"""Chooses the endpoints of a program that names none, and makes a lease service for each of them.

The command line, the executor and the pytest plugin choose in the same way: the given endpoints, else the
documented variables, else `local://`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from gpu_worker_pool.config import LOCAL_ENDPOINT, EndpointConfig, MultiEndpointConfigurationManager, parse_endpoints
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import ServiceRefusedError
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.state_directory import announce_privacy, state_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpu_worker_pool.leases.lease import LeaseService

logger: logging.Logger = logging.getLogger(__name__)

LOCAL = EndpointConfig("local", LOCAL_ENDPOINT)


def chosen_endpoints(
    given: Sequence[str], environment: MultiEndpointConfigurationManager | None = None, name: str = "--endpoint"
) -> tuple[EndpointConfig, ...]:
    """`name`: of the option or argument they were given by. Raises a `ValueError` that says what was expected."""
    if given:
        return parse_endpoints([entry for text in given for entry in text.split(",")], name)
    environment = environment or MultiEndpointConfigurationManager()
    if not environment.is_endpoint_configured():
        return (LOCAL,)
    return tuple(environment.get_service_endpoints())


def is_local(endpoint: EndpointConfig) -> bool:
    return endpoint.url == LOCAL_ENDPOINT


def local_backend() -> str:
    """`GPU_BACKEND`, with simulated outsiders. Raises a `ValueError` that says what was expected."""
    environment = Environment(complain=_raise)
    text = environment.text("GPU_BACKEND")
    if not text:
        return "auto"
    from gpu_worker_pool.hardware.readers.choose import check_backend, complete_backend, read_outsiders

    backend = check_backend(text, "GPU_BACKEND")
    return complete_backend(backend, read_outsiders(backend, environment))


def _raise(problem: str) -> None:
    raise ValueError(problem.removesuffix("; ignoring it"))


def local_state_directory() -> Path:
    """Raises a `ServiceRefusedError` that says what to do."""
    try:
        return state_directory()
    except OSError as error:
        raise ServiceRefusedError(f"no usable state directory: {error}") from None


def granting_state_directory() -> Path:
    """The same for a program that acquires GPUs; it reports if only this user's jobs are coordinated."""
    directory = local_state_directory()
    announce_privacy(say=logger.error)
    return directory


def lease_service(
    endpoint: EndpointConfig, environment: MultiEndpointConfigurationManager, *, is_command: bool = False
) -> LeaseService:
    """Its requests divide the lease inside which this program runs, if there is one.

    `is_command`: errors advise the user of a command, and not a Python programmer.
    """
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
    from gpu_worker_pool.api.client import IN_PYTHON, ON_COMMAND_LINE
    from gpu_worker_pool.leases.remembered import server_leases

    return server_leases(endpoint, environment, ON_COMMAND_LINE if is_command else IN_PYTHON)
