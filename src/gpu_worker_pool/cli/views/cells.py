"""The cells of the tables of leases, waiting requests and GPUs, from the bodies of the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.api.holder_rows import shown_holder
from gpu_worker_pool.cli.quantities import spoken_mb, spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

Row = dict[str, Any]

LEASE_COLUMNS = ("lease", "gpu", "holder", "since", "promised", "used", "state", "label")
QUEUE_COLUMNS = ("place", "request", "who", "waiting", "wants", "why", "label")
WAITING_COLUMNS = ("place", "who", "waiting", "why", "label")
#: How many processes of a GPU that is not leased are listed.
MOST_OUTSIDERS = 3
GPU_COLUMNS = ("gpu", "memory", "load", "state", "holder", "since", "promised", "used")


def lease_cells(row: Row) -> list[str]:
    return [
        row["lease_id"],
        ",".join(str(gpu["gpu_id"]) for gpu in row["gpus"]),
        shown_holder(row),
        _duration(row["held_seconds"]),
        promised(row),
        spoken_mb(row["memory_used_mb"]),
        lease_state(row),
        row["label"] or "",
    ]


def lease_state(row: Row) -> str:
    quarantine = row.get("quarantine")
    if quarantine:
        return f"quarantined: {quarantine['reason']}"
    if row.get("is_idle"):
        return f"idle for {_duration(row['idle_seconds'])}"
    state: str = row["state"] or "?"
    return state


def promised(row: Row) -> str:
    """Memory reserved on each GPU."""
    if row["memory_mb"] is None:
        return "all"
    return spoken_mb(row["memory_mb"])


def queue_cells(row: Row) -> list[str]:
    count, priority = row["count"] or 1, f", priority {row['priority']}" if row["priority"] else ""
    return [
        "?" if row["position"] is None else str(row["position"]),
        row["request_id"],
        shown_holder(row),
        _duration(row["waiting_seconds"]),
        f"{count} GPU{'s' if count > 1 else ''}{priority}",
        row["reasons"][0] if row["reasons"] else "",
        row["label"] or "",
    ]


def waiting_cells(row: Row) -> list[str]:
    """The short form, below the GPUs."""
    cells = dict(zip(QUEUE_COLUMNS, queue_cells(row), strict=True))
    return [cells[name] for name in WAITING_COLUMNS]


def gpu_rows(row: Row, leases: Iterable[Row]) -> list[list[str]]:
    """One GPU, with a line for each of its holders."""
    on_it = leases_on(row, leases)
    gpu = [str(row["gpu_id"]), memory_cell(row), load_cell(row), gpu_state(row, on_it)]
    holders = [
        [
            shown_holder(lease) + (f" ({lease['label']})" if lease["label"] else ""),
            _duration(lease["held_seconds"]),
            promised(lease),
            used_in_all(lease),
        ]
        for lease in on_it
    ] or _outsiders(row)
    return [(["", "", "", ""] if number else gpu) + cells for number, cells in enumerate(holders)]


def used_in_all(row: Row) -> str:
    """Of a lease of several GPUs only the sum is known, which may exceed the memory of one."""
    used = spoken_mb(row["memory_used_mb"])
    return used if len(row["gpus"]) == 1 else f"{used} of {len(row['gpus'])} GPUs"


def memory_cell(row: Row) -> str:
    memory = row["memory"] or {"used_mb": None, "total_mb": None}
    what = "GiB host memory" if row.get("unified_memory") else "GiB"
    return f"{_gib(memory['used_mb'])}/{_gib(memory['total_mb'])} {what}"


def load_cell(row: Row) -> str:
    return "?" if row["utilization_percent"] is None else f"{row['utilization_percent']:.0f} %"


def _duration(seconds: float | None) -> str:
    return "?" if seconds is None else spoken_seconds(seconds)


def _gib(megabytes: float | None) -> str:
    return "?" if megabytes is None else f"{megabytes / 1024:.1f}".removesuffix(".0")


def gpu_state(row: Row, on_it: list[Row]) -> str:
    if row.get("fault"):
        return f"fault: {row['fault']}"
    if any(lease.get("quarantine") for lease in on_it):
        return "quarantine"
    if on_it:
        ids = {lease.get("lease_id") for lease in on_it}
        # A lease stands for those inside it.
        return (
            "shared"
            if all(lease["share"] for lease in on_it if lease.get("within") is None or lease["within"] not in ids)
            else "held"
        )
    obstacles = row.get("obstacles")
    if obstacles is None:
        return "unknown"  # the ledger cannot be read, or the server has none
    if obstacles:
        return "busy"
    # `gpu-pool run` would not take it. (Older servers do not say so.)
    return "in use" if row.get("idle_obstacles") else "free"


def _outsiders(row: Row) -> list[list[str]]:
    """A line for each process without a lease; without such processes, what else keeps the GPU from a request."""
    processes = row.get("processes") or []
    lines = [
        [
            f"{process['name'] or 'process'} (pid {process['pid']}{', ' + process['user'] if process['user'] else ''})",
            _duration(process.get("running_seconds")),
            "no lease",
            spoken_mb(process["memory_used_mb"]),
        ]
        for process in processes[:MOST_OUTSIDERS]
    ]
    if len(processes) > MOST_OUTSIDERS:
        lines.append([f"and {len(processes) - MOST_OUTSIDERS} more", "", "", ""])
    why = next(iter(row.get("obstacles") or row.get("idle_obstacles") or ()), "")
    return lines or [[why, "", "", ""]]


def leases_on(gpu: Row, leases: Iterable[Row]) -> list[Row]:
    names = {gpu["uuid"], *(device["uuid"] for device in gpu.get("mig_devices") or ())} - {None}

    def is_it(held: Row) -> bool:
        return held["uuid"] in names if held["uuid"] is not None else held["gpu_id"] == gpu["gpu_id"]

    return [lease for lease in leases if any(map(is_it, lease["gpus"]))]
