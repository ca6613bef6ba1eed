"""Tables and lines where there is little room: what matters most stays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker_pool.cli import tables
from gpu_worker_pool.cli.running import progress as progress_module
from gpu_worker_pool.cli.running.progress import Progress
from gpu_worker_pool.cli.tables import columns_that_fit, print_table
from gpu_worker_pool.cli.views.cells import GPU_COLUMNS, LEASE_COLUMNS, QUEUE_COLUMNS, gpu_rows

GPU = {
    "gpu_id": 0,
    "uuid": "GPU-a",
    "memory": {"used_mb": 18022, "total_mb": 24576},
    "utilization_percent": 95,
}
LEASE = {
    "worker_id": "ana:python:4242",
    "label": None,
    "held_seconds": 65,
    "memory_mb": None,
    "memory_used_mb": 36044,
    "share": False,
    "gpus": [{"gpu_id": 0, "uuid": "GPU-a"}, {"gpu_id": 1, "uuid": "GPU-b"}],
}


def test_a_narrow_terminal_shows_who_has_a_gpu_rather_than_how_much_of_it() -> None:
    rows = gpu_rows(GPU, [LEASE])
    assert columns_that_fit(GPU_COLUMNS, rows, 120) == (list(GPU_COLUMNS), rows)
    columns, narrow = columns_that_fit(GPU_COLUMNS, rows, 50)
    assert "state" in columns
    assert "holder" in columns
    assert "used" not in columns
    assert [len(row) for row in narrow] == [len(columns)]
    assert columns_that_fit(GPU_COLUMNS, rows, 42)[0] == ["gpu", "memory", "state", "holder"]


# --- in a terminal ---

REQUEST_ID = "0123456789abcdef0123456789abcdef"
WAITING = [
    ["1", REQUEST_ID, "ana:python:4242", "20 s", "1 GPU", "one GPU: next in line; of 1 GPU: 1 held", "nightly run"],
    ["2", "train-7", "ben:train.py:17", "2 min 5 s", "2 GPUs, priority 5", "2 GPUs: 1 is before it; of 1: 1 held", ""],
]
LEASES = [
    ["lease-12", "0,1", "ana:python:4242", "2 h 3 min", "all", "12 GiB", "held", "nightly run"],
    ["lease-13", "2", "a-long-name:train_my_model.py:123456", "1 s", "8.0 GiB", "?", "quarantined: it is late", ""],
]
GPUS = [
    ["0", "17.6/24 GiB", "95 %", "shared", "ana:python:4242 (mine)", "5 s", "8.0 GiB", "17.6 GiB"],
    ["", "", "", "", "ben:train.py:17", "15 s", "8.0 GiB", "1.6 GiB"],
    ["1", "0/24 GiB", "0 %", "free", "", "", "", ""],
]


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, *table: Sequence[Any], **title: str
) -> list[str]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(tables, "is_pretty", lambda: True)
    capsys.readouterr()
    print_table(*table, **title)
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()]


@pytest.mark.parametrize(
    ("columns", "rows", "ids"),
    [(QUEUE_COLUMNS, WAITING, 1), (LEASE_COLUMNS, LEASES, 0), (("endpoint", *QUEUE_COLUMNS), None, 2)],
    ids=["queue", "leases", "queues"],
)
def test_ids_can_be_copied_and_no_line_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: Sequence[str],
    rows: list[list[str]] | None,
    ids: int,
) -> None:
    rows = rows or [["gpu-server-1_8000", *row] for row in WAITING]
    for width in range(20, 140):
        lines = shown(monkeypatch, capsys, width, columns, rows)
        for row in rows:
            assert any(re.search(rf"(^|\s){re.escape(row[ids])}(\s|$)", line) for line in lines), (width, lines)
        # A longer id is the terminal's to wrap.
        longest = max(width, *(len(row[ids]) + 2 for row in rows))
        assert [line for line in lines if len(line) > longest] == [], width


@pytest.mark.parametrize(("columns", "rows"), [(QUEUE_COLUMNS, WAITING), (LEASE_COLUMNS, LEASES), (GPU_COLUMNS, GPUS)])
def test_a_narrow_terminal_shows_each_row_as_a_few_lines_and_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: Sequence[str], rows: list[list[str]]
) -> None:
    lines = shown(monkeypatch, capsys, 40, columns, rows, title="a title")
    assert lines[0] == "a title"
    assert [line for line in lines[1:] if not line.startswith("  ")] == [
        line for line in lines if line.startswith(f"{columns[0]} ")
    ]
    words = " ".join(lines).split()
    for name, cell in ((name, cell) for row in rows for name, cell in zip(columns, row, strict=True) if cell):
        assert name in words
        assert set(re.split(r"[\s-]", cell)) <= set(re.split(r"[\s-]", " ".join(lines))), cell


def test_blocks_as_people_see_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(monkeypatch, capsys, 40, QUEUE_COLUMNS, WAITING[:1]) == [
        "place 1",
        "  request",
        "  0123456789abcdef0123456789abcdef",
        "  who ana:python:4242  waiting 20 s",
        "  wants 1 GPU",
        "  why one GPU: next in line; of 1 GPU: 1",
        "    held",
        "  label nightly run",
    ]
    assert shown(monkeypatch, capsys, 40, GPU_COLUMNS, GPUS) == [
        "gpu 0  memory 17.6/24 GiB  load 95 %",
        "  state shared",
        "  holder ana:python:4242 (mine)",
        "  since 5 s  promised 8.0 GiB",
        "  used 17.6 GiB",
        "  holder ben:train.py:17  since 15 s",
        "  promised 8.0 GiB  used 1.6 GiB",
        "gpu 1  memory 0/24 GiB  load 0 %",
        "  state free",
    ]


def test_what_a_lease_of_several_gpus_uses_is_not_said_of_one() -> None:
    ((*_, used),) = gpu_rows(GPU, [LEASE])
    assert used == "35.2 GiB of 2 GPUs"


def test_a_narrow_terminal_is_told_why_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "_is_live_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    Progress().hear({"kind": "waiting", "endpoint": "local", "position": 1, "summary": "next in line", "reasons": []})
    assert "next in l" in capsys.readouterr().err
