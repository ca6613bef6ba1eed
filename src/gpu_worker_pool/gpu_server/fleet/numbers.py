"""The metrics of a server in a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpu_worker_pool.core.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

#: All states, so that one that no host is in any more goes back to 0.
HOST_STATES: Final = ("up", "draining", "unreachable", "incompatible")


@record
class FleetNumbers:
    """None: this server does not know the value, which only the dispatcher or only candidates know."""

    #: To candidates.
    links: int
    is_dispatcher: bool = False
    is_database_up: bool | None = None
    commit_seconds: float | None = None
    takeovers: int | None = None
    grants: int | None = None
    refusals: int | None = None
    epoch: int | None = None
    waiting: int | None = None
    #: The longest silence of a host that has a link.
    lag_seconds: float | None = None
    #: By state.
    hosts: Mapping[str, int] | None = None


def fleet_metrics(numbers: FleetNumbers) -> Iterator[Metric]:
    gauges = (
        ("links", "Links of this host to candidates of its fleet.", numbers.links),
        ("is_dispatcher", "1 at the server that is the dispatcher.", int(numbers.is_dispatcher)),
        ("database_up", "1 while the database answers this candidate.", numbers.is_database_up),
        ("commit_seconds", "How long the last answer of the database took.", numbers.commit_seconds),
        ("epoch", "Grows with every new dispatcher.", numbers.epoch),
        ("waiting", "Requests that wait in the fleet.", numbers.waiting),
        ("lag_seconds", "Longest silence of a host that has a link.", numbers.lag_seconds),
    )
    for name, documentation, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(f"gpu_pool_fleet_{name}", documentation, value=float(value))
    counters = (
        ("grants", "Leases granted by this dispatcher.", numbers.grants),
        ("refusals", "Placements that hosts have refused.", numbers.refusals),
        ("takeovers", "How often this server became dispatcher.", numbers.takeovers),
    )
    for name, documentation, value in counters:
        if value is not None:
            yield CounterMetricFamily(f"gpu_pool_fleet_{name}", documentation, value=value)
    if numbers.hosts is not None:
        hosts = GaugeMetricFamily("gpu_pool_fleet_hosts", "Hosts of the fleet by state.", labels=["state"])
        for state in HOST_STATES:
            hosts.add_metric([state], numbers.hosts.get(state, 0))
        yield hosts
