"""`/metrics` for Prometheus: base units, a `uuid` label, and no line for unknown values.

All numbers come from the samples that the workers of a server share, so that it does not matter which one answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from gpu_worker_pool import __version__
from gpu_worker_pool.api.gpu_rows import driver_facts
from gpu_worker_pool.gpu_server.leases.metrics import lease_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from gpu_worker_pool.broker.broker import LeaseBroker
    from gpu_worker_pool.gpu_server.host_view import HostView, Shown
    from gpu_worker_pool.hardware.samples import GPUReading

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
    (
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded.",
        lambda gpu: gpu.ecc_uncorrected_errors,
    ),
    ("processes", "Processes computing.", lambda gpu: None if gpu.processes is None else len(gpu.processes)),
    ("healthy", "1 for a GPU that may be used, 0 for one with a fault.", lambda gpu: float(gpu.fault is None)),
)


def render(view: HostView, broker: LeaseBroker, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that `accept` prefers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view, broker))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collector:
    def __init__(self, view: HostView, broker: LeaseBroker) -> None:
        self._view = view
        self._broker = broker

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("gpu_pool_build_info", "The version that runs.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from self._sampling()
        # Like the other routes, without a sample that is too old.
        shown = self._view.usable()
        if shown is not None:
            yield from _gpus(shown)
        yield from lease_metrics(self._broker, () if shown is None else shown.visibility.gpus)

    def _sampling(self) -> Iterator[Metric]:
        health = self._view.health()
        yield GaugeMetricFamily(
            "gpu_pool_up", "1 while the readings can be used, 0 while they cannot.", value=health.status != "unhealthy"
        )
        if health.sample_age_seconds is not None:
            yield GaugeMetricFamily(
                "gpu_pool_sample_age_seconds", "Age of the last good sample.", value=health.sample_age_seconds
            )
        last = self._view.last_sample()
        if last is not None:
            yield CounterMetricFamily("gpu_pool_samples", "Samples taken of this host's GPUs.", value=last.number)
            yield CounterMetricFamily("gpu_pool_sample_failures", "Samples that failed.", value=last.failed_total)
            yield GaugeMetricFamily(
                "gpu_pool_sample_duration_seconds",
                "How long the last sample took.",
                value=last.took_seconds,
            )


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
    for name, documentation, take in _GAUGES:
        family = GaugeMetricFamily(f"gpu_pool_gpu_{name}", documentation, labels=["gpu", "uuid"])
        for gpu in gpus:
            value = take(gpu)
            if value is not None:
                family.add_metric([str(gpu.index), gpu.identity], value)
        yield family
