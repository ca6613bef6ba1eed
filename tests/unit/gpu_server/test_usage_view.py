"""What the page shows of usage: the same as the report, and in memory that does not grow with the records."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.gpu_server.dashboard.usage import UsageView
from gpu_worker_pool.ledger.records import moment
from gpu_worker_pool.ledger.usage_files import UsageRead, read_usage

RECORDS = 2_000
MIB = 1024 * 1024


class Broker:
    """With the records of a file, each of which is in it twice, and a lease that is held."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def usage(self, _begin: float, keep: Callable[[dict[str, Any]], bool]) -> UsageRead:
        found = read_usage(self._file, keep)
        return UsageRead([*found.records, record(0, account="key:held")])


def record(number: int, account: str) -> dict[str, Any]:
    ended = time.time() - 3600
    return {
        "kind": "lease",
        "request": f"r{number}",
        "lease": f"lease-{number}",
        "account": account,
        "label": f"run {number}",
        "asked": moment(ended - 62),
        "granted": moment(ended - 60),
        "ended": moment(ended),
        "waited_seconds": 2.0,
        "held_seconds": 60.0,
        "gpu_seconds": 60.0,
        "idle_seconds": None,
        "how": "released",
        "gpus": ["0"],
        "within": None,
    }


async def test_it_needs_no_room_for_the_records(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    lines = "".join(f"{json.dumps(record(number, f'key:user{number % 3}'))}\n" for number in range(RECORDS))
    file.write_text(lines)
    file.with_name("usage.jsonl.1").write_text(lines)  # as after a crash
    view = UsageView(cast("LeaseBroker", Broker(file)))
    tracemalloc.start()
    try:
        body = await view.body()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for span in ("day", "month"):
        assert body[span]["all"]["leases"] == RECORDS + 1
        names = {row["name"]: row["leases"] for row in body[span]["people"]}
        assert sum(names.values()) == RECORDS + 1
        assert len(names) == 4
    assert peak < 1.5 * MIB, f"{peak / MIB:.1f} MiB for {RECORDS} records"
    begun_at = time.monotonic()
    assert await view.body() is body
    assert time.monotonic() - begun_at < 1, "every open page may ask"
