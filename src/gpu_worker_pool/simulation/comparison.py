"""One workload, scheduled in several ways: by the core as asked for and as configured, and by two yardsticks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.ledger.policy_file import groups_of
from gpu_worker_pool.simulation.cluster import Cluster, Starts, settings_for_simulation
from gpu_worker_pool.simulation.measures import measures
from gpu_worker_pool.simulation.policies import cut_short, without_times
from gpu_worker_pool.simulation.workload import at_load, in_order
from gpu_worker_pool.simulation.yardsticks import easy_backfill, first_come_first_served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker_pool.core.policy import Policy
    from gpu_worker_pool.core.settings import Strategy
    from gpu_worker_pool.simulation.workload import Job

    #: Called with the name of a schedule and the part of it that is done.
    OnProgress = Callable[[str, float], object]

ASKED, CONFIGURED = "the pool as asked for", "the pool as configured"
FIRST_COME, EASY = "first come, first served", "EASY, all run times known"
#: In the order in which they are shown, with their names in JSON.
NAMES: Final = {ASKED: "asked", CONFIGURED: "configured", FIRST_COME: "first_come_first_served", EASY: "easy"}


@dataclass(frozen=True)
class Rules:
    """What can differ between two runs of the pool."""

    strategy: Strategy = "pack"
    #: The half-life of use; None: fair share is off.
    fair_share_seconds: float | None = None
    #: What limits accounts; None: nothing does.
    policy: Policy | None = None


@dataclass(frozen=True)
class Schedule:
    jobs: Sequence[Job]
    starts: Starts
    gpus: int

    def measures(self) -> dict[str, Any]:
        return measures(self.jobs, self.starts, self.gpus)


def hosts_of(hosts: int, gpus_per_host: int, add_gpus: int = 0) -> tuple[int, ...]:
    """How many GPUs each host has; more GPUs come in hosts of the same size, the last of which may be smaller."""
    full, rest = divmod(add_gpus, gpus_per_host)
    return (gpus_per_host,) * (hosts + full) + ((rest,) if rest else ())


def run_pool(
    jobs: Sequence[Job], hosts: Sequence[int], rules: Rules, on_progress: Callable[[float], object] | None = None
) -> Starts:
    """The core, over jobs in order of arrival."""
    policy = rules.policy
    settings = settings_for_simulation(
        strategy=rules.strategy,
        fair_share_half_life_seconds=rules.fair_share_seconds,
        tells_accounts_apart=policy is not None,
    )
    if policy is None:
        return Cluster(hosts, Pool(settings)).run(jobs, on_progress)
    cluster = Cluster(hosts, Pool(settings), without_times(policy), lambda account: groups_of(account, policy))
    return cluster.run(cut_short(jobs, policy), on_progress)


def compare(
    jobs: Sequence[Job],
    *,
    hosts: int,
    gpus_per_host: int,
    add_gpus: int,
    load: float | None,
    asked: Rules,
    configured: Rules,
    on_progress: OnProgress = lambda _name, _part: None,
) -> dict[str, Schedule]:
    """By name. The pool as configured has none of the added GPUs; `load` is that of the hosts as they are."""
    present = hosts_of(hosts, gpus_per_host)
    jobs = in_order(jobs if load is None else at_load(jobs, sum(present), load))
    more = hosts_of(hosts, gpus_per_host, add_gpus)
    allowed = jobs if asked.policy is None else cut_short(jobs, asked.policy)
    found = {
        ASKED: Schedule(allowed, run_pool(jobs, more, asked, partial(on_progress, ASKED)), sum(more)),
        CONFIGURED: Schedule(jobs, run_pool(jobs, present, configured, partial(on_progress, CONFIGURED)), sum(present)),
    }
    for name, schedule in ((FIRST_COME, first_come_first_served), (EASY, easy_backfill)):
        starts = schedule(jobs, more, partial(on_progress, name))
        found[name] = Schedule(jobs, starts, sum(more))
    return found
