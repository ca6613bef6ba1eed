"""Tables and lines where there is little room: what matters most stays."""

from __future__ import annotations

import pytest

from gpu_worker_pool.cli.running import progress as progress_module
from gpu_worker_pool.cli.running.progress import Progress
from gpu_worker_pool.cli.tables import columns_that_fit
from gpu_worker_pool.cli.views.cells import GPU_COLUMNS, gpu_rows

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
    assert columns_that_fit(GPU_COLUMNS, rows, 5)[0] == ["gpu", "memory", "state", "holder"]


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
