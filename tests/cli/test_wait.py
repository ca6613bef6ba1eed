"""`gpu-pool wait`: a GPU for a shell, given back when the shell ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.programs import GPU_POOL, Programs, is_there
from tests.waiting import eventually

WAIT = " ".join([*GPU_POOL, "wait"])
RUN = " ".join([*GPU_POOL, "run"])


def bash(programs: Programs, script: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["bash", "-c", script])


def is_free(programs: Programs) -> bool:
    return programs.call("run", "--no-wait", "--", "true").returncode == 0


def test_the_shell_has_it_until_it_ends(programs: Programs) -> None:
    begun_at = time.monotonic()
    done = bash(
        programs,
        f"CUDA_VISIBLE_DEVICES=$({WAIT}) || exit 1; export CUDA_VISIBLE_DEVICES; echo got $CUDA_VISIBLE_DEVICES; "
        f"env -u CUDA_VISIBLE_DEVICES {RUN} --no-wait -- true; echo $?",
    )
    # If the lease process kept our output open, `$(…)` would have waited for it.
    assert time.monotonic() - begun_at < 20
    assert done.stdout.split("\n") == ["got 0", "75", ""]
    assert eventually(lambda: is_free(programs), within_seconds=10)
    assert programs.leases() == []


def test_a_run_in_that_shell_uses_the_lease_of_the_shell(programs: Programs) -> None:
    """The value alone names no lease; the shell that has it is known all the same."""
    show = "sh -c 'echo $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID'"
    done = bash(
        programs, f'export CUDA_VISIBLE_DEVICES=$({WAIT}); {RUN} --no-wait -- {show}; sh -c "{RUN} --no-wait -- true"'
    )
    gpu, lease_id = done.stdout.split()
    assert gpu == "0", done.stderr
    assert lease_id.startswith("lease-")  # a part of the shell's
    assert done.returncode == 0, done.stderr


def test_another_shell_waits_and_is_told_what_limits_it(programs: Programs) -> None:
    programs.environment["GPU_BACKEND"] = "simulated:2"
    programs.holding("--only", "0")
    done = programs.call("run", "--no-wait", "--", "true", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 75
    assert "CUDA_VISIBLE_DEVICES=0 limits the choice" in done.stderr


@pytest.mark.parametrize(
    "substitution",
    [
        "$({wait})",
        "$({wait} | cat)",
        "$(true; {wait}; true)",
        "$( ( {wait}; true ); true )",
        "`{wait} || exit 3`",
    ],
)
def test_subshells_do_not_count(programs: Programs, substitution: str) -> None:
    """Which bash forks for a substitution, and which end with it."""
    # A shell that has started no program yet is told from its subshells, too.
    look = " ".join([*GPU_POOL, "leases", "--json"])
    script = f"x={substitution.format(wait=WAIT)}; {RUN} --no-wait -- true; echo $$ $x $?; {look}"
    first, leases = bash(programs, script).stdout.split("\n", 1)
    pid, value, status = first.split()
    assert (value, status) == ("0", "75")
    (lease,) = json.loads(leases)["leases"]
    assert lease["worker_id"].endswith(f":bash:{pid}"), "whose end gives it back"
    assert eventually(lambda: is_free(programs), within_seconds=10)


def test_other_output_may_be_caught_too(programs: Programs) -> None:
    done = bash(programs, f"x=$({WAIT} 2>&1); echo $x")
    assert done.stdout == "0\n"


def test_for_another_process(programs: Programs) -> None:
    other = subprocess.Popen(["/bin/sleep", "60"])
    try:
        done = programs.call("wait", "--pid", other.pid)
        assert done.stdout == "0\n"
        (lease,) = programs.leases()
        assert lease["worker_id"].endswith(f":sleep:{other.pid}")
        time.sleep(0.5)
        assert not is_free(programs)
    finally:
        other.kill()
        other.wait()
    assert eventually(lambda: is_free(programs), within_seconds=10)


def test_there_is_no_such_process(programs: Programs) -> None:
    done = programs.call("wait", "--pid", 2**22 - 3)
    assert done.returncode == 2
    assert "there is no such process" in done.stderr


def test_export_and_json(programs: Programs) -> None:
    done = bash(
        programs,
        f'eval "$({WAIT} --export --uuids)"; echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $NVIDIA_VISIBLE_DEVICES; '
        # Inside its lease a shell does not wait for itself.
        f"{RUN} --no-wait -- sh -c 'echo $CUDA_VISIBLE_DEVICES'",
    )
    uuid = "GPU-51309a7e-0000-4000-8000-000000000000"
    assert done.stdout.splitlines() == [f"{uuid} PCI_BUS_ID {uuid}", "0"]
    assert eventually(lambda: is_free(programs), within_seconds=10)
    told = json.loads(bash(programs, f"x=$({WAIT} --json); echo $x").stdout)
    assert told["gpus"][0]["gpu_id"] == 0
    assert told["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert told["env"]["GPU_POOL_LEASE_ID"] == told["lease_id"]
    assert told["endpoint"] == "local"
    assert told["pid"] > 0


def test_export_and_json_contradict_each_other(programs: Programs) -> None:
    done = programs.call("wait", "--json", "--export")
    assert done.returncode == 2
    assert "--json and --export exclude each other" in done.stderr


def test_it_is_renewed(programs: Programs) -> None:
    script = f"x=$({WAIT} --ttl 2s); sleep 6; {RUN} --no-wait -- true; echo $?"
    assert bash(programs, script).stdout == "75\n"


def test_without_a_gpu_it_prints_nothing(programs: Programs) -> None:
    programs.holding()
    done = bash(programs, f"x=$({WAIT} --no-wait); echo status $? value $x")
    assert done.stdout == "status 75 value\n"
    late = bash(programs, f"x=$({WAIT} --timeout 0.5s); echo status $?")
    assert late.stdout == "status 124\n"
    assert bash(programs, f"x=$({WAIT} -n 9); echo status $?").stdout == "status 65\n"
    assert programs.waiting() == []
    assert len(programs.leases()) == 1


def test_interrupted_while_waiting(programs: Programs) -> None:
    programs.holding()
    waiting = programs.start("wait")
    eventually(programs.waiting)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(10) == 143
    assert waiting.out == ""
    eventually(lambda: programs.waiting() == [])


def test_a_value_that_nobody_got_keeps_no_gpu(programs: Programs) -> None:
    script = (
        f"import os, subprocess, time; r, w = os.pipe(); os.close(r); subprocess.call({GPU_POOL} + ['wait'], stdout=w)"
    )
    still_there = subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], env=programs.environment)
    try:
        eventually((programs.folder / "state").exists)
        assert eventually(lambda: is_free(programs), within_seconds=10)
    finally:
        still_there.kill()
        still_there.wait()


def test_where_nobody_could_get_the_value_nothing_is_asked_for(programs: Programs) -> None:
    done = bash(programs, f"{WAIT} >&-; echo $? >&2; {RUN} --no-wait -- true; echo $? >&2")
    assert done.stderr.split("\n")[-3:] == ["2", "0", ""]
    assert "stdout is closed" in done.stderr


def test_its_keeper_gives_back_when_told_to_end(programs: Programs) -> None:
    programs.call("wait", "--pid", os.getpid())
    assert [lease["state"] for lease in programs.leases()] == ["held"]
    keepers = _keepers_for(os.getpid())
    assert len(keepers) == 1
    assert os.getsid(keepers[0]) == keepers[0]
    os.kill(keepers[0], signal.SIGTERM)
    eventually(lambda: not is_there(keepers[0]))
    # The lease of a keeper that was only gone would be in quarantine now.
    assert programs.leases() == []


def test_its_keeper_ends_with_a_lease_that_was_released(programs: Programs) -> None:
    programs.call("wait", "--ttl", "2s", "--pid", os.getpid())
    (lease,) = programs.leases()
    (keeper,) = _keepers_for(os.getpid())
    assert programs.call("release", lease["lease_id"]).returncode == 0
    eventually(lambda: not is_there(keeper))


def _keepers_for(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and is_there(int(entry.name)) and _is_keeper(entry, str(pid))
    ]


def _is_keeper(entry: Path, pid: str) -> bool:
    try:
        words = (entry / "cmdline").read_text().split("\0")
    except OSError:
        return False
    return "wait" in words and pid in words
