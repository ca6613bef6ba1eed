"""Measures what it costs to start on a GPU, beside a lock file: processor time, wall time, and hand-overs.

    make bench

The peer is written here, as bare as it can be: a Python program that locks one of several files, and runs its command.
It looks at no driver. Every job proves that its GPU is its own; where two have the same, the comparison is void, and
this program ends with an error. `--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

from bench.cli import GPU_POOL, NOTHING
from bench.table import Row, print_table

TURNS = 11
ROUNDS = 3
GPUS = SHELLS = 4
JOBS_EACH = 10
HAND_OVERS = 200
HAND_OVER_MS = 5.0

#: Locks the first file that is free and looks again every 50 ms, as `filelock` does.
LOCK_FILES = """
import fcntl, os, subprocess, sys, time
folder, gpus, *command = sys.argv[1:]
while True:
    for gpu in range(int(gpus)):
        file = open(f"{folder}/gpu-{gpu}.lock", "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        sys.exit(subprocess.call(command))
    time.sleep(0.05)
"""
#: The kernel keeps this lock for as long as the job lives.
JOB = 'exec flock -n -E 99 "$0/job-$CUDA_VISIBLE_DEVICES" sleep 0.5'
#: The first grant of a program: everything is loaded for it.
PROGRAM = """
from gpu_worker_pool import sync
with sync.GPUWorkerPoolClient("local://") as client:
    client.release_gpu(client.request_gpu())
"""


def cost(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Processor and wall time in ms, with that of all its processes."""
    before, begun_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - begun_at
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used * 1000, wall * 1000


def starts(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[tuple[float, float]]:
    """The medians of each. They run in turns, so that noise affects all of them."""
    turns = [[cost(command, environment) for command in commands] for _ in range(TURNS + 1)]
    return [
        (median(used for used, _ in costs), median(wall for _, wall in costs))
        for costs in zip(*turns[1:], strict=True)  # the first turn compiles
    ]


def jobs_ms(wrapper: Sequence[str], folder: Path, environment: dict[str, str]) -> float:
    """40 jobs of 0.5 s from 4 shells, on 4 GPUs: 5 s at best."""
    failed: list[int] = []

    def shell() -> None:
        for _ in range(JOBS_EACH):
            status = subprocess.run([*wrapper, "sh", "-c", JOB, str(folder)], env=environment, check=False).returncode
            if status:
                failed.append(status)

    threads = [threading.Thread(target=shell) for _ in range(SHELLS)]
    begun_at = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun_at
    if 99 in failed:
        sys.exit(f"{wrapper} gave a GPU to two jobs at once: this compares nothing that is safe")
    if failed:
        sys.exit(f"{wrapper} failed: statuses {failed}")
    return took * 1000


#: One of two programs that hand a GPU to each other: takes it with each line, and says when it had it.
HOLDER = """
import sys, time
from gpu_worker_pool import sync
with sync.GPUWorkerPoolClient("local://") as client:
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "take\\n":
            assignment = client.request_gpu()
            print(time.perf_counter(), flush=True)
        else:
            begun_at = time.perf_counter()
            client.release_gpu(assignment)
            print(begun_at, flush=True)
"""


def hand_overs_ms(environment: dict[str, str]) -> list[float]:
    """From the release in one program to the grant in another that waits, without a server."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]

    def say(program: subprocess.Popen[str], word: str) -> None:
        assert program.stdin is not None
        program.stdin.write(f"{word}\n")
        program.stdin.flush()

    def hear(program: subprocess.Popen[str]) -> str:
        assert program.stdout is not None
        return program.stdout.readline()

    took = []
    try:
        for program in programs:
            hear(program)
        holder, waiter = programs
        say(holder, "take")
        hear(holder)
        for _ in range(HAND_OVERS):
            say(waiter, "take")
            time.sleep(0.05)  # by then it waits
            say(holder, "release")
            begun_at, granted_at = float(hear(holder)), float(hear(waiter))
            took.append((granted_at - begun_at) * 1000)
            holder, waiter = waiter, holder
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return took


def measure(folder: Path) -> Iterator[Row]:
    unwanted = ("GPU_", "CUDA_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment = inherited | {"GPU_BACKEND": f"simulated:{GPUS}", "GPU_POOL_STATE_DIR": str(folder)}
    run, locks = [*GPU_POOL, "run", "--"], [sys.executable, "-c", LOCK_FILES, str(folder), str(GPUS)]
    nothing, locked, ran, granted = starts(
        [NOTHING, [*locks, "true"], [*run, "true"], [sys.executable, "-c", PROGRAM]], environment
    )
    yield Row("processor time of gpu-pool run -- true, against python -c pass", ran[0], nothing[0], 8, False)
    yield Row("wall time of it, against a wrapper around lock files", ran[1], locked[1], 1.2, False)
    yield Row("a program's first grant by local://, against python -c pass", granted[1], nothing[1], 10, False)
    rounds = [[jobs_ms(wrapper, folder, environment) for wrapper in (run, locks)] for _ in range(ROUNDS)]
    ours, theirs = (median(times) for times in zip(*rounds, strict=True))
    yield Row("40 jobs of 0.5 s from 4 shells on 4 GPUs, against lock files", ours, theirs, 1.15, False)
    took = hand_overs_ms(environment | {"GPU_BACKEND": "simulated:1"})
    p99 = quantiles(took, n=100)[98]
    print(f"hand-over between local:// programs: median {median(took):.1f} ms, p99 {p99:.1f} ms")
    yield Row("hand-over between local:// programs, p99, against 5 ms", p99, HAND_OVER_MS, 1, False)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        is_reached = print_table(measure(Path(name)), "ms")
    return 0 if is_reached or "--strict" not in sys.argv else 1


if __name__ == "__main__":
    sys.exit(main())
