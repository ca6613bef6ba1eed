"""What /proc says of a process, also in the moment in which it becomes another program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gpu_worker_pool.hardware.proc import environment_of


def test_a_process_that_is_starting_a_program_is_not_taken_for_one_without_variables(tmp_path: Path) -> None:
    restless = tmp_path / "restless"
    restless.write_text('#!/bin/sh\nexec "$0"\n')
    restless.chmod(0o755)
    process = subprocess.Popen([str(restless)], env={"MINE": "1"})
    try:
        raw = Path(f"/proc/{process.pid}/environ")
        # Only where the moment is hit has this shown anything.
        missed = 0
        while missed < 10:
            missed += raw.read_bytes() == b""
            assert b"MINE=1" in environment_of(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_ended_or_never_was_has_no_variables() -> None:
    process = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not any(environment_of(process.pid))
    process.wait()
    assert not any(environment_of(process.pid))


def test_a_program_started_without_variables_has_none() -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        assert not any(environment_of(process.pid))
    finally:
        process.kill()
        process.wait()
