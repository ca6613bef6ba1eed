"""`gpu-pool report` in real processes: who used what, also what is still held."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import Programs


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with Programs(tmp_path_factory.mktemp("report"), GPU_BACKEND="simulated:2") as made:
        made.call("run", "--label", "night", "--", "true")
        made.call("run", "-n", "2", "--", "true")
        made.call("run", "-n", "9", "--", "true")
        yield made


def test_it_sums_up_what_has_ended(programs: Programs) -> None:
    found = json.loads(programs.call("report", "--json", "--by", "label").stdout)
    assert {row["name"]: (row["leases"], row["refused"]) for row in found["rows"]} == {
        "night": (1, 0),
        "(no label)": (1, 1),
    }
    assert found["broken_lines"] == 0


def test_as_a_table_and_as_csv(programs: Programs, tmp_path: Path) -> None:
    picture = tmp_path / "day.svg"
    table = programs.call("report", "--since", "1d", "--plot", str(picture))
    assert "GPU HOURS" in table.stdout
    assert picture.read_text().startswith("<svg ")
    rows = list(csv.DictReader(io.StringIO(programs.call("report", "--by", "gpu", "--csv").stdout)))
    assert [row["leases"] for row in rows] != []
    assert sum(int(row["leases"]) for row in rows) == 3


def test_what_is_held_counts_up_to_now(programs: Programs) -> None:
    inside = "gpu-pool report --json | python3 -c \"import json,sys; print(json.load(sys.stdin)['total']['leases'])\""
    assert programs.call("run", "--", "sh", "-c", inside).stdout == "3\n"


def test_broken_lines_are_said(programs: Programs) -> None:
    (usage,) = (programs.folder / "state").glob("usage-*.jsonl")
    before = usage.read_text()
    usage.write_text(f"{before}garbage\n")
    try:
        done = programs.call("report")
        assert done.stderr == "gpu-pool: 1 line of the usage files cannot be read, and not counted\n"
        assert done.returncode == 0
    finally:
        usage.write_text(before)


def test_a_picture_that_cannot_be_written_is_said(programs: Programs, tmp_path: Path) -> None:
    done = programs.call("report", "--plot", str(tmp_path / "no" / "x.svg"))
    assert (done.returncode, done.stderr) == (
        1,
        f"gpu-pool: {tmp_path}/no/x.svg cannot be written: No such file or directory\n",
    )
