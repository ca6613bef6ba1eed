"""What is recorded of ended requests, in files beside the ledger: once each, whatever is killed, and bounded."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core import (
    Cancelled,
    LeaseUse,
    Origin,
    PoolSettings,
    Released,
    Request,
    Requested,
    Requirements,
    Ticked,
    UseSeen,
)
from gpu_worker_pool.ledger import usage_files, usage_recorder
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.ledger.usage_files import UsageFile, parse_record, read_usage, usage_path
from tests.ledger.places import InSQLite, Told, read, request

ADA = Origin("ada", "gpu-1", 4242, "train.py", is_verified=True)


@pytest.fixture
def place(tmp_path: Path) -> InSQLite:
    return InSQLite(tmp_path)


def opened(place: InSQLite, **settings: Any) -> SQLiteLedger:
    return SQLiteLedger(
        place.path,
        PoolSettings(**settings),
        Told(),
        clock=place.clock.now,
        boot_id=place.boot_id,
        first_fence=0,
        wall_clock=lambda: 1_700_000_000.0 + place.clock.now(),
    )


def lines(place: InSQLite) -> list[dict[str, Any]]:
    return read_usage(usage_path(place.path)).records


async def written(place: InSQLite, ledger: SQLiteLedger) -> list[dict[str, Any]]:
    place.clock.advance(usage_recorder.RECORD_SECONDS + 0.1)
    await ledger.submit(Ticked())
    await ledger.submit(Ticked())
    return lines(place)


async def test_a_lease_is_recorded_with_who_what_how_long_and_how_it_was_used(place: InSQLite) -> None:
    ledger = opened(place)
    await ledger.submit(read(place, 2, memory_total_mb=80_000.0))
    asked = Request("r", Requirements(), "w", "me", "night", 600.0, "user:1000", origin=ADA)
    await ledger.submit(Requested(asked))
    place.clock.advance(100.0)
    use = LeaseUse(place.clock.now(), 100.0, 25.0, place.clock.now() - 25.0, 30_000.0)
    await ledger.submit(UseSeen({"lease-1": use}))
    place.clock.advance(20.0)
    await ledger.submit(Released("lease-1"))
    (record,) = await written(place, ledger)
    await ledger.close()
    assert record == {
        "kind": "lease",
        "request": "r",
        "worker": "w",
        "account": "user:1000",
        "user": "ada",
        "is_user_verified": True,
        "program": "train.py",
        "host": "gpu-1",
        "label": "night",
        "count": 1,
        "priority": 0,
        "expected_seconds": None,
        "memory_promised_mb": None,
        "within": None,
        "ended": "2023-11-14T22:32:00.000Z",
        "how": "released",
        "reason": None,
        "lease": "lease-1",
        "gpus": ["0"],
        "indices": [0],
        "asked": "2023-11-14T22:30:00.000Z",
        "granted": "2023-11-14T22:30:00.000Z",
        "waited_seconds": 0.0,
        "held_seconds": 120.0,
        "quarantine_seconds": 0.0,
        "gpu_seconds": 120.0,
        "observed_seconds": 100.0,
        "idle_seconds": 25.0,
        "memory_used_mb": 30_000.0,
    }


async def test_what_the_releasing_process_saw_is_recorded_and_nothing_seen_is_none(place: InSQLite) -> None:
    ledger = opened(place)
    await ledger.submit(read(place, 2))
    for name in "ab":
        await ledger.submit(Requested(request(name)))
    use = LeaseUse(place.clock.now(), 3.0, 0.0, None, None)
    await ledger.submit(Released("lease-1", use=use))
    await ledger.submit(Released("lease-2"))
    found = await written(place, ledger)
    assert [(each["observed_seconds"], each["idle_seconds"]) for each in found] == [(3.0, 0.0), (0.0, None)]
    await ledger.close()


async def test_how_requests_and_leases_end(place: InSQLite) -> None:
    ledger = opened(place)
    await ledger.submit(read(place, 1, memory_total_mb=80_000.0))
    await ledger.submit(Requested(request("shares", share=True, memory_mb=20_000.0, ttl=10.0)))
    await ledger.submit(Requested(request("waits")))
    await ledger.submit(Cancelled("waits"))
    await ledger.submit(Requested(request("impossible", count=9)))
    for _ in range(120):  # a longer silence would be an outage, which does not count
        place.clock.advance(0.4)
        await ledger.submit(Ticked())
    await ledger.submit(read(place, 1, memory_total_mb=80_000.0))
    found = {each["request"]: each for each in await written(place, ledger)}
    await ledger.close()
    assert [(name, each["kind"], each["how"]) for name, each in found.items()] == [
        ("waits", "request", "cancelled"),
        ("impossible", "request", "rejected"),
        ("shares", "lease", "lost"),
    ]
    assert found["impossible"]["reason"] == "9 GPUs requested, 1 of 1 could ever serve it"
    # It held a quarter of the card until its lease was not renewed; the quarantine was nobody's.
    assert found["shares"]["reason"] == "its lease was not renewed in time"
    assert found["shares"]["gpu_seconds"] == found["shares"]["held_seconds"] / 4
    assert found["shares"]["quarantine_seconds"] == 48.0 - found["shares"]["held_seconds"]


async def test_records_are_written_by_the_next_process_if_this_one_is_gone(place: InSQLite) -> None:
    """A process that ends right after its last transaction, or is killed then, has stored them."""
    ledger = opened(place)
    await ledger.submit(read(place, 1))
    await ledger.submit(Requested(request("r")))
    await ledger.submit(Released("lease-1"))
    await ledger.close()
    assert lines(place) == []
    ledger = opened(place)
    await ledger.submit(Ticked())
    assert [each["request"] for each in await written(place, ledger)] == ["r"]
    assert place.read("SELECT count(*) FROM unrecorded") == [0]
    await ledger.close()


async def test_processes_that_end_soon_leave_few_records_to_others_and_write_many(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would else sync the file of the one before it while its own request waits."""
    monkeypatch.setattr(usage_recorder, "MANY_RECORDS", 3)
    for number in range(4):
        ledger = opened(place)
        await ledger.submit(Ticked())
        assert len(lines(place)) == (3 if number >= 3 else 0)
        place.clock.advance(0.01)
        await ledger.submit(read(place, 1))
        await ledger.submit(read(place, 1))
        await ledger.submit(Requested(request(f"r{number}")))
        await ledger.submit(Released(f"lease-{number + 1}"))
        await ledger.close()
    ledger = opened(place)
    assert len((await ledger.usage(0.0)).records) == 4, "whoever asks gets all of them"
    await ledger.close()


async def test_a_crash_between_file_and_commit_writes_a_line_twice_and_counts_it_once(place: InSQLite) -> None:
    ledger = opened(place)
    await ledger.submit(read(place, 1))
    await ledger.submit(Requested(request("r")))
    await ledger.submit(Released("lease-1"))
    (waiting,) = place.read("SELECT record FROM unrecorded")
    UsageFile(usage_path(place.path)).append([waiting])  # and the process is killed here
    await written(place, ledger)
    await ledger.close()
    assert usage_path(place.path).read_text().count("\n") == 2
    assert [each["request"] for each in lines(place)] == ["r"]
    totals = json.loads(place.read("SELECT data FROM totals WHERE name = 'accounts'")[0])
    assert totals[""]["leases"] == 1


async def test_several_processes_record_each_end_once(place: InSQLite) -> None:
    ledgers = [opened(place) for _ in range(3)]
    await ledgers[0].submit(read(place, 1))
    for number in range(9):
        await ledgers[number % 3].submit(read(place, 1))
        await ledgers[number % 3].submit(Requested(request(f"r{number}")))
        await ledgers[(number + 1) % 3].submit(Released(f"lease-{number + 1}"))
        place.clock.advance(0.4)
    for ledger in ledgers:
        await written(place, ledger)
        await ledger.close()
    found = usage_path(place.path).read_text().splitlines()
    assert sorted(json.loads(line)["request"] for line in found) == [f"r{number}" for number in range(9)]


async def test_totals_are_counted_for_metrics(place: InSQLite) -> None:
    ledger = opened(place)
    await ledger.submit(read(place, 2))
    await ledger.submit(Requested(request("a", account="user:7")))
    place.clock.advance(12.0)
    await ledger.submit(Released("lease-1"))
    await written(place, ledger)
    totals = await ledger.totals()
    await ledger.close()
    assert totals["accounts"] == {"user:7": {"leases": 1, "gpu_seconds": 12.0, "idle_gpu_seconds": 0.0}}
    assert totals["hold_seconds"] == {"counts": [0, 1, 0, 0, 0, 0, 0, 0, 0], "sum": 12.0}
    assert totals["wait_seconds"]["counts"][0] == 1


async def test_grants_go_on_where_the_file_cannot_be_written_and_records_wait(
    place: InSQLite, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.ledger.tables.MOST_UNRECORDED", 3)
    usage_path(place.path).mkdir()
    ledger = opened(place)
    for number in range(5):
        await ledger.submit(read(place, 1))
        await ledger.submit(Requested(request(f"r{number}")))
        await ledger.submit(Released(f"lease-{number + 1}"))
        place.clock.advance(1.0)
    assert await written(place, ledger) == []
    assert f"{usage_path(place.path)} cannot be written: Is a directory" in caplog.text
    assert caplog.text.count("1 records were lost") == 2
    usage_path(place.path).rmdir()
    place.clock.advance(usage_recorder.RECORD_AGAIN_SECONDS)
    assert [each["request"] for each in await written(place, ledger)] == ["r2", "r3", "r4"]
    await ledger.close()


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    file = UsageFile(path, rotate_bytes=100)
    for number in range(40):
        file.append([record_line(number)])
    assert len(list(tmp_path.iterdir())) == usage_files.KEPT_FILES + 1
    kept = [int(record["request"]) for record in read_usage(path).records]
    assert kept == list(range(40 - len(kept), 40))


def test_a_new_file_is_open_to_those_who_share_the_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    os.umask(before := os.umask(0o077))
    assert before is not None
    UsageFile(shared / "usage.jsonl").append(["{}"])
    assert stat.S_IMODE((shared / "usage.jsonl").stat().st_mode) == 0o660
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    UsageFile(private / "usage.jsonl").append(["{}"])
    assert stat.S_IMODE((private / "usage.jsonl").stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "other"
    target.write_text("precious\n")
    (tmp_path / "usage.jsonl").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        UsageFile(tmp_path / "usage.jsonl").append(["{}"])
    assert target.read_text() == "precious\n"


def test_a_file_from_elsewhere_is_not_written_to_by_its_second_name(tmp_path: Path) -> None:
    target = tmp_path / "other"
    target.write_text("precious\n")
    (tmp_path / "usage.jsonl").hardlink_to(target)
    with pytest.raises(OSError, match="one with a second name"):
        UsageFile(tmp_path / "usage.jsonl").append(["{}"])
    assert target.read_text() == "precious\n"


def test_a_pipe_in_its_place_makes_nobody_wait(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "usage.jsonl")
    os.mkfifo(file.path)
    with pytest.raises(OSError, match="not a regular file"):
        file.append(["{}"])
    found = read_usage(file.path)
    assert found.records == []
    assert len(found.unreadable) == 1


def test_broken_lines_are_skipped_and_counted_and_do_not_break_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text(f'{record_line(1)}\nnot JSON\n{{"kind": "lease"}}\n[1]\n{record_line(2)[:30]}')
    UsageFile(path).append([record_line(3)])
    found = read_usage(path)
    assert [record["request"] for record in found.records] == ["1", "3"]
    assert found.broken_lines == 4


@pytest.mark.parametrize("field", ["gpu_seconds", "held_seconds", "waited_seconds", "gpus", "granted", "ended"])
@pytest.mark.parametrize("value", [None, -1.0, "x" * 3, float("inf"), [], {}])
def test_a_field_of_another_type_makes_no_record(field: str, value: Any) -> None:
    record = json.loads(record_line(1))
    is_harmless = (field in ("granted", "ended") and value == "xxx") or (field == "gpus" and value == [])
    assert (parse_record(json.dumps(record | {field: value})) is None) != is_harmless


@pytest.mark.parametrize("kind", ["lease", "request"])
@pytest.mark.parametrize(
    ("field", "value"), [("label", ["a"]), ("label", 7), ("observed_seconds", "x"), ("idle_seconds", "x")]
)
def test_a_field_that_a_report_sums_by_or_up_is_of_its_type_or_makes_no_record(
    kind: str, field: str, value: Any
) -> None:
    record = json.loads(record_line(1)) | {"kind": kind, "idle_seconds": 1.0, field: value}
    assert parse_record(json.dumps(record)) is None or (kind == "request" and field != "label")


def record_line(number: int) -> str:
    record = {
        "kind": "lease",
        "request": str(number),
        "account": "user:7",
        "ended": "2023-11-14T22:31:40.000Z",
        "how": "released",
        "lease": f"lease-{number}",
        "asked": "2023-11-14T22:30:40.000Z",
        "granted": "2023-11-14T22:30:40.000Z",
        "waited_seconds": 0.0,
        "held_seconds": 60.0,
        "gpu_seconds": 60.0,
        "gpus": ["GPU-a"],
    }
    return json.dumps(record)
