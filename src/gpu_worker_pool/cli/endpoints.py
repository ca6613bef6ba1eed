"""Which endpoints a command means: those it was given, else the documented variables, else this host."""

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
    """Whether the environment, or a word that looks like an option, says something about endpoints."""
    return (
        any(word.startswith(("-e", "--endpoint")) for word in words)
        or MultiEndpointConfigurationManager().is_endpoint_configured()
    )


def is_local(endpoint: EndpointConfig) -> bool:
    return endpoint.url == LOCAL_ENDPOINT


def local_backend() -> str:
    """Which GPUs this host has, or pretends to have. Raises a `ValueError` that says what was expected."""
    text = Environment().text("GPU_BACKEND")
    if not text:
        return "auto"
    from gpu_worker_pool.hardware.readers.choose import check_backend

    return check_backend(text, "GPU_BACKEND")
