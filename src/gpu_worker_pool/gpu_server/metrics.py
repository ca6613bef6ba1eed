"""`/metrics` for Prometheus: base units, a `uuid` label, and no line for unknown values.

All numbers of `gpu_pool` come from samples and a ledger that the workers of a server share: it does not matter which of
them answers. Those of `process` are of the worker that answers.
Leases are counted by state and by GPU, not one by one, as each would add a time series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpu_worker_pool import __version__
from gpu_worker_pool.api.gpu_rows import driver_facts
from gpu_worker_pool.api.lease_rows import name_of_account
from gpu_worker_pool.core.moves import LEASE_MOVES, REQUEST_MOVES, RequestState
from gpu_worker_pool.hardware.samples import GPUReading
from gpu_worker_pool.ledger.records import HOLD_BOUNDS, WAIT_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from gpu_worker_pool.broker.broker import LeaseBroker
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.gpu_server.host_view import HostView, Shown
    from gpu_worker_pool.hardware.samples import MIGReading

_BYTES_PER_MB: Final = 1024 * 1024


def _bytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * _BYTES_PER_MB


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


#: Name, help text, and the value of a GPU.
_GAUGES: Final[tuple[tuple[str, str, Callable[[GPUReading], float | None]], ...]] = (
    ("memory_total_bytes", "Memory of the GPU.", lambda gpu: _bytes(gpu.memory_total_mb)),
    ("memory_used_bytes", "Memory in use.", lambda gpu: _bytes(gpu.memory_used_mb)),
    ("memory_free_bytes", "Memory that is free.", lambda gpu: _bytes(gpu.memory_free_mb)),
    ("utilization_ratio", "Share of the time in which the GPU was busy.", lambda gpu: _ratio(gpu.utilization_percent)),
    ("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature_c),
    ("power_watts", "Power drawn.", lambda gpu: gpu.power_draw_w),
    ("power_limit_watts", "Power the GPU may draw.", lambda gpu: gpu.power_limit_w),
    ("processes", "Processes computing.", lambda gpu: None if gpu.processes is None else len(gpu.processes)),
    ("healthy", "1 for a GPU that may be used, 0 for one with a fault.", lambda gpu: float(gpu.fault is None)),
)
#: Name and help text of what `_lease_values` returns.
_LEASE_GAUGES: Final = {
    "leases": "Leases on the GPU.",
    "promised_bytes": "Memory promised to holders.",
    "lease_used_bytes": "Memory that holders use.",
    "lease_idle_seconds": "How long its holders have left it idle.",
}


def render(
    view: HostView,
    broker: LeaseBroker,
    accept: str,
    totals: Mapping[str, Any],
    of_fleet: Sequence[Metric] = (),
) -> tuple[bytes, str]:
    """The page and its content type, in the format that `accept` prefers; `totals`: of the ledger's life."""
    registry = CollectorRegistry()
    registry.register(_Metrics(view, broker, totals, of_fleet))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Metrics(Collector):
    def __init__(
        self,
        view: HostView,
        broker: LeaseBroker,
        totals: Mapping[str, Any],
        of_fleet: Sequence[Metric],
    ) -> None:
        self._of_fleet = of_fleet
        self._view = view
        self._broker = broker
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("gpu_pool_build_info", "The version that runs.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from _sampling(self._view)
        # Like the other routes, without a sample that is too old.
        shown = self._view.usable()
        if shown is not None:
            yield from _gpus(shown)
        yield from _leases(self._broker, () if shown is None else shown.visibility.gpus)
        if self._broker.problem is None:
            yield from _usage(self._totals)
            if self._broker.policy.policy.names_in_metrics:
                yield from _accounts(self._totals)
        yield from self._of_fleet


def _sampling(view: HostView) -> Iterator[Metric]:
    health, last = view.health(), view.last_sample()
    is_up = health.status != "unhealthy"
    yield GaugeMetricFamily("gpu_pool_up", "1 while the readings can be used, 0 while they cannot.", value=is_up)
    if (age := health.sample_age_seconds) is not None:
        yield GaugeMetricFamily("gpu_pool_sample_age_seconds", "Age of the last good sample.", value=age)
    if last is not None:
        yield CounterMetricFamily("gpu_pool_samples", "Samples taken of this host's GPUs.", value=last.number)
        yield CounterMetricFamily("gpu_pool_sample_failures", "Samples that failed.", value=last.failed_total)
        took = last.took_seconds
        yield GaugeMetricFamily("gpu_pool_sample_duration_seconds", "How long the last sample took.", value=took)


def _gpus(shown: Shown) -> Iterator[Metric]:
    gpus = shown.visibility.gpus
    yield GaugeMetricFamily("gpu_pool_gpus", "GPUs that this server shows.", value=len(gpus))
    info = GaugeMetricFamily(
        "gpu_pool_gpu_info", "What the GPU is.", labels=["gpu", "uuid", "name", "pci_bus_id", "driver_version"]
    )
    driver_version = driver_facts(shown.sample)["driver_version"] or ""
    for gpu in gpus:
        info.add_metric([str(gpu.index), gpu.identity, gpu.name, gpu.pci_bus_id or "", driver_version], 1)
    yield info
    for name, documentation, value_of in _GAUGES:
        yield _by_gpu(name, documentation, gpus, map(value_of, gpus))
    yield _by_gpu(
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded.",
        gpus,
        (gpu.ecc_uncorrected_errors for gpu in gpus),
        CounterMetricFamily,
    )


def _by_gpu(
    name: str,
    documentation: str,
    gpus: Sequence[GPUReading],
    values: Iterable[float | None],
    kind: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(f"gpu_pool_gpu_{name}", documentation, labels=["gpu", "uuid"])
    for gpu, value in zip(gpus, values, strict=True):
        if value is not None:
            family.add_metric([str(gpu.index), gpu.identity], value)
    return family


# --- leases ---


def _leases(broker: LeaseBroker, gpus: Sequence[GPUReading]) -> Iterator[Metric]:
    is_usable = broker.problem is None
    yield GaugeMetricFamily("gpu_pool_ledger_up", "1 while leases can be granted, else 0.", value=is_usable)
    if not is_usable:
        return
    leases = GaugeMetricFamily("gpu_pool_leases", "Current leases.", labels=["state"])
    ended = CounterMetricFamily("gpu_pool_leases_ended", "Leases that ended, by how they ended.", labels=["state"])
    for state, moves in LEASE_MOVES.items():
        if moves:
            leases.add_metric([state.value], sum(lease.state is state for lease in broker.leases.values()))
        else:
            ended.add_metric([state.value], broker.tally.get(state, 0))
    yield leases
    yield GaugeMetricFamily("gpu_pool_waiting", "Requests that wait.", value=len(broker.waiting))
    yield CounterMetricFamily("gpu_pool_grants", "Leases granted since the ledger was created.", value=broker.grants)
    yield ended
    left = CounterMetricFamily("gpu_pool_requests_ended", "Requests that ended without a grant.", labels=["state"])
    for request_state, request_moves in REQUEST_MOVES.items():
        if not request_moves and request_state is not RequestState.GRANTED:
            left.add_metric([request_state.value], broker.tally.get(request_state, 0))
    yield left
    held: dict[str, list[Lease]] = {}
    for lease in broker.leases.values():
        if lease.within not in broker.leases:  # each stands for those inside it
            for gpu_id in lease.gpu_ids:
                held.setdefault(gpu_id, []).append(lease)
    values = [_lease_values(gpu, broker, held) for gpu in gpus]
    for name, documentation in _LEASE_GAUGES.items():
        yield _by_gpu(name, documentation, gpus, (of_gpu[name] for of_gpu in values))


def _usage(totals: Mapping[str, Any]) -> Iterator[Metric]:
    """Of leases that have ended; counted when they are written to the usage file, a second later."""
    for name, documentation, bounds in (
        ("wait_seconds", "How long granted requests had waited.", WAIT_BOUNDS),
        ("hold_seconds", "How long leases were held.", HOLD_BOUNDS),
    ):
        found = totals.get(name) or {"counts": [0] * (len(bounds) + 1), "sum": 0.0}
        buckets, count = [], 0
        for bound, more in zip((*map(str, bounds), "+Inf"), found["counts"], strict=False):
            count += more
            buckets.append((bound, count))
        yield HistogramMetricFamily(f"gpu_pool_{name}", documentation, buckets=buckets, sum_value=found["sum"])


#: Of an account, by its name in the totals.
_ACCOUNT_COUNTERS: Final = {
    "leases": ("leases", "Leases of the account that have ended."),
    "gpu_seconds": ("gpu_seconds", "GPU time of the account's ended leases; shares count in proportion to memory."),
    "idle_gpu_seconds": ("idle_gpu_seconds", "The part of that GPU time that was observed as idle."),
}


def _accounts(totals: Mapping[str, Any]) -> Iterator[Metric]:
    accounts: Mapping[str, Mapping[str, float]] = totals.get("accounts", {})
    for key, (name, documentation) in _ACCOUNT_COUNTERS.items():
        family = CounterMetricFamily(f"gpu_pool_account_{name}", documentation, labels=["account"])
        named: dict[str, float] = {}
        for account, values in accounts.items():
            shown = name_of_account(account)
            named[shown] = named.get(shown, 0.0) + values.get(key, 0.0)
        for shown, value in named.items():
            family.add_metric([shown], value)
        yield family


def _lease_values(gpu: GPUReading, broker: LeaseBroker, held: dict[str, list[Lease]]) -> dict[str, float | None]:
    """`held`: the leases of each device."""
    devices: tuple[GPUReading | MIGReading, ...] = (gpu, *gpu.mig_devices)
    found = [(device, sorted(held.get(_name_of(device), ()), key=lambda lease: lease.fence)) for device in devices]
    leases = {lease.lease_id: lease for _, on_device in found for lease in on_device}.values()
    # A lease without an amount has the whole device.
    promised = [each.request.requirements.memory_mb or device.memory_total_mb for device, on in found for each in on]
    idle = [broker.usage_of(lease).idle_seconds for lease in leases]
    known = [seconds for seconds in idle if seconds is not None]
    return {
        "leases": len(leases),
        "promised_bytes": _bytes(_sum(promised)),
        "lease_used_bytes": _bytes(_sum(_used_mb(device, on_device) for device, on_device in found)),
        "lease_idle_seconds": min(known) if known and len(known) == len(idle) else None,
    }


def _used_mb(device: GPUReading | MIGReading, leases: list[Lease]) -> float | None:
    """What is in use now, less what was in use before the first of the leases, which is the oldest."""
    if not leases:
        return 0.0
    before = leases[0].held[leases[0].gpu_ids.index(_name_of(device))].memory_used_mb
    now = device.memory_used_mb
    return None if now is None or before is None else max(now - before, 0.0)


def _name_of(device: GPUReading | MIGReading) -> str:
    return device.identity if isinstance(device, GPUReading) else device.uuid


def _sum(amounts: Iterable[float | None]) -> float | None:
    """None if one of them is unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total
