"""`gpu-pool simulate`: what it reads, what it writes, and that no GPU is promised twice in it."""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_worker_pool.simulation.cluster import Start, Starts
from gpu_worker_pool.simulation.comparison import NAMES, Rules, compare
from gpu_worker_pool.simulation.plot import draw
from gpu_worker_pool.simulation.workload import Job, at_load, generated, in_order
from tests.cli.programs import Programs

COLUMNS = "arrival_seconds,duration_seconds,gpus,account,expected_seconds\n"


def written(path: Path, number: int = 300) -> Path:
    jobs = in_order(at_load(generated(number, random.Random(3)), 16, 0.8))
    rows = [f"{job.arrival_seconds!r},{job.duration_seconds!r},{job.gpus},{job.account},\n" for job in jobs]
    path.write_text(COLUMNS + "".join(rows), encoding="utf-8")
    return path


def test_the_starts_are_a_schedule_that_can_be(programs: Programs, tmp_path: Path) -> None:
    file, starts, picture = written(tmp_path / "jobs.csv"), tmp_path / "starts.csv", tmp_path / "plot.svg"
    done = programs.call("simulate", file, "--hosts", 2, "--starts", starts, "--plot", picture, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    with starts.open(newline="") as opened:
        rows = list(csv.reader(opened))
    assert rows[0] == ["request", "arrival_seconds", "start_seconds", "end_seconds", "host", "gpus"]
    asked = [line.split(",") for line in file.read_text().splitlines()[1:]]
    assert len(rows) - 1 == len(asked)
    used: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for number, (row, (arrival, duration, gpus, *_)) in enumerate(zip(rows[1:], asked, strict=True)):
        assert (row[0], row[1], row[5]) == (str(number), arrival, gpus)
        assert float(row[2]) >= float(arrival)
        assert float(row[3]) - float(row[2]) == pytest.approx(float(duration))
        used[row[4]] += [(float(row[2]), int(gpus)), (float(row[3]), -int(gpus))]
    assert set(used) == {"0", "1"}
    for changes in used.values():
        busy = 0
        for _, change in sorted(changes):  # those that end come first
            busy += change
            assert busy <= 8
    found = json.loads(done.stdout)["schedules"]
    assert found.keys() == {"asked", "configured", "first_come_first_served", "easy"}
    waits = [float(row[2]) - float(row[1]) for row in rows[1:]]
    assert found["asked"]["wait_seconds"]["mean"] == pytest.approx(sum(waits) / len(waits))
    assert found["first_come_first_served"]["most_overtaken"] == 0
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314  # our own


def test_more_gpus_and_load(programs: Programs, tmp_path: Path) -> None:
    file = written(tmp_path / "jobs.csv", 120)

    def mean_wait(*options: object) -> float:
        done = programs.call("simulate", file, "--hosts", 2, "--json", *options)
        assert done.stderr == ""
        mean: float = json.loads(done.stdout)["schedules"]["asked"]["wait_seconds"]["mean"]
        return mean

    assert mean_wait("--add-gpus", 8) < mean_wait() < mean_wait("--load", 1.5)


def test_the_pool_as_configured_has_the_configured_strategy(programs: Programs, tmp_path: Path) -> None:
    """Two halves of a host: on one host they leave room for a whole one, on two they do not."""
    file = tmp_path / "jobs.csv"
    file.write_text(COLUMNS + "0,100,4,ana,\n1,100,4,ben,\n2,100,8,eve,\n")

    def longest_wait() -> float:
        schedules = json.loads(programs.call("simulate", file, "--hosts", 2, "--json").stdout)["schedules"]
        assert schedules["asked"]["wait_seconds"]["p99"] == 0
        longest: float = schedules["configured"]["wait_seconds"]["p99"]
        return longest

    assert longest_wait() == 98
    programs.environment["GPU_LOAD_BALANCING_STRATEGY"] = "pack"
    assert longest_wait() == 0


def test_progress_is_reported_for_each_schedule() -> None:
    jobs, reported = in_order(at_load(generated(4_500, random.Random(1)), 64, 0.3)), list[tuple[str, float]]()
    compare(
        jobs,
        hosts=8,
        gpus_per_host=8,
        add_gpus=0,
        load=None,
        asked=Rules(),
        configured=Rules(),
        on_progress=lambda name, part: reported.append((name, part)),
    )
    for name in NAMES:
        parts = [part for each, part in reported if each == name]
        assert len(parts) >= 3
        assert parts == sorted(parts)
        assert 0 <= parts[0] <= parts[-1] <= 1


def test_the_labels_of_the_picture_are_whole_numbers_within_its_frame() -> None:
    jobs = [Job(number, 0.0, 1234.0 * 86_400, 1, "ana") for number in range(1001)]
    starts: Starts = [Start(86_400.0 * number, 0) for number in range(1001)]
    root = ElementTree.fromstring(draw({"one": (jobs, starts, 64)}))  # noqa: S314  # our own
    texts = {each.text: each for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert texts["2234 d"].get("text-anchor") == "end"
    assert [text for text in texts if text and text.replace(".", "").isdigit() and "." in text] == []


def test_a_file_that_cannot_be_written_does_not_cost_the_results(programs: Programs, tmp_path: Path) -> None:
    done = programs.call("simulate", written(tmp_path / "jobs.csv", 20), "--starts", tmp_path / "no" / "starts.csv")
    assert (done.returncode, "cannot be written: No such file or directory" in done.stderr) == (1, True)
    assert "mean wait" in done.stdout


def test_the_table_is_for_people(programs: Programs, tmp_path: Path) -> None:
    file = written(tmp_path / "jobs.csv", 60)
    done = programs.call("simulate", file, file, "--hosts", 2, "--fair-share", "1d", "--strategy", "availability")
    assert done.returncode == 0
    for text in ("AS ASKED FOR", "AS CONFIGURED", "FIRST COME", "EASY", "mean wait, 1 GPU", "fairness"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: the column arrival_seconds is missing"),
        ("arrival_seconds,duration_seconds,gpus\n", "line 1: the column account is missing"),
        (COLUMNS, "no jobs in it"),
        (
            COLUMNS + "0,1,1,a,\n0,-1,1,a,\n",
            "line 3: duration_seconds must be a number of seconds, not '-1'",
        ),
        (COLUMNS + "0,1,1.5,a,\n", "line 2: gpus must be a whole number from 1 to 1024, not '1.5'"),
        (COLUMNS + "0,1,1\n", "line 2: 3 columns, but the header has 5"),
        (COLUMNS + "nan,1,1,a,\n", "line 2: arrival_seconds must be a number of seconds, not 'nan'"),
        (COLUMNS + "0,1,1,a,0\n", "line 2: expected_seconds must be a number of seconds, not '0'"),
        (COLUMNS + "1e300,1,1,a,\n", "line 2: arrival_seconds must be a number of seconds, not '1e300'"),
        (COLUMNS + f"0,1,1,{'x' * 200_000},\n", "field larger than field limit"),
        ("; SWF\n1 0 5 1e300 2 -1 -1 2 1 -1 1 7 1 1 1 -1 -1 -1\n", "line 2: more than 1e+12 seconds"),
        ("; SWF\n1 2 3\n", "line 2: expected 18 numbers, as SWF has them"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(programs: Programs, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "bad"
    file.write_text(text)
    done = programs.call("simulate", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


def test_a_file_that_is_not_there(programs: Programs) -> None:
    done = programs.call("simulate", "nowhere.csv")
    assert done.stderr == "gpu-pool: nowhere.csv cannot be read: No such file or directory\n"


def test_swf(programs: Programs, tmp_path: Path) -> None:
    file = tmp_path / "jobs.swf"
    rows = [
        "; Version: 2.2",
        "1 0 5 3600 2 -1 -1 2 7200 -1 1 7 1 1 1 -1 -1 -1",
        "2 5 -1 -1 -1 -1 -1 -1 -1 -1 5 3 1 1 1 -1 -1 -1",
    ]
    file.write_text("\n".join(rows) + "\n")
    found = json.loads(programs.call("simulate", file, "--json").stdout)
    assert (found["jobs"], found["lines_skipped"]) == (1, 1)
    assert found["schedules"]["asked"]["wait_seconds_by_account"].keys() == {"user 7"}


def test_what_the_pool_recorded_is_a_workload(programs: Programs, tmp_path: Path) -> None:
    programs.environment["GPU_BACKEND"] = "simulated:2"
    for seconds in ("0.3", "0.1"):
        assert programs.call("run", "--expect", "2m", "-n", 2, "--", "sleep", seconds).returncode == 0
    assert programs.call("run", "--no-wait", "-n", 99, "--", "true").returncode != 0, "it never held a GPU"
    assert programs.call("report").returncode == 0  # whoever comes next writes what has ended
    (recorded,) = tmp_path.rglob("usage-*.jsonl")
    starts = tmp_path / "starts.csv"
    options = ("--hosts", 1, "--gpus-per-host", 2, "--starts", starts)
    done = programs.call("simulate", recorded, recorded, *options, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["jobs"], found["schedules"]["asked"]["never_started"]) == (4, 0), "two files of two jobs"
    rows = list(csv.DictReader(starts.read_text().splitlines()))
    assert [float(row["arrival_seconds"]) for row in rows[:1]] == [0.0]
    assert all(row["gpus"] == "2" for row in rows)
    assert float(rows[0]["end_seconds"]) - float(rows[0]["start_seconds"]) >= 0.3
    records = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [record["expected_seconds"] for record in records if record["kind"] == "lease"] == [120.0, 120.0]


def test_limits_of_a_policy(programs: Programs, tmp_path: Path) -> None:
    """ana may hold one GPU and for ten minutes; robots, by their keys, may have one request that waits."""
    file, policy, starts = tmp_path / "jobs.csv", tmp_path / "policy.toml", tmp_path / "starts.csv"
    rows = ["0,3600,1,ana,", "1,60,1,ana,", "2,60,2,ana,", "3,5000,1,ci,", "4,5000,1,ci,", "5,5000,1,ci,"]
    file.write_text(COLUMNS + "\n".join(rows) + "\n")
    policy.write_text(
        '[account.ana]\nmost_gpus = 1\nlongest_time = "10m"\n[group.robots]\nkeys = ["ci"]\nmost_waiting = 1\n'
    )
    options = ("--hosts", 1, "--gpus-per-host", 2, "--policy", policy, "--starts", starts)
    done = programs.call("simulate", file, *options, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    begun = {
        row["request"]: (row["start_seconds"], row["end_seconds"])
        for row in csv.DictReader(starts.read_text().splitlines())
    }
    assert begun == {
        "0": ("0.0", "600.0"),  # its limit, not its hour
        "1": ("600.0", "660.0"),  # a GPU was free all the time
        "2": ("", ""),
        "3": ("3.0", "5003.0"),
        "4": ("660.0", "5660.0"),
        "5": ("", ""),
    }
    assert (
        "more than the policy allows, or a host has, and were left out: 2"
        in programs.call("simulate", file, *options).stdout
    )
    policy.write_text("[account.ana]\nmost_gpu = 1\n")
    refused = programs.call("simulate", file, "--policy", policy)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{policy}, line 2: 'most_gpu' is not a limit; did you mean most_gpus?" in refused.stderr
