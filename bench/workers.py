"""Measures worker processes with a GPU each, as ratios within one run, on simulated GPUs.

    make bench

`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.table import Row, print_table
from gpu_worker_pool import GPUProcessPoolExecutor

GPUS = 4
#: More than are used one after the other: a GPU that was just given back is not free at once.
MANY_GPUS = 64
TASKS = 1000
TURNS = 5


def ours() -> Executor:
    return GPUProcessPoolExecutor(GPUS)


def theirs(workers: int = GPUS) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def nothing(_: object = None) -> None:
    pass


def until(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.1)


def seconds_of_tasks(pool: Executor) -> float:
    begun = time.perf_counter()
    for future in [pool.submit(nothing) for _ in range(TASKS)]:
        future.result()
    return time.perf_counter() - begun


def seconds_of_a_start(pool: Executor, end: Path) -> float:
    """All of its workers are busy until the file exists: a further one is started for the task."""
    pool.submit(until, str(end))
    time.sleep(0.2)
    begun = time.perf_counter()
    pool.submit(nothing).result()
    return time.perf_counter() - begun


def seconds_from_nothing(make: Callable[[], Executor]) -> float:
    begun = time.perf_counter()
    with make() as pool:
        pool.submit(nothing).result()
        return time.perf_counter() - begun


def best_of(measure: Callable[[Executor], float], mine: Executor, other: Executor) -> tuple[float, float]:
    with mine, other:
        for pool in (mine, other):  # all workers have started
            list(pool.map(time.sleep, [0.5] * GPUS))
        measured = [(measure(mine), measure(other)) for _ in range(TURNS)]
    return min(each for each, _ in measured), min(each for _, each in measured)


def starts(end: Path) -> tuple[float, float]:
    with GPUProcessPoolExecutor(TURNS + 1) as mine, theirs(TURNS + 1) as other:
        for pool in (mine, other):
            pool.submit(nothing).result()
        measured = [(seconds_of_a_start(mine, end), seconds_of_a_start(other, end)) for _ in range(TURNS)]
        end.touch()
    return min(each for each, _ in measured), min(each for _, each in measured)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"GPU_BACKEND": f"simulated:{GPUS}", "GPU_POOL_STATE_DIR": folder}
        tasks = best_of(seconds_of_tasks, ours(), theirs())
        os.environ["GPU_BACKEND"] = f"simulated:{MANY_GPUS}"
        start = starts(Path(folder) / "end")
        cold = min(seconds_from_nothing(ours) for _ in range(3)), min(seconds_from_nothing(theirs) for _ in range(3))
    print(f"from nothing to the first result: {cold[0] * 1e3:.0f} ms, ProcessPoolExecutor {cold[1] * 1e3:.0f} ms")
    what = f"{TASKS:,} empty tasks on {GPUS} GPUs, against ProcessPoolExecutor"
    rows = [
        Row(what, tasks[0] * 1e3, tasks[1] * 1e3, 0.5, is_speed=True),
        Row(
            "start of a worker, against one of ProcessPoolExecutor", start[0] * 1e3, start[1] * 1e3, 1.3, is_speed=False
        ),
    ]
    is_reached = print_table(rows, "ms")
    return int("--strict" in sys.argv and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
