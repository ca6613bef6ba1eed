"""Rule 3 across endpoints: which of those that can serve a request serves it. The lowest rank wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.core.gpus import EndpointState
    from gpu_worker_pool.core.settings import Strategy


class Balancer(Protocol):
    def rank(self, endpoint: EndpointState) -> tuple[Any, ...]: ...

    def chosen(self, endpoint: EndpointState) -> None:
        """The endpoint was given a request; only its own rank may change by that."""


class Availability:
    """The largest share of free GPUs, then the most of them; equal ones take turns."""

    def rank(self, endpoint: EndpointState) -> tuple[Any, ...]:
        free = len(endpoint.free)
        return (-free / max(endpoint.present, 1), -free, endpoint.last_fence, endpoint.order, endpoint)

    def chosen(self, endpoint: EndpointState) -> None:
        """`last_fence` already says that it had its turn."""


class Pack:
    """The fewest free GPUs that suffice, so that whole hosts stay free for large requests."""

    def rank(self, endpoint: EndpointState) -> tuple[Any, ...]:
        return (len(endpoint.free), endpoint.order, endpoint)

    def chosen(self, endpoint: EndpointState) -> None:
        """It has fewer free GPUs now, which is all that counts."""


class Turns:
    """Each endpoint in its turn; one of weight 3 has three turns where one of weight 1 has one.

    Every turn adds 1/weight to an endpoint's total, and the endpoint with the lowest total is next. One that
    could not serve for a while does not catch up: it starts where the others are.
    """

    def __init__(self, *, is_weighted: bool) -> None:
        self._is_weighted = is_weighted
        self._road = 0.0

    def rank(self, endpoint: EndpointState) -> tuple[Any, ...]:
        return (endpoint.turn, endpoint.order, endpoint)

    def chosen(self, endpoint: EndpointState) -> None:
        self._road = max(self._road, endpoint.turn)
        weight = max(endpoint.present, 1) if self._is_weighted else 1
        endpoint.turn = self._road + 1 / weight


def balancer_for(strategy: Strategy) -> Balancer:
    if strategy == "availability":
        return Availability()
    if strategy == "pack":
        return Pack()
    return Turns(is_weighted=strategy == "weighted")
