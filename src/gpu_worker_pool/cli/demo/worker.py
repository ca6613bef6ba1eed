"""One of the demonstration's programs: a few workers that share a client, as in anybody's own program.

Reads what they want from stdin, and tells on stdout what happens to them; both JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient, ImpossibleRequestError, WorkerTimeoutError


def tell(name: str, what: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"worker": name, "what": what, **facts}) + "\n")
    sys.stdout.flush()


async def work(
    client: GPUWorkerPoolClient, name: str, after: float, seconds: float, requirements: dict[str, Any]
) -> None:
    await asyncio.sleep(after)
    begun_at = time.monotonic()
    tell(name, "asks")
    try:
        assignment = await client.request_gpu(label=name, **requirements)
    except ImpossibleRequestError as error:
        tell(name, "impossible", text="; ".join(error.reasons) or str(error))
        return
    except WorkerTimeoutError:
        tell(name, "timed out", seconds=time.monotonic() - begun_at)
        return
    tell(name, "has", gpus=list(assignment.local_gpu_ids), seconds=time.monotonic() - begun_at)
    await asyncio.sleep(seconds)
    await client.release_gpu(assignment)
    tell(name, "done")


async def main() -> None:
    job = json.load(sys.stdin)
    async with GPUWorkerPoolClient(service_endpoint=job["endpoint"], polling_interval=0.5, environ={}) as client:
        tell("", "ready")
        await asyncio.gather(*(work(client, **worker) for worker in job["workers"]))


if __name__ == "__main__":
    asyncio.run(main())
