"""The pytest plugin, by real runs of pytest over example projects, with xdist and without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.programs import GPU_POOL, Programs, is_there
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
#: By the names of their entry points, and without what else is installed here, which takes long to load.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_pool", "-p", "xdist", "-p", "no:cacheprovider"]
STAMPS = """
import os, time
import pytest
AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")
@pytest.mark.parametrize("number", range(int(os.environ["TESTS"])))
def test_it(gpu, number):
    begun = time.monotonic_ns()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(gpu.gpu_id)
    assert AT_IMPORT is not None
    time.sleep(0.01)
    with open("stamps", "a") as file:
        file.write(f"{gpu.gpu_id} {os.getpid()} {begun} {time.monotonic_ns()}\\n")
"""


class Project(Programs):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TESTS="12", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
        self.write("pytest.ini", "[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def pytest(self, *arguments: str, gpus: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
        backend = {"GPU_BACKEND": f"simulated:{gpus}"}
        return self.run([*PYTEST, *arguments], timeout=100, **(backend | variables))

    def overlapping(self) -> int:
        rows = [line.split() for line in (self.folder / "stamps").read_text().splitlines()]
        found = 0
        for gpu in {row[0] for row in rows}:
            times = sorted((int(row[2]), int(row[3])) for row in rows if row[0] == gpu)
            found += sum(later[0] < earlier[1] for earlier, later in pairwise(times))
        return found


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with Project(tmp_path) as made:
        yield made


def test_a_suite_that_does_not_ask_notices_nothing(project: Project) -> None:
    del project.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    project.write(
        "test_plain.py",
        """
        import os, sys
        def gpu_pool(*words): ...  # a helper of the suite that has the marker's name
        def test_plain():
            gpu_pool("status")
            ours = {name for name in sys.modules if name.startswith("gpu_worker_pool.")}
            assert {name.split(".")[1] for name in ours} <= {"_version", "pytest_plugin", "for_pytest"}
            assert "gpu_worker_pool.for_pytest.gpus" not in ours
            assert "aiohttp" not in sys.modules
            assert "CUDA_VISIBLE_DEVICES" not in os.environ
        """,
    )
    done = project.run([sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:schemathesis"], timeout=55)
    assert done.returncode == 0, done.stdout
    assert "gpu-pool" not in done.stdout


def test_a_fixture_of_the_suite_with_the_same_name_wins(project: Project) -> None:
    project.write("conftest.py", "import pytest\n@pytest.fixture\ndef gpu():\n    return 'mine'\n")
    project.write(
        "test_own.py",
        "import os\ndef test_own(gpu):\n    assert gpu == 'mine' and 'CUDA_VISIBLE_DEVICES' not in os.environ\n",
    )
    project.write(
        "test_given.py", "import pytest\n@pytest.mark.parametrize('gpu', [1])\ndef test_it(gpu): assert gpu == 1\n"
    )
    assert project.pytest().returncode == 0


@pytest.mark.parametrize("page", ["README.md", "docs/WORKERS.md"])
def test_the_tests_that_a_page_shows_are_run(project: Project, page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "(gpu)" in block]
    project.write("test_page.py", block)
    done = project.pytest("-n", "2", gpus=2, PYTHONPATH=str(ROOT / "tests" / "fakes" / "modules"))
    assert f"{block.count('def test_')} passed" in done.stdout, done.stdout


def test_the_variable_is_set_before_modules_are_imported_and_restored(project: Project) -> None:
    project.write("test_many.py", STAMPS)
    project.write(
        "conftest.py",
        "import os\ndef pytest_unconfigure(config):\n    config.add_cleanup(lambda: print('left', sorted(n for n in "
        "os.environ if n.startswith(('CUDA_', 'NVIDIA_', 'GPU_POOL_LEASE')))))\n",
    )
    done = project.pytest("-s")
    assert done.returncode == 0, done.stdout
    assert "12 tests on GPU 0, waited " in done.stdout
    assert project.leases() == []


def test_two_runs_with_more_workers_than_gpus(project: Project) -> None:
    project.write("test_many.py", STAMPS)
    command = [*PYTEST, "-n", "3"]
    environment = project.environment | {"GPU_BACKEND": "simulated:2"}
    runs = [
        subprocess.Popen(command, cwd=project.folder, env=environment, stdout=subprocess.PIPE, text=True) for _ in "12"
    ]
    said = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    assert len((project.folder / "stamps").read_text().splitlines()) == 24
    assert project.overlapping() == 0
    assert project.leases() == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hundred_tests_of_each_of_two_runs_with_four_workers(project: Project) -> None:
    project.environment["TESTS"] = "200"
    project.write("test_many.py", STAMPS)
    command, environment = [*PYTEST, "-n", "4"], project.environment | {"GPU_BACKEND": "simulated:2"}
    runs = [subprocess.Popen(command, cwd=project.folder, env=environment) for _ in "12"]
    assert [run.wait(600) for run in runs] == [0, 0]
    assert len((project.folder / "stamps").read_text().splitlines()) == 400
    assert project.overlapping() == 0


def test_the_marker_and_a_fixture_asked_for_twice(project: Project) -> None:
    project.write(
        "test_marked.py",
        """
        import os, pytest
        @pytest.fixture
        def model(gpu):
            return gpu
        def test_twice(gpu, model, request):
            assert gpu is model is request.getfixturevalue("gpu")
        @pytest.mark.gpu_pool(count=2, memory="8GiB")
        def test_two(gpu):
            assert sorted(gpu.gpu_ids) == [0, 1] and len(os.environ["CUDA_VISIBLE_DEVICES"]) == 3
        @pytest.mark.gpu_pool(memory="8GiB", share=True, only=[1])
        def test_shared(gpu):
            assert gpu.gpu_id == 1
            assert gpu.memory_mb == int(os.environ["GPU_POOL_MEMORY_MB"]) == 8192
            assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3333"
        @pytest.mark.gpu_pool(memory="4GiB", share=True, only=[1])
        def test_smaller(gpu):
            assert gpu.memory_mb == int(os.environ["GPU_POOL_MEMORY_MB"]) == 4096
            assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.1666"
        def test_whole(gpu):
            assert gpu.memory_mb is None
            assert not {"GPU_POOL_MEMORY_MB", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ)
        @pytest.mark.gpu_pool(gpus=2)
        def test_wrong(gpu): ...
        @pytest.mark.gpu_pool(memory="8 elephants")
        def test_size(gpu): ...
        @pytest.mark.gpu_pool(count=0)
        def test_none(gpu): ...
        """,
    )
    done = project.pytest(gpus=2)
    assert "5 passed, 3 errors" in done.stdout, done.stdout
    assert "@pytest.mark.gpu_pool has no argument 'gpus'; it has count, memory" in done.stdout
    assert "'8 elephants' is not a memory size; write 8GiB" in done.stdout
    assert "count must be a whole number of at least 1, not 0" in done.stdout


def test_where_there_is_none(project: Project) -> None:
    project.write(
        "test_gpu.py",
        """
        import pytest
        def test_any(gpu): ...
        @pytest.mark.gpu_pool(memory="99TiB", share=True)
        def test_too_large(gpu): ...
        def test_plain(): ...
        """,
    )
    done = project.pytest("-rs", gpus=0)
    assert "1 passed, 2 skipped" in done.stdout, done.stdout
    assert "no GPU for this test: this host has no GPU" in done.stdout
    failing = project.pytest("--gpu-pool-missing=fail")
    assert "2 passed, 1 error" in failing.stdout, failing.stdout
    assert "no GPU for this test: " in failing.stdout
    holder = project.holding()
    late = project.pytest("-rs", "-k", "any", "--gpu-pool-timeout=0.3s")
    assert "1 skipped, 2 deselected" in late.stdout, late.stdout
    assert "no GPU became free in 0." in late.stdout
    holder.kill()
    for workers in ((), ("-n", "2")):
        wrong = project.pytest("--gpu-pool-timeout=soon", *workers)
        assert wrong.returncode == 4, wrong.stdout
        assert "ERROR: --gpu-pool-timeout: 'soon' is not a duration" in wrong.stderr
        assert "INTERNALERROR" not in wrong.stdout + wrong.stderr


def test_the_report_names_each_wait(project: Project) -> None:
    project.write(
        "test_gpu.py",
        f"""
        import json, os, pathlib, subprocess, time
        from gpu_worker_pool.for_pytest.gpus import QUEUE_LOOK_SECONDS
        inside = ("CUDA_VISIBLE_DEVICES", "GPU_POOL_LEASE_ID")
        others = []
        def test_first(gpu):
            # Another program waits in the queue until this test is over, and then has the GPU for a while.
            outside = {{name: value for name, value in os.environ.items() if name not in inside}}
            command = {[*GPU_POOL, "run", "--", "sh", "-c", "touch had-it; sleep 0.6"]!r}
            others.append(subprocess.Popen(command, env=outside))
            while not json.loads(subprocess.check_output({[*GPU_POOL, "queue", "--json"]!r}))["queue"]:
                pass
            time.sleep(QUEUE_LOOK_SECONDS)  # who looked a moment ago does not look again
        def test_second(gpu): ...
        def test_third(gpu):
            assert pathlib.Path("had-it").exists()
            others[0].wait()
        """,
    )
    done = project.pytest("--junitxml=report.xml")
    assert done.returncode == 0, done.stdout
    assert "gpu-pool: waits for GPUs" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "test_gpu.py::test_second" in line]
    assert len(lines) == 1
    assert float(lines[0].split()[0]) >= 0.5
    report = ET.parse(project.folder / "report.xml")  # noqa: S314  # our own
    waits = {
        case.get("name"): float(each.get("value") or 0)
        for case in report.iter("testcase")
        for each in case.iter("property")
        if each.get("name") == "gpu_pool_wait_seconds"
    }
    assert set(waits) == {"test_first", "test_second", "test_third"}
    assert waits["test_second"] >= 0.5


def test_without_a_test_that_needs_one_nothing_is_read_and_nothing_kept_open(project: Project) -> None:
    project.write(
        "test_long.py",
        """
        import os, threading, time
        def names():
            return {thread.name for thread in threading.enumerate()}
        def test_gpu(gpu):
            assert {"gpu-ledger", "gpu-sampler"} <= names()
        def test_long_and_without():
            while {"gpu-ledger", "gpu-sampler"} & names():
                time.sleep(0.02)
        def test_again(gpu):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        """,
    )
    project.write(
        "conftest.py",
        "import threading\ndef pytest_unconfigure(config):\n    config.add_cleanup(lambda: print('left', "
        "sorted(t.name for t in threading.enumerate())))\n",
    )
    done = project.pytest("-s", "-p", "no:xdist")
    assert "3 passed" in done.stdout, done.stdout
    assert "left ['MainThread']" in done.stdout


def test_a_process_that_has_loaded_cuda_stays_with_its_gpu(project: Project) -> None:
    project.write(
        "test_cuda.py",
        """
        import mmap, pathlib, subprocess, sys, pytest
        loaded = []
        def test_loads_cuda(gpu):
            path = pathlib.Path("libcuda.so.1")
            path.write_bytes(b"x" * 4096)
            with path.open("r+b") as file:
                loaded.append((gpu.gpu_id, mmap.mmap(file.fileno(), 4096)))
        @pytest.mark.parametrize("number", range(2))
        @pytest.mark.gpu_pool(priority=1)
        def test_same(gpu, number):
            assert gpu.gpu_id == loaded[0][0]
        @pytest.mark.gpu_pool(exclude=[0])
        def test_cannot_have_another_one(gpu): ...
        @pytest.mark.gpu_pool(count=2)
        def test_cannot_have_two(gpu): ...
        """,
    )
    done = project.pytest("-rs", "--gpu-pool-scope=test", gpus=3)
    assert "3 passed, 2 skipped" in done.stdout, done.stdout
    assert "CUDA was loaded in this process when only GPU 0 was visible" in done.stdout


def test_a_gpu_that_is_lost_in_the_middle(project: Project) -> None:
    project.write(
        "test_lost.py",
        f"""
        import subprocess, time
        def test_loses_it(gpu):
            subprocess.run({[*GPU_POOL, "release", "--force"]!r}[:-1] + [gpu.lease_id], check=True)
            while not gpu.lost:
                time.sleep(0.02)
        def test_next(gpu): ...
        """,
    )
    done = project.pytest(GPU_POOL_LEASE_TTL="2")
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "the GPU of this test was lost while it ran" in done.stdout


def test_inside_a_lease_its_workers_divide_it(project: Project) -> None:
    project.write("test_many.py", STAMPS)
    done = project.call("run", "-n", "2", "--", *PYTEST, "-n", "2", GPU_BACKEND="simulated:4", timeout=100)
    assert done.returncode == 0, done.stdout
    assert project.overlapping() == 0
    assert {line.split()[0] for line in (project.folder / "stamps").read_text().splitlines()} <= {"0", "1"}


def test_a_killed_run_holds_nothing(project: Project) -> None:
    project.write(
        "test_long.py",
        """
        import os, pathlib, time
        def test_long(gpu):
            pathlib.Path("pid").write_text(str(os.getpid()))
            time.sleep(60)
        """,
    )
    run = subprocess.Popen(PYTEST, cwd=project.folder, env=project.environment, stdout=subprocess.DEVNULL)
    pid = int(eventually((project.folder / "pid").read_text))
    os.kill(pid, signal.SIGKILL)
    run.wait(10)
    eventually(lambda: not is_there(pid))
    assert project.call("run", "--timeout", "20s", "--", "true").returncode == 0
