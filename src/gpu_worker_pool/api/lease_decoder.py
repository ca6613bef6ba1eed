"""Decodes the answers about one lease, one request or one error, as hostile input."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpu_worker_pool.api.json_values import (
    UUID_PATTERN,
    flag,
    json_object,
    listed,
    matching,
    number,
    parse_json,
    record,
    seconds,
    text,
    whole_number,
)
from gpu_worker_pool.api.summary_decoder import LONGEST_GPU_NAME, MOST_GPUS
from gpu_worker_pool.errors import ServiceRetryableError

#: Reasons for waiting: one for the whole, and one for each GPU.
MOST_REASONS: Final = 129
REASONS: Final = listed(text(1000), MOST_REASONS, list)
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class LeaseRow(NamedTuple):
    lease_id: str
    request_id: str
    fence: int
    state: str
    #: Number, UUID and name of each.
    gpus: tuple[tuple[int, str | None, str], ...]
    #: How long the server took for the answer, and how long the lease lasts from then; None if it does not say.
    waited_seconds: float | None = None
    expires_in_seconds: float | None = None
    #: Until its time limit ends it; None: it has none, or the server is an older one.
    ends_in_seconds: float | None = None
    #: Why its holder is asked to give it back; None: it is not asked.
    yield_reason: str | None = None
    #: When the policy ends it if it stays idle.
    leave_in_seconds: float | None = None
    #: In a fleet, the name of the host that has its GPUs; else empty.
    host: str = ""


class QueuePosition(NamedTuple):
    #: 1 is next.
    position: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """The body of an error: a code for programs and a sentence for people."""

    error: str
    detail: str
    reasons: tuple[str, ...]
    #: How a request has ended.
    state: str
    #: What became of a lease whose renewal failed: `held` or `unknown`.
    lease: str = ""


_HELD: Final = record(
    {
        "lease_id": matching(_ID),
        "request_id": text(64, ""),
        "fence": whole_number(),
        "state": text(64, ""),
        "waited_seconds": number(),
        "expires_in_seconds": number(),
        "ends_in_seconds": seconds(),
        "yield_asked": flag(False),
        "yield_reason": text(300, ""),
        "leave_in_seconds": seconds(),
        "host": text(40, ""),
        "gpus": listed(
            record(
                {"gpu_id": whole_number(), "uuid": matching(UUID_PATTERN), "name": text(LONGEST_GPU_NAME, "")},
                key="gpu_id",
            ),
            MOST_GPUS,
        ),
    }
)
_POSITION: Final = record({"position": whole_number(), "reasons": REASONS})
_PROBLEM: Final = record(
    {
        "error": text(64, ""),
        "detail": text(1000, ""),
        "reasons": REASONS,
        "state": text(64, ""),
        "lease": text(64, ""),
    }
)


def read_lease_row(value: object) -> LeaseRow:
    """Of one lease every field must be right: a program is going to use its GPUs.

    `env` is not read: a server that chose the environment of programs would choose what they run.
    """
    problems: list[str] = []
    row = _HELD(value if isinstance(value, dict) else {}, "", problems)
    problems += [f"{name} is missing" for name in ("lease_id", "fence", "gpus") if row[name] is None]
    if problems:
        raise ServiceRetryableError(f"the lease cannot be used: {problems[0]}")
    gpus = tuple((gpu["gpu_id"], gpu["uuid"], gpu["name"]) for gpu in row["gpus"])
    names = ("waited_seconds", "expires_in_seconds", "ends_in_seconds", "leave_in_seconds")
    times = {name: row[name] for name in names}
    reason = (row["yield_reason"] or "another user asks for it") if row["yield_asked"] else None
    return LeaseRow(
        row["lease_id"],
        row["request_id"],
        row["fence"],
        row["state"],
        gpus,
        yield_reason=reason,
        host=row["host"] or "",
        **times,
    )


def decode_lease(body: bytes, request_id: str, count: int) -> LeaseRow:
    """The lease that this request was granted."""
    row = read_lease_row(parse_json(body))
    if row.request_id != request_id:
        raise ServiceRetryableError("the lease is that of another request")
    if len(row.gpus) != count:
        raise ServiceRetryableError(f"the lease must have {count} GPUs, not {len(row.gpus)}")
    return row


def decode_renewed(body: bytes) -> LeaseRow:
    return read_lease_row(parse_json(body))


def decode_queue_position(body: bytes) -> QueuePosition:
    row = _POSITION(json_object(body), "", [])
    return QueuePosition(row["position"], tuple(row["reasons"]))


def decode_problem(body: bytes | None) -> Problem:
    """Empty where the body is not that of an error of ours."""
    try:
        reply: object = None if body is None else parse_json(body)
    except ServiceRetryableError:
        reply = None
    row = _PROBLEM(reply if isinstance(reply, dict) else {}, "", [])
    return Problem(row["error"], row["detail"], tuple(row["reasons"]), row["state"], row["lease"])
