"""Decodes the replies of our HTTP API as hostile input; it reads bytes and does nothing else.

A bad envelope spoils the whole reply (a `ServiceRetryableError`), a bad field only its GPU: that GPU stays a row with a
`fault`, and the bad value becomes None. Rows hold the documented keys and no others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
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
from gpu_worker_pool.hardware.origin import LONGEST_NAME
from gpu_worker_pool.models import UNKNOWN_GPU, GPUInfo, GPUStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.api.json_values import FieldReader

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
        "unified_memory": flag(False),
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
        if type(gpu_id) is not int or not 0 <= gpu_id <= _LARGEST_GPU_ID:
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


def _sound_gpu(gpu_id: int, row: Body, uuids: dict[str, int]) -> GPUInfo | None:
    """The row as it nearly always is, with everything known and nothing wrong; None for any other.

    Gives what `_gpu` would, in half the time: hundreds of endpoints are read every few seconds.
    """
    try:
        name, uuid, total, process_count = row["name"], row["uuid"], row["memory_total_mb"], row["process_count"]
        is_sound = (
            row["fault"] is None
            and total <= LARGEST_MB
            and process_count <= _LARGEST_GPU_ID
            and 0 < len(name) <= _LONGEST_NAME
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


def _gpu(gpu_id: int, row: Body, faults: list[str], uuids: dict[str, int]) -> GPUInfo:
    found = _SUMMARY_ROW(row, "", faults)
    _check_used(found, "memory_used_mb", "memory_total_mb", faults)
    uuid = found["uuid"]
    if uuid is not None and uuids.setdefault(uuid, gpu_id) != gpu_id:
        faults.append(f"uuid is that of GPU {uuids[uuid]}, too")
        found["uuid"] = None
    found["name"] = found["name"] or UNKNOWN_GPU
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
    if "\\" in text:  # an escaped colon in a text would make up for that of a repeated key
        return False
    rows = reply.get("gpus_summary") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(rows, list) or not all(type(row) is dict for row in rows):
        return False
    extra = text.count(":") - len(reply) - sum(map(len, rows)) - str(reply.get("timestamp")).count(":")
    return extra == 0 or extra == sum(str(row.get(key)).count(":") for row in rows for key in ("name", "uuid"))


# --- rows for people: of the other routes ---

_TEXT: Final = text()
_NAME: Final = text(_LONGEST_NAME, "")
_REASONS: Final = listed(text(1000), MOST_REASONS, list)
#: By the name that `_row` knows them by.
_READERS: Final[dict[str, FieldReader]] = {
    "text": _TEXT,
    "name": _NAME,
    "sentence": text(2000, ""),
    "fault": _read_fault,
    "flag": flag(False),
    "true": flag(True),
    "gpu_id": whole_number(_LARGEST_GPU_ID),
    # More than any amount, number or percentage of a GPU.
    "number": number(1e12, least=-1e12),
    # How long something has lasted: a hundred years are more than any host has been up.
    "seconds": number(100 * 366 * 86_400),
    "reasons": _REASONS,
    "obstacles": listed(text(1000), MOST_REASONS),
}


def _row(fields: str, key: str | None = None) -> FieldReader:
    """A record of `name:reader` fields, in the order in which the server sends them."""
    pairs = [field.split(":") for field in fields.split()]
    return record({name: _READERS[reader] for name, reader in pairs}, key)


def _rows(fields: str, key: str | None = None, most: int = _MOST_ROWS) -> FieldReader:
    return listed(_row(fields, key), most, list)


_READERS["memory"] = _row("total_mb:number used_mb:number free_mb:number usage_percent:number")
_READERS["power"] = _row("draw_w:number limit_w:number")
# None where the processes, or the ledger, cannot be read.
_READERS["processes"] = listed(
    _row("pid:number name:text user:text memory_used_mb:number running_seconds:seconds"), 1024
)
_READERS["holder"] = record(
    {
        "user": text(LONGEST_NAME),
        "host": text(LONGEST_NAME),
        "pid": whole_number(_LARGEST_GPU_ID),
        "program": text(LONGEST_NAME),
        "verified": flag(False),
    }
)
_READERS["promises"] = listed(
    _row("lease_id:text worker_id:text label:text state:text user:text holder:holder within:text"), _MOST_ROWS
)
_READERS["mig_devices"] = _rows(
    "uuid:text name:text gpu_instance_id:number compute_instance_id:number memory:memory fault:text "
    "processes:processes",
    most=64,
)
_GPU: Final = _row(
    "gpu_id:gpu_id name:name memory:memory utilization_percent:number temperature_c:number power:power uuid:text "
    "pci_bus_id:text fault:fault reports_utilization:true ecc_uncorrected_errors:number recovery_action:text "
    "processes:processes graphics_processes:processes unified_memory:flag mig_enabled:flag mig_devices:mig_devices "
    "leases:promises obstacles:obstacles idle_obstacles:obstacles",
    key="gpu_id",
)


def _gpu_row(value: object, _name: str, _problems: list[str]) -> Body | None:
    faults: list[str] = []
    row: Body | None = _GPU(value, "", faults)
    if row is None:
        return None
    if isinstance(value, dict) and "leases" not in value:
        del row["leases"]  # null means that the ledger cannot be read; an older server leaves it out
    return _with_faults(row, faults)


_READERS["gpus"] = listed(_gpu_row, MOST_GPUS)
_STATS: Final = _row(
    "gpu_count:number gpus:gpus timestamp:text backend:text driver_version:text sample_age_seconds:seconds"
)
_READERS["quarantine"] = _row("reason:text seconds:seconds")
_READERS["leased_gpus"] = _rows("gpu_id:gpu_id uuid:text name:text")


def _with_host(read: FieldReader, most: int = _MOST_ROWS) -> FieldReader:
    """The same rows, each with its host where a fleet says it."""

    def read_row(value: object, name: str, problems: list[str]) -> Body | None:
        row: Body | None = read(value, name, problems)
        if row is not None and isinstance(value, dict) and isinstance(host := value.get("host"), str):
            row["host"] = cleaned(host, LONGEST_NAME)
        return row

    return listed(read_row, most, list)


_READERS["leases"] = _with_host(
    _row(
        "lease_id:text request_id:text worker_id:text fence:number gpus:leased_gpus granted_at:text expires_at:text "
        "yield_asked:flag yield_reason:text leave_in_seconds:seconds "
        "expires_in_seconds:seconds ends_in_seconds:seconds ttl_seconds:seconds state:text label:text memory_mb:number "
        "share:flag within:text "
        "held_seconds:seconds quarantine:quarantine memory_used_mb:number idle_seconds:seconds is_idle:flag user:text "
        "account:text expected_seconds:seconds max_seconds:seconds holder:holder",
        key="lease_id",
    )
)
_READERS["queue"] = _rows(
    "request_id:text worker_id:text position:number waiting_seconds:seconds reasons:reasons label:text "
    "priority:number count:number account:text expected_seconds:seconds max_seconds:seconds holder:holder within:text",
    key="request_id",
)
_READERS["explained_obstacles"] = _rows("kind:text text:sentence actual:number limit:number", most=MOST_REASONS)
_READERS["explained_gpus"] = _with_host(_row("gpu_id:gpu_id uuid:text name:text obstacles:explained_obstacles"))
_READERS["readings"] = _rows(
    "timestamp:text memory_usage_percent:number utilization_percent:number", most=MOST_READINGS
)
_READERS["gpu_histories"] = _rows("gpu_id:gpu_id uuid:text readings:readings")
_HEALTH: Final = _row("status:text error:text gpu_count:number backend:text driver_version:text")


def _decoder(reader: FieldReader, name: str) -> Callable[[bytes], Body]:
    """`name`: the list that the reply must have."""

    def decode(body: bytes) -> Body:
        row: Body = reader(_envelope(body, name), "", [])
        return row

    return decode


decode_stats: Final = _decoder(_STATS, "gpus")
decode_leases: Final = _decoder(_row("leases:leases"), "leases")
decode_queue: Final = _decoder(_row("queue:queue"), "queue")
decode_explanation: Final = _decoder(
    _row(
        "request_id:text position:number waiting_seconds:seconds summary:sentence impossible:reasons "
        "gpus:explained_gpus"
    ),
    "gpus",
)
decode_history: Final = _decoder(_row("gpus:gpu_histories sample_age_seconds:seconds"), "gpus")


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
        "ends_in_seconds": _READERS["seconds"],
        "yield_asked": _READERS["flag"],
        "yield_reason": text(300, ""),
        "leave_in_seconds": _READERS["seconds"],
        "host": text(40, ""),
        "gpus": listed(
            record({"gpu_id": whole_number(), "uuid": matching(UUID_PATTERN), "name": _NAME}, key="gpu_id"), MOST_GPUS
        ),
    }
)
_POSITION: Final = record({"position": whole_number(), "reasons": _REASONS})
_PROBLEM: Final = record(
    {
        "error": text(64, ""),
        "detail": text(1000, ""),
        "reasons": _REASONS,
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
    row = _POSITION(_object(body), "", [])
    return QueuePosition(row["position"], tuple(row["reasons"]))


def decode_problem(body: bytes | None) -> Problem:
    """Empty where the body is not that of an error of ours."""
    try:
        reply: object = None if body is None else parse_json(body)
    except ServiceRetryableError:
        reply = None
    row = _PROBLEM(reply if isinstance(reply, dict) else {}, "", [])
    return Problem(row["error"], row["detail"], tuple(row["reasons"]), row["state"], row["lease"])


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
