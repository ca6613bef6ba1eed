"""What a server answers of leases, read as hostile input."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from gpu_worker_pool.api.replies import cleaned
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.leases.lifetime import LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeasedGPU, StillWaiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.leases.values import LeaseAsk

_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_UUID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class Problem:
    """The body of an error: what it is for programs, and what for people."""

    error: str
    detail: str
    reasons: tuple[str, ...]
    #: Of a request that has ended: how.
    state: str


@dataclass(frozen=True, slots=True)
class LeaseRow:
    lease_id: str
    request_id: str
    fence: int
    gpus: tuple[LeasedGPU, ...]
    state: str


def read_problem(reply: object) -> Problem:
    found: dict[str, Any] = reply if isinstance(reply, dict) else {}
    return Problem(_text(found, "error", 64), _text(found, "detail", 1000), _reasons(found), _text(found, "state", 64))


def read_waiting(reply: object) -> StillWaiting:
    found: dict[str, Any] = reply if isinstance(reply, dict) else {}
    position = found.get("position")
    return StillWaiting(position if _is_count(position) else None, _reasons(found))


def read_lease(
    reply: object, endpoint_id: str, ask: LeaseAsk, sent_at: float, now: Callable[[], float] = boot_time
) -> HeldLease:
    """A `ServiceRetryableError` for what is no lease: it can be asked for again, and given back by its request's id."""
    row = read_row(reply)
    if row.request_id != ask.request_id:
        raise ServiceRetryableError("the lease is that of another request")
    if len(row.gpus) != ask.requirements.count:
        raise ServiceRetryableError(f"the lease must have {ask.requirements.count} gpus")
    life = LeaseLife(ask.ttl_seconds, sent_at, now)
    # Its `env` is not looked at: it follows from the rest, and whoever chooses what is in the environment of programs
    # chooses what they run.
    return HeldLease(endpoint_id, row.lease_id, row.fence, row.gpus, ask, life)


def read_row(reply: object) -> LeaseRow:
    """Anybody's lease."""
    if not isinstance(reply, dict):
        raise ServiceRetryableError("the lease must be a JSON object")
    lease_id, fence, rows = reply.get("lease_id"), reply.get("fence"), reply.get("gpus")
    if not (isinstance(lease_id, str) and _ID.fullmatch(lease_id)):
        raise ServiceRetryableError("the lease has no lease_id that can be one")
    if not _is_count(fence):
        raise ServiceRetryableError("the lease has no fence that can be one")
    if not isinstance(rows, list):
        raise ServiceRetryableError("the lease must have gpus")
    gpus = tuple(_read_gpu(row) for row in rows)
    return LeaseRow(lease_id, _text(reply, "request_id", 64), fence, gpus, _text(reply, "state", 64))


def _read_gpu(row: object) -> LeasedGPU:
    found: dict[str, Any] = row if isinstance(row, dict) else {}
    index, uuid_ = found.get("gpu_id"), found.get("uuid")
    if not _is_count(index):
        raise ServiceRetryableError("a GPU of the lease has no gpu_id that can be one")
    if uuid_ is not None and not (isinstance(uuid_, str) and _UUID.fullmatch(uuid_)):
        raise ServiceRetryableError("a GPU of the lease has a uuid that cannot be one")
    return LeasedGPU(index, uuid_, _text(found, "name", 128))


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LARGEST


def _text(where: dict[str, Any], key: str, longest: int) -> str:
    value = where.get(key)
    return cleaned(value, longest) if isinstance(value, str) else ""


def _reasons(where: dict[str, Any]) -> tuple[str, ...]:
    reasons = where.get("reasons")
    if not isinstance(reasons, list):
        return ()
    return tuple(cleaned(reason, 500) for reason in reasons[:64] if isinstance(reason, str))
