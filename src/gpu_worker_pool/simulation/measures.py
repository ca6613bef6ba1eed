"""Measures a schedule: waits, slowdown, utilization, GPUs that are idle while requests wait, and fairness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_worker_pool.simulation.cluster import Starts
    from gpu_worker_pool.simulation.workload import Job

#: Shorter jobs count as this long in the slowdown, or the shortest ones alone would decide it.
SHORTEST_SECONDS = 600.0


def measures(jobs: Sequence[Job], starts: Starts, gpus: int) -> dict[str, Any]:
    """All as JSON values, in seconds; jobs that could never begin are counted and left out."""
    begun = [(job, start) for job, start in zip(jobs, starts, strict=True) if start is not None]
    waits = [start.seconds - job.arrival_seconds for job, start in begun]
    slowdowns = [
        max((wait + job.duration_seconds) / max(job.duration_seconds, SHORTEST_SECONDS), 1.0)
        for (job, _), wait in zip(begun, waits, strict=True)
    ]
    ends = [start.seconds + job.duration_seconds for job, start in begun]
    span = max(ends, default=0.0) - min((job.arrival_seconds for job, _ in begun), default=0.0)
    return {
        "jobs": len(jobs),
        "never_started": len(jobs) - len(begun),
        "wait_seconds": _spread(waits),
        "wait_seconds_by_gpus": {
            str(size): _spread([wait for (job, _), wait in zip(begun, waits, strict=True) if job.gpus == size])
            for size in sorted({job.gpus for job, _ in begun})
        },
        "wait_seconds_by_account": {
            account: _spread([wait for (job, _), wait in zip(begun, waits, strict=True) if job.account == account])
            for account in sorted({job.account for job, _ in begun})
        },
        "bounded_slowdown": _mean(slowdowns),
        "utilization": sum(job.gpu_seconds for job, _ in begun) / (gpus * span) if span > 0 else None,
        "idle_gpu_seconds_while_waiting": _idle_while_waiting(begun, gpus),
        "most_overtaken": _most_overtaken(begun),
        "fairness": _jain(_slowdown_by_account(begun, slowdowns)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread(values: list[float]) -> dict[str, float | None]:
    found = sorted(values)

    def at(part: float) -> float | None:
        return found[min(int(part * len(found)), len(found) - 1)] if found else None

    return {"mean": _mean(found), "median": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def _idle_while_waiting(begun: Iterable[tuple[Job, Any]], gpus: int) -> float:
    """GPU seconds: free GPUs in all moments in which a request waits."""
    changes: list[tuple[float, int, int]] = []
    for job, start in begun:
        changes.append((job.arrival_seconds, 1, 0))
        changes.append((start.seconds, -1, job.gpus))
        changes.append((start.seconds + job.duration_seconds, 0, -job.gpus))
    changes.sort(key=lambda change: change[0])
    total, last, waiting, busy = 0.0, -math.inf, 0, 0
    for at, more_waiting, more_busy in changes:
        if waiting > 0:
            total += (gpus - busy) * (at - last)
        last, waiting, busy = at, waiting + more_waiting, busy + more_busy
    return total


def _most_overtaken(begun: Sequence[tuple[Job, Any]]) -> int:
    """The most jobs that arrived later than a waiting job and started before it."""
    order = sorted(range(len(begun)), key=lambda place: (begun[place][1].seconds, place))
    # Counts those that began before and are later by arrival: a Fenwick tree over places.
    size = len(begun)
    tree = [0] * (size + 1)
    most = 0
    for begun_before, place in enumerate(order):
        earlier, node = 0, place + 1
        while node > 0:
            earlier += tree[node]
            node -= node & -node
        most = max(most, begun_before - earlier)
        node = place + 1
        while node <= size:
            tree[node] += 1
            node += node & -node
    return most


def _slowdown_by_account(begun: Sequence[tuple[Job, Any]], slowdowns: Sequence[float]) -> list[float]:
    found: dict[str, list[float]] = {}
    for (job, _), slowdown in zip(begun, slowdowns, strict=True):
        found.setdefault(job.account, []).append(slowdown)
    return [sum(values) / len(values) for values in found.values()]


def _jain(values: Sequence[float]) -> float | None:
    """Jain's index of the accounts' mean slowdowns: 1 is equal for all, 1/n the worst."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
