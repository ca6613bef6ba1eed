"""`gpu-pool map` in real processes: each job on a GPU that it has alone, whole outputs, and no job without a lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import GPU_POOL, LISTENER, Programs, children_of, is_there
from tests.waiting import eventually

#: Says when it has which GPU, in one line.
STAMP = """
import os, sys, time
begun = time.monotonic_ns()
time.sleep(0.05)
line = f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.environ['GPU_POOL_LEASE_ID']} {begun} {time.monotonic_ns()}"
with open(sys.argv[1], "a") as file:
    file.write(line + "\\n")
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Programs]:
    """With two simulated GPUs."""
    with Programs(tmp_path, GPU_BACKEND="simulated:2") as programs:
        yield programs


def overlapping(log: Path) -> list[tuple[list[str], list[str]]]:
    """The jobs that had the same GPU at the same time."""
    rows = [line.split() for line in log.read_text().splitlines()]
    return [
        (one, other)
        for position, one in enumerate(rows)
        for other in rows[position + 1 :]
        if one[0] == other[0] and int(one[2]) < int(other[3]) and int(other[2]) < int(one[3])
    ]


def test_two_maps_at_once_with_more_slots_than_gpus(two: Programs, tmp_path: Path) -> None:
    log, job = tmp_path / "log", [sys.executable, "-S", "-c", STAMP]
    arguments = [str(number) for number in range(12)]
    first = two.start("map", "-j", "5", "--", *job, log, ":::", *arguments)
    second = two.start("map", "--", *job, log, ":::", *arguments)
    assert (first.wait(60), second.wait(60)) == (0, 0), first.err + second.err
    assert len(log.read_text().splitlines()) == 24
    assert overlapping(log) == []
    assert two.leases() == []
    assert "12 jobs: 12 done" in first.err


def test_a_lease_stays_from_one_job_to_the_next(programs: Programs, tmp_path: Path) -> None:
    done = programs.call("map", "-q", "--", "sh", "-c", "echo $GPU_POOL_LEASE_ID $CUDA_VISIBLE_DEVICES", ":::", 1, 2, 3)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = set(done.stdout.splitlines())
    assert line.endswith(" 0")


def test_each_output_is_whole_and_the_states_are_on_stderr(two: Programs) -> None:
    script = 'echo "begin $0"; echo "problem $0" >&2; sleep 0.2; echo "end $0"'
    done = two.call("map", "--", "sh", "-c", script, "{}", ":::", "a", "b", "c", "d")
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(f"{when} {name}" for when in ("begin", "end") for name in "abcd")
    assert all(begin[6:] == end[4:] for begin, end in zip(lines[::2], lines[1::2], strict=True))
    assert all(f"problem {name}\n" in done.stderr for name in "abcd")
    assert "gpu-pool: job 1 of 4 (a) started on GPU" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gpu-pool: 4 jobs: 4 done, in ")


def test_stdin_has_one_argument_per_line(programs: Programs) -> None:
    done = programs.call("map", "-q", "--", "echo", "<{}>", text_in="a b\n\nc")
    assert (done.stdout, done.returncode) == ("<a b>\n<c>\n", 0)


def test_the_worst_status_and_retries_with_logs(programs: Programs, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    script = 'echo "try $0"; test -e "$1" || { touch "$1"; exit 9; }; exit $0'
    done = programs.call(
        "map",
        "--retries",
        1,
        "--log-dir",
        logs,
        "--",
        "sh",
        "-c",
        script,
        "{}",
        f"{tmp_path}/seen-{{#}}",
        ":::",
        0,
        3,
        2,
    )
    assert done.returncode == 3
    assert "job 2 of 3 (3) failed with status 9 after 0 s; trying again (1 of 1)" in done.stderr
    assert "3 jobs: 1 done, 2 failed (2, 3)" in done.stderr
    assert sorted(file.name for file in logs.glob("*.out")) == sorted(
        f"{number}{again}.out" for number in (1, 2, 3) for again in ("", ".retry1")
    )
    assert (logs / "2.retry1.out").read_text() == "try 3\n"


def test_a_job_killed_by_a_signal(programs: Programs) -> None:
    done = programs.call("map", "--", "sh", "-c", "kill -9 $$", ":::", 1)
    assert done.returncode == 137
    assert "killed by SIGKILL" in done.stderr


def test_halting_soon_and_now(two: Programs) -> None:
    soon = two.call("map", "-j", 1, "--halt", "soon,fail=1", "--", "sh", "-c", "exit {}", ":::", 0, 4, 0, 0)
    assert soon.returncode == 4
    assert "4 jobs: 1 done, 1 failed (2), 2 not run" in soon.stderr
    begun = time.monotonic()
    now = two.call("map", "--halt", "now,fail=1", "--", "sh", "-c", "sleep {}; exit 4", ":::", 60, 0.1, 60)
    assert time.monotonic() - begun < 40
    assert now.returncode == 4
    assert "0 done, 1 failed (2), 1 stopped, 1 not run" in now.stderr
    won = two.call("map", "--halt", "now,success=1", "--", "sh", "-c", "sleep {}", ":::", 0, 60, 60)
    assert won.returncode == 0


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (["--", "true", ":::"], 2, "There is nothing to do: no argument follows :::"),
        (["--", "true"], 2, "There is nothing to do: stdin has no line with an argument"),
        (["--", "true", ":::", "1", ":::"], 2, "no argument follows :::"),
        ([":::", "1"], 2, "There is no command before :::"),
        (
            ["--halt", "soon", "--", "true", ":::", "1"],
            2,
            "'soon' does not say when to stop; write never",
        ),
        (["-j", "0", "--", "true", ":::", "1"], 2, "'-j'"),
        (["--log-dir", "/proc/none", "--", "true", ":::", "1"], 1, "cannot be stored in /proc/none"),
        (["--", "no-such-program", ":::", "1"], 127, "program 'no-such-program' not found"),
        (["--", "{}", ":::", "no-such-program"], 127, "not started: program 'no-such-program' not found"),
        (["--memory", "99TiB", "--share", "--", "true", ":::", "1"], 65, "can never be granted"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    programs: Programs, words: list[str], status: int, problem: str
) -> None:
    done = programs.call("map", *words)
    assert (done.returncode, problem in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_map_waits_in_one_place_of_the_queue_and_gives_up_in_time(programs: Programs) -> None:
    programs.holding()
    busy = programs.call("map", "--no-wait", "--", "true", ":::", 1, 2)
    assert busy.returncode == 75
    waiting = programs.start("map", "--timeout", "3s", "--", "true", ":::", 1, 2, 3)
    eventually(lambda: len(programs.waiting()) == 1)
    assert waiting.wait(30) == 124
    assert "no GPU became free in 3 s" in waiting.err
    assert "3 jobs: 0 done, 3 not run" in waiting.err


def test_killing_the_map_ends_its_jobs_and_frees_the_gpus(two: Programs, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    # The shell's child is in the job, too.
    script = f"echo $$ > {pids}/{{}}; sleep 60 & echo $! > {pids}/{{}}.child; wait"
    mapping = two.start("map", "--", "sh", "-c", script, ":::", 1, 2, 3)
    eventually(lambda: len(list(pids.glob("*.child"))) == 2)
    eventually(lambda: all(file.read_text().strip() for file in pids.iterdir()))
    assert len(two.leases()) == 2
    os.kill(mapping.pid, signal.SIGKILL)
    mapping.wait(10)
    jobs = [int(file.read_text()) for file in pids.iterdir()]
    eventually(lambda: not any(map(is_there, jobs)))
    eventually(lambda: two.leases() == [])
    # The GPUs can be had again.
    assert two.call("run", "-n", 2, "--timeout", "40s", "--", "true", timeout=60).returncode == 0


def test_killing_the_lease_process_is_reported_and_no_further_job_begins(programs: Programs, tmp_path: Path) -> None:
    flag = tmp_path / "runs"
    mapping = programs.start("map", "--", "sh", "-c", f"touch {flag}; sleep 1; echo {{}}", ":::", 1, 2)
    eventually(flag.exists)
    (lease_process,) = [
        pid for pid in children_of(mapping.pid) if "gpu-pool-lease" in Path(f"/proc/{pid}/comm").read_text()
    ]
    os.kill(lease_process, signal.SIGKILL)
    assert mapping.wait(30) == 1
    assert mapping.out == "1\n"
    assert "the lease process has ended" in mapping.err
    assert "2 jobs: 1 done, 1 not run" in mapping.err


def test_a_signal_reaches_every_job_once(two: Programs, tmp_path: Path) -> None:
    job = [sys.executable, "-c", LISTENER, f"{tmp_path}/signals-{{}}", "SIGTERM"]
    mapping = two.start("map", "--", *job, ":::", 1, 2, 3)
    logs = [tmp_path / "signals-1", tmp_path / "signals-2"]
    eventually(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    os.kill(mapping.pid, signal.SIGUSR1)
    eventually(lambda: all("SIGUSR1" in log.read_text() for log in logs))
    os.killpg(mapping.pid, signal.SIGTERM)  # as `timeout` does
    assert mapping.wait(30) == 128 + signal.SIGTERM
    assert [log.read_text().split() for log in logs] == [["ready", "SIGUSR1", "SIGTERM"]] * 2
    assert "3 jobs: 0 done, 2 stopped, 1 not run" in mapping.err
    assert two.leases() == []


def test_ctrl_c_on_a_terminal(two: Programs, tmp_path: Path) -> None:
    job = [sys.executable, "-c", LISTENER, f"{tmp_path}/signals-{{}}", "SIGINT"]
    terminal = two.terminal([*GPU_POOL, "map", "--", *job, ":::", "1", "2", "3"])
    logs = [tmp_path / "signals-1", tmp_path / "signals-2"]
    eventually(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT
    assert [log.read_text().split() for log in logs] == [["ready", "SIGINT"]] * 2
    assert two.leases() == []


def test_ctrl_z_stops_the_jobs_with_it(programs: Programs, tmp_path: Path) -> None:
    shell = programs.terminal(["sh", "-m"])  # with job control
    shell.type(f"{' '.join(GPU_POOL)} map -- sh -c 'echo $$ > {tmp_path}/pid; exec sleep 2' ::: 1; echo 'status' $?\n")
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
    job = int((tmp_path / "pid").read_text())
    shell.type("\x1a")
    eventually(lambda: Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    shell.type("fg\n")
    shell.until("1 job: 1 done")


def test_what_a_job_leaves_running_keeps_its_gpu(two: Programs, tmp_path: Path) -> None:
    flag = tmp_path / "end"
    script = f"echo $CUDA_VISIBLE_DEVICES; test {{}} = b || (while [ ! -e {flag} ]; do sleep 0.1; done) &"
    mapping = two.start("map", "-j", 1, "--", "sh", "-c", script, ":::", "a", "b")
    mapping.wait(40)
    first, second = mapping.out.split()
    assert first != second
    assert "a job left processes running (" in mapping.err
    assert f"GPU {first} stays reserved while they use it" in mapping.err
    assert mapping.returncode == 0
    flag.touch()


def test_a_gpu_comes_back_as_soon_as_nothing_is_left_on_it(programs: Programs) -> None:
    done = programs.call("map", "--", "sh", "-c", "echo $GPU_POOL_LEASE_ID; sleep 2 &", ":::", "a", "b")
    assert done.returncode == 0
    assert len(set(done.stdout.split())) == 2, "the second job must not start beside what the first one left"


def test_a_job_whose_lease_is_lost_is_ended_on_request(programs: Programs, tmp_path: Path) -> None:
    flag = tmp_path / "runs"
    command = ["sh", "-c", f"touch {flag}; test {{}} = b || exec sleep 60"]
    mapping = programs.start("map", "--on-lost", "terminate", "--ttl", "2s", "--", *command, ":::", "a", "b")
    eventually(flag.exists)
    (lease,) = programs.leases()
    assert programs.call("release", lease["lease_id"]).returncode == 0
    assert mapping.wait(40) == 128 + signal.SIGTERM
    assert "GPU 0 is lost: " in mapping.err
    assert "; ending job 1 of 2 (a)" in mapping.err
    assert "2 jobs: 1 done, 1 failed (1)" in mapping.err


def test_a_closed_output_ends_the_jobs(programs: Programs) -> None:
    command = f"{' '.join(GPU_POOL)} map -- sh -c 'echo {{}}; sleep 0.1' ::: $(seq 100) | head -1"
    done = programs.run(["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"])
    assert done.stdout.split() == ["1", "141"], done.stderr
    assert programs.leases() == []


def test_a_killed_map_ends_no_job_of_another_ledger(programs: Programs, tmp_path: Path) -> None:
    """Both leases are called the same, and both maps are in one session."""
    both = "; ".join(
        f"GPU_POOL_STATE_DIR={tmp_path}/{name} {' '.join(GPU_POOL)} map -- sh -c 'echo $$ > {tmp_path}/pid-{name}; "
        f"echo $PPID > {tmp_path}/map-{name}; exec sleep 60' ::: 1 &"
        for name in "ab"
    ).replace("&;", "&")
    session = programs.terminal(["bash", "-c", f"{both} wait"])
    files = [tmp_path / f"{kind}-{name}" for kind in ("pid", "map") for name in "ab"]
    eventually(lambda: all(file.exists() and file.read_text().strip() for file in files))
    first, other, mapping, _ = (int(file.read_text()) for file in files)
    os.kill(mapping, signal.SIGKILL)
    eventually(lambda: not is_there(first))
    time.sleep(0.3)  # for what must not happen
    assert is_there(other)
    session.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_a_full_disk_for_logs_is_reported(programs: Programs, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=64k", "none", full], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        # `head` fails when it cannot write; a script may go on all the same, and seem to have succeeded.
        for end, status in (("false", 1), ("true", 0)):
            script = f"head -c 200000 /dev/zero || {end}"
            done = programs.call("map", "--log-dir", full, "--", "sh", "-c", script, ":::", "1")
            assert done.returncode == status
            assert f"job 1 of 1 (1): the disk of {full} is full, so its output may be incomplete" in done.stderr
    finally:
        subprocess.run(["/bin/umount", full], check=True)
    assert programs.leases() == []
