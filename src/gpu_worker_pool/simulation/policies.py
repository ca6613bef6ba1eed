"""A policy file as it would limit the accounts of a workload."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.ledger.policy_file import accounts_named, groups_of, read_text
from gpu_worker_pool.ledger.policy_text import parse_policy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpu_worker_pool.core.policy import Limits, Policy
    from gpu_worker_pool.simulation.workload import Job


def read_policy(path: Path) -> Policy:
    """Raises a `PolicyError`. Names mean accounts as the workload writes them, and as this host knows them."""
    named = parse_policy(read_text(path), str(path))
    policy = named.policy(lambda name: dict.fromkeys((name, *accounts_named(name))))
    groups = {account.removeprefix("key:"): of_it for account, of_it in policy.key_groups.items()}
    return replace(policy, key_groups={**groups, **policy.key_groups})


def cut_short(jobs: Sequence[Job], policy: Policy) -> list[Job]:
    """The same jobs, ended at the longest time of their accounts."""

    def allowed(job: Job) -> float:
        longest = policy.limits_of(job.account, groups_of(job.account, policy) or ()).longest_seconds
        return job.duration_seconds if longest is None else min(job.duration_seconds, longest)

    return [job._replace(duration_seconds=allowed(job)) for job in jobs]


def without_times(policy: Policy) -> Policy:
    """For jobs that were cut short: a lease with a time limit of its own leaves its GPU only to a later reading."""

    def untimed(limits: Limits) -> Limits:
        return replace(limits, longest_seconds=None)

    return replace(
        policy,
        everyone=untimed(policy.everyone),
        accounts={name: untimed(limits) for name, limits in policy.accounts.items()},
        groups={name: untimed(limits) for name, limits in policy.groups.items()},
    )
