"""Makes the bodies of the lease routes. Only `granted_body` and `waiting_body` contain a token."""

from __future__ import annotations

import math
import pwd
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.holder_rows import holder_row
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.accounts import account_name, uid_of
from gpu_worker_pool.lease_variables import VisibleGPU, lease_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.broker.broker import Waiting
    from gpu_worker_pool.broker.usage import LeaseUsage
    from gpu_worker_pool.core.assignments import Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.explanation import Explanation
    from gpu_worker_pool.lease_variables import GPUNaming

    #: The present index of a GPU; None while the driver does not report it.
    IndexOf = Callable[[str], int | None]


def granted_body(
    lease: Lease, token: str, index_of: IndexOf, naming: GPUNaming, waited_seconds: float
) -> dict[str, Any]:
    """`waited_seconds`: from when the server took the request until now."""
    return {**lease_body(lease, index_of, naming), "waited_seconds": _seconds(waited_seconds), "token": token}


def lease_body(lease: Lease, index_of: IndexOf, naming: GPUNaming) -> dict[str, Any]:
    """For the holder."""
    return {**_facts(lease, boot_time()), "env": lease_env(lease, index_of, naming)}


def lease_row(lease: Lease, usage: LeaseUsage) -> dict[str, Any]:
    """For any caller."""
    now, quarantine = boot_time(), lease.quarantine
    return {
        **_facts(lease, now),
        "held_seconds": _seconds(now - lease.granted_at),
        "quarantine": None
        if quarantine is None
        else {"reason": quarantine.reason, "seconds": _seconds(now - quarantine.since)},
        "memory_used_mb": usage.memory_used_mb,
        "idle_seconds": None if usage.idle_seconds is None else _seconds(usage.idle_seconds),
        "is_idle": usage.is_idle,
        "user": user_of(lease),
        "account": shown_account(lease.request),
        "holder": holder_row(lease.request),
    }


def _facts(lease: Lease, now: float) -> dict[str, Any]:
    request, expires_at = lease.request, lease.expires_at
    return {
        "lease_id": lease.lease_id,
        "request_id": request.request_id,
        "worker_id": request.worker_id,
        "fence": lease.fence,
        "gpus": [{"gpu_id": held.index, "uuid": held.uuid, "name": held.name} for held in lease.held],
        "granted_at": _moment(lease.granted_at, now),
        "expires_at": None if expires_at is None else _moment(expires_at, now),
        "expires_in_seconds": None if expires_at is None else round(max(expires_at - now, 0.0), 3),
        "ends_in_seconds": None if lease.ends_at is None else round(max(lease.ends_at - now, 0.0), 3),
        **_asked(lease, now),
        "expected_seconds": request.expected_seconds,
        "max_seconds": request.max_seconds,
        "ttl_seconds": request.ttl_seconds,
        "state": lease.state.value,
        "label": request.label,
        "memory_mb": request.requirements.memory_mb,
        "share": request.requirements.share,
        "within": request.within,
    }


def _asked(lease: Lease, now: float) -> dict[str, Any]:
    """Whether its holder was asked to give it back, why, and when the lease ends if it stays idle."""
    asked = lease.asked
    ends_at = None if asked is None else asked.ends_at
    return {
        "yield_asked": asked is not None,
        "yield_reason": None if asked is None else asked.reason,
        "leave_in_seconds": None if ends_at is None else _seconds(ends_at - now),
    }


def promises_of(leases: Iterable[Lease]) -> dict[str, list[dict[str, Any]]]:
    """By GPU or MIG device, its holders, as in a row of `/gpu/stats`."""
    promises: dict[str, list[dict[str, Any]]] = {}
    for lease in leases:
        for gpu_id in lease.gpu_ids:
            promises.setdefault(gpu_id, []).append(_promise(lease))
    return promises


def _promise(lease: Lease) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "worker_id": lease.request.worker_id,
        "label": lease.request.label,
        "state": lease.state.value,
        "user": user_of(lease),
        "holder": holder_row(lease.request),
        "within": lease.within,
    }


def lease_env(lease: Lease, index_of: IndexOf, naming: GPUNaming = "index") -> dict[str, str]:
    """The environment of a program that may see only these GPUs, as they are numbered now: a reboot may change that."""
    gpus = [VisibleGPU(held.index if held.uuid is None else index_of(held.gpu_id), held.uuid) for held in lease.held]
    return lease_variables(gpus, lease.lease_id, naming)


def user_of(lease: Lease) -> str | None:
    """The user of a `local://` program; None for a request to a server."""
    uid = uid_of(lease.request.account)
    return None if uid is None else _user_name(uid)


def shown_account(request: Request) -> str | None:
    """For whom it was requested, as others see it: the name of a user or of a key; None where that is unknown."""
    if not request.account:
        return None
    uid = uid_of(request.account)
    return account_name(request.account, request.origin, None if uid is None else _user_name(uid))


def name_of_account(account: str, user: str | None = None) -> str:
    """As others see it, also long after its requests; `user`: what the kernel said then."""
    uid = uid_of(account)
    return account_name(account, None, user if uid is None or user is not None else _user_name(uid)) or "nobody"


def person_of(record: dict[str, Any]) -> str:
    """Whose lease or request a usage record is about."""
    return _person(record["account"], record.get("user") if record.get("is_user_verified") is True else None)


@lru_cache(maxsize=4096)
def _person(account: str, user: object) -> str:
    return name_of_account(account, user if isinstance(user, str) else None)


@lru_cache(maxsize=256)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, ValueError, OverflowError):
        return str(uid)


def waiting_body(waiting: Waiting, token: str) -> dict[str, Any]:
    """For the waiter."""
    return {
        "request_id": waiting.request.request_id,
        "position": waiting.position,
        "waiting_seconds": _seconds(waiting.waiting_seconds),
        "reasons": list(waiting.reasons),
        "token": token,
    }


def queue_row(waiting: Waiting) -> dict[str, Any]:
    """For any caller."""
    return {
        **request_row(waiting.request),
        "position": waiting.position,
        "waiting_seconds": _seconds(waiting.waiting_seconds),
        "reasons": list(waiting.reasons),
    }


def request_row(request: Request) -> dict[str, Any]:
    """For any caller."""
    return {
        "request_id": request.request_id,
        "worker_id": request.worker_id,
        "label": request.label,
        "priority": request.requirements.priority,
        "count": request.requirements.count,
        "expected_seconds": request.expected_seconds,
        "max_seconds": request.max_seconds,
        "account": shown_account(request),
        "holder": holder_row(request),
        "within": request.within,
    }


def explanation_body(request_id: str, explanation: Explanation, index_of: IndexOf) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "position": explanation.position,
        "waiting_seconds": _seconds(explanation.waiting_seconds),
        "summary": explanation.summary,
        "impossible": list(explanation.impossible),
        "gpus": [
            {
                "gpu_id": index_of(gpu.gpu_id),
                "uuid": gpu.gpu_id if gpu.gpu_id.startswith(("GPU-", "MIG-")) else None,
                "name": gpu.name,
                "obstacles": [
                    {
                        "kind": each.kind.value,
                        "text": each.text,
                        "actual": _finite(each.actual),
                        "limit": _finite(each.limit),
                    }
                    for each in gpu.obstacles
                ],
            }
            for gpu in explanation.gpus
        ],
    }


def _finite(number: float | None) -> float | None:
    """JSON has no infinity, which is the limit of a GPU that is held alone."""
    return number if number is not None and math.isfinite(number) else None


def _seconds(seconds: float) -> float:
    return round(max(seconds, 0.0), 3)


def _moment(at: float, now: float) -> str:
    """In wall-clock time, as the clock is set now."""
    moment = datetime.fromtimestamp(at + _boot_in_wall_time(time.time() - now), UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _boot_in_wall_time(measured: float) -> float:
    """The same in all replies, so that one moment is always written alike, until the clock is set."""
    if abs(measured - _sent.get("boot", 0.0)) > _CLOCK_WAS_SET_SECONDS:
        _sent["boot"] = measured
    return _sent["boot"]


_CLOCK_WAS_SET_SECONDS: Final = 0.5
_sent: dict[str, float] = {}
