"""Reads the recordings of one's own pool, the usage files beside a ledger, as workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.ledger.records import UNCLAIMED, seconds_of
from gpu_worker_pool.ledger.usage_files import parse_record
from gpu_worker_pool.simulation.workload import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def is_recording(text: str) -> bool:
    return text.lstrip().startswith("{")


def jobs_of(lines: Iterable[str]) -> Iterator[Job | None]:
    """The job of each record; None for requests that never held a GPU, and for lines that are not records.

    Arrivals are in seconds since 1970. A share counts as a whole GPU.
    """
    seen: set[int] = set()
    for line in lines:
        if line.strip() and (key := hash(line)) not in seen:  # a record may be written twice
            seen.add(key)
            record = parse_record(line)
            yield None if record is None else _job_of(record)


def _job_of(record: dict[str, Any]) -> Job | None:
    # What is held inside a lease has the GPUs of that lease.
    if record["kind"] != "lease" or record["within"] is not None or record["how"] == UNCLAIMED:
        return None
    asked, gpus = seconds_of(record["asked"]), len(record["gpus"])
    if asked is None or not gpus:
        return None
    expected = record.get("expected_seconds")
    is_declared = isinstance(expected, (int, float)) and 0 < expected < 1e12
    return Job(0, asked, record["held_seconds"], gpus, record["account"], expected if is_declared else None)
