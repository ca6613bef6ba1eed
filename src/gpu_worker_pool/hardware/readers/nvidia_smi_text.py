"""Parses the output of nvidia-smi. It starts no process; unreadable values become None, never 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.samples import UNKNOWN_NAME, GPUReading, MIGReading

MANDATORY_FIELDS: Final = frozenset({"index", "name", "memory.total", "memory.used"})
#: Queried in this order; an optional field that the driver does not know is left out of the next query.
GPU_FIELDS: Final = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "memory.free",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "ecc.errors.uncorrected.volatile.total",
    "gpu_recovery_action",
    "mig.mode.current",
)
#: A process name may contain commas, so the fields around it must not.
PROCESS_FIELDS: Final = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")

_LONGEST_QUOTE: Final = 200
# Too few digits for int() or float() to fail or overflow; no plus sign, exponent or NaN.
_NUMBER: Final = re.compile(r"(-?[0-9]{1,15}(?:\.[0-9]{1,15})?) ?([%A-Za-z]*)")
_WHOLE_NUMBER: Final = re.compile(r"[0-9]{1,15}")
_PLACEHOLDER: Final = re.compile(
    r"\[.*\]|n/?a|err!|none|not supported|not found|unknown error|insufficient permissions|", re.IGNORECASE
)
_LOSS: Final = re.compile(r"gpu is lost|requires (?:a )?reset|fallen off the bus", re.IGNORECASE)
_NOT_SUPPORTED: Final = re.compile(r"\[?(?:n/a|not supported)\]?", re.IGNORECASE)
_ERROR: Final = re.compile(r"err!|unknown error", re.IGNORECASE)

_BUS_ID: Final = re.compile(r"\b(?:GPU)?([0-9A-F]{1,8}):([0-9A-F]{2}):([0-9A-F]{2})\.([0-9A-F])\b", re.IGNORECASE)
_NO_HANDLE: Final = re.compile(r"unable to determine the device handle for\s+(?:gpu\s*)?(.*)", re.IGNORECASE)
_LEADING_INDEX: Final = re.compile(r"([0-9]{1,4})\s*:\s+")
_UNKNOWN_FIELD: Final = re.compile(r'field "([^"]*)" is not a valid field to query', re.IGNORECASE)

_PROCESS: Final = re.compile(r"((?:GPU|MIG)-[^,\s]+)\s*,([^,]*),(.*)", re.DOTALL)
_LISTED_GPU: Final = re.compile(r"GPU ([0-9]{1,4}):")
_LISTED_MIG: Final = re.compile(r"MIG ([!-~]+)\s+Device\s+([0-9]{1,4}):\s*\(UUID:\s*(MIG-[!-(*-~]+)\)")
_INSTANCES_IN_UUID: Final = re.compile(r"MIG-GPU-[^/]+/([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Complaint:
    """A GPU that nvidia-smi names but cannot read; index or bus id is set."""

    reason: str
    index: int | None = None
    bus_id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedGPUs:
    rows: tuple[GPUReading, ...]
    complaints: tuple[Complaint, ...]
    driver_version: str | None


class ParsedProcess(NamedTuple):
    pid: int
    name: str | None
    memory_used_mb: float | None


class MIGMemory(NamedTuple):
    gpu_instance_id: int | None
    compute_instance_id: int | None
    used_mb: float | None
    total_mb: float | None
    fault: str | None


# --- GPUs ---


def parse_gpus(text: str, fields: tuple[str, ...]) -> ParsedGPUs:
    """The output of `--query-gpu=` with these fields, as CSV without header, mixed with other lines."""
    rows: list[GPUReading] = []
    complaints: list[Complaint] = []
    unreadable: list[Complaint] = []
    seen: set[int | str] = set()
    driver_version = None
    for line in filter(None, map(str.strip, text.split("\n"))):
        if (complaint := parse_complaint(line)) is not None:
            complaints.append(complaint)
            continue
        cells = [cell.strip() for cell in line.split(",")]
        index, bus = _whole_number(cells[0]), bus_id(line)
        if len(cells) < 2 or (index is None and bus is None):
            continue
        if index is None or len(cells) != len(fields):
            # The cells cannot be matched to fields, but they belong to this GPU.
            unreadable.append(Complaint(f"its line from nvidia-smi cannot be read: {quote(line)}", index, bus))
            continue
        named = dict(zip(fields, cells, strict=True))
        row = _gpu(index, named)
        if not seen.isdisjoint({index, row.uuid or index}):
            continue
        seen.update({index, row.uuid or index})
        rows.append(row)
        driver_version = driver_version or _text(named.get("driver_version", ""))
    # Without any readable row, this is not the output of nvidia-smi.
    first_about_each: dict[tuple[int | None, str | None], Complaint] = {}
    for complaint in (*complaints, *(unreadable if rows else ())):
        first_about_each.setdefault((complaint.index, complaint.bus_id), complaint)
    return ParsedGPUs(tuple(rows), tuple(first_about_each.values()), driver_version)


def _gpu(index: int, cells: dict[str, str]) -> GPUReading:
    def number(field: str, unit: str) -> float | None:
        return _number(cells.get(field, ""), unit)

    def memory(field: str) -> float | None:
        return _memory_mb(cells.get(field, ""))

    mig_enabled = cells.get("mig.mode.current", "").lower() == "enabled"
    # Then the driver has no memory to report; the reader knows whether the GPU has reported some before.
    is_unified = not mig_enabled and all(
        _NOT_SUPPORTED.fullmatch(cells[field]) for field in ("memory.total", "memory.used")
    )
    is_without_utilization = is_unified and _NOT_SUPPORTED.fullmatch(cells.get("utilization.gpu", "")) is not None
    recovery_action = _text(cells.get("gpu_recovery_action", ""))
    return GPUReading(
        index=index,
        name=_text(cells["name"]) or UNKNOWN_NAME,
        uuid=_uuid(cells.get("uuid", "")),
        pci_bus_id=bus_id(cells.get("pci.bus_id", "")),
        memory_total_mb=memory("memory.total"),
        memory_used_mb=memory("memory.used"),
        memory_free_mb=memory("memory.free"),
        utilization_percent=None if mig_enabled else number("utilization.gpu", "%"),
        reports_utilization=not mig_enabled and not is_without_utilization,
        unified_memory=is_unified,
        temperature_c=number("temperature.gpu", "C"),
        power_draw_w=number("power.draw", "W"),
        power_limit_w=number("power.limit", "W"),
        ecc_uncorrected_errors=_whole_number(cells.get("ecc.errors.uncorrected.volatile.total", "")),
        recovery_action=recovery_action,
        fault=_fault(cells, mig_enabled=mig_enabled, recovery_action=recovery_action),
        mig_enabled=mig_enabled,
    )


def _fault(cells: dict[str, str], *, mig_enabled: bool, recovery_action: str | None) -> str | None:
    for cell in cells.values():
        if _LOSS.search(cell):
            return quote(cell.strip("[]"))
    # Without its MIG mode a split GPU would look like a whole one without devices.
    decisive = ["memory.total", "memory.used", "mig.mode.current"]
    if not mig_enabled:
        decisive.append("utilization.gpu")
    for field in decisive:
        if _ERROR.search(cells.get(field, "")):
            return f"{field} cannot be read: {quote(cells[field].strip('[]'))}"
    return None if recovery_action is None else f"the driver asks for a recovery action: {recovery_action}"


def parse_complaint(line: str) -> Complaint | None:
    """Such as `Unable to determine the device handle for GPU3: 0000:0A:00.0: GPU is lost.  Reboot …`."""
    match = _NO_HANDLE.search(line)
    if match is None:
        bus = bus_id(line)
        # Rows contain commas, and their cells show the problem.
        return Complaint(quote(line), None, bus) if bus and "," not in line and _LOSS.search(line) else None
    # `GPU3: …` is an index; `GPU0000:0A:00.0` is a bus id whose domain looks like one.
    leading = _LEADING_INDEX.match(match[1])
    index, bus = None if leading is None else int(leading[1]), bus_id(match[1])
    return None if index is None and bus is None else Complaint(quote(line), index, bus)


def bus_id(text: str) -> str | None:
    """In the form of NVML, with eight digits for the domain: `00000000:0A:00.0`."""
    match = _BUS_ID.search(text)
    return None if match is None else f"{match[1].zfill(8)}:{match[2]}:{match[3]}.{match[4]}".upper()


# --- processes ---


def parse_processes(text: str) -> dict[str, tuple[ParsedProcess, ...] | None] | None:
    """By GPU UUID; None for a GPU whose processes are hidden. None if the output cannot be parsed."""
    records: list[str] = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        if _PROCESS.fullmatch(line):
            records.append(line)
        elif parse_complaint(line) or line.startswith("WARNING") or "no running processes" in line.lower():
            continue
        elif records:
            records[-1] += f" {line}"  # a name may contain a line break
        else:
            return None
    found: dict[str, dict[int, ParsedProcess] | None] = {}
    for record in records:
        match = _PROCESS.fullmatch(record)
        assert match is not None
        uuid, pid = match[1], _whole_number(match[2].strip())
        of_gpu = found.setdefault(uuid, {})
        if not pid:
            found[uuid] = None
        elif of_gpu is not None:
            name, comma, memory = match[3].rpartition(",")
            process = ParsedProcess(pid, _text((name if comma else memory).strip()), _process_memory(memory, comma))
            of_gpu.setdefault(pid, process)
    return {uuid: None if of_gpu is None else tuple(of_gpu.values()) for uuid, of_gpu in found.items()}


def _process_memory(cell: str, comma: str) -> float | None:
    value = _memory_mb(cell.strip()) if comma else None
    return value if value is not None and 0 <= value <= LARGEST_MB else None


# --- MIG devices ---


def parse_mig_list(text: str) -> dict[int, dict[int, MIGReading]]:
    """The output of `-L`, by GPU index and device number."""
    gpus: dict[int, dict[int, MIGReading]] = {}
    devices: dict[int, MIGReading] = {}
    uuids: set[str] = set()
    for line in map(str.strip, text.split("\n")):
        if (gpu := _LISTED_GPU.match(line)) is not None:
            devices = gpus.setdefault(int(gpu[1]), {})
        elif (mig := _LISTED_MIG.match(line)) is not None and mig[3] not in uuids:
            uuids.add(mig[3])
            # Drivers before 470 put both instance ids into the UUID.
            ids = _INSTANCES_IN_UUID.fullmatch(mig[3])
            reading = MIGReading(mig[3], mig[1], int(ids[1]) if ids else None, int(ids[2]) if ids else None)
            devices.setdefault(int(mig[2]), reading)
    return gpus


def parse_mig_table(text: str) -> dict[tuple[int, int], MIGMemory]:
    """The section `MIG devices:` of the plain table, by GPU index and device number."""
    found: dict[tuple[int, int], MIGMemory] = {}
    _, _, section = text.partition("MIG devices:")
    for line in section.partition("Processes:")[0].split("\n"):
        columns = line.strip().strip("|").split("|")
        numbers = columns[0].split()
        if len(numbers) != 4 or len(columns) < 2:
            continue
        gpu, gpu_instance, compute_instance, device = map(_whole_number, numbers)
        if gpu is None or device is None:
            continue
        used, _, total = map(str.strip, columns[1].partition(" / "))
        fault = f"its memory cannot be read: {quote(columns[1].strip())}" if _ERROR.search(columns[1]) else None
        memory = MIGMemory(gpu_instance, compute_instance, _memory_mb(used), _memory_mb(total), fault)
        found.setdefault((gpu, device), memory)
    return found


# --- failures ---


def unknown_field(text: str) -> str | None:
    match = _UNKNOWN_FIELD.search(text)
    return None if match is None else match[1]


def says_no_devices(exit_status: int, text: str) -> bool:
    return "no devices were found" in text.lower() or (exit_status == 6 and not text.strip())


def failure(exit_status: int, text: str) -> DriverError:
    """The error for output without any row."""
    lowered = text.lower()
    if "couldn't communicate with the nvidia driver" in lowered or exit_status == 9:
        message = (
            "nvidia-smi cannot reach the NVIDIA driver: load the kernel module (modprobe nvidia), or install a version"
        )
        return DriverError(f"{message} that fits the running kernel.", code="driver_not_loaded")
    if "version mismatch" in lowered or exit_status == 18:
        message = "The NVIDIA driver was updated while the old one is loaded: reboot, or reload its kernel modules."
        return DriverError(message, code="driver_version_mismatch")
    if "insufficient permissions" in lowered or exit_status == 4:
        message = "nvidia-smi may not read the GPUs: let this user open /dev/nvidia*, or run as a user who can."
        return DriverError(message, code="permission_denied")
    how = f"was ended by signal {-exit_status}" if exit_status < 0 else f"ended with status {exit_status}"
    said = quote(next(filter(None, map(str.strip, text.split("\n"))), ""))
    return DriverError(
        f"nvidia-smi {how} and said {repr(said) if said else 'nothing'}: run it by hand to see what is wrong."
    )


def quote(text: str) -> str:
    """Makes text safe for a message or a log: short and without control characters."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 4 * _LONGEST_QUOTE])
    short = " ".join(printable.split())
    return short if len(short) <= _LONGEST_QUOTE else f"{short[: _LONGEST_QUOTE - 1]}…"


# --- cells ---


def _number(cell: str, unit: str) -> float | None:
    """Some drivers print units in spite of `nounits`."""
    match = _NUMBER.fullmatch(cell)
    if match is None or match[2] not in ("", unit):
        return None
    return float(match[1]) if "." in match[1] else int(match[1])


def _memory_mb(cell: str) -> float | None:
    if cell.endswith("GiB"):
        gigabytes = _number(cell, "GiB")
        return None if gigabytes is None else gigabytes * 1024
    return _number(cell, "MiB")


def _whole_number(cell: str) -> int | None:
    return int(cell) if _WHOLE_NUMBER.fullmatch(cell) else None


def _text(cell: str) -> str | None:
    return None if _PLACEHOLDER.fullmatch(cell) else quote(cell) or None


def _uuid(cell: str) -> str | None:
    return cell if re.fullmatch(r"GPU-[!-~]+", cell) else None
