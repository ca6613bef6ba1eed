"""Leases in `/metrics`: by state and by GPU, not by lease, as each would add a time series."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpu_worker_pool.core.moves import LEASE_MOVES, REQUEST_MOVES, RequestState
from gpu_worker_pool.hardware.samples import GPUReading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gpu_worker_pool.broker.broker import LeaseBroker
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.hardware.samples import MIGReading

_BYTES_PER_MB: Final = 1024 * 1024


def lease_metrics(broker: LeaseBroker, gpus: Iterable[GPUReading]) -> Iterator[Metric]:
    """`gpus`: the GPUs that the server shows."""
    is_usable = broker.problem is None
    yield GaugeMetricFamily("gpu_pool_ledger_up", "1 while leases can be granted, else 0.", value=is_usable)
    if not is_usable:
        return
    yield from _totals(broker)
    yield from _by_gpu(broker, gpus)


def _totals(broker: LeaseBroker) -> Iterator[Metric]:
    leases = GaugeMetricFamily("gpu_pool_leases", "Current leases.", labels=["state"])
    for state in (state for state, moves in LEASE_MOVES.items() if moves):
        leases.add_metric([state.value], sum(lease.state is state for lease in broker.leases.values()))
    yield leases
    yield GaugeMetricFamily("gpu_pool_waiting", "Requests that wait.", value=len(broker.waiting))
    yield CounterMetricFamily("gpu_pool_grants", "Leases granted since the ledger was created.", value=broker.fence)
    ended = CounterMetricFamily("gpu_pool_leases_ended", "Leases that ended, by how they ended.", labels=["state"])
    for lease_state in (state for state, moves in LEASE_MOVES.items() if not moves):
        ended.add_metric([lease_state.value], broker.tally.get(lease_state, 0))
    yield ended
    left = CounterMetricFamily("gpu_pool_requests_ended", "Requests that ended without a grant.", labels=["state"])
    for request_state in (state for state, moves in REQUEST_MOVES.items() if not moves):
        if request_state is not RequestState.GRANTED:
            left.add_metric([request_state.value], broker.tally.get(request_state, 0))
    yield left


def _by_gpu(broker: LeaseBroker, gpus: Iterable[GPUReading]) -> Iterator[Metric]:
    labels = ["gpu", "uuid"]
    count = GaugeMetricFamily("gpu_pool_gpu_leases", "Leases on the GPU.", labels=labels)
    promised = GaugeMetricFamily("gpu_pool_gpu_promised_bytes", "Memory promised to holders.", labels=labels)
    used = GaugeMetricFamily("gpu_pool_gpu_lease_used_bytes", "Memory that holders use.", labels=labels)
    idle = GaugeMetricFamily(
        "gpu_pool_gpu_lease_idle_seconds", "How long its holders have left it idle.", labels=labels
    )
    for gpu in gpus:
        names = [str(gpu.index), gpu.identity]
        parts: tuple[GPUReading | MIGReading, ...] = (gpu, *gpu.mig_devices)
        devices = [_Device.of(part, broker.leases.values()) for part in parts]
        leases = {lease.lease_id: lease for device in devices for lease in device.leases}.values()
        count.add_metric(names, len(leases))
        for family, amount in (
            (promised, _sum(device.promised_mb for device in devices)),
            (used, _sum(device.used_mb for device in devices)),
        ):
            if amount is not None:
                family.add_metric(names, amount * _BYTES_PER_MB)
        idle_seconds = [broker.usage_of(lease).idle_seconds for lease in leases]
        known = [seconds for seconds in idle_seconds if seconds is not None]
        if known and len(known) == len(idle_seconds):
            idle.add_metric(names, min(known))
    yield from (count, promised, used, idle)


class _Device(NamedTuple):
    """A GPU or a MIG device, and the leases on it."""

    leases: list[Lease]
    promised_mb: float | None
    used_mb: float | None

    @classmethod
    def of(cls, device: GPUReading | MIGReading, leases: Iterable[Lease]) -> Self:
        name = device.identity if isinstance(device, GPUReading) else device.uuid
        found = sorted((lease for lease in leases if name in lease.gpu_ids), key=lambda lease: lease.fence)
        if not found:
            return cls([], 0.0, 0.0)
        # A lease without an amount has the whole device.
        promised = _sum(lease.request.requirements.memory_mb or device.memory_total_mb for lease in found)
        before = found[0].held[found[0].gpu_ids.index(name)].memory_used_mb
        now = device.memory_used_mb
        return cls(found, promised, None if now is None or before is None else max(now - before, 0.0))


def _sum(amounts: Iterable[float | None]) -> float | None:
    """None if one of them is unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total
