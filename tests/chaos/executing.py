"""A program whose executor does numbered tasks, and writes down how each of them ended.

`python -m tests.chaos.executing FOLDER RETRIES PACE`; a task takes about PACE seconds. The numbers of the tasks come on
standard input.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path

from gpu_worker_pool import GPUProcessPoolExecutor


def note(folder: str, name: str, **entry: object) -> None:
    """One line, whatever is killed meanwhile."""
    file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (json.dumps(entry) + "\n").encode())
    os.close(file)


def task(folder: str, number: int, pace: float) -> int:
    """Uses its GPU as if it were the only one, and says so if it is not."""
    gpu, pid = os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()
    mine = Path(folder, f"gpu-{gpu}.user")
    note(folder, "begun.jsonl", task=number, pid=pid, gpu=gpu)
    if mine.exists() and (other := mine.read_text()) and is_alive(int(other), pid):
        note(folder, "crimes.jsonl", crime=f"GPU {gpu} is used by {other} and by {pid}")
    mine.write_text(str(pid))
    time.sleep(random.choice([0.0, pace, 2 * pace]))
    mine.unlink()
    note(folder, "done.jsonl", task=number, pid=pid)
    return number


def is_alive(pid: int, besides: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return pid != besides and state not in "ZX"


def main(folder: str, retries: str, pace: str) -> None:
    numbers = json.loads(sys.stdin.read())
    with GPUProcessPoolExecutor(retries=int(retries), idle_release=1.0) as pool:
        futures = {pool.submit(task, folder, number, float(pace)): number for number in numbers}
        for future in as_completed(futures):
            error = future.exception()
            note(
                folder,
                "ended.jsonl",
                task=futures[future],
                program=os.getpid(),
                value=None if error else future.result(),
                error=type(error).__name__ if error else None,
                why=str(error) if error else None,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
