"""The life of an executor and its workers, with real processes on simulated GPUs.

1. A task whose worker dies fails with a reason or is tried again; others are not disturbed; the worker is replaced.
2. What can never work (an impossible request, a worker that cannot begin) fails every task at once, and leaks nothing.
3. Workers come as tasks need them, and go when they are idle; `min_workers` stay.
4. Whatever ends the executor, every GPU is given back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import BrokenGPUWorkerError, GPUProcessPoolExecutor, ImpossibleRequestError, WorkerTimeoutError
from gpu_worker_pool.core import LeaseState
from gpu_worker_pool.hardware.proc import process_stat
from tests.waiting import eventually
from tests.workers import tasks
from tests.workers.conftest import GPUS, Host


def is_gone(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.state == "Z"


def test_a_worker_that_computes_without_a_pause_keeps_its_lease(host: Host) -> None:
    """For longer than its TTL: no thread of its own could renew it meanwhile."""
    with GPUProcessPoolExecutor(1, lease_ttl=5.0) as pool:
        blocked = pool.submit(tasks.block, 8.0)
        assert blocked.result() is True
        assert pool.submit(tasks.square, 2).result() == 4


def test_an_initializer_is_called_in_every_worker(host: Host) -> None:
    with GPUProcessPoolExecutor(1, initializer=tasks.set_greeting, initargs=("hello",)) as pool:
        assert pool.submit(tasks.get_greeting).result() == "hello"
    eventually(host.is_clean)


# --- workers that die ---


def test_a_task_whose_worker_dies_fails_and_the_others_go_on(host: Host, tmp_path: Path) -> None:
    with GPUProcessPoolExecutor(1) as pool:
        first, _ = pool.submit(tasks.whoami).result()
        dying, after = pool.submit(tasks.die), pool.submit(tasks.whoami)
        with pytest.raises(BrokenGPUWorkerError, match=rf"\(pid {first}, GPU \d\) was killed while it ran die \("):
            dying.result()
        assert after.result()[0] != first
        with pytest.raises(BrokenGPUWorkerError, match="ended with status 3 while it ran leave"):
            pool.submit(tasks.leave, 3).result()
        assert pool.submit(tasks.square, 3).result() == 9
    eventually(host.is_clean)


def test_it_is_tried_again_as_often_as_it_should_be(host: Host, tmp_path: Path) -> None:
    with GPUProcessPoolExecutor(1, retries=1) as pool:
        assert pool.submit(tasks.die_once, str(tmp_path / "died")).result() == "done"
        with pytest.raises(BrokenGPUWorkerError, match="SIGSEGV"):
            pool.submit(tasks.die, int(signal.SIGSEGV)).result()
        with pytest.raises(ValueError, match="once"):  # what a task raises is its result
            pool.submit(tasks.fail, "once").result()
    eventually(host.is_clean)


def test_a_gpu_that_is_lost_in_the_middle_ends_its_worker(host: Host, tmp_path: Path) -> None:
    """Somebody ends the lease: the worker must not go on using a GPU that others are given."""
    import asyncio

    from gpu_worker_pool.broker.local import LocalBroker, local_user

    async def end(lease_id: str) -> None:
        local = LocalBroker(host.variables["GPU_BACKEND"], state_dir=str(host.folder))
        await local.start()
        await local.broker.release(lease_id, local_user())
        await local.stop()

    with GPUProcessPoolExecutor(1, lease_ttl=2.0) as pool:
        environment = pool.submit(tasks.initial_environment).result()
        lost = pool.submit(tasks.sleep, 60.0)
        asyncio.run(end(environment["GPU_POOL_LEASE_ID"]))
        with pytest.raises(BrokenGPUWorkerError, match=r"because it lost its GPU: .*released"):
            lost.result(timeout=30)
        assert pool.submit(tasks.square, 3).result() == 9
    eventually(host.is_clean)


def test_a_gpu_is_not_given_back_while_a_child_of_its_worker_may_use_it(host: Host, tmp_path: Path) -> None:
    """It goes into quarantine; of simulated GPUs readings show at once that they are empty."""
    go = tmp_path / "go"
    before = host.tally()
    with GPUProcessPoolExecutor(1) as pool:
        pool.submit(tasks.start_child, str(go)).result()
    eventually(host.is_clean)
    after = host.tally()
    assert after[LeaseState.RELEASED] == before[LeaseState.RELEASED]
    assert after[LeaseState.RECLAIMED] == before[LeaseState.RECLAIMED] + 1
    go.touch()
    eventually(host.is_clean)


# --- what can never work ---


def test_a_worker_that_cannot_begin_breaks_the_executor(host: Host) -> None:
    with GPUProcessPoolExecutor(2, initializer=tasks.refuse_to_begin) as pool:
        futures = [pool.submit(tasks.square, number) for number in range(5)]
        for future in futures:
            with pytest.raises(
                BrokenGPUWorkerError, match="its initializer, raised RuntimeError: no licence"
            ) as caught:
                future.result()
        assert "refuse_to_begin" in str(caught.value.__cause__)
        with pytest.raises(BrokenGPUWorkerError, match="no licence"):
            pool.submit(tasks.square, 1)
    eventually(host.is_clean)


def test_workers_that_keep_dying_before_their_first_task_break_it(host: Host) -> None:
    with GPUProcessPoolExecutor(1, initializer=tasks.die) as pool:
        future = pool.submit(tasks.square, 1)
        with pytest.raises(BrokenGPUWorkerError, match=r"killed before its first task .*as did the 4 before it"):
            future.result()
    eventually(host.is_clean)


@pytest.mark.parametrize(
    "requirements", [{"memory_mb": 10**6, "share": True}, {"count": GPUS + 1}, {"gpu_model": "Z80"}, {"only": [9]}]
)
def test_a_request_that_can_never_be_granted_fails_every_task(host: Host, requirements: dict[str, Any]) -> None:
    with GPUProcessPoolExecutor(**requirements) as pool:
        futures = [pool.submit(tasks.square, number) for number in range(3)]
        for future in futures:
            with pytest.raises(ImpossibleRequestError):
                future.result()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_workers": 0}, 'max_workers must be a whole number of at least 1 or "gpus", not 0'),
        ({"max_workers": "all"}, "max_workers must be a whole number of at least 1 or \"gpus\", not 'all'"),
        ({"max_workers": 2, "min_workers": 3}, "min_workers must be at most max_workers, 2, not 3"),
        ({"retries": -1}, "retries must be a whole number of at least 0, not -1"),
        ({"idle_release": -1}, "idle_release must be a number of seconds of at least 0, or None, not -1"),
        ({"gpu_timeout": "1"}, "gpu_timeout must be a number of seconds of at least 0, or None, not '1'"),
        ({"max_tasks_per_child": 0}, "max_tasks_per_child must be a whole number of at least 1, not 0"),
        ({"share": True}, "share=True needs memory_mb: say how much of the GPU is yours"),
        ({"service_endpoints": "ftp://x"}, "service_endpoints: 'ftp://x' cannot be used: expected a URL such as"),
        ({"progress": 3}, "progress must be True, a function that is called with the number of tasks"),
        ({"lease_ttl": 1}, "lease_ttl must be a number of seconds from 2 to 3600, not 1"),
    ],
)
def test_a_bad_argument_is_refused_at_once(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is checked
        GPUProcessPoolExecutor(**arguments)
    assert str(caught.value).startswith(expected)


def test_an_initializer_that_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="the initializer or one of its arguments cannot be pickled"):
        GPUProcessPoolExecutor(initializer=lambda: None)


# --- how many there are ---


def test_tasks_that_get_no_gpu_in_time_fail_with_the_reason(host: Host, tmp_path: Path) -> None:
    with GPUProcessPoolExecutor(1, count=GPUS - 1) as holder:
        holder.submit(tasks.whoami).result()
        with GPUProcessPoolExecutor(1, count=GPUS, gpu_timeout=0.5) as pool:
            future = pool.submit(tasks.square, 1)
            with pytest.raises(WorkerTimeoutError, match=r"no GPU became free for a worker within 0.5 s: number 1"):
                future.result()
    eventually(host.is_clean)


def test_workers_come_with_the_tasks_and_go_when_they_are_idle(host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with GPUProcessPoolExecutor(idle_release=0.2, min_workers=1) as pool:
        eventually(lambda: len(host.leases()) == 1)
        futures = [pool.submit(tasks.wait_for, str(go)) for _ in range(GPUS)]
        eventually(lambda: len(list(tmp_path.iterdir())) == GPUS)
        assert len(host.leases()) == GPUS
        go.touch()
        pids = {future.result() for future in futures}
        assert len(pids) == GPUS
        eventually(lambda: len(host.leases()) == 1)
        eventually(lambda: sum(not is_gone(pid) for pid in pids) == 1)
        assert pool.submit(tasks.whoami).result()[0] in pids
    eventually(host.is_clean)


def test_more_tasks_than_gpus_share_them(host: Host) -> None:
    with GPUProcessPoolExecutor(memory_mb=8000, share=True, max_workers=3, only=[2]) as pool:
        futures = [pool.submit(tasks.sleep, 0.5) for _ in range(3)]
        assert len({future.result() for future in futures}) == 3
        assert {pool.submit(tasks.whoami).result()[1] for _ in range(5)} == {"2"}
    eventually(host.is_clean)


def test_a_worker_has_as_many_gpus_as_it_should(host: Host) -> None:
    with GPUProcessPoolExecutor(1, count=2) as pool:
        assert len(pool.submit(tasks.whoami).result()[1].split(",")) == 2
    eventually(host.is_clean)


def test_a_worker_is_replaced_after_its_last_task(host: Host) -> None:
    with GPUProcessPoolExecutor(1, max_tasks_per_child=2) as pool:
        pids = [pool.submit(tasks.whoami).result()[0] for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
    eventually(host.is_clean)


# --- progress ---


def test_progress_is_reported_for_each_task(host: Host) -> None:
    class FakeBar:
        total: int | None = None
        done = 0

        def update(self, count: int) -> None:
            self.done += count

    bar, counts = FakeBar(), list[int]()
    with GPUProcessPoolExecutor(1, progress=bar) as pool:
        list(pool.map(tasks.square, range(5)))
        pool.submit(lambda: 1)
    assert (bar.total, bar.done) == (5, 5)
    with GPUProcessPoolExecutor(1, progress=counts.append) as pool, pytest.raises(ValueError, match="no"):
        pool.submit(tasks.fail, "no").result()
    assert sum(counts) == 1


def test_a_line_on_stderr_says_how_far_it_is(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    with GPUProcessPoolExecutor(1, progress=True) as pool:
        list(pool.map(tasks.square, range(5)))
    assert "gpu-pool: [####################] 5/5 tasks, " in capsys.readouterr().err


# --- the end ---


def test_shutdown_waits_for_what_was_submitted_or_cancels_it(host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"
    pool = GPUProcessPoolExecutor(1)
    running, waiting = pool.submit(tasks.wait_for, str(go)), pool.submit(tasks.square, 3)
    eventually(lambda: running.running() and len(list(tmp_path.iterdir())) == 1)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="cannot schedule new tasks after shutdown"):
        pool.submit(tasks.square, 1)
    go.touch()
    pool.shutdown()
    pool.shutdown()
    assert running.result()
    assert host.is_given_back(), "every GPU is given back when shutdown returns"


def test_one_that_was_never_used_starts_nothing(host: Host) -> None:
    with GPUProcessPoolExecutor() as pool:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(tasks.square, 1)


def test_one_that_is_dropped_finishes_its_tasks(host: Host) -> None:
    future = GPUProcessPoolExecutor(1).submit(tasks.square, 5)
    assert future.result() == 25
    eventually(host.is_clean)


def test_an_interrupt_ends_tasks_that_have_begun_too(host: Host, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(KeyboardInterrupt), GPUProcessPoolExecutor(1) as pool:  # noqa: PT012
        running, waiting = pool.submit(tasks.note_interrupt, str(note)), pool.submit(tasks.square, 3)
        eventually(note.exists)
        raise KeyboardInterrupt
    assert isinstance(running.exception(), KeyboardInterrupt)
    assert waiting.cancelled()
    assert Path(f"{note}.saved").exists(), "the task could save its work"
    assert host.is_given_back()


def test_a_worker_that_is_stopped_holds_up_no_other(host: Host) -> None:
    with GPUProcessPoolExecutor(2) as pool:
        pids = [future.result() for future in [pool.submit(tasks.sleep, 0.5) for _ in range(2)]]
        os.kill(pids[0], signal.SIGSTOP)
        large = b"x" * (4 << 20)
        futures = [pool.submit(len, large) for _ in range(6)]
        eventually(lambda: sum(future.done() for future in futures) == 5)
        os.kill(pids[0], signal.SIGCONT)
        assert [future.result() for future in futures] == [len(large)] * 6
    eventually(host.is_clean)


def test_a_worker_with_a_share_is_told_its_part_of_the_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    with GPUProcessPoolExecutor(1, memory_mb=6144, share=True) as pool:
        monkeypatch.setenv("SET_LATER", "yes")
        environment = pool.submit(tasks.initial_environment).result()
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"
    assert environment["GPU_POOL_MEMORY_MB"] == "6144"
    assert environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "false", "what is set stays"
    assert environment["SET_LATER"] == "yes", "a worker has the environment of the program as it is when it starts"
    eventually(host.is_clean)
