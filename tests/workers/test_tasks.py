"""Tasks and their futures, in an executor that the tests share: it is for those that do no harm to it.

1. A worker has one lease, finds its GPU in the environment it starts with, and is the lease's holder by its pid.
2. Values, exceptions with their traceback, and what cannot be pickled reach the future of their task, and no other.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import as_completed, wait
from pathlib import Path

import pytest

from gpu_worker_pool import GPUProcessPoolExecutor
from gpu_worker_pool.errors import NotStartedError
from gpu_worker_pool.hardware.processes import name_of_process
from tests.waiting import eventually
from tests.workers import tasks
from tests.workers.conftest import Host


@pytest.fixture(scope="module")
def pool(host: Host) -> Iterator[GPUProcessPoolExecutor]:
    with GPUProcessPoolExecutor(2) as made:
        yield made


# --- what a worker is ---


def test_a_worker_holds_its_gpu_by_its_own_pid_and_starts_with_it(pool: GPUProcessPoolExecutor, host: Host) -> None:
    environment = pool.submit(tasks.initial_environment).result()
    (lease,) = [lease for lease in host.leases() if lease.lease_id == environment["GPU_POOL_LEASE_ID"]]
    pid, gpu = next(
        found for found in (pool.submit(tasks.whoami).result() for _ in range(20))
        if lease.request.process == name_of_process(found[0])
    )  # fmt: skip
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu == str(lease.held[0].index)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert lease.request.origin is not None
    assert lease.request.origin.pid == pid != os.getpid()
    assert lease.request.worker_id.endswith(f":{pid}")
    assert lease.request.requirements.policy == "idle"


def test_workers_have_different_gpus_and_keep_them_between_tasks(pool: GPUProcessPoolExecutor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    both = [pool.submit(tasks.wait_for, str(go)) for _ in range(2)]
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    go.touch()
    pids = {future.result() for future in both}
    seen = {pool.submit(tasks.whoami).result() for _ in range(10)}
    assert len(pids) == 2
    assert {pid for pid, _ in seen} <= pids
    assert len(seen) == len({gpu for _, gpu in seen}) == len({pid for pid, _ in seen})


# --- tasks and their futures ---


def test_it_is_an_executor_as_the_standard_library_has_them(pool: GPUProcessPoolExecutor) -> None:
    assert list(pool.map(tasks.square, range(10))) == [number**2 for number in range(10)]
    assert list(pool.map(tasks.square, range(10), chunksize=3)) == [number**2 for number in range(10)]
    assert list(pool.map(pow, [2, 3], [3, 2], chunksize=7)) == [8, 9]
    assert list(pool.map(tasks.square, [])) == []
    futures = [pool.submit(tasks.square, number) for number in range(20)]
    assert sorted(future.result() for future in as_completed(futures)) == [number**2 for number in range(20)]
    assert pool.submit(functools.partial(int, base=2), "101").result() == 5
    with pytest.raises(ValueError, match="chunksize must be at least 1"):
        pool.map(tasks.square, [1], chunksize=0)


def test_an_exception_comes_with_the_traceback_of_the_worker(pool: GPUProcessPoolExecutor) -> None:
    with pytest.raises(ValueError, match="too large") as caught:
        pool.submit(tasks.fail, "too large").result()
    assert "in fail" in str(caught.value.__cause__)
    assert "raise ValueError(text)" in str(caught.value.__cause__)


def test_what_cannot_be_pickled_is_an_error_of_its_task_alone(pool: GPUProcessPoolExecutor) -> None:
    with pytest.raises(TypeError, match=r"<lambda>, which is not defined at the top level of a module, cannot be"):
        pool.submit(lambda: 1).result(timeout=0)
    with pytest.raises(
        TypeError, match=r"an argument of square cannot be pickled, .*: pass what a worker can make it from"
    ):
        pool.submit(tasks.square, threading.Lock()).result(timeout=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the result of unpicklable cannot be pickled"):
        pool.submit(tasks.unpicklable).result()
    with pytest.raises(RuntimeError, match=r"OnlyHereError: the text \(this exception cannot be pickled\)") as caught:
        pool.submit(tasks.raise_only_here).result()
    assert "raise OnlyHereError" in str(caught.value.__cause__)
    assert pool.submit(tasks.square, 3).result() == 9


def test_an_exception_that_is_none_elsewhere_is_an_error_of_its_task_alone(pool: GPUProcessPoolExecutor) -> None:
    """Its class decides what is read of it, and whether it can be changed: neither may end a worker or the executor."""
    with pytest.raises(RuntimeError, match=r"FrozenError: late \(this exception cannot be pickled\)"):
        pool.submit(tasks.raise_frozen, "late").result(timeout=30)
    with pytest.raises(RuntimeError, match=r"DisguisedError \(this exception cannot be pickled\)"):
        pool.submit(tasks.raise_disguised, "text").result(timeout=30)
    with pytest.raises(RuntimeError, match=r"unpickled here \(TypeError: it is not an exception, but int"):
        pool.submit(tasks.raise_read_elsewhere, os.getpid()).result(timeout=30)
    with pytest.raises(RuntimeError, match=r"the result of EndsItsReader cannot be unpickled here \(SystemExit: 3\)"):
        pool.submit(tasks.EndsItsReader, os.getpid()).result(timeout=30)
    assert pool.submit(tasks.square, 3).result(timeout=30) == 9


def test_large_values_go_there_and_back(pool: GPUProcessPoolExecutor) -> None:
    large = os.urandom(5 << 20)
    assert [found == large for found in pool.map(bytes, [large, large, large])] == [True] * 3


def test_a_task_that_waits_can_be_cancelled(pool: GPUProcessPoolExecutor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = [pool.submit(tasks.wait_for, str(go)) for _ in range(2)]
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    waiting = pool.submit(tasks.square, 3)
    assert waiting.cancel()
    assert wait([waiting], timeout=30).done == {waiting}
    assert not running[0].cancel()
    go.touch()
    assert all(future.result() for future in running)


def test_a_fork_is_told_to_make_its_own(pool: GPUProcessPoolExecutor) -> None:
    pool.submit(tasks.square, 2).result()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            pool.submit(tasks.square, 2)
        except NotStartedError as error:
            os.write(write_end, str(error).encode())
            pool.shutdown()
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert f"made in process {os.getpid()}, of which this one, {child}, is a fork" in said.read()
    assert os.waitpid(child, 0)[1] == 0
    assert pool.submit(tasks.square, 3).result() == 9
