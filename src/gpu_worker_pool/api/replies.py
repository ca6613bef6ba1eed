"""What a GPU statistics server answered, checked as hostile input; it parses bytes and does nothing else.

A bad envelope spoils the whole reply, a bad field only its GPU: that GPU stays a row with a `fault`, and the bad
value becomes `None`. Nothing here ever turns what is missing or wrong into a number.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import product
from math import inf
from operator import itemgetter
from typing import Any

from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.models import GPUInfo, GPUStats

LARGEST_BODY_BYTES = 8 * 1024 * 1024
#: No host has more; what is parsed blocks the caller's event loop for as long as it takes.
MOST_GPUS = 16_384
LONGEST_RETRY_AFTER_SECONDS = 300.0

#: Values in a body, at most. Small ones such as `[]` become 30 times their own size in memory.
_MOST_VALUES = 500_000
_MOST_PROBLEMS = 20
#: Refuses infinity, and integers that no float can hold.
_LARGEST_NUMBER = sys.float_info.max
_LARGEST_GPU_ID = 2**31 - 1
_LONGEST_NAME = 128
_LONGEST_TIMESTAMP = 64
_LONGEST_SENTENCE = 300
#: A UUID may end up in `CUDA_VISIBLE_DEVICES`, where a comma or a space would mean another GPU.
_UUID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


#: What our own server tells of every GPU, and of which types it may be where nothing is unknown or wrong.
_ALWAYS_THERE = itemgetter(
    "name",
    "uuid",
    "fault",
    "memory_usage_percent",
    "utilization_percent",
    "memory_total_mb",
    "memory_used_mb",
    "process_count",
)
_SOUND_TYPES = frozenset((str, str, type(None), *numbers, int) for numbers in product((int, float), repeat=4))


_FIELDS = tuple(field.name for field in fields(GPUInfo))


@dataclass(frozen=True, slots=True)
class ParsedReply:
    stats: GPUStats
    #: What was wrong with the reply, one sentence each, for a log; empty for a good one.
    problems: tuple[str, ...]


def parse_stats(body: bytes) -> ParsedReply:
    """Read a reply of `/gpu/summary`, ours or that of any server that keeps to the documented keys."""
    reply = _decoded(body)
    if not isinstance(reply, dict):
        raise ServiceRetryableError(f"the reply must be a JSON object, not {_shown(reply)}")
    rows = reply.get("gpus_summary")
    if not isinstance(rows, list):
        raise ServiceRetryableError(f"the reply must have a list gpus_summary, not {_shown(rows)}")
    if len(rows) > MOST_GPUS:
        raise ServiceRetryableError(f"the reply lists {len(rows)} GPUs; at most {MOST_GPUS} are believed")
    age = reply.get("sample_age_seconds", 0.0)
    if not _is_number(age, _LARGEST_NUMBER):
        # Of unknown age is as good as old, and from old readings nothing may be granted.
        raise ServiceRetryableError(f"sample_age_seconds is {_shown(age)}, so the age of the readings is unknown")

    problems: list[str] = []
    gpus, dropped = _gpus(rows, problems)
    if reply.get("gpu_count") != len(rows):
        problems.append(f"gpu_count is {_shown(reply.get('gpu_count'))}, but {len(rows)} GPUs are listed")
    total = _number(reply, "total_memory_mb", _LARGEST_NUMBER, problems)
    used = _number(reply, "total_used_memory_mb", _LARGEST_NUMBER, problems)
    if total is not None and used is not None and used > total:
        problems.append(f"total_used_memory_mb is {used}, but total_memory_mb is {total}")
        used = None
    stats = GPUStats(
        # Counted, not believed: it is what totals are made of.
        gpu_count=len(gpus) + dropped,
        total_memory_mb=total,
        total_used_memory_mb=used,
        average_utilization_percent=_number(reply, "average_utilization_percent", 100, problems),
        gpus_summary=gpus,
        total_memory_usage_percent=_number(reply, "total_memory_usage_percent", 100, problems),
        timestamp=_text(reply, "timestamp", _LONGEST_TIMESTAMP, problems),
        sample_age_seconds=age,
    )
    return ParsedReply(stats, _few(problems))


def parse_json(body: bytes) -> object:
    """Of any shape; a `ServiceRetryableError` for what is none, or too much of it."""
    return _decoded(body)


def parse_detail(body: bytes) -> str | None:
    """What a server says about its error, if it says it as ours does: `{"detail": "…"}`."""
    try:
        reply = _decoded(body)
    except ServiceRetryableError:
        return None
    detail = reply.get("detail") if isinstance(reply, dict) else None
    return cleaned(detail, _LONGEST_SENTENCE) or None if isinstance(detail, str) else None


def parse_features(body: bytes) -> frozenset[str] | None:
    """What a server lists as its `features`; None where it lists none, as older and foreign ones do."""
    try:
        reply = _decoded(body)
    except ServiceRetryableError:
        return None
    features = reply.get("features") if isinstance(reply, dict) else None
    return frozenset(name for name in features if isinstance(name, str)) if isinstance(features, list) else None


def parse_retry_after(value: str | None, date: str | None, now: float) -> float | None:
    """Seconds from 0 to 300; `None` where there is nothing sensible to read.

    A moment is reckoned from the server's own `Date` where it sent one, so that its clock need not agree with
    ours; else from `now`, in seconds since 1970.
    """
    value = (value or "").strip()
    if value.isascii() and value.isdigit():
        seconds = float(value)
    elif (moment := _moment(value)) is None:
        return None
    else:
        sent = _moment(date or "")
        seconds = moment - (now if sent is None else sent)
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_SECONDS)


def cleaned(text: str, longest: int) -> str:
    """Safe to log and to show: one line, no control characters, no direction marks, not too long."""
    if len(text) <= longest and text.isprintable():
        return text
    shown = "".join(letter for letter in text[:longest] if letter.isprintable()).strip()
    return f"{shown}…" if len(text) > longest else shown


# --- rows ---


def _gpus(rows: list[Any], problems: list[str]) -> tuple[list[GPUInfo], int]:
    """The GPUs in the order they were listed, and how many could not be told apart and were dropped."""
    gpus: dict[int, GPUInfo] = {}
    uuids: dict[str, int] = {}
    dropped = 0
    for position, row in enumerate(rows):
        gpu_id = row.get("gpu_id") if isinstance(row, dict) else None
        if type(gpu_id) is not int or not 0 <= gpu_id <= _LARGEST_GPU_ID:
            what = f"gpu_id is {_shown(gpu_id)}" if isinstance(row, dict) else f"it is {_shown(row)}"
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


def _sound_gpu(gpu_id: int, row: dict[str, Any], uuids: dict[str, int]) -> GPUInfo | None:
    """The row as it nearly always is, with everything known and nothing wrong; None for one to look at closely.

    Says nothing that `_gpu` would not, in a third of its time: hundreds of endpoints are read every few seconds.
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
        and _UUID.fullmatch(uuid) is not None
    )
    if not is_sound:
        return None
    uuids[uuid] = gpu_id
    return _made(
        gpu_id, name, memory_usage, utilization, uuid, total, used, fault, leased, reports_utilization, process_count
    )


def _made(*values: Any) -> GPUInfo:
    """Of the fields in their order. Its own checks would say again what was just made sure of, at twice the price."""
    gpu = object.__new__(GPUInfo)
    object.__setattr__(gpu, "__dict__", dict(zip(_FIELDS, values, strict=True)))
    return gpu


def _gpu(gpu_id: int, row: dict[str, Any], faults: list[str], uuids: dict[str, int]) -> GPUInfo:
    total = _number(row, "memory_total_mb", LARGEST_MB, faults)
    used = _number(row, "memory_used_mb", LARGEST_MB, faults)
    if total is not None and used is not None and used > total:
        faults.append(f"memory_used_mb is {used}, but memory_total_mb is {total}")
        used = None
    name = _text(row, "name", _LONGEST_NAME, faults)
    memory_usage = _number(row, "memory_usage_percent", 100, faults)
    utilization = _number(row, "utilization_percent", 100, faults)
    uuid = _uuid(row, gpu_id, uuids, faults)
    process_count = _process_count(row, faults)
    leased = _flag(row, "leased", False, faults)
    reports_utilization = _flag(row, "reports_utilization", True, faults)
    reported = row.get("fault")
    if reported is not None and not (isinstance(reported, str) and cleaned(reported, _LONGEST_SENTENCE)):
        faults.append(f"fault is {_shown(reported)}")
        reported = None
    fault = None
    if reported or faults:
        believed = [cleaned(reported, _LONGEST_SENTENCE)] if reported else []
        fault = cleaned("; ".join([*believed, *(f"bad value: {what}" for what in faults)]), 2 * _LONGEST_SENTENCE)
    return _made(
        gpu_id, name, memory_usage, utilization, uuid, total, used, fault, leased, reports_utilization, process_count
    )


def _busyness(gpu: GPUInfo) -> tuple[bool, bool, float]:
    """Of two rows of one GPU, at most one is true; to take the free one for it could book a GPU twice."""
    memory, utilization = gpu.memory_usage_percent, gpu.utilization_percent
    load = inf if memory is None or utilization is None else memory + utilization
    return gpu.fault is not None, gpu.leased, load


def _uuid(row: dict[str, Any], gpu_id: int, uuids: dict[str, int], faults: list[str]) -> str | None:
    uuid = row.get("uuid")
    if uuid is None:
        return None
    if not (isinstance(uuid, str) and _UUID.fullmatch(uuid)):
        faults.append(f"uuid is {_shown(uuid)}")
        return None
    if uuids.setdefault(uuid, gpu_id) != gpu_id:
        faults.append(f"uuid is that of GPU {uuids[uuid]}, too")
        return None
    return uuid


# --- fields: each returns what may be believed, and notes what may not ---


def _number(where: dict[str, Any], key: str, largest: float, problems: list[str]) -> float | None:
    value: float | None = where.get(key)
    if value is None or _is_number(value, largest):
        return value
    problems.append(f"{key} is {_shown(value)}")
    return None


def _process_count(row: dict[str, Any], faults: list[str]) -> int | None:
    value: int | None = row.get("process_count")
    if value is None or (type(value) is int and 0 <= value <= _LARGEST_GPU_ID):
        return value
    faults.append(f"process_count is {_shown(value)}")
    return None


def _flag(row: dict[str, Any], key: str, default: bool, faults: list[str]) -> bool:
    value = row.get(key, default)
    if value is True or value is False:
        return value
    faults.append(f"{key} is {_shown(value)}")
    return default


def _text(where: dict[str, Any], key: str, longest: int, problems: list[str]) -> str:
    value = where.get(key)
    if isinstance(value, str):
        return cleaned(value, longest)
    if value is not None:
        problems.append(f"{key} is {_shown(value)}")
    return ""


def _is_number(value: object, largest: float) -> bool:
    # By exact type: a bool is an int, and nothing else that JSON has is a subclass. NaN fails the comparison.
    return (type(value) is float or type(value) is int) and 0 <= value <= largest


def _shown(value: object) -> str:
    """The value for a message: short, whatever it is."""
    match value:
        case list():
            return "a list"
        case dict():
            return "an object"
        case str():
            return repr(cleaned(value, 40))
        case None:
            return "missing"
        case bool():
            return str(value).lower()
        case _:
            return cleaned(str(value), 40)


def _few(problems: list[str]) -> tuple[str, ...]:
    if len(problems) <= _MOST_PROBLEMS:
        return tuple(problems)
    return (*problems[:_MOST_PROBLEMS], f"and {len(problems) - _MOST_PROBLEMS} more")


# --- JSON ---


class _GivenTwice:
    """Stands for the value of a key that an object has twice: of no type that any field accepts."""

    def __str__(self) -> str:
        return "given twice"


_GIVEN_TWICE = _GivenTwice()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                found[key] = _GIVEN_TWICE
    return found


def _whole_number(digits: str) -> float:
    # Python refuses to read integers of thousands of digits; that must spoil their field, not the reply.
    return int(digits) if len(digits) < 300 else inf


_DECODER = json.JSONDecoder()
#: Three times as slow, and used where the quick one may have overlooked something or stumbled.
_PATIENT_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole_number)


def _decoded(body: bytes) -> object:
    if len(body) > LARGEST_BODY_BYTES:
        raise ServiceRetryableError(f"the reply has {len(body)} bytes; at most {LARGEST_BODY_BYTES} are read")
    # Every value takes a byte at least, and every one but the first begins behind one of these.
    if len(body) > _MOST_VALUES and body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        raise ServiceRetryableError(f"the reply has more than {_MOST_VALUES} values")
    try:
        text = body.decode("utf-8")
        try:
            reply: object = _DECODER.decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer of thousands of digits
            return _PATIENT_DECODER.decode(text)
        return reply if _has_every_key(reply, text) else _PATIENT_DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise ServiceRetryableError(f"the reply is not UTF-8: {error.reason} (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ServiceRetryableError(f"the reply is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise ServiceRetryableError("the reply is nested too deeply") from None


def _has_every_key(reply: object, text: str) -> bool:
    """Whether no key was given twice, as far as can be told quickly: every colon is one of a key or of a text read."""
    rows = reply.get("gpus_summary") if isinstance(reply, dict) else None
    if not isinstance(reply, dict) or not isinstance(rows, list):
        return False
    accounted = len(reply) + _colons(reply, "timestamp")
    for row in rows:
        if not isinstance(row, dict):
            return False
        accounted += len(row) + _colons(row, "name") + _colons(row, "uuid")
    return accounted == text.count(":")


def _colons(where: dict[str, Any], key: str) -> int:
    value = where.get(key)
    return value.count(":") if isinstance(value, str) else 0


def _moment(date: str) -> float | None:
    """An HTTP date in seconds since 1970."""
    try:
        moment = parsedate_to_datetime(date)
        # Without a zone it would be taken for local time; HTTP has no dates but in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    # What that parser raises depends on where it stumbles.
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
