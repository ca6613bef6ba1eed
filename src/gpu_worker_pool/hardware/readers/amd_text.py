"""Parses the JSON of amd-smi, as ROCm 6 and 7 write it. It starts no process; unreadable values become None, never 0.

ROCm 6 prints a list with one object per GPU; ROCm 7 puts that list into an object, as `gpu_data`. Both print values as
`{"value": 42, "unit": "%"}`, as a bare number, or as "N/A".
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, GPUReading

Row = dict[str, Any]

_LISTS: Final = ("gpu_data", "gpus", "data")
#: In the driver's MB, which are 2**20 bytes.
_UNITS: Final = {"b": 1 / 1024**2, "kb": 1 / 1024, "mb": 1.0, "gb": 1024.0, "tb": 1024.0**2}
_SERIAL: Final = re.compile(r"(?:0x|GPU-)?([0-9a-fA-F]{1,16})")
_TEMPERATURES: Final = ("hotspot", "edge")
_POWERS: Final = ("socket_power", "current_socket_power", "average_socket_power")


def rows_of(text: str) -> dict[int, Row]:
    """By the tool's number of the GPU. Raises a `DriverError` if this is not the JSON of amd-smi."""
    # Warnings about missing groups may come first, on stdout.
    begin = min((found for found in (text.find("\n[", 0), text.find("\n{", 0)) if found >= 0), default=-1) + 1
    if text[:1] in "[{":
        begin = 0
    try:
        found, _ = json.JSONDecoder().raw_decode(text[begin:])
    except (ValueError, RecursionError):
        raise unreadable(text) from None
    if isinstance(found, dict):
        found = next((found[name] for name in _LISTS if isinstance(found.get(name), list)), [found])
    rows: dict[int, Row] = {}
    for row in found if isinstance(found, list) else []:
        number = row.get("gpu") if isinstance(row, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 10_000:
            rows.setdefault(number, row)  # the same GPU twice counts once
    return rows


def unreadable(text: str) -> DriverError:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return DriverError(f"amd-smi printed no readable JSON, but: {first[:200]}")


def reading_of(number: int, listed: Row, static: Row, metric: Row | None, processes: Row | None) -> GPUReading:
    """One GPU; `metric` and `processes` are None where the tool did not report them."""
    asic = _part(static, "asic")
    name = _text(asic.get("market_name")) or _text(_part(static, "board").get("product_name")) or UNKNOWN_NAME
    hip_id = listed.get("hip_id")
    index = hip_id if isinstance(hip_id, int) and not isinstance(hip_id, bool) and hip_id >= 0 else number
    bus_id = _text(listed.get("bdf")) or _text(_part(static, "bus").get("bdf"))
    identity = identity_of(listed.get("hip_uuid"), asic.get("asic_serial"), bus_id)
    if metric is None:
        return GPUReading(index, name, identity, bus_id, fault="amd-smi reports nothing about it: see `dmesg`")
    memory = _part(metric, "mem_usage")
    temperature, power = _part(metric, "temperature"), _part(metric, "power")
    return GPUReading(
        index,
        name,
        identity,
        bus_id,
        memory_total_mb=size_mb(memory.get("total_vram")) or size_mb(_part(static, "vram").get("size")),
        memory_used_mb=size_mb(memory.get("used_vram")),
        memory_free_mb=size_mb(memory.get("free_vram")),
        utilization_percent=number_of(_part(metric, "usage").get("gfx_activity")),
        temperature_c=_first(temperature, _TEMPERATURES),
        power_draw_w=_first(power, _POWERS),
        processes=None if processes is None else _processes_of(processes),
    )


def identity_of(hip_uuid: object, serial: object, bus_id: str | None) -> str | None:
    """As ROCm names it, `GPU-` and 16 digits; a GPU without a serial number is known by where it is plugged in."""
    for value in (hip_uuid, serial):
        found = _SERIAL.fullmatch(value) if isinstance(value, str) else None
        if found is not None and int(found[1], 16) > 0:
            return f"GPU-{found[1].lower():0>16}"
    return None if bus_id is None else f"AMD-{bus_id.lower()}"


def _processes_of(row: Row) -> tuple[Any, ...] | None:
    found = row.get("process_list", row.get("processes"))
    if not isinstance(found, list):
        return None
    readings = []
    for each in found:
        info = each.get("process_info", each) if isinstance(each, dict) else each
        if isinstance(info, str):  # that there are none
            continue
        pid = info.get("pid") if isinstance(info, dict) else None
        if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
            return None  # one that cannot be identified may be anybody's
        used_mb = size_mb(_part(info, "memory_usage").get("vram_mem"))
        readings.append(describe_process(pid, name=_text(info.get("name")), memory_used_mb=used_mb))
    return tuple(readings)


def number_of(value: object) -> float | None:
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:  # N/A
        return None


def size_mb(value: object, unit: str = "MB") -> float | None:
    if isinstance(value, dict):
        unit = str(value.get("unit") or unit)
    number, factor = number_of(value), _UNITS.get(unit.lower())
    return None if number is None or factor is None else number * factor


def _first(row: Row, names: tuple[str, ...]) -> float | None:
    return next((found for name in names if (found := number_of(row.get(name))) is not None), None)


def _part(row: Row, name: str) -> Row:
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str | None:
    return value.strip() if isinstance(value, str) and value.strip() not in ("", "N/A") else None
