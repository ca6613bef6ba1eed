"""A worker that takes a GPU, holds it for a moment and gives it back, over and over, and writes down what it saw.

`python -m tests.chaos.worker ENDPOINT FOLDER NUMBER SEED TTL quick|slow`; ends its turn when standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.errors import GPUWorkerPoolError, StaleAssignmentError

#: Much less than what is left of a lease when its renewal is due.
STALL_SECONDS = 0.3


async def main(endpoint: str, folder: str, number: str, seed: str, ttl: str, pace: str) -> None:
    draw = random.Random(seed)  # which work takes how long
    file = os.open(Path(folder, f"worker-{number}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    is_over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=watch, daemon=True).start()

    def note(what: str, request: str, at: float | None = None, **more: object) -> None:
        line = json.dumps({"what": what, "request": request, "at": time.monotonic() if at is None else at, **more})
        os.write(file, f"{line}\n".encode())

    def watch_stalls() -> None:
        """Also for who is paused, or gets no processor: that it loses its lease is no wonder then."""
        while True:
            since = time.monotonic()
            time.sleep(0.05)
            if time.monotonic() - since > STALL_SECONDS:
                note("stalled", "", since=since)

    threading.Thread(target=watch_stalls, daemon=True).start()

    async with GPUWorkerPoolClient(
        endpoint, lease_ttl=float(ttl), worker_timeout=120.0, polling_interval=0.5
    ) as client:
        serial = 0
        while not is_over.is_set():
            serial += 1
            request = f"{number}-{serial}"
            note("asked", request)
            try:
                assignment = await client.request_gpu()
            except GPUWorkerPoolError as error:
                note("refused", request, why=f"{type(error).__name__}: {error}")
                continue
            note("granted", request, gpu=assignment.gpu_uuids[0], fence=assignment.fence)
            # Those that are slow hold it for so long that it must be renewed.
            is_slow = pace == "slow"
            await asyncio.sleep(draw.uniform(1.0, 4.0) if is_slow else draw.choice([0.0, 0.0, 0.002, 0.01, 0.03]))
            if assignment.lost:
                note("lost", request)
            note("releasing", request)
            try:
                await client.release_gpu(assignment)
            except StaleAssignmentError:
                note("lost", request)
            except GPUWorkerPoolError as error:
                note("release failed", request, why=str(error))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
