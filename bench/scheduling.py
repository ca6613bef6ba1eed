"""Measures scheduling: waits against EASY backfill, what a flood costs others, and the speed of what decides.

    python -m bench.scheduling [--quick] [--strict]

Waits are ratios of mean waits. The recorded workload is measured where it is there; the generated one has its shape.
`--quick` leaves out the recorded workload and the year on 1,000 GPUs; `--strict` exits with 1 if a target is missed.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from bench.core import TURNS, timed
from gpu_worker_pool.core import Granted, Pool, PoolSettings, Released, Request, Requested, Requirements, Ticked
from gpu_worker_pool.core.settings import FAIR_SHARE_HALF_LIFE_SECONDS
from gpu_worker_pool.simulation.cluster import Cluster, Starts, settings_for_simulation
from gpu_worker_pool.simulation.comparison import Rules, hosts_of, run_pool
from gpu_worker_pool.simulation.files import read_workload
from gpu_worker_pool.simulation.workload import Job, at_load, generated, in_order
from gpu_worker_pool.simulation.yardsticks import easy_backfill, first_come_first_served
from gpu_worker_pool.testing import gpus, snapshot

TRACES = Path(__file__).parents[2] / "shared" / "traces"
HOSTS = hosts_of(8, 8)
LOADS = (0.45, 0.6)
#: What a flood is: so many requests of one account at once.
FLOOD = 300
FLOOD_SECONDS = 3600.0


class Row(NamedTuple):
    what: str
    value: float
    limit: float
    is_upper: bool = True
    unit: str = " x"

    @property
    def is_reached(self) -> bool:
        return self.value <= self.limit if self.is_upper else self.value >= self.limit


# --- waits ---


def waits(jobs: Sequence[Job], starts: Starts, gpus_wanted: int | None = None) -> float:
    found = [
        start.seconds - job.arrival_seconds
        for job, start in zip(jobs, starts, strict=True)
        if start is not None and gpus_wanted in (None, job.gpus)
    ]
    return sum(found) / max(len(found), 1)


def against_easy(
    workloads: Sequence[Sequence[Job]], *, declares: bool, hosts: Sequence[int] = HOSTS
) -> tuple[float, float]:
    """The mean ratios of waits, for all jobs and for those of 8 GPUs; `declares`: every second one says how long."""
    ratios, large = [], []
    for jobs in workloads:
        known = easy_backfill(jobs, hosts)
        declared = [
            job._replace(expected_seconds=job.duration_seconds if declares and job.number % 2 == 0 else None)
            for job in jobs
        ]
        starts = run_pool(declared, hosts, Rules())
        ratios.append(waits(jobs, starts) / waits(jobs, known))
        large.append(waits(jobs, starts, 8) / waits(jobs, known, 8))
    return sum(ratios) / len(ratios), sum(large) / len(large)


def flood_ratio(workloads: Sequence[Sequence[Job]], hosts: Sequence[int] = HOSTS) -> float:
    """How much longer all others wait because of floods, with fair share, against first come, first served."""

    def of_others(jobs: Sequence[Job], starts: Starts) -> float:
        return sum(
            start.seconds - job.arrival_seconds
            for job, start in zip(jobs, starts, strict=True)
            if start is not None and job.account != "flood"
        )

    fair = Rules(fair_share_seconds=FAIR_SHARE_HALF_LIFE_SECONDS)
    cost_fair = cost_first = 0.0
    for jobs in workloads:
        middle = jobs[len(jobs) // 3].arrival_seconds
        flood = [Job(len(jobs) + each, middle, FLOOD_SECONDS, 1, "flood") for each in range(FLOOD)]
        together = in_order([*jobs, *flood])
        cost_fair += of_others(together, run_pool(together, hosts, fair)) - of_others(jobs, run_pool(jobs, hosts, fair))
        cost_first += of_others(together, first_come_first_served(together, hosts))
        cost_first -= of_others(jobs, first_come_first_served(jobs, hosts))
    return cost_fair / cost_first


def generated_workloads(number: int, seeds: Sequence[int], loads: Sequence[float] = LOADS) -> list[list[Job]]:
    return [
        in_order(at_load(generated(number, random.Random(seed)), sum(HOSTS), load))  # noqa: S311
        for seed in seeds
        for load in loads
    ]


def recorded_workloads() -> list[list[Job]]:
    return [
        in_order(at_load(read_workload(path).jobs, sum(HOSTS), load))
        for path in sorted(TRACES.glob("philly-*.csv"))
        for load in LOADS
    ]


# --- speed ---


def cycles(half_life_seconds: float | None, number: int) -> Callable[[], None]:
    """Request and release, uncontended, as a host's ledger has them."""
    pool = Pool(PoolSettings(fair_share_half_life_seconds=half_life_seconds, remember_at_most=1000))
    pool.apply(snapshot(gpus(8), at=0.0), 0.0)
    request, now = Request("", worker_id="worker", account="user:1000", ttl_seconds=60.0), 0.0

    def run() -> None:
        nonlocal now
        for serial in range(number):
            now += 1e-4
            asked = Request(f"{now}-{serial}", worker_id=request.worker_id, account=request.account)
            (granted,) = pool.apply(Requested(asked), now)
            assert isinstance(granted, Granted)
            pool.apply(Released(granted.lease.lease_id), now)

    return run


def fair_share_cost() -> float:
    without, with_it = cycles(None, 5_000), cycles(FAIR_SHARE_HALF_LIFE_SECONDS, 5_000)
    best_without = best_with = float("inf")
    for _ in range(3 * TURNS):
        best_without = min(best_without, timed(without))
        best_with = min(best_with, timed(with_it))
    return best_with / best_without


class Reserved:
    """All GPUs are held, and some reserved for a request for 8; one at a time is released and requested."""

    def __init__(self, number_of_hosts: int) -> None:
        self.pool = Pool(PoolSettings(remember_at_most=1000, poll_seconds=1e9))
        for host in range(number_of_hosts):
            self.pool.apply(snapshot(gpus(8, endpoint_id=str(host)), at=0.0, endpoint_id=str(host)), 0.0)
        self.now, self.serial = 0.0, 0
        self.held: list[str] = []
        for _ in range(8 * number_of_hosts):
            self.ask()
        self.pool.apply(Requested(Request("large", Requirements(count=8))), 1.0)
        self.now = 100.0
        self.ask()  # one waits behind it
        self.pool.apply(Ticked(), self.now)
        self.cycles(8)
        assert self.pool.reserved_for is not None

    def ask(self) -> None:
        self.serial += 1
        for effect in self.pool.apply(Requested(Request(str(self.serial))), self.now):
            if isinstance(effect, Granted):
                self.held.append(effect.lease.lease_id)

    def cycles(self, number: int) -> None:
        for _ in range(number):
            self.now += 1e-3
            reserved = set() if self.pool.reserved_for is None else set(self.pool.reserved_for.reserved)
            # Not of the host that is reserved: it would fill, and the large request begin.
            place = next(
                place
                for place in range(len(self.held) - 1, -1, -1)
                if not reserved & set(self.pool.leases.by_id[self.held[place]].gpu_ids)
            )
            for effect in self.pool.apply(Released(self.held.pop(place)), self.now):
                if isinstance(effect, Granted):
                    self.held.append(effect.lease.lease_id)
            self.ask()


def reserved_cost() -> float:
    small, large = Reserved(8), Reserved(1000)
    best_small = best_large = float("inf")
    for _ in range(TURNS):
        best_small = min(best_small, timed(lambda: small.cycles(300)))
        best_large = min(best_large, timed(lambda: large.cycles(300)))
    return best_large / best_small


def year(number: int = 500_000) -> tuple[float, float]:
    """Events per second, and the memory in MB, for a year on 1,000 GPUs."""
    jobs = in_order(at_load(generated(number, random.Random(1)), 1000, 0.6))  # noqa: S311
    cluster = Cluster(hosts_of(125, 8), Pool(settings_for_simulation(strategy="pack")))
    begun = perf_counter()
    cluster.run(jobs)
    seconds = perf_counter() - begun
    return cluster.events / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- the table ---


def rows(*, is_quick: bool) -> list[Row]:
    found = []
    sources = [("generated", generated_workloads(3_000 if is_quick else 8_000, range(1, 3 if is_quick else 4)))]
    if not is_quick and TRACES.is_dir():
        sources.insert(0, ("recorded", recorded_workloads()))
    for name, workloads in sources:
        for declares, most, most_large in ((False, 1.15, 1.3), (True, 1.0, 1.2)):
            how = "every second time declared" if declares else "nothing declared"
            ratio, large = against_easy(workloads, declares=declares)
            found.append(Row(f"wait against EASY, {name}, {how}", ratio, most))
            found.append(Row("  the same, 8 GPUs", large, most_large))
    flood = flood_ratio(generated_workloads(2_000, range(1, 5), [0.6]))
    found.append(Row(f"what a flood of {FLOOD} costs others, against first come", flood, 0.25))
    found.append(Row("request + release, uncontended, fair share on, against off", fair_share_cost(), 1.25))
    found.append(Row("a cycle with 8 GPUs reserved, 1,000 hosts of 8 against 8 of 8", reserved_cost(), 3.0))
    if not is_quick:
        events, megabytes = year()
        found.append(
            Row("events per second, a year on 1,000 GPUs, 500,000 jobs", events, 3000, is_upper=False, unit="")
        )
        found.append(Row("  the same, memory", megabytes, 400, unit=" MB"))
    return found


def main() -> int:
    is_reached = True
    for row in rows(is_quick="--quick" in sys.argv):
        is_reached &= row.is_reached
        limit = f"{'≤' if row.is_upper else '≥'} {row.limit:g}{row.unit}"
        sign = "" if row.is_reached else "  MISSED"
        print(f"{row.what:<70} {row.value:10.2f}{row.unit}  {limit}{sign}", flush=True)
    return int("--strict" in sys.argv and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
