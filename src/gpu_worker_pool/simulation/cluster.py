"""Runs the core over a workload: hosts whose GPUs are idle unless held, and jobs that hold them for a while."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.core.effects import Ended, Granted, WakeAt
from gpu_worker_pool.core.events import Observed, PolicyRead, Released, Request, Requested, Ticked
from gpu_worker_pool.core.readings import Reading
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.errors import PolicyLimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.core.effects import Effect
    from gpu_worker_pool.core.policy import Policy
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.simulation.workload import Job

#: Progress is reported after this many events.
REPORTED_EVENTS = 2_000


class Start(NamedTuple):
    """When and where a job began."""

    seconds: float
    host: int


#: By job, in the order of the jobs; None: it could never begin.
Starts = list[Start | None]


def settings_for_simulation(**rules: object) -> PoolSettings:
    """The rules, without what depends on readings: a simulated GPU is idle the moment it is released."""
    return PoolSettings(
        poll_seconds=1e12,
        reading_delays_seconds=(0.0,),
        remembers_releases=False,
        remember_at_most=1000,
        **rules,  # type: ignore[arg-type]
    )


class Cluster:
    """A pool of equal hosts, driven by the arrivals and ends of jobs as a host's clock would drive it."""

    def __init__(
        self,
        hosts: Sequence[int],
        pool: Pool,
        policy: Policy | None = None,
        groups_of: Callable[[str], tuple[str, ...] | None] = lambda _account: None,
    ) -> None:
        """`hosts`: how many GPUs each has. `groups_of` an account, by which the policy may limit it."""
        self.pool = pool
        self._groups_of = groups_of
        #: How many events the core handled.
        self.events: int = 0
        #: By job.
        self._starts: dict[str, Start] = {}
        #: Ends to come: when, which job, and its lease.
        self._ends: list[tuple[float, int, str]] = []
        self._jobs: dict[str, Job] = {}
        self._wake_at = math.inf
        self._requirements: dict[int, Requirements] = {1: ANY_GPU}
        for host, size in enumerate(hosts):
            name = str(host)
            readings = tuple(
                Reading(f"{name}:{index}", index, "GPU", None, 80_000.0, 0.0, 0.0, 0.0) for index in range(size)
            )
            self.pool.apply(Observed(name, readings, 0.0), 0.0)
        if policy is not None:
            self.pool.apply(PolicyRead(policy), 0.0)

    def run(self, jobs: Sequence[Job], on_progress: Callable[[float], object] | None = None) -> Starts:
        """`jobs`: in order of arrival. `on_progress` is called with the part of the work that is done."""
        arrivals = iter(jobs)
        coming = next(arrivals, None)
        done = 0
        while coming is not None or self._ends:
            at = min(
                math.inf if coming is None else coming.arrival_seconds, self._ends[0][0] if self._ends else math.inf
            )
            if self._wake_at <= at:
                at, self._wake_at = self._wake_at, math.inf
                self._apply(Ticked(), at)
                continue
            if self._ends and self._ends[0][0] <= at:
                _, _, lease_id = heappop(self._ends)
                self._apply(Released(lease_id), at)
                done += 1
            else:
                assert coming is not None
                self._arrive(coming, at)
                coming = next(arrivals, None)
                done += 1
            if on_progress is not None and done % REPORTED_EVENTS == 0:
                on_progress(done / (2 * len(jobs)))
        return [self._starts.get(str(job.number)) for job in jobs]

    def _arrive(self, job: Job, at: float) -> None:
        requirements = self._requirements.get(job.gpus)
        if requirements is None:
            requirements = self._requirements[job.gpus] = Requirements(count=job.gpus)
        name = str(job.number)
        self._jobs[name] = job
        request = Request(
            name,
            requirements,
            account=job.account,
            expected_seconds=job.expected_seconds,
            groups=self._groups_of(job.account),
        )
        try:
            self._apply(Requested(request), at)
        except PolicyLimitError:  # too many of its account wait: it is refused, and not sent again
            del self._jobs[name]

    def _apply(self, event: Released | Requested | Ticked, at: float) -> None:
        self.events += 1
        for effect in self.pool.apply(event, at):
            self._perform(effect, at)

    def _perform(self, effect: Effect, at: float) -> None:
        if isinstance(effect, Granted):
            job = self._jobs.pop(effect.lease.request.request_id)
            self._starts[effect.lease.request.request_id] = Start(at, int(effect.lease.endpoint_id))
            heappush(self._ends, (at + job.duration_seconds, job.number, effect.lease.lease_id))
        elif isinstance(effect, WakeAt):
            self._wake_at = min(self._wake_at, effect.at)
        elif isinstance(effect, Ended):
            del self._jobs[effect.request_id]  # no host can ever serve it, or the policy never allows it
