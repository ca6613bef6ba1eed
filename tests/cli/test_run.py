"""`gpu-pool run` in a pipe: what the command sees, what the caller gets, and what is said meanwhile."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.programs import Programs, children_of, is_there
from tests.waiting import eventually


def test_the_command_sees_its_gpu_and_the_caller_its_exit_status(programs: Programs) -> None:
    script = "import os; [print(f'{k}={v}') for k, v in os.environ.items()]; raise SystemExit(7)"
    done = programs.call("run", "--", sys.executable, "-c", script)
    assert done.returncode == 7
    assert done.stderr == ""
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "GPU-51309a7e-0000-4000-8000-000000000000"
    assert variables["GPU_POOL_LEASE_ID"]
    assert programs.leases() == []


def test_keys_of_administrators_and_servers_are_not_passed_on(programs: Programs) -> None:
    names = ("GPU_POOL_ADMIN_KEY", "GPU_POOL_ADMIN_KEYS", "GPU_POOL_API_KEYS", "GPU_POOL_API_KEY")
    keys = {name: f"the-key-of-{name}" for name in names}
    done = programs.call("run", "--", "env", **keys)
    assert re.findall(r"the-key-of-\w+", done.stdout) == ["the-key-of-GPU_POOL_API_KEY"]


def test_uuids_on_request(programs: Programs) -> None:
    done = programs.call("run", "--uuids", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.stdout == "GPU-51309a7e-0000-4000-8000-000000000000\n"
    by_variable = programs.call("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", GPU_POOL_GPU_NAMES="UUID")
    assert (by_variable.stdout, by_variable.stderr) == (done.stdout, "")
    bad = programs.call("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", GPU_POOL_GPU_NAMES="name")
    assert bad.stdout == "0\n"
    assert "GPU_POOL_GPU_NAMES must be one of index, uuid, not 'name'" in bad.stderr


def test_arguments_stdin_and_output_are_the_commands_own(programs: Programs) -> None:
    done = programs.call("run", "--", "sh", "-c", 'cat; echo "$@" >&2', "sh", "--label", "-n", "a b", text_in="in\n")
    assert done.stdout == "in\n"
    assert done.stderr == "--label -n a b\n"
    # Without the two dashes, too: options behind the command are the command's.
    assert programs.call("run", "echo", "-n", "x").stdout == "x"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143), (signal.SIGSEGV, 139)])
def test_a_command_killed_by_a_signal(programs: Programs, number: signal.Signals, status: int) -> None:
    assert programs.call("run", "--", "sh", "-c", f"kill -{int(number)} $$").returncode == status


def test_commands_that_cannot_be_run(programs: Programs, tmp_path: Path) -> None:
    missing = programs.call("run", "--", "no-such-program")
    assert missing.returncode == 127
    assert missing.stderr == "gpu-pool: program 'no-such-program' not found; is it in PATH?\n"
    plain = tmp_path / "plain"
    plain.write_text("no program")
    refused = programs.call("run", "--", plain)
    assert refused.returncode == 126
    assert "chmod +x" in refused.stderr
    plain.chmod(0o755)
    assert programs.call("run", "--", plain).returncode == 126  # it has no first line that says what runs it
    assert programs.call("run", "--", tmp_path).returncode == 126
    orphan = tmp_path / "orphan"
    orphan.write_text("#!/no/such/interpreter -x\n")
    orphan.chmod(0o755)
    done = programs.call("run", "--", orphan)
    assert done.returncode == 126
    assert "its first line names '/no/such/interpreter', which does not exist" in done.stderr
    assert programs.leases() == []


def test_a_command_that_is_not_there_is_told_before_anybody_waits(programs: Programs) -> None:
    programs.holding()
    assert programs.call("run", "--", "no-such-program", timeout=10).returncode == 127


def test_what_can_never_be_granted_fails_at_once(programs: Programs) -> None:
    for wish in (["-n", "2"], ["--memory", "80GiB"], ["--model", "H100"], ["--only", "7"]):
        done = programs.call("run", *wish, "--", "true")
        assert done.returncode == 65, wish
        assert done.stderr.startswith("gpu-pool: The request can never be granted"), done.stderr


def test_nothing_is_free_now(programs: Programs) -> None:
    programs.holding()
    done = programs.call("run", "--no-wait", "--", "true")
    assert done.returncode == 75
    assert done.stderr == "gpu-pool: nothing is free now: one idle GPU: next in line; of 1 GPU: 1 held\n"
    late = programs.call("run", "--timeout", "0.5s", "--", "true")
    assert late.returncode == 124
    assert "no GPU became free in 0.5 s: one idle GPU: next in line; of 1 GPU: 1 held" in late.stderr
    assert programs.waiting() == []


def test_no_endpoint_answers(programs: Programs) -> None:
    for patience in (["--no-wait"], ["--timeout", "1"]):
        done = programs.call("run", "-e", "http://127.0.0.1:9", *patience, "--", "true")
        assert done.returncode == 69, patience
        assert "connection refused; is the GPU server running?" in done.stderr


def test_a_host_without_a_driver(programs: Programs) -> None:
    done = programs.call("run", "--", "/bin/true", GPU_BACKEND="nvidia-smi", PATH="/nowhere")
    assert done.returncode == 69
    assert "nvidia-smi" in done.stderr
    none = programs.call("run", "--", "true", GPU_BACKEND="simulated:0")
    assert none.returncode == 69
    assert "this host has no GPU" in none.stderr


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
def test_closed_streams_are_the_commands_matter(programs: Programs, closed: str) -> None:
    done = programs.run(["bash", "-c", f"gpu-pool run -- sh -c 'touch ran; exit 3' {closed}"])
    assert done.returncode == 3
    assert (programs.folder / "ran").exists()
    assert done.stderr == ""
    assert programs.run(["bash", "-c", f"gpu-pool status {closed}"]).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--"],
        ["--share", "--", "true"],
        ["--memory", "8", "--", "true"],
        ["--memory", "8 parsecs", "--", "true"],
        ["--timeout", "soon", "--", "true"],
        ["--no-wait", "--timeout", "3", "--", "true"],
        ["--ttl", "1s", "--", "true"],
        ["-n", "0", "--", "true"],
        ["--nonsense", "--", "true"],
        ["--label", "a\x1b[31mb", "--", "true"],
        ["--label", "\udcff", "--", "true"],
        ["--only", "\x1b[31m0", "--", "true"],
        ["--exclude", "0,\x1b[31m", "--", "true"],
        ["--model", "A\x1b[31m", "--", "true"],
        ["--model", "", "--", "true"],
        ["-e", "ftp://host", "--", "true"],
    ],
)
def test_usage(programs: Programs, arguments: list[str]) -> None:
    done = programs.call("run", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()[-1]) > 10


def test_one_waits_is_told_why_and_gets_it(programs: Programs) -> None:
    first = programs.holding("--label", "the first")
    second = programs.start("run", "--explain", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    (row,) = eventually(programs.waiting)
    assert row["position"] == 1
    assert any("held by" in reason for reason in row["reasons"])
    explained = programs.call("explain")
    assert f":sleep:{first.pid}" not in explained.stdout  # it is named after what was run, which was a shell
    assert f"'s sh (pid {first.pid}) for" in explained.stdout
    eventually(lambda: "GPU 0: held by" in second.err)
    first.terminate()
    assert first.wait(10) == 143
    assert second.wait(10) == 0
    assert second.out == "0\n"
    lines = second.err.splitlines()
    assert any(line.startswith("gpu-pool: waiting ") and "next in line" in line for line in lines)
    assert any("GPU 0: held by" in line for line in lines)
    assert lines[-1].startswith("gpu-pool: GPU 0 after ")


def test_the_same_is_not_said_twice_and_nothing_where_silence_is_wanted(programs: Programs) -> None:
    programs.holding()
    waiting = programs.start("run", "--", "true")
    eventually(lambda: waiting.err)
    quiet = programs.start("run", "-q", "--", "true")
    eventually(lambda: len(programs.waiting()) == 2)
    # Longer than two polls, each of which tells the place and the reasons anew.
    time.sleep(4.5)
    waiting.terminate()
    quiet.terminate()
    assert waiting.wait(10) == quiet.wait(10) == 143
    said = r"gpu-pool: waiting \d+ s: one idle GPU: next in line; of 1 GPU: 1 held\n"
    assert re.fullmatch(said, waiting.err), waiting.err
    assert quiet.err == ""


def test_a_ledger_that_is_gone_is_told_once(programs: Programs) -> None:
    process = programs.holding("--ttl", "3s")
    keeper, _ = children_of(process.pid)

    def stopped_at_rest() -> bool:
        """Whoever has had a GPU for a while opens the ledger for a moment only; stopped, it cannot do so meanwhile."""
        os.kill(keeper, signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        open_files = [str(each.readlink()) for each in Path(f"/proc/{keeper}/fd").iterdir()]
        if not any(str(programs.folder / "state") in name for name in open_files):
            return True
        os.kill(keeper, signal.SIGCONT)
        return False

    eventually(stopped_at_rest)
    state = programs.folder / "state"
    state.rename(programs.folder / "away")
    state.write_text("not a folder")
    os.kill(keeper, signal.SIGCONT)
    eventually(lambda: "the lease is lost: it could not be renewed for 3 s" in process.err)
    assert process.err.count("File exists") == 1, process.err
    process.terminate()
    process.wait(20)


def test_the_gpu_is_free_when_run_returns(programs: Programs) -> None:
    for _ in range(5):
        assert programs.call("run", "--no-wait", "--", "true").returncode == 0


def test_priorities_go_first(programs: Programs, tmp_path: Path) -> None:
    first, order = programs.holding(), tmp_path / "order"
    low = programs.start("run", "--", "sh", "-c", f"echo low >> {order}")
    eventually(lambda: len(programs.waiting()) == 1)
    high = programs.start("run", "--priority", "5", "--", "sh", "-c", f"echo high >> {order}")
    eventually(lambda: len(programs.waiting()) == 2)
    first.terminate()
    assert low.wait(10) == high.wait(10) == 0
    assert order.read_text().split() == ["high", "low"]


def test_small_ones_share_a_gpu(programs: Programs) -> None:
    programs.holding("--memory", "8GiB", "--share")
    assert programs.call("run", "--no-wait", "--memory", "8GiB", "--share", "--", "true").returncode == 0
    assert programs.call("run", "--no-wait", "--memory", "20GiB", "--share", "--", "true").returncode == 75
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75


def test_inside_a_lease_it_does_not_wait_for_itself(programs: Programs) -> None:
    inner = (
        f"{sys.executable} -m gpu_worker_pool run --no-wait -- sh -c 'echo $GPU_POOL_LEASE_ID $CUDA_VISIBLE_DEVICES'"
    )
    done = programs.call("run", "--", "sh", "-c", f"echo $GPU_POOL_LEASE_ID; {inner}; {inner}")
    assert done.returncode == 0, done.stderr
    around, *inside = done.stdout.splitlines()
    fence = int(around.removeprefix("lease-"))
    assert inside == [f"lease-{fence + 1} 0", f"lease-{fence + 2} 0"]
    assert programs.leases() == []
    more = programs.call("run", "--", "gpu-pool", "run", "-n", "2", "--", "true")
    assert more.returncode == 65
    assert ", inside which this runs, has one GPU; 2 were requested" in more.stderr


def test_inside_a_lease_nobody_gets_more_than_was_asked_for_nor_what_it_has_not(programs: Programs) -> None:
    programs.environment["GPU_BACKEND"] = "simulated:3"
    show = "-- sh -c 'echo $CUDA_VISIBLE_DEVICES'"
    script = (
        f"echo $CUDA_VISIBLE_DEVICES; gpu-pool run {show}; gpu-pool run -n 2 {show}; gpu-pool run --exclude 1 {show}; "
        "gpu-pool run --model H100 -- true; echo $?; gpu-pool run --only 0 -- true; echo $?"
    )
    done = programs.call("run", "-n", "2", "--only", "1,2", "--", "sh", "-c", script)
    both, one, again, other, model, only = done.stdout.splitlines()
    assert one == both.split(",")[0]
    assert again == both
    assert other == "2"
    assert (model, only) == ("65", "65")
    assert "could ever serve it (GPU 1, 2: Simulated GPU 24GB, not H100)" in done.stderr
    assert "could ever serve it (GPU 1, 2: not among 0)" in done.stderr


def test_visible_devices_are_a_wish(programs: Programs) -> None:
    programs.environment["GPU_BACKEND"] = "simulated:3"
    done = programs.call("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="2")
    assert done.stdout == "2\n"
    assert done.stderr == ""
    some = programs.call("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="1,9")
    assert some.stdout == "1\n"
    assert some.stderr == "gpu-pool: CUDA_VISIBLE_DEVICES lists GPUs that this host does not have (9): ignoring them\n"
    nothing = programs.call("run", "--", "true", CUDA_VISIBLE_DEVICES="NoDevFiles")
    assert nothing.returncode == 0
    assert nothing.stderr == (
        "gpu-pool: CUDA_VISIBLE_DEVICES lists GPUs that this host does not have (NoDevFiles): using all GPUs\n"
    )
    hidden = programs.call("run", "--", "true", CUDA_VISIBLE_DEVICES="-1")
    assert hidden.returncode == 65
    assert "CUDA_VISIBLE_DEVICES='-1' hides every GPU: unset it" in hidden.stderr


def test_several_gpus_and_which(programs: Programs) -> None:
    programs.environment["GPU_BACKEND"] = "simulated:4"
    show = ["--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert sorted(programs.call("run", "-n", "2", "--only", "1,2,3", "--exclude", "2", *show).stdout.strip()) == [
        ",",
        "1",
        "3",
    ]
    assert len(programs.call("run", "--gpus", "4", *show).stdout.split(",")) == 4


def test_what_a_command_leaves_behind_is_said(programs: Programs, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    done = programs.call("run", "--", "sh", "-c", f"sleep 20 > /dev/null 2>&1 & echo $! > {pid_file}")
    assert done.returncode == 0
    left = int(pid_file.read_text())
    assert f"the command left processes running ({left})" in done.stderr
    assert is_there(left)
    # With simulated GPUs nobody is seen to be on it any more.
    assert eventually(lambda: programs.call("run", "--no-wait", "--", "true").returncode == 0)
    os.kill(left, signal.SIGKILL)


def test_the_keeper_is_another_process_with_nothing_of_ours_open(programs: Programs) -> None:
    process = programs.holding()
    keeper, command = children_of(process.pid)
    assert Path(f"/proc/{keeper}/fd/1").readlink() == Path("/dev/null")
    assert Path(f"/proc/{keeper}/fd/0").readlink() == Path("/dev/null")
    assert "sleep" in Path(f"/proc/{command}/cmdline").read_text()
    process.terminate()
    assert process.wait(10) == 143
    assert not is_there(keeper)
    assert not is_there(command)


def test_a_gpu_of_another_host_is_refused_before_anything_is_asked(programs: Programs) -> None:
    """By its address alone: nothing is sent to it, and a server here is not asked either."""
    there = "http://198.51.100.7:8000"
    for words in (["run", "-e", there, "--", "true"], ["run", "-e", f"here=http://127.0.0.1:9,there={there}", "true"]):
        done = programs.call(*words)
        assert done.returncode == 2
        assert done.stderr == (
            f"gpu-pool: {there} is another host, and a command runs where its GPU is: add --ssh to start it there, "
            "or --here if those GPUs are this host's, as behind a tunnel\n"
        )
    done = programs.call("wait", GPU_SERVICE_ENDPOINT=there)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--here" in done.stderr
    assert programs.call("run", "--ssh=gpu-1", "--", "true").returncode == 2
    shown = programs.call("run", "--", "sh", "-c", "echo $GPU_POOL_HOST $GPU_POOL_LEASE_ENDPOINT")
    assert shown.stdout.split() == [os.uname().nodename, "local://"]
