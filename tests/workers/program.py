"""A program with an executor, for tests that end it: `python -m tests.workers.program WHAT …`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from gpu_worker_pool import GPUProcessPoolExecutor
from tests.workers import tasks


def wait_in_a_task(path: str) -> None:
    """Until there is the file, or something ends this program."""
    with GPUProcessPoolExecutor(1) as pool:
        pool.submit(tasks.wait_for, path).result()


def wait_uninterrupted(path: str) -> None:
    """In a task that is deaf to SIGTERM."""
    with GPUProcessPoolExecutor(1) as pool:
        pool.submit(tasks.wait_deaf, path).result()


def wait_beside_a_fork(path: str) -> None:
    """A child that was forked after the executor had started, and that outlives this program."""
    with GPUProcessPoolExecutor(1) as pool:
        pool.submit(tasks.whoami).result()
        if (pid := os.fork()) == 0:
            signal.pause()
        Path(path).with_name(f"fork.{pid}").touch()
        pool.submit(tasks.wait_for, path).result()


def save_when_interrupted(path: str) -> None:
    with GPUProcessPoolExecutor(1) as pool:
        futures = [pool.submit(tasks.note_interrupt, path), *(pool.submit(time.sleep, 60) for _ in range(20))]
        futures[0].result()


def interrupted_without_a_block(path: str) -> None:
    pool = GPUProcessPoolExecutor(1)
    futures = [pool.submit(tasks.note_interrupt, path), *(pool.submit(time.sleep, 60) for _ in range(20))]
    futures[0].result()


def end_without_shutdown(path: str) -> None:
    """Its tasks are finished all the same."""
    pool = GPUProcessPoolExecutor(1)
    futures = [pool.submit(tasks.append_line, path, str(number)) for number in range(5)]
    del futures


if __name__ == "__main__":
    # Where tests run in the background of a script, a shell has had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](*sys.argv[2:])
