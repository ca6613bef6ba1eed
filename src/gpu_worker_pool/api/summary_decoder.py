"""Decodes `GET /gpu/summary`, which monitors poll, as hostile input.

A bad envelope spoils the whole reply (a `ServiceRetryableError`), a bad field only its GPU: that GPU stays a row with a
`fault`, and the bad value becomes None.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

from gpu_worker_pool.api.json_values import (
    LONGEST_SENTENCE,
    MISSING,
    UUID_PATTERN,
    cleaned,
    envelope,
    flag,
    is_number,
    matching,
    number,
    record,
    shown,
    text,
    whole_number,
)
from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.models import UNKNOWN_GPU, GPUInfo, GPUStats

#: No host has more.
MOST_GPUS: Final = 16_384
LARGEST_GPU_ID: Final = 2**31 - 1
LONGEST_GPU_NAME: Final = 128
_MOST_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class DecodedSummary:
    stats: GPUStats
    #: What was wrong with the reply, one sentence each, for a log; empty for a good one.
    problems: tuple[str, ...]


def read_fault(value: object, name: str, problems: list[str]) -> str | None:
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
        "name": text(LONGEST_GPU_NAME, ""),
        "uuid": matching(UUID_PATTERN),
        "fault": read_fault,
        "memory_usage_percent": number(100),
        "utilization_percent": number(100),
        "memory_total_mb": number(LARGEST_MB),
        "memory_used_mb": number(LARGEST_MB),
        "process_count": whole_number(LARGEST_GPU_ID),
        "leased": flag(False),
        "reports_utilization": flag(True),
        "unified_memory": flag(False),
    }
)


def decode_summary(body: bytes) -> DecodedSummary:
    """`GET /gpu/summary` of our server, or of any other that uses the documented keys."""
    reply = envelope(body, "gpus_summary", _has_every_key)
    rows = reply["gpus_summary"]
    if len(rows) > MOST_GPUS:
        raise ServiceRetryableError(f"the reply lists {len(rows)} GPUs; at most {MOST_GPUS} are believed")
    age = reply.get("sample_age_seconds", 0.0)
    if not is_number(age):
        # Readings of unknown age may be old, and nothing may be granted from old readings.
        raise ServiceRetryableError(f"sample_age_seconds is {shown(age)}, so the age of the readings is unknown")

    problems: list[str] = []
    gpus = _summary_rows(rows, problems)
    if reply.get("gpu_count") != len(rows):
        problems.append(f"gpu_count is {shown(reply.get('gpu_count'))}, but {len(rows)} GPUs are listed")
    totals = _TOTALS(reply, "", problems)
    _check_used(totals, "total_used_memory_mb", "total_memory_mb", problems)
    stats = GPUStats(gpu_count=len(gpus), gpus_summary=gpus, sample_age_seconds=age, **totals)
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
    return DecodedSummary(stats, tuple(problems))


def _summary_rows(rows: list[Any], problems: list[str]) -> list[GPUInfo]:
    """The GPUs in the order of the reply, without those that have no usable id."""
    gpus: dict[int, GPUInfo] = {}
    uuids: dict[str, int] = {}
    for position, row in enumerate(rows):
        gpu_id = row.get("gpu_id") if isinstance(row, dict) else None
        if type(gpu_id) is not int or not 0 <= gpu_id <= LARGEST_GPU_ID:
            what = f"gpu_id is {shown(gpu_id)}" if isinstance(row, dict) else f"it is {shown(row)}"
            problems.append(f"row {position} is left out: {what}")
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
    return list(gpus.values())


def _sound_gpu(gpu_id: int, row: dict[str, Any], uuids: dict[str, int]) -> GPUInfo | None:
    """The row as it nearly always is, with everything known and nothing wrong; None for any other.

    Gives what `_gpu` would, in half the time: hundreds of endpoints are read every few seconds.
    """
    try:
        name, uuid, total, process_count = row["name"], row["uuid"], row["memory_total_mb"], row["process_count"]
        is_sound = (
            row["fault"] is None
            and total <= LARGEST_MB
            and process_count <= LARGEST_GPU_ID
            and 0 < len(name) <= LONGEST_GPU_NAME
            and name.isprintable()
            and uuid not in uuids
            and UUID_PATTERN.fullmatch(uuid) is not None
        )
        if not is_sound:
            return None
        gpu = GPUInfo(  # checks the rest
            gpu_id,
            name,
            row["memory_usage_percent"],
            row["utilization_percent"],
            uuid=uuid,
            memory_total_mb=total,
            memory_used_mb=row["memory_used_mb"],
            leased=row.get("leased", False),
            reports_utilization=row.get("reports_utilization", True),
            process_count=process_count,
            unified_memory=row.get("unified_memory", False),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    uuids[uuid] = gpu_id
    return gpu


def _gpu(gpu_id: int, row: dict[str, Any], faults: list[str], uuids: dict[str, int]) -> GPUInfo:
    found = _SUMMARY_ROW(row, "", faults)
    _check_used(found, "memory_used_mb", "memory_total_mb", faults)
    uuid = found["uuid"]
    if uuid is not None and uuids.setdefault(uuid, gpu_id) != gpu_id:
        faults.append(f"uuid is that of GPU {uuids[uuid]}, too")
        found["uuid"] = None
    found["name"] = found["name"] or UNKNOWN_GPU
    return GPUInfo(gpu_id, **with_faults(found, faults))


def with_faults(row: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """A GPU with a bad value must not be used."""
    if faults:
        reported = [row["fault"]] if row["fault"] else []
        sentences = [*reported, *(f"bad value: {what}" for what in faults)]
        row["fault"] = cleaned("; ".join(sentences), 2 * LONGEST_SENTENCE)
    return row


def _check_used(row: dict[str, Any], used: str, total: str, problems: list[str]) -> None:
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
    if "\\" in text:  # an escaped colon in a text would make up for that of a repeated key
        return False
    rows = reply.get("gpus_summary") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(rows, list) or not all(type(row) is dict for row in rows):
        return False
    extra = text.count(":") - len(reply) - sum(map(len, rows)) - str(reply.get("timestamp")).count(":")
    return extra == 0 or extra == sum(str(row.get(key)).count(":") for row in rows for key in ("name", "uuid"))
