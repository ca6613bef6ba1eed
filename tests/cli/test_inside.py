"""`gpu-pool run` and `wait` inside a lease, in real shells: they divide it and wait for each other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import Programs, Started, children_of, is_there
from tests.server_process import ServerProcess
from tests.waiting import eventually

#: Each starts up to a dozen programs, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)

#: Says which GPUs it has, and stays until the file named by its first argument is there.
PART = """\
echo "$CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID $GPU_POOL_OUTER_LEASES" > "$1.part"
until [ -e "$1.end" ]; do sleep 0.05; done
"""


@pytest.fixture(params=["local", "server"])
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Programs]:
    """With four GPUs: without a server, and at one."""
    (tmp_path / "part").write_text(PART)
    if request.param == "local":
        with Programs(tmp_path, GPU_BACKEND="simulated:4") as started:
            yield started
        return
    with (
        ServerProcess(tmp_path / "server", GPU_BACKEND="simulated:4", ACCESS_LOG="false") as server,
        Programs(tmp_path, GPU_SERVICE_ENDPOINT=server.url) as started,
    ):
        yield started


def parts(programs: Programs, *names: str) -> list[str]:
    """The GPUs of each of these parts that has begun."""
    files = (programs.folder / f"{name}.part" for name in names)
    return [file.read_text().split()[0] for file in files if file.exists() and file.read_text().endswith("\n")]


def end(programs: Programs, *names: str) -> None:
    for name in names:
        (programs.folder / f"{name}.end").touch()


def lease_of(programs: Programs, name: str) -> dict[str, Any]:
    lease_id = (programs.folder / f"{name}.part").read_text().split()[1]
    return next(row for row in programs.leases() if row["lease_id"] == lease_id)


def pid_of(row: dict[str, Any]) -> int:
    """Of the `gpu-pool run` that holds it."""
    return int(row["worker_id"].rpartition(":")[2])


def start_parts(programs: Programs, *options: str, inner: str = "", names: str) -> Started:
    """A run with these options, and inside it a run for each name, all at once."""
    script = f"for name in {names}; do gpu-pool run {inner} -- sh part $name & done; wait"
    return programs.start("run", *options, "--", "sh", "-c", script)


def test_they_divide_the_lease_and_wait_for_each_other(programs: Programs) -> None:
    outer = start_parts(programs, "-n", "2", names="a b c")
    eventually(lambda: len(parts(programs, "a", "b", "c")) == 2 and len(programs.waiting()) == 1)
    begun = [name for name in "abc" if parts(programs, name)]
    assert sorted(parts(programs, *begun)) == ["0", "1"]
    (last,) = {"a", "b", "c"} - set(begun)

    whole, *inner = sorted(programs.leases(), key=lambda row: row["fence"])
    assert whole["within"] is None
    assert [row["within"] for row in inner] == [whole["lease_id"]] * 2
    (waits,) = programs.waiting()
    assert (waits["within"], waits["position"]) == (whole["lease_id"], 1)
    assert f"inside {whole['lease_id']}: next in line; of 2 GPUs: 2 held" in waits["reasons"][0]
    assert [reason.split(":")[0] for reason in waits["reasons"][1:]] == ["GPU 0", "GPU 1"]
    assert programs.json("explain", "--request", waits["request_id"])
    assert f"inside {whole['lease_id']}" in programs.call("leases").stdout
    assert "2 free" in programs.call("status").stdout
    # Whoever is outside does not wait for them, nor they for those.
    assert programs.call("run", "--no-wait", "-n", "2", "--", "true").returncode == 0

    end(programs, begun[0])
    assert eventually(lambda: parts(programs, last)) == parts(programs, begun[0])
    end(programs, *begun, last)
    assert outer.wait(20) == 0, outer.err
    assert programs.leases() == []


def test_a_run_inside_an_inner_run_gets_the_inner_part(programs: Programs) -> None:
    show = "sh -c 'echo $CUDA_VISIBLE_DEVICES $GPU_POOL_OUTER_LEASES'"
    script = f"{show}; gpu-pool run --no-wait --exclude 0 -- {show}; gpu-pool run --no-wait -n 3 -- true; echo $?"
    done = programs.call("run", "-n", "3", "--", "gpu-pool", "run", "-n", "2", "--", "sh", "-c", script)
    inner, innermost, more = done.stdout.splitlines()
    assert inner.split()[0] == "0,1"
    assert innermost.split()[0] == "1"
    assert innermost.split()[1].startswith(f"{inner.split()[1]},")
    assert more == "65"
    assert "inside which this runs, has 2 GPUs; 3 were requested" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("-n 3", "inside which this runs, has 2 GPUs; 3 were requested"),
        ("--only 3", "none of them could ever serve it (GPU 0, 1: not among 3)"),
        ("--model H100", "none of them could ever serve it (GPU 0, 1: Simulated GPU 24GB, not H100)"),
    ],
)
def test_more_than_the_lease_has_is_refused_at_once(programs: Programs, options: str, why: str) -> None:
    done = programs.call("run", "-n", "2", "--", "gpu-pool", "run", *options.split(), "--", "true")
    assert done.returncode == 65
    assert why in done.stderr
    assert programs.leases() == []


def test_those_that_share_use_one_gpu_together(programs: Programs) -> None:
    outer = start_parts(programs, "--only", "2", inner="--share --memory 8GiB", names="a b c d")
    eventually(lambda: len(parts(programs, *"abcd")) == 3 and len(programs.waiting()) == 1)
    assert parts(programs, *"abcd") == ["2"] * 3
    end(programs, *"abcd")
    assert outer.wait(20) == 0, outer.err
    assert parts(programs, *"abcd") == ["2"] * 4


def test_a_killed_inner_run_gives_its_part_back_at_once(programs: Programs) -> None:
    outer = start_parts(programs, names="a b")
    eventually(lambda: parts(programs, "a", "b") == ["0"] and programs.waiting())
    first, second = ("a", "b") if parts(programs, "a") else ("b", "a")
    os.kill(pid_of(lease_of(programs, first)), signal.SIGKILL)
    eventually(lambda: parts(programs, second))
    assert outer.poll() is None
    end(programs, second)
    assert outer.wait(20) == 0


def test_an_inner_run_that_leaves_something_behind_keeps_its_part_until_that_has_ended(programs: Programs) -> None:
    script = (
        "gpu-pool run -- sh -c 'sh part a & echo $GPU_POOL_LEASE_ID > begun'; gpu-pool run --no-wait -- true; "
        "echo $? > status; gpu-pool run -- sh part b"
    )
    outer = programs.start("run", "--", "sh", "-c", script)
    status = programs.folder / "status"
    eventually(lambda: status.exists() and status.read_text() == "75\n", 30)
    eventually(programs.waiting)
    assert not parts(programs, "b")
    end(programs, "a")
    eventually(lambda: parts(programs, "b"))
    end(programs, "b")
    assert outer.wait(20) == 0, outer.err


def test_a_killed_outer_run_does_not_free_the_gpu_of_an_inner_one(programs: Programs) -> None:
    outer = start_parts(programs, "--ttl", "2s", names="a")
    eventually(lambda: parts(programs, "a"))
    inner = pid_of(lease_of(programs, "a"))
    outer.kill()
    assert outer.wait(10) == -signal.SIGKILL
    eventually(lambda: "quarantined" in {row["state"] for row in programs.leases()}, 30)
    assert is_there(inner)
    assert lease_of(programs, "a")["state"] == "held"
    assert programs.call("run", "--no-wait", "--only", "0", "--", "true").returncode == 75
    end(programs, "a")
    eventually(lambda: not programs.leases(), 30)
    assert programs.call("run", "--no-wait", "--only", "0", "--", "true").returncode == 0


def test_an_outer_run_killed_with_all_that_renews_it(programs: Programs) -> None:
    """Without a server it is seen at once that its process is gone."""
    outer = start_parts(programs, "--ttl", "2s", names="a")
    eventually(lambda: parts(programs, "a"))
    for pid in (*children_of(outer.pid), outer.pid):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: "quarantined" in {row["state"] for row in programs.leases()}, 30)
    assert lease_of(programs, "a")["state"] == "held"
    assert programs.call("run", "--no-wait", "--only", "0", "--", "true").returncode == 75
    end(programs, "a")
    eventually(lambda: not programs.leases(), 30)


def test_an_inner_run_whose_outer_one_ends_goes_on(programs: Programs) -> None:
    outer = programs.start("run", "--ttl", "2s", "--", "sh", "-c", "setsid gpu-pool run -- sh part a &")
    assert outer.wait(20) == 0
    eventually(lambda: parts(programs, "a"))
    assert "left processes running" in outer.err
    assert programs.call("run", "--no-wait", "--only", "0", "--", "true").returncode == 75
    end(programs, "a")
    eventually(lambda: not programs.leases(), 30)


def test_what_is_started_outside_again_is_outside(programs: Programs) -> None:
    """As TROUBLESHOOTING.md says how to."""
    show = "sh -c 'echo $CUDA_VISIBLE_DEVICES/$GPU_POOL_OUTER_LEASES'"
    script = f"gpu-pool run -- env -u GPU_POOL_LEASE_ID -u CUDA_VISIBLE_DEVICES gpu-pool run --no-wait -- {show}"
    done = programs.call("run", "-n", "2", "--", "sh", "-c", script)
    assert done.stdout == "2/\n", done.stderr


def test_a_python_program_has_the_whole_part_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from gpu_worker_pool.sync import GPUWorkerPoolClient\n"
        "with GPUWorkerPoolClient('local://') as client:\n"
        "    print(client.request_gpu(timeout=5, count=2).gpu_ids, client.get_pool_status().total_gpus)\n"
    )
    script = f"for i in 1 2; do {sys.executable} program.py & done; wait"
    with Programs(tmp_path, GPU_BACKEND="simulated:4") as programs:
        done = programs.call("run", "-n", "3", "--", "gpu-pool", "run", "-n", "2", "--", "sh", "-c", script)
    assert done.stdout.splitlines() == ["(0, 1) 2"] * 2, done.stderr


def test_wait_inside_a_lease(programs: Programs) -> None:
    script = (
        'eval "$(gpu-pool wait --export)"; echo $CUDA_VISIBLE_DEVICES; '
        'eval "$(gpu-pool wait --export)"; echo $CUDA_VISIBLE_DEVICES; gpu-pool run --no-wait -n 2 -- true; echo $?'
    )
    done = programs.call("run", "-n", "2", "--", "bash", "-c", script)
    assert done.stdout.split() == ["0", "0", "65"], done.stderr
    # It has released all of them when its shell had ended.
    assert "left processes running" not in done.stderr
    assert programs.leases() == []
