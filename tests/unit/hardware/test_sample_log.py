"""One file for all processes of a host: what one appends, all others read, whatever happens to the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import eventually

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.hardware import sample_log
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample, MIGReading

EVERYTHING = GPUReading(
    index=3,
    name='NVIDIA "quoted" GPU\n',
    uuid="GPU-1",
    pci_bus_id="00000000:01:00.0",
    memory_total_mb=80_000,
    memory_used_mb=12.5,
    memory_free_mb=79_000,
    utilization_percent=5,
    reports_utilization=False,
    temperature_c=30,
    power_draw_w=70.25,
    power_limit_w=700.0,
    ecc_uncorrected_errors=1,
    recovery_action="Reset",
    fault="recovery action: Reset",
    processes=(ProcessReading(12, 3.5, "python", "somebody", 12.0), ProcessReading(13)),
    mig_devices=(MIGReading("MIG-1", "1g.10gb", 1, 0, 9_984, 9, 9_975, ()), MIGReading("MIG-2", "1g.10gb")),
    mig_enabled=True,
    distances=(10, None, 50, 0),
)


def sample(number: int, answer: DriverAnswer | DriverFailure | None = None) -> HostSample:
    answer = answer or DriverAnswer((GPUReading(0, f"GPU of sample {number}"),), "590.1", "nvml")
    return HostSample(number, 0, 100.0 + number, 0.01, "2026-01-01T00:00:00", answer)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[SampleLog]]:
    opened = [SampleLog(tmp_path, "real", keep=3) for _ in range(3)]
    yield opened
    for log in opened:
        log.close()


def append(log: SampleLog, number: int) -> HostSample:
    """As a sampler does: with the lock, and after it has read what others wrote."""
    assert log.try_lock()
    log.follow()
    made = sample(number)
    log.append(made)
    log.unlock()
    return made


def test_everything_a_sample_holds_comes_back(logs: list[SampleLog]) -> None:
    written = [sample(1, DriverAnswer((EVERYTHING,), "590.1", "nvml")), sample(2, DriverFailure("it hangs", "hangs"))]
    for entry in written:
        logs[0].append(entry)
    assert logs[1].follow() == written


def test_what_one_appends_the_others_read_once(logs: list[SampleLog]) -> None:
    writer, *readers = logs
    for number in range(1, 30):  # the file is rewritten several times meanwhile
        made = append(writer, number)
        assert [reader.follow() for reader in readers] == [[made], [made]]
    assert [reader.follow() for reader in logs] == [[], [], []]


def test_who_comes_late_gets_what_is_kept(logs: list[SampleLog], tmp_path: Path) -> None:
    made = [append(logs[0], number) for number in range(1, 21)]
    late = SampleLog(tmp_path, "real", keep=3)
    assert late.follow()[-3:] == made[-3:]
    late.close()


def test_the_file_does_not_grow(logs: list[SampleLog], tmp_path: Path) -> None:
    (file,) = tmp_path.glob("*.jsonl")
    sizes = []
    for number in range(1, 201):
        append(logs[0], number)
        sizes.append(file.stat().st_size)
    assert max(sizes[100:]) <= max(sizes[:20]) + 20  # the numbers have more digits


@given(turns=st.lists(st.sampled_from("012abc"), max_size=60))
def test_any_order_of_writers_and_readers_loses_nothing_and_tells_nothing_twice(turns: str) -> None:
    """A digit: that process appends; a letter: it reads. Nobody reads less often than the file is rewritten."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [SampleLog(Path(folder), "real", keep=100) for _ in range(3)]
        seen: list[list[int]] = [[], [], []]
        number = 0
        for turn in turns:
            who = "012".find(turn) if turn in "012" else "abc".find(turn)
            seen[who] += [entry.number for entry in logs[who].follow()]
            if turn in "012":
                number += 1
                logs[who].append(sample(number))
                seen[who].append(number)
        for who, log in enumerate(logs):
            seen[who] += [entry.number for entry in log.follow()]
            log.close()
    assert seen == [list(range(1, number + 1))] * 3


def test_a_reader_that_slept_through_rewritings_goes_on_with_what_is_there(logs: list[SampleLog]) -> None:
    append(logs[0], 1)
    assert len(logs[1].follow()) == 1
    for number in range(2, 50):
        append(logs[0], number)
    numbers = [entry.number for entry in logs[1].follow()]
    assert numbers == sorted(set(numbers))
    assert numbers[-3:] == [47, 48, 49]


def test_half_a_line_is_skipped_and_the_next_one_read(logs: list[SampleLog], tmp_path: Path) -> None:
    append(logs[0], 1)
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("ab") as torn:
        torn.write(b'{"number": 2, "answ')
    assert [entry.number for entry in logs[1].follow()] == [1]
    append(logs[2], 3)
    assert [entry.number for entry in logs[1].follow()] == [3]
    assert [entry.number for entry in logs[0].follow()] == [3]


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"\n\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"boot": 3}\n',
        b'{"number": 1, "answer": {"gpus": 4}}\n',
        b"null\n",
    ],
)
def test_rubbish_in_the_file_is_written_over(rubbish: bytes, tmp_path: Path) -> None:
    log = SampleLog(tmp_path, "real", keep=3)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(rubbish)
    assert log.follow() == []
    made = append(log, 1)
    other = SampleLog(tmp_path, "real", keep=3)
    assert other.follow() == [made]
    log.close()
    other.close()


@pytest.mark.parametrize(
    "spoil", [{"surprise": 1}, {"number": "x"}, {"answer": {"gpus": [{"index": 0}]}}, {"answer": 7}]
)
def test_a_line_that_makes_no_sense_is_skipped(logs: list[SampleLog], tmp_path: Path, spoil: dict[str, object]) -> None:
    append(logs[0], 1)
    (file,) = tmp_path.glob("*.jsonl")
    line = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as out:
        out.write(json.dumps(line | {"number": 2} | spoil) + "\n")
    assert [entry.number for entry in logs[1].follow()] == [1]
    made = append(logs[0], 3)
    assert logs[1].follow() == [made]


def test_another_boot_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(sample_log, "boot_id", lambda: "the boot before")
        log = SampleLog(tmp_path, "real", keep=3)
        append(log, 7)
        log.close()
    log = SampleLog(tmp_path, "real", keep=3)
    assert log.follow() == []
    append(log, 1)
    assert len(next(iter(tmp_path.glob("*.jsonl"))).read_text().splitlines()) == 2
    log.close()


def test_only_one_has_the_lock_and_its_end_frees_it(logs: list[SampleLog]) -> None:
    assert logs[0].try_lock()
    assert not logs[1].try_lock()
    logs[0].unlock()
    assert logs[1].try_lock()
    logs[1].close()
    assert logs[2].try_lock()


def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_ended(logs: list[SampleLog]) -> None:
    assert logs[0].try_lock()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    try:
        logs[0].close()  # as the end of the parent does
        eventually(logs[1].try_lock)
    finally:
        os.close(release)
        os.waitpid(child, 0)


def test_a_file_that_was_removed_is_made_again(logs: list[SampleLog], tmp_path: Path) -> None:
    append(logs[0], 1)
    for file in tmp_path.iterdir():
        file.unlink()
    made = append(logs[0], 2)
    assert logs[1].try_lock()
    assert logs[1].follow()[-1] == made


def test_a_full_disk_is_an_error_and_later_samples_are_read_again(
    logs: list[SampleLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(logs[0], 1)
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(sample_log.os, "pwrite", lambda file, content, offset: real(file, content[:9], offset))
        with pytest.raises(OSError, match="No space"):
            logs[0].append(sample(2))
    logs[0].append(sample(3))
    assert [entry.number for entry in logs[1].follow()] == [1, 3]


def test_a_full_disk_while_rewriting_is_made_up_for(logs: list[SampleLog], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 7):
        append(logs[0], number)
    real = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(sample_log.os, "pwrite", lambda file, content, offset: real(file, content[:9], offset))
        with pytest.raises(OSError, match="No space"):
            logs[0].append(sample(7))
    assert logs[1].follow() == []
    logs[0].append(sample(8))
    assert [entry.number for entry in logs[1].follow()] == [8]


def test_different_hardware_is_in_different_files(tmp_path: Path) -> None:
    real, simulated = SampleLog(tmp_path, "real", keep=3), SampleLog(tmp_path, "simulated-4", keep=3)
    append(real, 1)
    assert simulated.follow() == []
    assert simulated.try_lock()
    real.close()
    simulated.close()


def test_who_wants_the_most_decides_what_is_kept(tmp_path: Path) -> None:
    few, many = SampleLog(tmp_path, "real", keep=1), SampleLog(tmp_path, "real", keep=50)
    for number in range(1, 60):
        append(many if number < 40 else few, number)
    newcomer = SampleLog(tmp_path, "real", keep=1)
    assert len(newcomer.follow()) >= 50
    for log in (few, many, newcomer):
        log.close()


def test_a_file_that_was_emptied_is_begun_anew(logs: list[SampleLog], tmp_path: Path) -> None:
    append(logs[0], 1)
    os.truncate(next(tmp_path.glob("*.jsonl")), 0)
    made = append(logs[0], 2)
    assert logs[1].follow() == [made]


@pytest.mark.parametrize("begun_at", ["1e999", "-1", "NaN", '"soon"', "true"])
def test_times_that_cannot_be_are_skipped(logs: list[SampleLog], tmp_path: Path, begun_at: str) -> None:
    append(logs[0], 1)
    (file,) = tmp_path.glob("*.jsonl")
    line = file.read_text().splitlines()[-1]
    with file.open("a") as out:
        out.write(line.replace('"begun_at":101.0', f'"begun_at":{begun_at}').replace('"number":1', '"number":2') + "\n")
    assert [entry.number for entry in logs[1].follow()] == [1]


def test_links_and_other_things_are_not_opened(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for make in (lambda path: path.symlink_to(victim), os.mkfifo, lambda path: path.mkdir()):
        folder = tmp_path / f"folder-{id(make)}"
        folder.mkdir()
        make(folder / "readings-real-v3.jsonl")
        with pytest.raises(OSError, match=r"symbolic|regular|directory"):
            SampleLog(folder, "real", keep=3)
    assert victim.read_text() == "precious"


def test_a_line_stays_readable_for_those_who_run_already(logs: list[SampleLog], tmp_path: Path) -> None:
    """A field added or renamed makes older processes skip every line: then the number in the file's name must grow."""
    logs[0].append(sample(1, DriverAnswer((EVERYTHING,), "590.1", "nvml")))
    entry = json.loads(next(tmp_path.glob("readings-real-v3.jsonl")).read_text().splitlines()[-1])
    gpu = entry["answer"]["gpus"][0]
    assert sorted(entry) == ["answer", "begun_at", "failed_total", "number", "timestamp", "took_seconds"]
    assert sorted(entry["answer"]) == ["backend", "driver_version", "gpus"]
    assert " ".join(sorted(gpu)) == (
        "distances ecc_uncorrected_errors fault graphics index memory_free_mb memory_total_mb memory_used_mb "
        "mig_devices mig_enabled name pci_bus_id power_draw_w power_limit_w processes recovery_action "
        "reports_processes reports_utilization temperature_c unified_memory utilization_percent uuid"
    )
    assert " ".join(sorted(gpu["mig_devices"][0])) == (
        "compute_instance_id fault gpu_instance_id graphics memory_free_mb memory_total_mb memory_used_mb name "
        "processes uuid"
    )
    assert " ".join(sorted(gpu["processes"][0])) == "memory_used_mb name pid started_at user"


def test_in_a_folder_for_all_the_file_is_for_all(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    shared.chmod(0o1777)
    private.mkdir(mode=0o755)
    for folder in (shared, private):
        SampleLog(folder, "real", keep=3).close()
    assert {file.stat().st_mode & 0o777 for file in shared.iterdir()} == {0o666}
    assert all(not file.stat().st_mode & 0o022 for file in private.iterdir())


HOLDS_THE_LOCK = """
import sys, time
from pathlib import Path
from gpu_worker_pool.hardware.sample_log import SampleLog
log = SampleLog(Path(sys.argv[1]), "real", keep=3)
assert log.try_lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_stopped_program_does_not_keep_others_from_probing(logs: list[SampleLog], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not logs[0].try_lock(), "it runs, and has the lock"
        holder.send_signal(signal.SIGSTOP)
        eventually(logs[0].try_lock)
        assert not logs[1].try_lock(), "one is enough"
        logs[0].unlock()
        assert logs[1].try_lock()
        logs[1].unlock()
        holder.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert not logs[0].try_lock(), "it runs again"
        holder.kill()
    eventually(logs[0].try_lock)
