"""How an executor ends when its program does: by a signal, by Ctrl-C, or without having shut it down.

1. While a worker runs, its GPU is nobody else's, whatever was killed; when it is gone, the GPU is given back.
2. Ctrl-C ends running tasks by a `KeyboardInterrupt`, drops the others, and leaves nothing.
3. A program that ends normally finishes its tasks first.
4. A main module without a guard, or one that a worker cannot import, is explained.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool import GPUProcessPoolExecutor
from gpu_worker_pool.hardware.proc import children_of, descendants, process_stat
from gpu_worker_pool.workers.lease_process import WorkerLeaseProcess, python_command
from gpu_worker_pool.workers.worker_spec import WorkerSpec
from tests.waiting import eventually
from tests.workers import tasks
from tests.workers.conftest import Host

ROOT = Path(__file__).parents[2]


def started(host: Host, *words: object) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.workers.program", *map(str, words)],
        cwd=ROOT,
        env=host.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def worker_of(path: Path) -> int:
    """The one that runs `wait_for`."""
    eventually(lambda: list(path.parent.glob(f"{path.name}.*")))
    return int(next(path.parent.glob(f"{path.name}.*")).suffix[1:])


def is_gone(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.state == "Z"


def ended(program: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = program.communicate(timeout=50)
    return program.returncode, output + errors


# --- killed ---


def test_when_the_program_is_killed_its_workers_end_and_then_their_leases(host: Host, tmp_path: Path) -> None:
    program = started(host, "wait_in_a_task", tmp_path / "go")
    worker = worker_of(tmp_path / "go")
    program.kill()
    ended(program)
    eventually(lambda: is_gone(worker))
    eventually(host.is_clean)


def test_a_gpu_is_held_as_long_as_a_worker_that_outlives_its_program(host: Host, tmp_path: Path) -> None:
    """It ignores SIGTERM, so that it is there for a while."""
    program = started(host, "wait_uninterrupted", tmp_path / "go")
    worker = worker_of(tmp_path / "go")
    program.kill()
    seen = 0
    while not is_gone(worker):
        holders = [lease.request.origin for lease in host.leases() if lease.is_live]
        if not is_gone(worker):
            assert [holder.pid for holder in holders if holder is not None] == [worker]
            seen += 1
    assert seen, "it was never seen alive: this has shown nothing"
    ended(program)
    eventually(host.is_clean)


def test_a_fork_of_the_program_keeps_nothing_alive(host: Host, tmp_path: Path) -> None:
    """It has copies of all connections: the lease process knows its program by the pid, too."""
    program = started(host, "wait_beside_a_fork", tmp_path / "go")
    worker = worker_of(tmp_path / "go")
    (fork,) = [int(path.suffix[1:]) for path in tmp_path.glob("fork.*")]
    program.kill()
    eventually(lambda: is_gone(worker))
    assert not is_gone(fork)
    os.kill(fork, signal.SIGKILL)
    ended(program)
    eventually(host.is_clean)


def test_when_the_lease_process_is_killed_no_worker_outlives_it(host: Host, tmp_path: Path) -> None:
    program = started(host, "wait_in_a_task", tmp_path / "go")
    worker = worker_of(tmp_path / "go")
    stat = process_stat(worker)
    assert stat is not None
    os.kill(stat.parent, signal.SIGKILL)
    status, said = ended(program)
    assert is_gone(worker)
    assert status == 1
    assert "the process that held its lease has ended; was it killed?" in said
    host.look_until_clean()


def test_sigterm_ends_everything(host: Host, tmp_path: Path) -> None:
    program = started(host, "wait_in_a_task", tmp_path / "go")
    worker = worker_of(tmp_path / "go")
    program.terminate()
    assert ended(program)[0] == -signal.SIGTERM
    eventually(lambda: is_gone(worker))
    eventually(host.is_clean)


# --- Ctrl-C ---


@pytest.mark.parametrize("to_group", [True, False], ids=["to the group, as a terminal", "to the program alone"])
@pytest.mark.parametrize("what", ["save_when_interrupted", "interrupted_without_a_block"])
def test_ctrl_c_ends_it_cleanly(host: Host, tmp_path: Path, what: str, to_group: bool) -> None:
    note = tmp_path / "note"
    program = started(host, what, note)
    eventually(note.exists)
    processes = descendants(program.pid)
    (os.killpg if to_group else os.kill)(program.pid, signal.SIGINT)
    status, said = ended(program)
    assert status == -signal.SIGINT
    assert said.count("Traceback (most recent call last)") <= 2, said
    assert "KeyboardInterrupt" in said
    assert Path(f"{note}.saved").exists(), "a task could save what it had"
    assert host.is_given_back(), "every GPU is given back before the program ends"
    assert all(map(is_gone, processes))


def test_ctrl_c_reaches_the_lease_process_at_no_moment_and_the_workers_at_each(host: Host, tmp_path: Path) -> None:
    spec = WorkerSpec({}, ["local://"], None, None, "test", os.getpid(), python_command("worker"))
    lease_process = WorkerLeaseProcess(spec, {})
    (pid,) = children_of(os.getpid())
    (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    lease_process.end()
    assert int(blocked, 16) & 1 << (signal.SIGINT - 1), "it has only begun"
    with GPUProcessPoolExecutor() as pool:
        assert pool.submit(tasks.blocked_signals).result() == []


# --- a normal end ---


def test_a_program_that_does_not_shut_it_down_finishes_its_tasks(host: Host, tmp_path: Path) -> None:
    status, said = ended(started(host, "end_without_shutdown", tmp_path / "lines"))
    assert (status, said) == (0, "")
    assert (tmp_path / "lines").read_text().split() == ["0", "1", "2", "3", "4"]
    assert host.is_given_back()


# --- main modules ---

WITHOUT_GUARD = """
from gpu_worker_pool import GPUProcessPoolExecutor
pool = GPUProcessPoolExecutor(1)
print(pool.submit(abs, -1).result())
"""
WITH_GUARD = """
import os
from gpu_worker_pool import GPUProcessPoolExecutor
def task(number):
    return number + 1
def main():
    with GPUProcessPoolExecutor(1) as pool:
        print(pool.submit(task, 1).result())
if __name__ == "__main__":
    main()
"""


def run_script(host: Host, script: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    words = [sys.executable, *(arguments or [str(script)])]
    return subprocess.run(
        words, env=host.environment, capture_output=True, text=True, timeout=50, check=False, cwd=script.parent
    )


def test_a_function_of_the_main_module_can_be_a_task(host: Host, tmp_path: Path) -> None:
    done = run_script(host, tmp_path / "train.py", WITH_GUARD)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_main_module_without_a_guard_is_explained(host: Host, tmp_path: Path) -> None:
    done = run_script(host, tmp_path / "train.py", WITHOUT_GUARD)
    assert done.returncode == 1
    assert "BrokenGPUWorkerError: a worker could not begin" in done.stderr
    assert "put what starts the program below `if __name__ == '__main__':`" in done.stderr
    assert host.is_given_back()


def test_a_main_module_that_only_fails_in_a_worker_is_explained(host: Host, tmp_path: Path) -> None:
    text = "if __name__ != '__main__': raise ImportError('no such model')\n" + WITH_GUARD
    done = run_script(host, tmp_path / "train.py", text)
    assert "BrokenGPUWorkerError: a worker could not begin: what it imports, or its initializer, raised" in done.stderr
    assert "ImportError: no such model" in done.stderr
    assert host.is_given_back()


def test_a_function_that_only_an_interactive_session_has_is_explained(host: Host, tmp_path: Path) -> None:
    text = WITH_GUARD.replace('if __name__ == "__main__":', "if True:")
    assert run_script(host, tmp_path / "unused.py", "", "-c", text).stdout == "2\n", "cloudpickle sends it by value"
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    done = run_script(host, tmp_path / "unused.py", "", "-c", text)
    assert "put it into a module and import it from there, or `pip install cloudpickle`" in done.stderr
    assert run_script(host, tmp_path / "unused.py", "", "-c", text.replace("task, 1", "abs, -2")).stdout == "2\n"
