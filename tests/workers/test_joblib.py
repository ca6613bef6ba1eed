"""joblib's own `Parallel` with the backend `gpu-pool`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from joblib import Parallel, delayed, parallel_config

import gpu_worker_pool.joblib
from tests.waiting import eventually
from tests.workers import tasks
from tests.workers.conftest import GPUS, Host


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    gpu_worker_pool.joblib.register()


def test_every_call_has_a_gpu_and_results_keep_their_order(host: Host, tmp_path: Path) -> None:
    with parallel_config(backend="gpu-pool"):
        found = Parallel()(delayed(tasks.sleep_and_name)(0.3) for _ in range(2 * GPUS))
        assert Parallel()(delayed(tasks.square)(number) for number in range(30)) == [n * n for n in range(30)]
    by_process = dict(found)
    assert 1 < len(by_process) <= GPUS
    assert len(set(by_process.values())) == len(by_process), "no GPU has two processes"
    assert host.is_given_back(), "they are given back when Parallel has returned"


def test_n_jobs_and_the_arguments_of_the_executor_count(host: Host) -> None:
    with parallel_config(backend="gpu-pool", n_jobs=1, count=2):
        found = Parallel()(delayed(tasks.whoami)() for _ in range(4))
    assert len({pid for pid, _ in found}) == 1
    assert all(len(gpus.split(",")) == 2 for _, gpus in found)
    eventually(host.is_clean)


def test_functions_that_no_module_has_are_sent_by_value(host: Host) -> None:
    offset = 40
    with parallel_config(backend="gpu-pool", n_jobs=2):
        assert Parallel()(delayed(lambda number: number + offset)(number) for number in range(3)) == [40, 41, 42]


def test_an_error_ends_the_other_calls(host: Host, tmp_path: Path) -> None:
    with parallel_config(backend="gpu-pool", n_jobs=2), pytest.raises(ValueError, match="wrong"):
        Parallel()([delayed(tasks.fail)("wrong"), *(delayed(tasks.sleep)(60) for _ in range(20))])
    eventually(host.is_clean)


def test_it_is_imported_only_when_asked_for() -> None:
    program = "import sys, gpu_worker_pool, gpu_worker_pool.workers.executor; sys.exit('joblib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_joblib_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['joblib'] = None; import gpu_worker_pool.joblib"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: joblib is not installed: pip install joblib" in done.stderr
