"""`gpu-pool run` in loops of several shells, and any of its processes killed at random: no GPU is in two hands.

The driver, a fake nvidia-smi, sees the commands that run, as a real one does: that is the evidence by which a GPU is
handed on after its lease process was killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_worker_pool.cli.running.lease_process import PROCESS_NAME
from gpu_worker_pool.hardware.proc import children_of
from tests.cli.programs import Programs
from tests.fakes.nvidia_smi import healthy_gpu
from tests.waiting import eventually

GPUS, SHELLS = 2, 4

#: What runs on a GPU: the kernel keeps its lock for exactly as long as it lives.
JOB = """
import fcntl, os, sys, time
folder, number, seconds = sys.argv[1:]
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
open(f"{folder}/begun-{number}", "w").close()
lock = os.open(f"{folder}/gpu-{gpu}", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(f"{folder}/crimes", "a").write(f"job {number}: GPU {gpu} is in use by another one\\n")
time.sleep(float(seconds))  # a program is not on its GPU at once
seen = f"{folder}/seen-{gpu}-{os.getpid()}"
open(seen, "w").close()
time.sleep(float(seconds) / 4)
open(f"{folder}/done", "a").write(f"{number}\\n")
os.unlink(seen)
"""

DRIVER = """\
#!{python} -IS
import os, sys
words = " ".join(sys.argv[1:])
gpus = {gpus!r}
if "--query-gpu=" in words:
    fields = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    for gpu in gpus:
        print(", ".join(gpu.get(field, "[N/A]") for field in fields))
elif "--query-compute-apps=" in words:
    for name in os.listdir({folder!r}):
        if name.startswith("seen-"):
            _, gpu, pid = name.split("-")
            try:
                state = open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX":
                print(gpus[int(gpu)]["uuid"], pid, "job", 300, sep=", ")
sys.stdout.flush()
os._exit(0)
"""


class Shell(threading.Thread):
    """Runs one job after the other, as a loop of a shell does, and kills a process of every third."""

    def __init__(self, programs: Programs, folder: Path, numbers: range) -> None:
        super().__init__(daemon=True)
        self._programs, self._folder, self._numbers = programs, folder, numbers
        self._draw = random.Random(numbers.start)
        self.killed = Counter[str]()
        self.ended = 0

    def run(self) -> None:
        for number in self._numbers:
            job = [str(self._folder / "job.py"), str(self._folder), str(number), str(self._draw.random() * 0.4)]
            command = [sys.executable, "-m", "gpu_worker_pool", "run", "-q", "--", sys.executable, "-IS", *job]
            with (self._folder / "told").open("ab") as told:
                front = subprocess.Popen(command, env=self._programs.environment, stderr=told)
            if self._draw.random() < 0.35:
                if self._draw.random() < 0.6:  # while the command runs, or is about to
                    begun = self._folder / f"begun-{number}"
                    while not begun.exists() and front.poll() is None:
                        time.sleep(0.005)
                time.sleep(self._draw.random() * 0.05)
                self._kill_one(front)
            front.wait()
            self.ended += 1

    def _kill_one(self, front: subprocess.Popen[bytes]) -> None:
        """A run itself, its lease process, or its command."""
        with suppress(OSError):
            pid = self._draw.choice([front.pid, *children_of(front.pid)])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            os.kill(pid, signal.SIGKILL)
            self.killed["run" if pid == front.pid else "lease process" if name == PROCESS_NAME else "command"] += 1


def run(programs: Programs, folder: Path, jobs: int) -> None:
    (folder / "job.py").write_text(JOB)
    driver = folder / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    gpus = [healthy_gpu(index, memory_used="1", utilization_gpu="0") for index in range(GPUS)]
    driver.write_text(DRIVER.format(python=sys.executable, gpus=gpus, folder=str(folder)))
    driver.chmod(0o755)
    programs.environment |= {"GPU_BACKEND": "nvidia-smi"}
    programs.environment["PATH"] = f"{driver.parent}:{programs.environment['PATH']}"
    share = jobs // SHELLS
    shells = [Shell(programs, folder, range(place * share, (place + 1) * share)) for place in range(SHELLS)]
    for shell in shells:
        shell.start()
    for shell in shells:
        shell.join()
    killed = sum((shell.killed for shell in shells), Counter[str]())
    crimes = folder / "crimes"
    assert not crimes.exists(), crimes.read_text()
    assert sum(shell.ended for shell in shells) == share * SHELLS
    done = len((folder / "done").read_text().splitlines())
    assert done > jobs / 2, f"too little was done to show anything: {done}, {killed}"
    assert sum(killed.values()) > jobs / 8, f"too few were killed to show anything: {killed}"
    eventually(lambda: programs.leases() == [])


@pytest.mark.fault(1)
@pytest.mark.timeout(150)
def test_processes_of_runs_that_are_killed(programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, jobs=16)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_processes_of_a_thousand_runs_that_are_killed(programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, jobs=1000)
