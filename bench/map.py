"""Measures `gpu-pool map`, as ratios within one run to `xargs -P 8` with the bare command.

    python -m bench.map

`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.table import Row, print_table

TURNS = 9
FEW, MANY = 8, 208
GPU_POOL = [sys.executable, "-m", "gpu_worker_pool"]
MAP = [*GPU_POOL, "map", "-q", "-j", "8", "--", "true"]
XARGS = ["xargs", "-P", "8", "-n", "1", "true"]


def milliseconds(command: Sequence[str], jobs: int, environment: dict[str, str]) -> float:
    arguments = "".join(f"{number}\n" for number in range(jobs))
    begun_at = time.perf_counter()
    subprocess.run(command, input=arguments, text=True, env=environment, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begun_at) * 1000


def measure(folder: Path) -> Iterator[Row]:
    unwanted = ("GPU_", "CUDA_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment = inherited | {"GPU_BACKEND": "simulated:8", "GPU_POOL_STATE_DIR": str(folder)}
    calls = [(MAP, FEW), (MAP, MANY), (XARGS, FEW), (XARGS, MANY), ([*GPU_POOL, "run", "--", "true"], 0)]
    # In turns, so that noise affects all of them; the first turn compiles.
    turns = [[milliseconds(command, jobs, environment) for command, jobs in calls] for _ in range(TURNS + 1)][1:]
    few, many, other_few, other_many, run = (median(times) for times in zip(*turns, strict=True))
    # Starting Python and acquiring a lease take longer than all that xargs does here: bench/cli.py watches that.
    yield Row("200 x true on 8 GPUs, beyond what 8 x true take", many - few, other_many - other_few, 0.5, is_speed=True)
    yield Row("8 x true on 8 GPUs, to one gpu-pool run -- true", few, run, 1.6, is_speed=False)
    yield Row("208 x true on 8 GPUs, with the start of gpu-pool", many, other_many, 0.15, is_speed=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        is_reached = print_table(measure(Path(folder)), "ms")
    if "--strict" in sys.argv and not is_reached:
        sys.exit(1)


if __name__ == "__main__":
    main()
