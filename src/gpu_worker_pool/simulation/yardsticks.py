"""What schedules are compared with: strict first come, first served, and EASY backfill that knows every run time.

EASY cannot be had in practice, since run times are not known in advance. Both pack: of the hosts with enough free
GPUs they choose the one with the fewest. Neither uses the core.
"""

from __future__ import annotations

import math
from bisect import insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from gpu_worker_pool.simulation.cluster import REPORTED_EVENTS, Start, Starts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.simulation.workload import Job


class _Hosts:
    """Free GPUs and running jobs, and the starts so far."""

    def __init__(self, hosts: Sequence[int], jobs: Sequence[Job]) -> None:
        self.free = list(hosts)
        self.jobs = jobs
        self.starts: Starts = [None] * len(jobs)
        #: Of each host, the ends to come and how many GPUs they free.
        self.running: list[list[tuple[float, int, int]]] = [[] for _ in hosts]
        self.ends: list[tuple[float, int, int]] = []

    def tightest(self, gpus: int, closed: int | None = None) -> int | None:
        found: int | None = None
        for host, free in enumerate(self.free):
            if free >= gpus and host != closed and (found is None or free < self.free[found]):
                found = host
        return found

    def begin(self, number: int, host: int, now: float) -> None:
        job = self.jobs[number]
        self.free[host] -= job.gpus
        end = now + job.duration_seconds
        insort(self.running[host], (end, number, job.gpus))
        heappush(self.ends, (end, number, host))
        self.starts[number] = Start(now, host)

    def end_until(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            end, number, host = heappop(self.ends)
            self.free[host] += self.jobs[number].gpus
            self.running[host].remove((end, number, self.jobs[number].gpus))

    def soonest(self, gpus: int, now: float) -> tuple[float, int, int]:
        """When and where as many are free at the earliest, and how many more are then."""
        best: tuple[float, int, int] | None = None
        for host, running in enumerate(self.running):
            free, at = self.free[host], now
            for end, _, number in running:
                if free >= gpus:
                    break
                free, at = free + number, end
            if free >= gpus and (best is None or at < best[0]):
                left = self.free[host] + sum(number for end, _, number in running if end <= at) - gpus
                best = (at, host, left)
        assert best is not None  # jobs that no host can serve were left out
        return best


def first_come_first_served(
    jobs: Sequence[Job], hosts: Sequence[int], on_progress: Callable[[float], object] = lambda _part: None
) -> Starts:
    """No job begins before all that arrived before it have begun."""
    cluster, now = _Hosts(hosts, jobs), 0.0
    for number, job in enumerate(jobs):
        if number % REPORTED_EVENTS == 0:
            on_progress(number / len(jobs))
        if job.gpus > max(hosts):
            continue
        now = max(now, job.arrival_seconds)
        cluster.end_until(now)
        while (host := cluster.tightest(job.gpus)) is None:
            now = cluster.ends[0][0]
            cluster.end_until(now)
        cluster.begin(number, host, now)
    return cluster.starts


def easy_backfill(
    jobs: Sequence[Job], hosts: Sequence[int], on_progress: Callable[[float], object] = lambda _part: None
) -> Starts:
    """The first that must wait has a host reserved, and others may go there only if they do not delay it."""
    cluster = _Hosts(hosts, jobs)
    #: The jobs that wait, in order of arrival.
    waiting: dict[int, None] = {}
    arrivals = [number for number, job in enumerate(jobs) if job.gpus <= max(hosts)]
    place = moments = 0
    while place < len(arrivals) or cluster.ends:
        if moments % REPORTED_EVENTS == 0:
            on_progress((len(arrivals) - len(waiting) - len(cluster.ends) + place) / (2 * len(arrivals)))
        moments += 1
        arrival = jobs[arrivals[place]].arrival_seconds if place < len(arrivals) else math.inf
        now = min(arrival, cluster.ends[0][0] if cluster.ends else math.inf)
        cluster.end_until(now)
        while place < len(arrivals) and jobs[arrivals[place]].arrival_seconds <= now:
            waiting[arrivals[place]] = None
            place += 1
        while waiting and _start_one(cluster, waiting, now):
            pass
    return cluster.starts


def _start_one(cluster: _Hosts, waiting: dict[int, None], now: float) -> bool:
    """Start the first job that may start; False if none may."""
    reserved: tuple[float, int, int] | None = None
    if not any(cluster.free):
        return False
    for number in waiting:
        job = cluster.jobs[number]
        if reserved is None:
            host = cluster.tightest(job.gpus)
            if host is None:
                reserved = cluster.soonest(job.gpus, now)
                continue
        else:
            at, closed, left = reserved
            host = cluster.tightest(job.gpus, closed)
            is_harmless = now + job.duration_seconds <= at or job.gpus <= left
            if host is None and cluster.free[closed] >= job.gpus and is_harmless:
                host = closed
        if host is not None:
            cluster.begin(number, host, now)
            del waiting[number]
            return True
    return False
