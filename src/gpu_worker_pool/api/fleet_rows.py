"""Reads what a server says of its fleet (`GET /fleet`), as hostile as any other reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.json_values import MISSING, listed, number, parse_json, record, shown, text, whole_number
from gpu_worker_pool.errors import ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: As many as a fleet is made for, and some.
MOST_HOSTS: Final = 5_000
MOST_WAITING: Final = 100_000

_HOST: Final = record(
    {
        "host": text(),
        "url": text(),
        "state": text(),
        "gpus": whole_number(),
        "free": whole_number(),
        "seen_seconds_ago": number(),
        "version": text(),
        "reason": text(),
    },
    "host",
)
_REPLY: Final = record(
    {
        "fleet_id": text(),
        "epoch": whole_number(),
        "dispatcher": record({"host": text(), "url": text()}, "host"),
        "database": record({"state": text(), "problem": text()}),
        "hosts": listed(_HOST, MOST_HOSTS, list),
    }
)


def decode_fleet(body: bytes) -> dict[str, Any]:
    reply = parse_json(body)
    if not isinstance(reply, dict) or not isinstance(reply.get("hosts"), list):
        raise ServiceRetryableError(f"the reply must be an object with a list of hosts, not {shown(reply)}")
    found: dict[str, Any] = _REPLY(reply, "", [])
    found["waiting"] = _length(reply, "queue")
    return found


def _length(reply: Mapping[str, object], name: str) -> int | None:
    rows = reply.get(name, MISSING)
    return min(len(rows), MOST_WAITING) if isinstance(rows, list) else None


def decode_host_state(body: bytes) -> str | None:
    """What a host is after it was drained, for instance."""
    reply = parse_json(body)
    if not isinstance(reply, dict):
        raise ServiceRetryableError(f"the reply must be an object, not {shown(reply)}")
    state: str | None = text()(reply.get("state"), "state", [])
    return state
