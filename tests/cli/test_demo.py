"""`gpu-pool demo` in a pipe and on a terminal; it leaves nothing behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cli.programs import GPU_POOL, Programs, processes_in
from tests.waiting import eventually

BARE_PATH = "/usr/bin:/bin"


def left_over(folder: Path) -> list[str]:
    """The folders of the demo that still exist, and the processes that use them."""
    folders = [str(path) for path in folder.glob("gpu-pool-demo-*")]
    return [*folders, *map(str, processes_in(folder))]


@pytest.mark.timeout(90)
def test_in_a_pipe(programs: Programs, tmp_path: Path) -> None:
    begun_at = time.monotonic()
    # As from a virtual environment that was not activated.
    done = programs.call("demo", timeout=60, TMPDIR=str(tmp_path), PATH=BARE_PATH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun_at < 20
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "1 gave up, 1 killed, 1 rejected at once, 9 served; 4 of 5 GPUs are free again" in done.stdout
    assert not re.search(r"has GPU (\d, )*4", done.stdout), "it was left alone"
    for line in (
        r"5 simulated GPUs; 12 workers in 2 programs",
        r"GPU 4 is left alone: in use by notebook \(pid \d+, outsider\) with 15\.0 GiB for \d.*, without a lease",
        r"free again, and GPU 4 was left alone: in use by notebook",
        r"worker 3 has GPU \d, \d after",
        r"why does worker \d+ wait\? ",
        r"GPU \d: held by",
        r"worker 12 is killed \(kill -9\)",
        r"worker 12: killed, GPU \d is back \d+\.\d s later",
        r"worker 9: rejected at once, ",
        r"in two shells:$|in two shells in this folder:$",
    ):
        assert re.search(line, done.stdout, re.MULTILINE), line
    last = done.stdout.partition("Try it yourself")[2].splitlines()[1:]
    typed = [line.rsplit("   ", 1)[0].strip() for line in last]
    assert [command.split()[-1] for command in typed] == ["GPU_BACKEND=simulated:1", "30", "status", "explain"]
    # As they are printed, in a shell that knows nothing of this installation.
    lines = "; ".join(typed).replace("sleep 30", "true")
    done = programs.run(["sh", "-ec", lines], PATH=BARE_PATH, GPU_BACKEND="")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "1 free" in done.stdout
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
