"""Converts a pool to plain data and back, for a restart or a ledger file. Readings are not included."""

from __future__ import annotations

import math
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.assignments import HeldGPU, Lease, LeaseUse, LeaveAsked, Quarantine
from gpu_worker_pool.core.events import Origin, Request
from gpu_worker_pool.core.fair_share import Use
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.core.replication import Counters, GPUHistory
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements

if TYPE_CHECKING:
    from gpu_worker_pool.core.settings import PoolSettings

FORMAT = 1
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
#: Fields that are stored under an older name, so that every version reads the others' ledgers.
STORED_NAMES = {
    "requirements": "wishes",
    "poll_deadline": "asking_until",
    "poll_id": "ask",
    "may_reserve": "may_keep",
    "reserved": "kept",
    "reserved_at": "kept_at",
}
_FIELD_NAMES = {stored: name for name, stored in STORED_NAMES.items()}
#: Fields of a request that came after the first format. Older versions refuse a row that has one, so a ledger stores
#: them apart (`without_later_fields`); a value of None is not stored at all.
LATER_FIELDS = frozenset({"origin", "within", "expected_seconds", "max_seconds", "groups", "asks"})
#: The same for a lease. Unlike those of a request they change.
LATER_LEASE_FIELDS = frozenset({"use", "asked", "longest_seconds"})
#: By type: the fields, each with the name it is stored under.
_NAMES: dict[type[Any], tuple[tuple[str, str], ...]] = {}
#: Fields that are times, wherever they occur: they are shifted together when the clock restarts.
MOMENTS = frozenset(
    {
        "asking_until",
        "at",
        "busy_at",
        "deadline",
        "ends_at",
        "enqueued_at",
        "expires_at",
        "freed_at",
        "gives_up_at",
        "granted_at",
        "kept_at",
        "now",
        "read_after",
        "requested_at",
        "seen_until",
        "since",
        "until",
    }
)


def save(pool: Pool) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        "format": FORMAT,
        "now": to_json(pool.now),
        "fence": pool.fence,
        "ticket": pool.ticket,
        "requests_ended": {state.value: pool.tally[state] for state in RequestState if pool.tally[state]},
        "leases_ended": {state.value: pool.tally[state] for state in LeaseState if pool.tally[state]},
        "gpus": [to_json(GPUHistory.of(gpu)) for gpu in pool.allocator.gpus.values()],
        "leases": [to_json(lease) for lease in sorted(pool.leases, key=lambda lease: lease.fence)],
        # By arrival: the order in which they are served also depends on when the use of accounts was last looked at.
        "waiters": [to_json(waiter) for waiter in sorted(pool.queue.in_order(), key=lambda waiter: waiter.ticket)],
        "uses": [] if pool.fair_share is None else [to_json(use) for use in pool.fair_share.uses()],
        "outcomes": [to_json(outcome) for outcome in pool.outcomes],
    }


def restore(
    saved: dict[str, Any], settings: PoolSettings | None = None, *, clock_restarted_at: float | None = None
) -> Pool:
    """The pool that was saved, without its readings; submit `Resumed` with the length of the outage next.

    `clock_restarted_at`: after a reboot, the new clock's time: all times are shifted to it, and process ids dropped.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"saved by another version: format {saved.get('format')!r}, not {FORMAT}")
    if clock_restarted_at is not None:
        then = saved["now"]
        saved = after_reboot(saved, 0.0 if then is None else clock_restarted_at - then)
    pool = Pool(settings)
    tally = saved["requests_ended"] | saved["leases_ended"]
    pool.replicate(
        [
            *map(lease_of, saved["leases"]),
            *map(waiter_of, saved["waiters"]),
            *map(outcome_of, saved["outcomes"]),
        ],
        [
            GPUHistory(**{**row, "freed_at": moment_of(row["freed_at"]), "read_after": moment_of(row["read_after"])})
            for row in saved["gpus"]
        ],
        Counters(saved["fence"], saved["ticket"], moment_of(saved["now"]), tally),
        [Use(**row) for row in saved.get("uses", ())],
    )
    return pool


def to_json(value: Any) -> Any:
    """A waiter, a lease, an outcome, or a part of one, as JSON values."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return None if value in (math.inf, -math.inf) else value  # never, in either direction
    if isinstance(value, Enum):
        return value.value
    if value is ANY_GPU:
        return {}  # most requests have these values
    if kind is tuple:
        return [to_json(item) for item in value]
    if kind is frozenset:
        return [list(identity) for identity in sorted(value, key=lambda identity: (identity[0], identity[1] or 0.0))]
    row = {stored: to_json(getattr(value, name)) for name, stored in _stored_fields(kind)}
    for name in LATER_FIELDS if kind is Request else LATER_LEASE_FIELDS if kind is Lease else ():
        if row[name] is None:
            del row[name]
    return row


def without_later_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Remove them from the row of a waiter, a lease or an outcome; returns what was removed."""
    later: dict[str, Any] = {}
    lease = row.get("lease") or row
    for request in (row["request"], lease["request"]):
        if "within" in request:
            # Older versions do not know the lease around it, and must never grant it a GPU: no GPU has this name.
            later["wishes"], request["wishes"] = request["wishes"], {"only": [f"inside {request['within']}"]}
        for name in LATER_FIELDS & request.keys():
            later[name] = request.pop(name)
    return later


def without_later_lease_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Remove them from the row of a lease or an outcome; returns what was removed."""
    lease = row.get("lease") or row
    return {name: lease.pop(name) for name in LATER_LEASE_FIELDS & lease.keys()}


def with_later_fields(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The same row with them."""
    lease = row.get("lease") or row
    row["request"].update(later)
    lease["request"].update(later)
    return row


def with_later_lease_fields(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The same row with them."""
    (row.get("lease") or row).update(later)
    return row


def _stored_fields(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(
            (field.name, STORED_NAMES.get(field.name, field.name)) for field in fields(kind) if field.init
        )
    return names


def _fields_of(row: dict[str, Any]) -> dict[str, Any]:
    """A stored row with the names its type knows."""
    return {_FIELD_NAMES.get(stored, stored): value for stored, value in row.items()}


def after_reboot(value: Any, seconds: float, name: str = "") -> Any:
    """The same with every time this much later, and without the processes, which are gone."""
    if name == "processes":
        return None
    if name in MOMENTS and value is not None:
        return value + seconds
    if isinstance(value, dict):
        return {key: after_reboot(item, seconds, key) for key, item in value.items()}
    return [after_reboot(item, seconds) for item in value] if isinstance(value, list) else value


def moment_of(value: float | None) -> float:
    return -math.inf if value is None else value


def request_of(row: dict[str, Any]) -> Request:
    found = _fields_of(row)
    requirements, origin = found["requirements"], found.get("origin")
    return Request(
        **{
            **found,
            "requirements": Requirements(**requirements) if requirements else ANY_GPU,
            "origin": None if origin is None else Origin(**origin),
            "groups": None if found.get("groups") is None else tuple(found["groups"]),
        }
    )


#: The names under which the fields of a request are stored.
REQUEST_FIELDS = frozenset(stored for _, stored in _stored_fields(Request))


def _held(row: dict[str, Any]) -> HeldGPU:
    processes = row["processes"]
    known = None if processes is None else frozenset((pid, started_at) for pid, started_at in processes)
    return HeldGPU(**{**row, "processes": known})


def lease_of(row: dict[str, Any]) -> Lease:
    return Lease(
        **{
            **_fields_of(row),
            "request": request_of(row["request"]),
            "gpu_ids": tuple(row["gpu_ids"]),
            "held": tuple(map(_held, row["held"])),
            "state": LeaseState(row["state"]),
            "quarantine": None if row["quarantine"] is None else Quarantine(**row["quarantine"]),
            "asked": None if row.get("asked") is None else LeaveAsked(**row["asked"]),
            "use": None if row.get("use") is None else LeaseUse(**row["use"]),
        }
    )


def waiter_of(row: dict[str, Any]) -> Waiter:
    request, state = request_of(row["request"]), RequestState(row["state"])
    found = _fields_of(row)
    return Waiter(**{**found, "request": request, "state": state, "reserved": tuple(found["reserved"])})


def outcome_of(row: dict[str, Any]) -> Outcome:
    lease = None if row["lease"] is None else lease_of(row["lease"])
    lease_state = None if row["lease_state"] is None else LeaseState(row["lease_state"])
    request, state = request_of(row["request"]), RequestState(row["state"])
    return Outcome(request, state, row["at"], tuple(row["reasons"]), lease, lease_state)
