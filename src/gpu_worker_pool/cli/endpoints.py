"""Chooses the endpoints of a command: its options, else the documented variables, else `local://`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.config import LOCAL_ENDPOINT, EndpointConfig, MultiEndpointConfigurationManager, parse_endpoints
from gpu_worker_pool.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL = EndpointConfig("local", LOCAL_ENDPOINT)


def chosen_endpoints(
    given: Sequence[str], environment: MultiEndpointConfigurationManager | None = None
) -> tuple[EndpointConfig, ...]:
    """Raises a `ValueError` that says what was expected."""
    if given:
        return parse_endpoints([entry for text in given for entry in text.split(",")], "--endpoint")
    environment = environment or MultiEndpointConfigurationManager()
    if not environment.is_endpoint_configured():
        return (LOCAL,)
    return tuple(environment.get_service_endpoints())


def is_endpoint_named(words: Sequence[str]) -> bool:
    """Whether the environment or the command line names an endpoint."""
    return (
        any(word.startswith(("-e", "--endpoint")) for word in words)
        or MultiEndpointConfigurationManager().is_endpoint_configured()
    )


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
