"""`gpu-pool demo` in a pipe and on a terminal; it leaves nothing behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cli.programs import GPU_POOL, Programs, processes_in
from tests.waiting import eventually


def left_over(folder: Path) -> list[str]:
    """The folders of the demo that still exist, and the processes that use them."""
    folders = [str(path) for path in folder.glob("gpu-pool-demo-*")]
    return [*folders, *map(str, processes_in(folder))]


@pytest.mark.timeout(90)
def test_in_a_pipe(programs: Programs, tmp_path: Path) -> None:
    begun_at = time.monotonic()
    done = programs.call("demo", timeout=60, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun_at < 20
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "1 gave up, 1 killed, 1 rejected at once, 9 served; 4 of 4 GPUs are free again" in done.stdout
    for line in (
        r"4 simulated GPUs; 12 workers in 2 programs",
        r"worker 3 has GPU \d, \d after",
        r"why does worker \d+ wait\? ",
        r"GPU \d: held by",
        r"worker 12 is killed \(kill -9\)",
        r"worker 12: killed, GPU \d is back \d+\.\d s later",
        r"worker 9: rejected at once, ",
        r"gpu-pool run -- sleep 30",
    ):
        assert re.search(line, done.stdout), line
    eventually(lambda: left_over(tmp_path) == [], within_seconds=5)


@pytest.mark.timeout(90)
def test_on_a_terminal_until_ctrl_c(programs: Programs, tmp_path: Path) -> None:
    terminal = programs.terminal([*GPU_POOL, "demo", "--simulate", "2"], TMPDIR=str(tmp_path))
    terminal.until("of 12 workers are done", within_seconds=30)
    terminal.until("waiting", within_seconds=30)
    terminal.type("\x03")
    terminal.wait(within_seconds=20)
    assert "Traceback" not in terminal.shown
    eventually(lambda: left_over(tmp_path) == [], within_seconds=10)
