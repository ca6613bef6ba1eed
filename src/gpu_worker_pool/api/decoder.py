"""Decodes the replies of all routes but `/gpu/summary`, and those about one lease, as hostile input.

As in `summary_decoder.py`, a bad field spoils only its GPU. Rows hold the documented keys and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.json_values import (
    cleaned,
    envelope,
    flag,
    json_object,
    listed,
    number,
    record,
    seconds,
    text,
    whole_number,
)
from gpu_worker_pool.api.lease_decoder import MOST_REASONS, REASONS
from gpu_worker_pool.api.summary_decoder import LARGEST_GPU_ID, LONGEST_GPU_NAME, MOST_GPUS, read_fault, with_faults
from gpu_worker_pool.hardware.origin import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.api.json_values import FieldReader

    Body = dict[str, Any]

#: Readings of a GPU in `/gpu/history`.
MOST_READINGS: Final = 300
_MOST_ROWS: Final = 50_000

_TEXT: Final = text()
#: By the name that `_row` knows them by.
_READERS: Final[dict[str, FieldReader]] = {
    "text": _TEXT,
    "name": text(LONGEST_GPU_NAME, ""),
    "sentence": text(2000, ""),
    "fault": read_fault,
    "flag": flag(False),
    "true": flag(True),
    "gpu_id": whole_number(LARGEST_GPU_ID),
    # More than any amount, number or percentage of a GPU.
    "number": number(1e12, least=-1e12),
    "seconds": seconds(),
    "reasons": REASONS,
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
        "pid": whole_number(LARGEST_GPU_ID),
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
    return with_faults(row, faults)


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
        row: Body = reader(envelope(body, name), "", [])
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
    health: Body = _HEALTH(json_object(body), "", [])
    if health["status"] not in ("healthy", "degraded", "unhealthy"):
        health["status"] = None
    return health


def decode_host_id(body: bytes) -> str | None:
    host_id: str | None = _TEXT(json_object(body).get("host_id"), "", [])
    return host_id


def decode_features(body: bytes) -> frozenset[str] | None:
    """The `features` that a server lists; None if it has no such list: an older server, or not one of ours."""
    features = listed(text(64), 1000)(json_object(body).get("features"), "", [])
    return None if features is None else frozenset(features)
