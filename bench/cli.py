"""Measures the command line, as ratios within one run to the start of an empty Python program.

    make bench

`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median

from bench.table import Row, print_table

TURNS = 15
GRANTS = 5
NOTHING = [sys.executable, "-c", "pass"]
GPU_POOL = [sys.executable, "-m", "gpu_worker_pool"]
#: Prints when it started, and runs long enough to be observed.
CLOCK = ["sh", "-c", "date +%s.%N; exec sleep 1"]
#: The longest time `run` may take from the grant to the start of the command.
START_MS = 150.0


def milliseconds(command: Sequence[str], environment: dict[str, str]) -> float:
    begun_at = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begun_at) * 1000


def side_by_side(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[float]:
    """The median of each. They run in turns, so that noise affects all of them."""
    turns = [[milliseconds(command, environment) for command in commands] for _ in range(TURNS + 1)]
    return [median(times) for times in zip(*turns[1:], strict=True)]  # the first turn compiles


def from_grant_to_start_ms(environment: dict[str, str]) -> float:
    """For a waiting `run`: from the grant in the ledger to the start that the command printed."""
    holder = subprocess.Popen([*GPU_POOL, "run", "--", "sleep", "2"], env=environment)
    time.sleep(1)
    command = [*GPU_POOL, "run", "-q", "--", *CLOCK]
    waiter = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert waiter.stdout is not None
    started_at = float(waiter.stdout.readline())
    told = subprocess.run([*GPU_POOL, "leases", "--json"], env=environment, capture_output=True, text=True, check=True)
    (lease,) = json.loads(told.stdout)["leases"]
    holder.wait()
    waiter.wait()
    return (started_at - datetime.fromisoformat(lease["granted_at"]).timestamp()) * 1000


@contextmanager
def server(environment: dict[str, str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["serve", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--no-access-log"]
    process = subprocess.Popen([*GPU_POOL, *arguments], env=environment)
    try:
        look = [*GPU_POOL, "leases", "-e", f"http://127.0.0.1:{port}"]
        while subprocess.run(look, env=environment, capture_output=True, check=False).returncode:
            if process.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def measure(folder: Path) -> Iterator[Row]:
    # An installed program is already compiled.
    unwanted = ("GPU_", "CUDA_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment = inherited | {"GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(folder)}
    run, help_ = [*GPU_POOL, "run", "--", "true"], [*GPU_POOL, "--help"]
    nothing, helped, ran = side_by_side([NOTHING, help_, run], environment)
    yield Row("gpu-pool --help", helped, nothing, 6, is_speed=False)
    # 0.26 s where `python -c pass` takes 0.02 s: as long as the nearest peer takes.
    yield Row("gpu-pool run -- true, a GPU is free", ran, nothing, 13, is_speed=False)
    with server(environment) as url:
        nothing, ran = side_by_side([NOTHING, [*GPU_POOL, "run", "-e", url, "--", "true"]], environment)
    yield Row("the same by a server", ran, nothing, 30, is_speed=False)
    waits = [from_grant_to_start_ms(environment) for _ in range(GRANTS)]
    yield Row("from the grant to the start of the command that waited", max(waits), START_MS, 1, is_speed=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        is_reached = print_table(measure(Path(folder)), "ms")
    if "--strict" in sys.argv and not is_reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
