"""A pool as plain data, and back: what survives a restart. Readings are not part of it; they are taken anew."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.assignments import HeldGPU, Lease, Quarantine
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.core.wishes import Wishes

if TYPE_CHECKING:
    from gpu_worker_pool.core.settings import PoolSettings

FORMAT = 1
#: Fields that are moments, wherever they occur: they move together when the clock begins anew.
MOMENTS = frozenset(
    {
        "asking_until",
        "at",
        "deadline",
        "enqueued_at",
        "expires_at",
        "freed_at",
        "gives_up_at",
        "granted_at",
        "now",
        "read_after",
        "requested_at",
        "since",
        "until",
    }
)


def save(pool: Pool) -> dict[str, Any]:
    """JSON can carry all of it."""
    return {
        "format": FORMAT,
        "now": _plain(pool.now),
        "fence": pool.fence,
        "ticket": pool.ticket,
        "requests_ended": {state.value: pool.tally[state] for state in RequestState if pool.tally[state]},
        "leases_ended": {state.value: pool.tally[state] for state in LeaseState if pool.tally[state]},
        "gpus": [
            {
                "gpu_id": gpu.gpu_id,
                "endpoint_id": gpu.endpoint.endpoint_id,
                "freed_at": _plain(gpu.freed_at),
                "read_after": _plain(gpu.read_after),
                "last_fence": gpu.last_fence,
                "is_gone": gpu.is_gone,
            }
            for gpu in pool.allocator.gpus.values()
        ],
        "leases": [_plain(lease) for lease in sorted(pool.leases, key=lambda lease: lease.fence)],
        "waiters": [_plain(waiter) for waiter in pool.queue.in_order()],
        "outcomes": [_plain(outcome) for outcome in pool.outcomes],
    }


def restore(
    saved: dict[str, Any], settings: PoolSettings | None = None, *, clock_began_anew_at: float | None = None
) -> Pool:
    """The pool that was saved, without its readings; `Resumed` tells it how long nobody served it.

    After a reboot say what the new clock shows: all times are moved to it, and process ids of before are forgotten.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"saved by another version: format {saved.get('format')!r}, not {FORMAT}")
    if clock_began_anew_at is not None:
        then = saved["now"]
        saved = _moved(saved, 0.0 if then is None else clock_began_anew_at - then)
    pool = Pool(settings)
    pool.now = _moment(saved["now"])
    pool.fence = saved["fence"]
    pool.ticket = saved["ticket"]
    pool.tally.update({RequestState(state): count for state, count in saved["requests_ended"].items()})
    pool.tally.update({LeaseState(state): count for state, count in saved["leases_ended"].items()})
    for row in saved["gpus"]:
        gpu = pool.allocator.gpu(row["gpu_id"], row["endpoint_id"])
        gpu.freed_at = _moment(row["freed_at"])
        gpu.read_after = _moment(row["read_after"])
        gpu.last_fence = row["last_fence"]
        gpu.is_gone = row["is_gone"]
    for row in saved["leases"]:
        pool.readopt(_lease(row, are_processes_known=clock_began_anew_at is None))
    for row in saved["waiters"]:
        request, state = _request(row["request"]), RequestState(row["state"])
        pool.readopt(Waiter(**{**row, "request": request, "state": state, "kept": tuple(row["kept"])}))
    for row in saved["outcomes"]:
        pool.readopt(_outcome(row))
    return pool


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return [list(identity) for identity in sorted(value, key=lambda identity: (identity[0], identity[1] or 0.0))]
    return None if value in (math.inf, -math.inf) else value  # never, in either direction


def _moved(value: Any, seconds: float) -> Any:
    if isinstance(value, dict):
        return {
            name: item + seconds if name in MOMENTS and item is not None else _moved(item, seconds)
            for name, item in value.items()
        }
    return [_moved(item, seconds) for item in value] if isinstance(value, list) else value


def _moment(value: float | None) -> float:
    return -math.inf if value is None else value


def _request(row: dict[str, Any]) -> Request:
    return Request(**{**row, "wishes": Wishes(**row["wishes"])})


def _held(row: dict[str, Any], *, are_processes_known: bool) -> HeldGPU:
    processes = row["processes"] if are_processes_known else None
    known = None if processes is None else frozenset((pid, started_at) for pid, started_at in processes)
    return HeldGPU(**{**row, "processes": known})


def _lease(row: dict[str, Any], *, are_processes_known: bool = True) -> Lease:
    return Lease(
        **{
            **row,
            "request": _request(row["request"]),
            "gpu_ids": tuple(row["gpu_ids"]),
            "held": tuple(_held(held, are_processes_known=are_processes_known) for held in row["held"]),
            "state": LeaseState(row["state"]),
            "quarantine": None if row["quarantine"] is None else Quarantine(**row["quarantine"]),
        }
    )


def _outcome(row: dict[str, Any]) -> Outcome:
    return Outcome(
        _request(row["request"]),
        RequestState(row["state"]),
        row["at"],
        tuple(row["reasons"]),
        None if row["lease"] is None else _lease(row["lease"]),
        None if row["lease_state"] is None else LeaseState(row["lease_state"]),
    )
