"""`gpu-pool` beside programs that use GPUs without a lease: such GPUs are left alone, and who uses them is said."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import Programs, processes_in
from tests.fakes.nvml import FakeNVML, fake_gpus
from tests.server_process import ServerProcess
from tests.waiting import eventually

NOTEBOOK = r"notebook \(pid 50000, outsider\)"
SHOW = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Two simulated GPUs: a notebook sits idle on the first, with 15 of 24 GiB loaded."""
    with Programs(tmp_path, GPU_BACKEND="simulated:2", GPU_SIMULATED_OUTSIDERS="0:15GiB") as started:
        yield started


def test_a_gpu_with_an_idle_notebook_is_left_alone(programs: Programs) -> None:
    """It is below the documented thresholds: 62 % of its memory are used, and it computes nothing."""
    assert programs.call("run", *SHOW).stdout == "1\n"
    shell = programs.run(["sh", "-c", "gpu-pool wait"])
    assert shell.stdout == "1\n"
    programs.holding()
    both = rf"(1 held, 1 in use by {NOTEBOOK}|1 in use by {NOTEBOOK}, 1 held)"
    told = f"one idle GPU: next in line; of 2 GPUs: {both}\n"
    done = programs.call("run", "--no-wait", *SHOW)
    assert (done.returncode, done.stdout) == (75, "")
    assert re.fullmatch(f"gpu-pool: nothing is free now: {told}", done.stderr), done.stderr
    waiting = programs.start("run", *SHOW)
    eventually(lambda: re.search(rf"waiting \d+ s: {told}", waiting.err))
    assert waiting.poll() is None


@pytest.mark.parametrize(
    "option", ["--policy thresholds", "--max-memory-usage 80", "--max-gpu-utilization 50", "--memory 4GiB --share"]
)
def test_other_options_take_it(programs: Programs, option: str) -> None:
    assert programs.call("run", *option.split(), "--only", "0", *SHOW).stdout == "0\n"


def test_shares_of_idle_gpus_leave_it_alone_too(programs: Programs) -> None:
    done = programs.call("run", "--no-wait", "--idle", "--memory", "4GiB", "--share", "--only", "0", *SHOW)
    assert done.returncode == 75
    assert re.search(NOTEBOOK, done.stderr)


def test_explain_names_the_outsider(programs: Programs) -> None:
    shown = programs.call("explain").stdout
    assert re.search(rf"^0 +Simulated GPU 24GB +in use by {NOTEBOOK} with 15\.0 GiB for \d.*$", shown, re.MULTILINE), (
        shown
    )
    by_thresholds = programs.call("explain", "--policy", "thresholds").stdout
    assert "notebook" not in by_thresholds
    (first, _) = programs.json("explain")["gpus"]
    assert [obstacle["kind"] for obstacle in first["obstacles"]] == ["foreign_process"]


def test_status_shows_who_it_is_and_since_when(programs: Programs) -> None:
    shown = programs.call("status").stdout
    assert "local: 2 x Simulated GPU 24GB, 1 free, 0 waiting" in shown
    assert re.search(rf"^0 +15/24 GiB +0 % +in use +{NOTEBOOK} +\d.* +no lease +15\.0 GiB$", shown, re.MULTILINE), shown
    first, second = programs.json("status")["endpoints"][0]["gpus"]
    (process,) = first["processes"]
    assert {**process, "running_seconds": None} == {
        "pid": 50_000,
        "name": "notebook",
        "user": "outsider",
        "memory_used_mb": 15_360.0,
        "running_seconds": None,
    }
    assert process["running_seconds"] > 0
    assert first["obstacles"] == [], "a request by thresholds could have it"
    assert [re.sub(r" for .*", "", text) for text in first["idle_obstacles"]] == [
        "in use by notebook (pid 50000, outsider) with 15.0 GiB"
    ]
    assert (second["processes"], second["graphics_processes"], second["idle_obstacles"]) == ([], [], [])
    assert (first["unified_memory"], second["unified_memory"]) == (False, False)


def test_outsiders_that_cannot_be_simulated(programs: Programs) -> None:
    done = programs.call("status", GPU_SIMULATED_OUTSIDERS="2:1GiB")
    assert done.returncode != 0
    assert "GPU_SIMULATED_OUTSIDERS must be GPU:SIZE, such as 0:15GiB,2:4GiB" in done.stderr
    assert "Traceback" not in done.stderr
    shown = programs.call("config").stdout
    assert re.search(r"^GPU_SIMULATED_OUTSIDERS +0:15GiB +environment +server and local://", shown, re.MULTILINE), shown


def test_a_server_gives_what_is_asked_for(tmp_path: Path) -> None:
    """The same server: `gpu-pool` asks for idle GPUs, a plain HTTP request goes by the documented thresholds."""
    environment = {"GPU_BACKEND": "simulated:1", "GPU_SIMULATED_OUTSIDERS": "0:15GiB", "ACCESS_LOG": "false"}
    with ServerProcess(tmp_path / "server", **environment) as server:
        (tmp_path / "programs").mkdir()
        with Programs(tmp_path / "programs", GPU_SERVICE_ENDPOINT=server.url) as programs:
            assert programs.call("run", "--no-wait", *SHOW).returncode == 75
            assert re.search(rf"in use +{NOTEBOOK}", programs.call("status").stdout)
            assert programs.call("run", "--policy", "thresholds", *SHOW).stdout == "0\n"
        eventually(lambda: server.get("/leases").json["leases"] == [])
        assert server.ask("POST", "/leases", {"request_id": "idle", "policy": "idle"}).status == 202
        assert server.ask("DELETE", "/queue/idle").status == 200
        eventually(lambda: server.ask("POST", "/leases", {"request_id": "plain"}).status == 201)


# --- a GPU without memory of its own, as in a GB10 ---


@pytest.fixture
def gb10(tmp_path: Path) -> FakeNVML:
    (gpu,) = fake_gpus(1)
    gpu.name, gpu.memory_total_mb = "NVIDIA GB10", None
    return FakeNVML(tmp_path / "nvml", gpus=[gpu])


@pytest.fixture
def unified(gb10: FakeNVML, tmp_path: Path) -> Iterator[Programs]:
    with Programs(tmp_path, GPU_BACKEND="nvml", **gb10.env) as started:
        yield started


def test_the_host_s_memory_stands_in_for_a_gpu_that_has_none(unified: Programs) -> None:
    assert unified.call("run", *SHOW).stdout == "0\n"
    assert unified.call("run", "--policy", "thresholds", "--max-memory-usage", "100", *SHOW).stdout == "0\n"
    shown = unified.call("status").stdout
    total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = re.search(r"^0 +[\d.]+/([\d.]+) GiB host memory +0 % +free", shown, re.MULTILINE)
    assert found, shown
    assert float(found[1]) == pytest.approx(total_gib, abs=0.2)
    (gpu,) = unified.json("status")["endpoints"][0]["gpus"]
    assert gpu["unified_memory"] is True
    assert gpu["memory"]["total_mb"] == pytest.approx(total_gib * 1024, abs=2)


def test_there_only_processes_say_whether_it_is_idle(gb10: FakeNVML, unified: Programs) -> None:
    gb10.gpus[0].processes = [(os.getpid(), None)]
    gb10.write()
    done = unified.call("run", "--no-wait", *SHOW)
    assert done.returncode == 75
    assert f"(pid {os.getpid()}" in done.stderr
    gb10.gpus[0].processes = []
    gb10.gpus[0].graphics = [(os.getpid(), None)]
    gb10.write()
    assert unified.call("run", *SHOW).stdout == "0\n"


def test_a_quarantine_there_ends_with_the_processes(gb10: FakeNVML, unified: Programs) -> None:
    """Whatever the memory of the host does meanwhile."""
    unified.holding()
    gb10.gpus[0].processes = [(os.getpid(), None)]  # as if the holder had started it
    gb10.write()
    # Stopped first: a lease process that sees `gpu-pool` die would still give the GPU back.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes_in(unified.folder):
            os.kill(pid, number)
    waiting = unified.start("run", *SHOW)  # sees that the holder is gone
    # For longer than it takes to read the GPU again.
    eventually(lambda: [(row["quarantine"] or {"seconds": 0})["seconds"] > 3 for row in unified.leases()] == [True])
    gb10.gpus[0].processes = []
    gb10.write()
    assert waiting.wait(20) == 0, waiting.err
    assert waiting.out == "0\n"


def test_where_nothing_shows_whether_it_is_idle_the_request_is_refused(gb10: FakeNVML, unified: Programs) -> None:
    """Never a wait without an end; and what the message says works."""
    gb10.gpus[0].errors = {"processes": 3}
    gb10.write()
    done = unified.call("run", *SHOW)
    assert done.returncode == 65
    assert "policy thresholds goes by its utilization" in done.stderr
    assert unified.call("run", "--policy", "thresholds", "--max-memory-usage", "100", *SHOW).stdout == "0\n"
