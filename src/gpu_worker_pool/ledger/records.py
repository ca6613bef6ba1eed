"""What is recorded of each request that has ended: who asked for what, what it got, how long, and how it was used."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.fair_share import weight_of
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.remembered import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.pool import Pool

#: How the record of a lease says that it ended.
RELEASED, LOST, UNCLAIMED, HELD = "released", "lost", "unclaimed", "held"
#: Upper bounds of the histograms of waiting and holding.
WAIT_BOUNDS: Final = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0)
HOLD_BOUNDS: Final = (10.0, 60.0, 600.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0, 7 * 86_400.0)
#: Further accounts are only counted as a sum.
MOST_ACCOUNTS: Final = 1000
OTHER_ACCOUNTS: Final = "others"


def records_of(
    pool: Pool, ended: Iterable[object], now: float, wall_clock: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """The records of the outcomes among `ended`; `wall_clock`: seconds since 1970, which the pool does not know."""
    for outcome in ended:
        if isinstance(outcome, Outcome):
            began_at = wall_clock() - now
            if outcome.lease is not None:
                yield _of_lease(pool, outcome.lease, outcome.at, began_at, outcome)
            else:
                yield _of_request(outcome.request, outcome.at, began_at, outcome)


def records_of_held(pool: Pool, now: float, wall_clock: Callable[[], float]) -> list[dict[str, Any]]:
    """The records of the leases that are held, as if they ended now."""
    began_at = wall_clock() - now
    held = (lease for lease in pool.leases if lease.state is LeaseState.HELD)
    return [_of_lease(pool, lease, now, began_at, None) for lease in held]


def _of_request(request: Request, ended_at: float, began_at: float, outcome: Outcome | None) -> dict[str, Any]:
    origin = request.origin
    return {
        "kind": "request",
        "request": request.request_id,
        "worker": request.worker_id,
        "account": request.account,
        "user": None if origin is None else origin.user,
        "is_user_verified": origin is not None and origin.is_verified,
        "program": None if origin is None else origin.program,
        "host": None if origin is None else origin.host,
        "label": request.label,
        "count": request.requirements.count,
        "priority": request.requirements.priority,
        "expected_seconds": request.declared_seconds,
        "memory_promised_mb": request.requirements.memory_mb,
        "within": request.within,
        "ended": moment(began_at + ended_at),
        "how": HELD if outcome is None else outcome.state.value,
        "reason": None if outcome is None else "; ".join(outcome.reasons) or None,
    }


def _of_lease(pool: Pool, lease: Lease, at: float, began_at: float, outcome: Outcome | None) -> dict[str, Any]:
    quarantine, use = lease.quarantine, lease.use
    # Its holder had it until then; in quarantine it had no holder.
    held_until = at if quarantine is None else quarantine.since
    held_seconds = max(held_until - lease.granted_at, 0.0)
    was_offered = lease.state is LeaseState.OFFERED
    is_counted = not was_offered and lease.within is None
    record = _of_request(lease.request, held_until, began_at, outcome)
    if outcome is not None:
        is_lost = quarantine is not None or outcome.lease_state is not LeaseState.RELEASED
        record["how"] = UNCLAIMED if was_offered else LOST if is_lost else RELEASED
    if quarantine is not None:
        record["reason"] = quarantine.reason
    return record | {
        "kind": "lease",
        "lease": lease.lease_id,
        "gpus": list(lease.gpu_ids),
        "indices": [held.index for held in lease.held],
        "asked": moment(began_at + lease.requested_at),
        "granted": moment(began_at + lease.granted_at),
        "waited_seconds": _seconds(lease.granted_at - lease.requested_at),
        "held_seconds": _seconds(held_seconds),
        "quarantine_seconds": _seconds(at - held_until),
        "gpu_seconds": _seconds(held_seconds * weight_of(lease, pool.allocator.gpus)[0]) if is_counted else 0.0,
        "observed_seconds": 0.0 if use is None else _seconds(use.observed_seconds),
        "idle_seconds": None if use is None or use.idle_seconds is None else _seconds(use.idle_seconds),
        "memory_used_mb": None if use is None else use.most_memory_mb,
    }


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: str) -> float | None:
    """Seconds since 1970 of a moment in a record; None if the text is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _seconds(seconds: float) -> float:
    return round(max(seconds, 0.0), 3)


# --- what is counted over the whole life of a ledger ---


def add_to_totals(totals: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Histograms of waiting and holding, and what each account used, for metrics."""
    accounts: dict[str, dict[str, float]] = totals.setdefault("accounts", {})
    for record in records:
        account = record["account"]
        if account not in accounts and len(accounts) >= MOST_ACCOUNTS:
            account = OTHER_ACCOUNTS
        of_account = accounts.setdefault(account, {"leases": 0, "gpu_seconds": 0.0, "idle_gpu_seconds": 0.0})
        if record["kind"] != "lease" or record["within"] is not None:
            continue
        of_account["leases"] += 1
        of_account["gpu_seconds"] = round(of_account["gpu_seconds"] + record["gpu_seconds"], 3)
        of_account["idle_gpu_seconds"] = round(of_account["idle_gpu_seconds"] + (idle_gpu_seconds(record) or 0.0), 3)
        _add(totals, "wait_seconds", WAIT_BOUNDS, record["waited_seconds"])
        _add(totals, "hold_seconds", HOLD_BOUNDS, record["held_seconds"])


def idle_gpu_seconds(record: dict[str, Any]) -> float | None:
    """Idle GPU seconds of a lease; None if unknown."""
    idle, held = record["idle_seconds"], record["held_seconds"]
    return None if idle is None or held <= 0 else record["gpu_seconds"] * min(idle / held, 1.0)


def _add(totals: dict[str, Any], name: str, bounds: tuple[float, ...], value: float) -> None:
    histogram = totals.setdefault(name, {"counts": [0] * (len(bounds) + 1), "sum": 0.0})
    histogram["counts"][next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
    histogram["sum"] = round(histogram["sum"] + value, 3)
