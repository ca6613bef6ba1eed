"""What another host's server says, as far as it is believed: known keys, of the right type, short, and not too many.

The page shows texts as texts whatever is in them; this keeps what it gets from a stranger small and of a known shape.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpu_worker_pool.api.replies import cleaned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Pick = Callable[[object], Any]

T = TypeVar("T")

LONGEST_TEXT: Final = 300
MOST_GPUS: Final = 1024
MOST_LEASES: Final = 2048
MOST_WAITING: Final = 200
#: One for the whole, and one for each GPU.
MOST_REASONS: Final = 129
MOST_PROCESSES: Final = 32
MOST_MIG_DEVICES: Final = 64
MOST_READINGS: Final = 300
#: More than any amount, number or percentage of a GPU.
LARGEST_NUMBER: Final = 1e12
#: A hundred years: no host has been up for longer.
MOST_SECONDS: Final = 100 * 366 * 86_400


class UnbelievableError(ValueError):
    """The reply is no JSON, or no reply of a GPU server."""


def decoded(body: bytes) -> Mapping[str, Any]:
    def refuse(constant: str) -> None:
        raise UnbelievableError(f"it says {constant}, which is no number")

    try:
        reply = json.loads(body, parse_constant=refuse)
    except UnbelievableError:
        raise
    except (ValueError, RecursionError):  # also what is no UTF-8, and an integer of thousands of digits
        raise UnbelievableError("it is no JSON") from None
    if not isinstance(reply, dict):
        raise UnbelievableError("it is no object")
    return reply


# --- one value: None for what is not what it should be ---


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST_NUMBER else None


def seconds(value: object) -> float | None:
    """How long something has lasted."""
    found = number(value)
    return found if found is not None and 0 <= found <= MOST_SECONDS else None


def text(value: object) -> str | None:
    return cleaned(value, LONGEST_TEXT) if isinstance(value, str) else None


def flag(value: object) -> bool:
    return value is True


def _object(picks: Mapping[str, Pick]) -> Pick:
    def pick(value: object) -> dict[str, Any] | None:
        return {key: picks[key](value.get(key)) for key in picks} if isinstance(value, dict) else None

    return pick


def _list(pick: Callable[[object], T | None], most: int) -> Callable[[object], list[T] | None]:
    def pick_all(value: object) -> list[T] | None:
        if not isinstance(value, list):
            return None
        return [found for each in value[:most] if (found := pick(each)) is not None]

    return pick_all


# --- rows, of the keys that the page knows ---

_MEMORY: Final = _object({"total_mb": number, "used_mb": number, "usage_percent": number})
_PROCESSES: Final = _list(
    _object({"pid": number, "name": text, "user": text, "memory_used_mb": number}), MOST_PROCESSES
)
_GPU: Final = _object(
    {
        "gpu_id": number,
        "name": text,
        "memory": _MEMORY,
        "utilization_percent": number,
        "temperature_c": number,
        "power": _object({"draw_w": number, "limit_w": number}),
        "uuid": text,
        "fault": text,
        "processes": _PROCESSES,
        "obstacles": _list(text, MOST_REASONS),
        "mig_devices": _list(_object({"uuid": text, "name": text, "memory": _MEMORY, "fault": text}), MOST_MIG_DEVICES),
    }
)
_LEASE: Final = _object(
    {
        "lease_id": text,
        "worker_id": text,
        "label": text,
        "user": text,
        "state": text,
        "gpus": _list(_object({"gpu_id": number, "uuid": text}), MOST_GPUS),
        "held_seconds": seconds,
        "memory_mb": number,
        "memory_used_mb": number,
        "idle_seconds": seconds,
        "is_idle": flag,
        "share": flag,
        "quarantine": _object({"reason": text, "seconds": seconds}),
    }
)
_WAITER: Final = _object(
    {
        "request_id": text,
        "worker_id": text,
        "label": text,
        "position": number,
        "waiting_seconds": seconds,
        "priority": number,
        "count": number,
        "reasons": _list(text, MOST_REASONS),
    }
)
_HISTORY: Final = _object(
    {
        "gpu_id": number,
        "uuid": text,
        "readings": _list(
            _object({"timestamp": text, "memory_usage_percent": number, "utilization_percent": number}), MOST_READINGS
        ),
    }
)


def believed_stats(body: bytes) -> dict[str, Any]:
    reply = decoded(body)
    gpus = _list(_GPU, MOST_GPUS)(reply.get("gpus"))
    if gpus is None:
        raise UnbelievableError("it lists no GPUs")
    return {
        # Without a number there is nothing to call it by.
        "gpus": [gpu for gpu in gpus if gpu["gpu_id"] is not None],
        "sample_age_seconds": seconds(reply.get("sample_age_seconds")),
        # Null is not none, nor is it what an older server says, which knows of no leases.
        "is_ledger_unread": any(isinstance(row, dict) and row.get("leases", ()) is None for row in reply["gpus"]),
    }


def believed_health(body: bytes) -> dict[str, Any]:
    reply = decoded(body)
    status = reply.get("status")
    return {
        "status": status if status in ("healthy", "degraded", "unhealthy") else None,
        "error": text(reply.get("error")),
    }


def believed_leases(body: bytes) -> list[dict[str, Any]]:
    return _list(_LEASE, MOST_LEASES)(decoded(body).get("leases")) or []


def believed_queue(body: bytes) -> tuple[list[dict[str, Any]], int]:
    """The first of those who wait, and how many there are."""
    rows = decoded(body).get("queue")
    count = len(rows) if isinstance(rows, list) else 0
    return _list(_WAITER, MOST_WAITING)(rows) or [], count


def believed_history(body: bytes) -> dict[str, Any]:
    reply = decoded(body)
    return {
        "gpus": _list(_HISTORY, MOST_GPUS)(reply.get("gpus")) or [],
        "sample_age_seconds": seconds(reply.get("sample_age_seconds")),
    }


def believed_host_id(body: bytes) -> str | None:
    return text(decoded(body).get("host_id"))
