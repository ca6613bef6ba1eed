"""Requests that only say how many GPUs they want: with and without the index, every start is the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest

from gpu_worker_pool.core import Pool, PoolSettings, Requirements, Strategy
from gpu_worker_pool.core.allocator import GPUAllocator
from gpu_worker_pool.simulation.cluster import Cluster, Starts, settings_for_simulation
from gpu_worker_pool.simulation.files import read_workload
from gpu_worker_pool.simulation.workload import Job, at_load, generated, in_order

TRACES = Path(__file__).parents[4] / "shared" / "traces"


class AllocatorWithoutIndex(GPUAllocator):
    """Looks at every GPU for every request."""

    def is_any_gpu(self, requirements: Requirements) -> bool:  # noqa: ARG002  # never
        return False


def starts(jobs: list[Job], settings: PoolSettings, *, is_indexed: bool, hosts: tuple[int, ...] = (8,) * 4) -> Starts:
    pool = Pool(settings)
    if not is_indexed:
        pool.allocator.__class__ = AllocatorWithoutIndex
    cluster = Cluster(hosts, pool)
    cluster._requirements[1] = Requirements()  # not the one that the pool knows by identity
    return cluster.run(jobs)


@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize("declares", [False, True])
def test_every_start_is_the_same_without_the_index(strategy: Strategy, declares: bool) -> None:
    draw = random.Random(7)
    jobs = in_order(at_load(generated(700, draw), 32, 1.5))
    if declares:
        jobs = [job._replace(expected_seconds=job.duration_seconds) if draw.random() < 0.5 else job for job in jobs]
    settings = settings_for_simulation(strategy=strategy)
    with_index = starts(jobs, settings, is_indexed=True, hosts=(8, 8, 10, 4, 2))
    assert with_index == starts(jobs, settings, is_indexed=False, hosts=(8, 8, 10, 4, 2))
    assert None not in with_index
    waited = sum(start.seconds > job.arrival_seconds for start, job in zip(with_index, jobs, strict=True) if start)
    assert waited > 50  # it was contended


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded workload is not here")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_start_of_the_recorded_workload_is_the_same_without_the_index(number: int) -> None:
    jobs = in_order(at_load(read_workload(TRACES / f"philly-{number}.csv").jobs, 64, 0.6))
    settings = settings_for_simulation(strategy="pack")
    first, second = (starts(jobs, settings, is_indexed=is_indexed, hosts=(8,) * 8) for is_indexed in (True, False))
    assert first == second
