"""Decodes the replies of our HTTP API as hostile input; it reads bytes and does nothing else.

A bad envelope spoils the whole reply (a `ServiceRetryableError`), a bad field only its GPU: that GPU stays a row with a
`fault`, and the bad value becomes None. Rows hold the documented keys and no others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.api.json_values import (
    LONGEST_SENTENCE,
    MISSING,
    UUID_PATTERN,
    cleaned,
    flag,
    is_number,
    listed,
    matching,
    number,
    parse_json,
    record,
    shown,
    text,
    whole_number,
)
from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.models import GPUInfo, GPUStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.api.json_values import Reader

    Body = dict[str, Any]

#: No host has more.
MOST_GPUS: Final = 16_384
#: Readings of a GPU in `/gpu/history`.
MOST_READINGS: Final = 300
#: One for the whole, and one for each GPU.
MOST_REASONS: Final = 129
_MOST_ROWS: Final = 50_000
_MOST_PROBLEMS: Final = 20
_LARGEST_GPU_ID: Final = 2**31 - 1
_LONGEST_NAME: Final = 128
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


# --- /gpu/summary, which monitors poll ---


@dataclass(frozen=True, slots=True)
class DecodedSummary:
    stats: GPUStats
    #: What was wrong with the reply, one sentence each, for a log; empty for a good one.
    problems: tuple[str, ...]


def _read_fault(value: object, name: str, problems: list[str]) -> str | None:
    if value is None or value is MISSING:
        return None
    fault = cleaned(value, LONGEST_SENTENCE) if isinstance(value, str) else ""
    if not fault:  # it says nothing, and is still one
        problems.append(f"{name} is {shown(value)}")
    return fault or None


_TOTALS: Final = record(
    {
        "total_memory_mb": number(),
        "total_used_memory_mb": number(),
        "total_memory_usage_percent": number(100),
        "average_utilization_percent": number(100),
        "timestamp": text(64, ""),
    }
)
_SUMMARY_ROW: Final = record(
    {
        "name": text(_LONGEST_NAME, ""),
        "uuid": matching(UUID_PATTERN),
        "fault": _read_fault,
        "memory_usage_percent": number(100),
        "utilization_percent": number(100),
        "memory_total_mb": number(LARGEST_MB),
        "memory_used_mb": number(LARGEST_MB),
        "process_count": whole_number(_LARGEST_GPU_ID),
        "leased": flag(False),
        "reports_utilization": flag(True),
    }
)


def decode_summary(body: bytes) -> DecodedSummary:
    """`GET /gpu/summary` of our server, or of any other that uses the documented keys."""
    reply = _envelope(body, "gpus_summary", _has_every_key)
    rows = reply["gpus_summary"]
    if len(rows) > MOST_GPUS:
        raise ServiceRetryableError(f"the reply lists {len(rows)} GPUs; at most {MOST_GPUS} are believed")
    age = reply.get("sample_age_seconds", 0.0)
    if not is_number(age):
        # Readings of unknown age may be old, and nothing may be granted from old readings.
        raise ServiceRetryableError(f"sample_age_seconds is {shown(age)}, so the age of the readings is unknown")

    problems: list[str] = []
    gpus, dropped = _summary_rows(rows, problems)
    if reply.get("gpu_count") != len(rows):
        problems.append(f"gpu_count is {shown(reply.get('gpu_count'))}, but {len(rows)} GPUs are listed")
    totals = _TOTALS(reply, "", problems)
    _check_used(totals, "total_used_memory_mb", "total_memory_mb", problems)
    stats = GPUStats(gpu_count=len(gpus) + dropped, gpus_summary=gpus, sample_age_seconds=age, **totals)
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
    return DecodedSummary(stats, tuple(problems))


def _summary_rows(rows: list[Any], problems: list[str]) -> tuple[list[GPUInfo], int]:
    """The GPUs in the order of the reply, and how many rows without a usable id were dropped."""
    gpus: dict[int, GPUInfo] = {}
    uuids: dict[str, int] = {}
    dropped = 0
    for position, row in enumerate(rows):
        gpu_id = row.get("gpu_id") if isinstance(row, dict) else None
        if type(gpu_id) is not int or not 0 <= gpu_id <= _LARGEST_GPU_ID:
            what = f"gpu_id is {shown(gpu_id)}" if isinstance(row, dict) else f"it is {shown(row)}"
            problems.append(f"row {position} is left out: {what}")
            dropped += 1
            continue
        gpu = _sound_gpu(gpu_id, row, uuids)
        if gpu is None:
            faults: list[str] = []
            gpu = _gpu(gpu_id, row, faults, uuids)
            problems += [f"GPU {gpu_id}: {fault}" for fault in faults]
        if gpu_id in gpus:
            problems.append(f"GPU {gpu_id} is listed more than once; the busier row counts")
            gpu = max(gpus[gpu_id], gpu, key=_busyness)
        gpus[gpu_id] = gpu
    return list(gpus.values()), dropped


#: What our own server sends of every GPU, and the types it may have where nothing is unknown or wrong.
_ALWAYS_THERE: Final = itemgetter(
    "name",
    "uuid",
    "fault",
    "memory_usage_percent",
    "utilization_percent",
    "memory_total_mb",
    "memory_used_mb",
    "process_count",
)
_SOUND_TYPES: Final = frozenset((str, str, type(None), *numbers, int) for numbers in product((int, float), repeat=4))


def _sound_gpu(gpu_id: int, row: Body, uuids: dict[str, int]) -> GPUInfo | None:
    """The row as it nearly always is, with everything known and nothing wrong; None for any other.

    Gives what `_gpu` would, in a fraction of its time: hundreds of endpoints are read every few seconds.
    """
    try:
        values = _ALWAYS_THERE(row)
    except KeyError:
        return None
    name, uuid, fault, memory_usage, utilization, total, used, process_count = values
    leased, reports_utilization = row.get("leased", False), row.get("reports_utilization", True)
    is_sound = (
        tuple(map(type, values)) in _SOUND_TYPES
        and 0 <= memory_usage <= 100
        and 0 <= utilization <= 100
        and 0 <= used <= total <= LARGEST_MB
        and 0 <= process_count <= _LARGEST_GPU_ID
        and (leased is False or leased is True)
        and (reports_utilization is True or reports_utilization is False)
        and len(name) <= _LONGEST_NAME
        and name.isprintable()
        and uuid not in uuids
        and UUID_PATTERN.fullmatch(uuid) is not None
    )
    if not is_sound:
        return None
    uuids[uuid] = gpu_id
    return GPUInfo(
        gpu_id,
        name,
        memory_usage,
        utilization,
        uuid=uuid,
        memory_total_mb=total,
        memory_used_mb=used,
        fault=fault,
        leased=leased,
        reports_utilization=reports_utilization,
        process_count=process_count,
    )


def _gpu(gpu_id: int, row: Body, faults: list[str], uuids: dict[str, int]) -> GPUInfo:
    found = _SUMMARY_ROW(row, "", faults)
    _check_used(found, "memory_used_mb", "memory_total_mb", faults)
    uuid = found["uuid"]
    if uuid is not None and uuids.setdefault(uuid, gpu_id) != gpu_id:
        faults.append(f"uuid is that of GPU {uuids[uuid]}, too")
        found["uuid"] = None
    return GPUInfo(gpu_id, **_with_faults(found, faults))


def _with_faults(row: Body, faults: list[str]) -> Body:
    """A GPU with a bad value must not be used."""
    if faults:
        reported = [row["fault"]] if row["fault"] else []
        sentences = [*reported, *(f"bad value: {what}" for what in faults)]
        row["fault"] = cleaned("; ".join(sentences), 2 * LONGEST_SENTENCE)
    return row


def _check_used(row: Body, used: str, total: str, problems: list[str]) -> None:
    if row[used] is not None and row[total] is not None and row[used] > row[total]:
        problems.append(f"{used} is {row[used]}, but {total} is {row[total]}")
        row[used] = None


def _busyness(gpu: GPUInfo) -> tuple[bool, bool, float]:
    """Of two rows of one GPU, at most one is true; believing the free one could book a GPU twice."""
    memory, utilization = gpu.memory_usage_percent, gpu.utilization_percent
    load = inf if memory is None or utilization is None else memory + utilization
    return gpu.fault is not None, gpu.leased, load


def _has_every_key(reply: object, text: str) -> bool:
    """Whether surely no key was given twice: then every colon is that of a key, or stands in a text that was read."""
    rows = reply.get("gpus_summary") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(rows, list):
        return False
    accounted = len(reply) + _colons(reply, "timestamp")
    for row in rows:
        if not isinstance(row, dict):
            return False
        accounted += len(row) + _colons(row, "name") + _colons(row, "uuid")
    return accounted == text.count(":")


def _colons(where: Body, key: str) -> int:
    value = where.get(key)
    return value.count(":") if isinstance(value, str) else 0


# --- rows for people: of the other routes ---

#: More than any amount, number or percentage of a GPU.
_MEASURE: Final = number(1e12, least=-1e12)
#: How long something has lasted: a hundred years are more than any host has been up.
_SECONDS: Final = number(100 * 366 * 86_400)
_TEXT: Final = text()
_NAME: Final = text(_LONGEST_NAME, "")
_REASONS: Final = listed(text(1000), MOST_REASONS)
_SOME_REASONS: Final = listed(text(1000), MOST_REASONS, list)
_GPU_ID: Final = whole_number(_LARGEST_GPU_ID)

_MEMORY: Final = record({"total_mb": _MEASURE, "used_mb": _MEASURE, "free_mb": _MEASURE, "usage_percent": _MEASURE})
_PROCESSES: Final = listed(
    record({"pid": _MEASURE, "name": _TEXT, "user": _TEXT, "memory_used_mb": _MEASURE}), most=1024
)
_MIG_DEVICE: Final = record(
    {
        "uuid": _TEXT,
        "name": _TEXT,
        "gpu_instance_id": _MEASURE,
        "compute_instance_id": _MEASURE,
        "memory": _MEMORY,
        "fault": _TEXT,
        "processes": _PROCESSES,
    }
)
_PROMISE: Final = record({"lease_id": _TEXT, "worker_id": _TEXT, "label": _TEXT, "state": _TEXT, "user": _TEXT})
_GPU_FIELDS: Final = record(
    {
        "gpu_id": _GPU_ID,
        "name": _NAME,
        "memory": _MEMORY,
        "utilization_percent": _MEASURE,
        "temperature_c": _MEASURE,
        "power": record({"draw_w": _MEASURE, "limit_w": _MEASURE}),
        "uuid": _TEXT,
        "pci_bus_id": _TEXT,
        "fault": _read_fault,
        "reports_utilization": flag(True),
        "ecc_uncorrected_errors": _MEASURE,
        "recovery_action": _TEXT,
        "processes": _PROCESSES,
        "mig_enabled": flag(False),
        "mig_devices": listed(_MIG_DEVICE, 64, list),
        "leases": listed(_PROMISE, _MOST_ROWS),
        "obstacles": _REASONS,
    },
    key="gpu_id",
)


def _gpu_row(value: object, _name: str, _problems: list[str]) -> Body | None:
    faults: list[str] = []
    row: Body | None = _GPU_FIELDS(value, "", faults)
    if row is None:
        return None
    if isinstance(value, dict) and "leases" not in value:
        del row["leases"]  # null means that the ledger cannot be read; an older server leaves it out
    return _with_faults(row, faults)


_STATS: Final = record(
    {
        "gpu_count": _MEASURE,
        "gpus": listed(_gpu_row, MOST_GPUS),
        "timestamp": _TEXT,
        "backend": _TEXT,
        "driver_version": _TEXT,
        "sample_age_seconds": _SECONDS,
    }
)
_LEASE: Final = record(
    {
        "lease_id": _TEXT,
        "request_id": _TEXT,
        "worker_id": _TEXT,
        "fence": _MEASURE,
        "gpus": listed(record({"gpu_id": _GPU_ID, "uuid": _TEXT, "name": _TEXT}), MOST_GPUS, list),
        "granted_at": _TEXT,
        "expires_at": _TEXT,
        "expires_in_seconds": _SECONDS,
        "ttl_seconds": _SECONDS,
        "state": _TEXT,
        "label": _TEXT,
        "memory_mb": _MEASURE,
        "share": flag(False),
        "held_seconds": _SECONDS,
        "quarantine": record({"reason": _TEXT, "seconds": _SECONDS}),
        "memory_used_mb": _MEASURE,
        "idle_seconds": _SECONDS,
        "is_idle": flag(False),
        "user": _TEXT,
    },
    key="lease_id",
)
_QUEUED: Final = record(
    {
        "request_id": _TEXT,
        "worker_id": _TEXT,
        "position": _MEASURE,
        "waiting_seconds": _SECONDS,
        "reasons": _SOME_REASONS,
        "label": _TEXT,
        "priority": _MEASURE,
        "count": _MEASURE,
    },
    key="request_id",
)
_OBSTACLE: Final = record({"kind": _TEXT, "text": text(1000, "?"), "actual": _MEASURE, "limit": _MEASURE})
_EXPLANATION: Final = record(
    {
        "request_id": _TEXT,
        "position": _MEASURE,
        "waiting_seconds": _SECONDS,
        "summary": text(2000, ""),
        "impossible": _SOME_REASONS,
        "gpus": listed(
            record(
                {
                    "gpu_id": _GPU_ID,
                    "uuid": _TEXT,
                    "name": _TEXT,
                    "obstacles": listed(_OBSTACLE, MOST_REASONS, list),
                }
            ),
            MOST_GPUS,
        ),
    }
)
_HISTORY: Final = record(
    {
        "gpus": listed(
            record(
                {
                    "gpu_id": _GPU_ID,
                    "uuid": _TEXT,
                    "readings": listed(
                        record({"timestamp": _TEXT, "memory_usage_percent": _MEASURE, "utilization_percent": _MEASURE}),
                        MOST_READINGS,
                    ),
                }
            ),
            MOST_GPUS,
        ),
        "sample_age_seconds": _SECONDS,
    }
)
_HEALTH: Final = record(
    {"status": _TEXT, "error": _TEXT, "gpu_count": _MEASURE, "backend": _TEXT, "driver_version": _TEXT}
)


def _decoder(reader: Reader, name: str) -> Callable[[bytes], Body]:
    """`name`: the list that the reply must have."""

    def decode(body: bytes) -> Body:
        row: Body = reader(_envelope(body, name), "", [])
        return row

    return decode


decode_stats: Final = _decoder(_STATS, "gpus")
decode_leases: Final = _decoder(record({"leases": listed(_LEASE, _MOST_ROWS)}), "leases")
decode_queue: Final = _decoder(record({"queue": listed(_QUEUED, _MOST_ROWS)}), "queue")
decode_explanation: Final = _decoder(_EXPLANATION, "gpus")
decode_history: Final = _decoder(_HISTORY, "gpus")


def decode_health(body: bytes) -> Body:
    health: Body = _HEALTH(_object(body), "", [])
    if health["status"] not in ("healthy", "degraded", "unhealthy"):
        health["status"] = None
    return health


def decode_host_id(body: bytes) -> str | None:
    host_id: str | None = _TEXT(_object(body).get("host_id"), "", [])
    return host_id


def decode_features(body: bytes) -> frozenset[str] | None:
    """The `features` that a server lists; None if it has no such list: an older server, or not one of ours."""
    features = listed(text(64), 1000)(_object(body).get("features"), "", [])
    return None if features is None else frozenset(features)


# --- one lease, one request, one error ---


class LeaseRow(NamedTuple):
    lease_id: str
    request_id: str
    fence: int
    state: str
    #: Number, UUID and name of each.
    gpus: tuple[tuple[int, str | None, str], ...]


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


_HELD: Final = record(
    {
        "lease_id": matching(_ID),
        "request_id": text(64, ""),
        "fence": whole_number(),
        "state": text(64, ""),
        "gpus": listed(
            record({"gpu_id": whole_number(), "uuid": matching(UUID_PATTERN), "name": _NAME}, key="gpu_id"), MOST_GPUS
        ),
    }
)
_POSITION: Final = record({"position": whole_number(), "reasons": _SOME_REASONS})
_PROBLEM: Final = record(
    {"error": text(64, ""), "detail": text(1000, ""), "reasons": _SOME_REASONS, "state": text(64, "")}
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
    return LeaseRow(row["lease_id"], row["request_id"], row["fence"], row["state"], gpus)


def decode_lease(body: bytes) -> LeaseRow:
    return read_lease_row(parse_json(body))


def decode_queue_position(body: bytes) -> QueuePosition:
    row = _POSITION(_object(body), "", [])
    return QueuePosition(row["position"], tuple(row["reasons"]))


def decode_problem(body: bytes | None) -> Problem:
    """Empty where the body is not that of an error of ours."""
    try:
        reply: object = None if body is None else parse_json(body)
    except ServiceRetryableError:
        reply = None
    row = _PROBLEM(reply if isinstance(reply, dict) else {}, "", [])
    return Problem(row["error"], row["detail"], tuple(row["reasons"]), row["state"])


# --- envelopes ---


def _object(body: bytes, has_every_key: Callable[[object, str], bool] | None = None) -> Body:
    reply = parse_json(body, has_every_key)
    if not isinstance(reply, dict):
        raise ServiceRetryableError(f"the reply must be a JSON object, not {shown(reply)}")
    return reply


def _envelope(body: bytes, name: str, has_every_key: Callable[[object, str], bool] | None = None) -> Body:
    reply = _object(body, has_every_key)
    if not isinstance(reply.get(name), list):
        raise ServiceRetryableError(f"the reply must have a list {name}, not {shown(reply.get(name))}")
    return reply
