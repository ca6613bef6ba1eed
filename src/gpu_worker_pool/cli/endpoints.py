"""Whether a command line or its environment names an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.config import MultiEndpointConfigurationManager

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_endpoint_named(words: Sequence[str]) -> bool:
    """`words`: the command line, not parsed yet."""
    return (
        any(word.startswith(("-e", "--endpoint")) for word in words)
        or MultiEndpointConfigurationManager().is_endpoint_configured()
    )
