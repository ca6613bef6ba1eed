"""What holders make of their GPUs, sample by sample."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.broker.usage import LeaseUsage, LeaseUsages
from gpu_worker_pool.core import HeldGPU, Lease, LeaseState, Request
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading, HostSample, MIGReading


def sample(at: float, *gpus: GPUReading) -> HostSample:
    return HostSample(1, 0, at, 0.0, "", DriverAnswer(gpus))


def card(name: str, used: float | None, utilization: float | None) -> GPUReading:
    return GPUReading(0, "GPU", uuid=name, memory_used_mb=used, utilization_percent=utilization)


def lease(*held: HeldGPU, state: LeaseState = LeaseState.HELD) -> Lease:
    gpu_ids = tuple(gpu.gpu_id for gpu in held)
    return Lease("lease-1", Request("r"), "", gpu_ids, held, 1, state, 0.0, 0.0, 60.0)


ONE = lease(HeldGPU("a", memory_used_mb=100.0))
TWO = lease(HeldGPU("a", memory_used_mb=100.0), HeldGPU("b", memory_used_mb=0.0))


def test_nothing_is_known_before_the_first_sample() -> None:
    assert LeaseUsages(10.0).of(ONE, 5.0) == LeaseUsage()


def test_memory_above_what_was_there_before_on_all_its_gpus() -> None:
    usages = LeaseUsages(10.0)
    usages.take(sample(1.0, card("a", 1_100.0, 0.0), card("b", 500.0, 0.0)), [TWO])
    assert usages.of(TWO, 1.0).memory_used_mb == 1_500.0
    usages.take(sample(2.0, card("a", 50.0, 0.0), card("b", 500.0, 0.0)), [TWO])
    assert usages.of(TWO, 2.0).memory_used_mb == 500.0, "less than before the grant is nothing, not less than nothing"
    usages.take(sample(3.0, card("a", None, 0.0), card("b", 500.0, 0.0)), [TWO])
    assert usages.of(TWO, 3.0).memory_used_mb is None
    usages.take(sample(4.0, card("a", 5.0, 0.0)), [TWO])
    assert usages.of(TWO, 4.0).memory_used_mb is None, "one of its GPUs is missing"
    unknown = lease(HeldGPU("a"))
    usages.take(sample(5.0, card("a", 5.0, 0.0)), [unknown])
    assert usages.of(unknown, 5.0).memory_used_mb is None


def test_idle_time_counts_from_the_last_sample_in_which_any_of_its_gpus_computed() -> None:
    usages = LeaseUsages(10.0)
    usages.take(sample(1.0, card("a", 0.0, 0.0), card("b", 0.0, 0.0)), [TWO])
    assert usages.of(TWO, 3.0) == LeaseUsage(0.0, 2.0, False)
    usages.take(sample(4.0, card("a", 0.0, 0.0), card("b", 0.0, 5.0)), [TWO])
    assert usages.of(TWO, 5.0).idle_seconds == 1.0
    usages.take(sample(9.0, card("a", 0.0, 0.0), card("b", 0.0, 0.0)), [TWO])
    assert not usages.of(TWO, 13.9).is_idle
    assert usages.of(TWO, 14.0) == LeaseUsage(0.0, 10.0, True)
    usages.take(sample(15.0, card("a", 0.0, None), card("b", 0.0, 0.0)), [TWO])
    assert usages.of(TWO, 15.0).idle_seconds is None
    usages.take(sample(16.0, card("a", 0.0, 0.0), card("b", 0.0, 0.0)), [TWO])
    assert usages.of(TWO, 17.0).idle_seconds == 1.0, "what happened meanwhile is not known"
    assert usages.of(TWO, 15.5).idle_seconds == 0.0


def test_a_mig_device_tells_its_memory_and_not_whether_it_computes() -> None:
    device = MIGReading("MIG-a", "1g.10gb", memory_used_mb=300.0)
    split = replace(card("a", 900.0, None), mig_devices=(device,))
    on_it = lease(HeldGPU("MIG-a", memory_used_mb=100.0))
    usages = LeaseUsages(10.0)
    usages.take(sample(1.0, split), [on_it])
    assert usages.of(on_it, 50.0) == LeaseUsage(200.0, None, False)


def test_what_is_not_held_any_more_is_forgotten() -> None:
    usages = LeaseUsages(10.0)
    usages.take(sample(1.0, card("a", 900.0, 0.0)), [ONE])
    usages.take(sample(2.0, card("a", 900.0, 0.0)), [replace(ONE, state=LeaseState.OFFERED)])
    assert usages.of(ONE, 3.0) == LeaseUsage()
    usages.take(sample(3.0, card("a", 900.0, 0.0)), [ONE])
    assert usages.of(ONE, 4.0).idle_seconds == 1.0
