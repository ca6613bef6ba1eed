"""The `holder` in the rows of leases, waiting requests and GPUs: made here, and turned into words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.events import Origin
from gpu_worker_pool.core.origins import described
from gpu_worker_pool.hardware.origin import host_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.events import Request


def holder_row(request: Request) -> dict[str, Any] | None:
    """Who holds or waits; None where that is unknown, as for requests of older clients."""
    origin = request.origin
    if origin is None:
        return None
    return {
        "user": origin.user,
        "host": origin.host,
        "pid": origin.pid,
        "program": origin.program,
        "verified": origin.is_verified,
    }


def shown_holder(row: Mapping[str, Any]) -> str:
    """The holder or waiter of such a row for people: "ada train.py (pid 4242)"."""
    worker: str = row["worker_id"] or row.get("request_id") or row.get("lease_id") or "?"
    holder, inside = row.get("holder"), f" inside {row['within']}" if row.get("within") else ""
    account = row.get("account")
    if holder is None and account and " " not in account:  # the name of a key, which is sure
        return (f"{account} {row['worker_id']}" if row["worker_id"] else account) + inside
    if holder is None:
        return worker + inside
    origin = Origin(holder["user"], holder["host"], holder["pid"], holder["program"], holder["verified"])
    return described(origin, worker, host_name()) + inside
