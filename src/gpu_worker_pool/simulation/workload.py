"""Workloads: jobs with their arrival, duration and number of GPUs; from a generator, if wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


class Job(NamedTuple):
    #: Names it: the number of its line in the file, from 0.
    number: int
    arrival_seconds: float
    duration_seconds: float
    gpus: int
    account: str
    #: What it declares about how long it takes; None: nothing.
    expected_seconds: float | None = None

    @property
    def gpu_seconds(self) -> float:
        return self.gpus * self.duration_seconds


def offered_load(jobs: Sequence[Job], gpus: int) -> float:
    """How much of the GPUs' time until the last arrival is asked for; above 1 the queue grows for ever."""
    last = max((job.arrival_seconds for job in jobs), default=0.0)
    work = sum(job.gpu_seconds for job in jobs)
    return work / (gpus * last) if last > 0 else math.inf if work else 0.0


def at_load(jobs: Sequence[Job], gpus: int, load: float) -> list[Job]:
    """The same with all arrivals stretched or compressed by one factor, so that the offered load is `load`."""
    factor = offered_load(jobs, gpus) / load
    if not 0 < factor < math.inf:
        return list(jobs)
    return [job._replace(arrival_seconds=job.arrival_seconds * factor) for job in jobs]


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Sorted by arrival; jobs that arrive at the same moment keep their order."""
    return sorted(jobs, key=lambda job: job.arrival_seconds)


#: By number of GPUs: how many of 1,000 jobs; and of each kind of them its part, the median and how they spread.
_SHAPE = {
    1: (934, ((0.90, 900.0, 1.4), (0.10, 30_000.0, 1.6))),
    2: (22, ((0.75, 22.0, 0.8), (0.25, 100_000.0, 1.2))),
    4: (23, ((1.0, 17_500.0, 2.2),)),
    8: (21, ((1.0, 26_000.0, 2.3),)),
}
#: By how much the number of arrivals differs between days, as the logarithm's standard deviation.
_DAYS_DIFFER = 1.0
#: No job is longer.
_LONGEST_SECONDS = 35 * 86_400.0
#: How many of 1,000 jobs are of each account; the first ones mostly send small jobs in bursts.
_ACCOUNTS = (500, 195, 120, 90, 25, 20, 15, 15, 10, 10)


def generated(number: int, draw: random.Random) -> list[Job]:
    """Jobs of the shape of recorded ones: nearly all want one GPU, few large ones take most of the time, in bursts.

    Run times differ by a factor of a million. Use `at_load`: the arrivals only say which come close together.
    """
    jobs, now = [], 0.0
    sizes, parts = [*_SHAPE], [part for part, _ in _SHAPE.values()]
    accounts = range(len(_ACCOUNTS))
    account, gpus, day, busy = 0, 1, -1, 1.0
    for each in range(number):
        if int(now / 86_400.0) != day:
            day, busy = int(now / 86_400.0), draw.lognormvariate(0.0, _DAYS_DIFFER)
        now += draw.lognormvariate(math.log(58.0), 2.1) / busy
        if draw.random() < 0.3:  # else it belongs to the burst of the one before
            account = draw.choices(accounts, _ACCOUNTS)[0]
            (gpus,) = draw.choices(sizes, parts)
        kinds = _SHAPE[gpus][1]
        (kind,) = draw.choices(kinds, [part for part, _, _ in kinds])
        seconds = min(max(draw.lognormvariate(math.log(kind[1]), kind[2]), 1.0), _LONGEST_SECONDS)
        jobs.append(Job(each, now, seconds, gpus, f"account-{account}"))
    return jobs
