"""Worker processes, tests and the jobs of `map` over a fleet: one queue for all hosts, and GPUs of this host alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import BrokenGPUWorkerError, GPUProcessPoolExecutor, GPUWorkerPoolClient, ImpossibleRequestError
from tests.fleet.servers import Fleet, fleet_of
from tests.postgres_server import PostgresServer
from tests.waiting import eventually
from tests.workers import tasks

#: Several servers and programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)

#: An address of documentation: a host of the fleet that is not this one.
ANOTHER_HOST = "http://192.0.2.7:8000"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fleet(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    database = shared_postgres.create_database("fleet_of_workers")
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GPU_", "CUDA_")):
                patch.delenv(name)
        patch.setenv("GPU_POOL_STATE_DIR", str(folder / "of-programs"))
        with fleet_of(folder, database, gpus=2) as found:
            yield found


@pytest.fixture
def here(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of `gpu-3`, which is this host in these tests, as programs are configured for it."""
    monkeypatch.setenv("GPU_POOL_ENDPOINT", f"{ANOTHER_HOST},{fleet['gpu-3'].url}")
    yield fleet["gpu-3"].url
    eventually(lambda: rows(fleet) == [])


def rows(fleet: Fleet) -> list[dict[str, Any]]:
    """The leases of the whole fleet, as another host shows them."""
    found: list[dict[str, Any]] = fleet["gpu-1"].get("/leases").json["leases"]
    return found


def fill(fleet: Fleet, host: str) -> list[dict[str, Any]]:
    replies = [fleet.request("gpu-1", f"of-{host}-{os.urandom(4).hex()}", only=[host], wait_seconds=20) for _ in "12"]
    assert [reply.status for reply in replies] == [201, 201], replies
    return [reply.json for reply in replies]


def test_each_worker_has_a_gpu_of_this_host(fleet: Fleet, here: str) -> None:
    with GPUProcessPoolExecutor() as pool:
        found = set(pool.map(tasks.sleep_and_name, [0.3] * 6))
        assert sorted(gpu for _, gpu in found) == ["0", "1"]
        assert {(row["host"], row["holder"]["pid"]) for row in rows(fleet)} == {("gpu-3", pid) for pid, _ in found}
        environment = pool.submit(tasks.initial_environment).result()
        assert environment["GPU_POOL_LEASE_ID"].startswith("gpu-3:lease-")
        assert environment["GPU_POOL_LEASE_ENDPOINT"] == here


def test_an_executor_waits_in_the_queue_of_the_fleet(fleet: Fleet, here: str) -> None:
    held = fill(fleet, "gpu-3")
    with GPUProcessPoolExecutor() as pool:
        future = pool.submit(tasks.whoami)
        (waiting,) = eventually(lambda: fleet["gpu-1"].get("/queue").json["queue"])
        assert waiting["position"] == 1
        # A GPU of another host is not for it, and goes to who comes later.
        other = fleet.request("gpu-1", "later", wait_seconds=5).json
        assert other["host"] != "gpu-3"
        fleet.release("gpu-1", other)
        assert not future.done()
        for lease in held:
            fleet.release("gpu-1", lease)
        assert future.result()[1] in {"0", "1"}


def test_a_share_is_exported_as_one_of_the_card(fleet: Fleet, here: str) -> None:
    with GPUProcessPoolExecutor(1, memory_mb=12288, share=True) as pool:
        environment = pool.submit(tasks.initial_environment).result()
    assert environment["GPU_POOL_MEMORY_MB"] == "12288"
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_what_no_gpu_of_this_host_can_serve_fails_at_once(fleet: Fleet, here: str) -> None:
    with GPUProcessPoolExecutor(1, count=3) as pool:
        future = pool.submit(tasks.whoami)
        with pytest.raises(ImpossibleRequestError, match="gpu-3: 3 GPUs requested, 2 of 2"):
            future.result()


def test_a_worker_that_dies_is_replaced(fleet: Fleet, here: str) -> None:
    with GPUProcessPoolExecutor(1) as pool:
        pid, _ = pool.submit(tasks.whoami).result()
        dying = pool.submit(tasks.die)
        with pytest.raises(BrokenGPUWorkerError, match="SIGKILL"):
            dying.result()
        assert pool.submit(tasks.whoami).result()[0] != pid


def test_when_the_program_is_killed_the_fleet_has_its_gpu_again(fleet: Fleet, here: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.workers.program", "wait_in_a_task", str(tmp_path / "go")]
    program = subprocess.Popen(words, cwd=ROOT)
    eventually(lambda: list(tmp_path.glob("go.*")))
    assert [row["host"] for row in rows(fleet)] == ["gpu-3"]
    program.kill()
    assert program.wait() == -signal.SIGKILL
    # Given back by its lease process, and not by the end of its TTL.
    eventually(lambda: rows(fleet) == [], within_seconds=20)


async def test_an_async_client_of_the_whole_fleet(fleet: Fleet, here: str) -> None:
    async with GPUWorkerPoolClient(service_endpoints=[ANOTHER_HOST, here], environ={}) as client:
        _, gpu = await client.run_in_gpu_process(tasks.whoami)
        assert gpu in {"0", "1"}
        assert [row["host"] for row in rows(fleet)] == ["gpu-3"]


def test_the_dispatcher_ends_while_workers_run_and_are_asked_for(
    shared_postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_STATE_DIR", str(tmp_path / "of-programs"))
    with fleet_of(tmp_path, shared_postgres.create_database("fleet_of_workers_2"), gpus=2) as fleet:
        with GPUProcessPoolExecutor(service_endpoints=fleet["gpu-3"].url) as pool:
            running = pool.submit(tasks.wait_for, str(tmp_path / "go"))
            eventually(lambda: list(tmp_path.glob("go.*")))
            dispatcher = fleet.seen_by("gpu-3")["dispatcher"]["host"]
            fleet[dispatcher].kill()
            # It gets the second GPU from the next dispatcher, in the place of the queue that it had.
            assert pool.submit(tasks.square, 3).result() == 9
            (tmp_path / "go").touch()
            assert running.result() > 0
        other = next(name for name in ("gpu-1", "gpu-2") if name != dispatcher)
        eventually(lambda: fleet[other].get("/leases").json["leases"] == [])


# --- the command line ---


def ran(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=90, check=False, **more
    )


def test_the_jobs_of_a_map_run_on_gpus_of_this_host(fleet: Fleet, here: str) -> None:
    script = "echo {} $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID; sleep 0.1"
    done = ran("gpu_worker_pool", "map", "--", "sh", "-c", script, ":::", "a", "b", "c", "d")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[0] for line in lines] == ["a", "b", "c", "d"]
    assert {line[1] for line in lines} <= {"0", "1"}
    assert all(line[2].startswith("gpu-3:lease-") for line in lines)
    assert f"gpu-pool: {ANOTHER_HOST} is another host: jobs run here, and it is not asked" in done.stderr


def test_tests_get_gpus_of_this_host(fleet: Fleet, here: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\nimport pytest\n@pytest.mark.parametrize('number', range(8))\n"
        "def test_it(gpu, number):\n"
        "    assert os.environ['CUDA_VISIBLE_DEVICES'] == str(gpu.gpu_id)\n"
        "    assert gpu.lease_id.startswith('gpu-3:lease-')\n"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    plugins = ["-p", "gpu_pool", "-p", "xdist", "-p", "no:cacheprovider"]
    done = ran("pytest", "-q", *plugins, "-n", "3", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
    assert "8 tests on GPU " in done.stdout
