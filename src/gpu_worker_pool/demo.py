"""`make demo`: a dozen workers with different wishes share four pretended GPUs for a few seconds. Needs no hardware."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from gpu_worker_pool.core import ProcessReading, Reading
from gpu_worker_pool.errors import ImpossibleRequestError, WorkerTimeoutError
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager

GPU_COUNT = 4
MEMORY_TOTAL_MB = 24_000.0
READING_SECONDS = 0.2
#: What makes a shared GPU hard: a model is loaded some time after the GPU was given out.
LOADING_SECONDS = 0.4


@dataclass
class PretendedHost:
    """Four GPUs whose load follows the workers, and an outsider who never asked anybody."""

    #: Memory in use, by GPU and by whom.
    memory_mb: dict[int, dict[str, float]] = field(default_factory=lambda: {index: {} for index in range(GPU_COUNT)})

    def readings(self) -> list[Reading]:
        return [
            Reading(
                gpu_id=str(index),
                index=index,
                name="Pretended GPU 24GB",
                memory_total_mb=MEMORY_TOTAL_MB,
                memory_used_mb=sum(used.values()),
                utilization_percent=95.0 if used else 0.0,
                processes=tuple(ProcessReading(hash(who) % 30_000, name=who) for who in used),
            )
            for index, used in self.memory_mb.items()
        ]


@dataclass
class Show:
    """Says what happens, one line at a time, with the time it happened."""

    begun_at: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self.begun_at:5.1f} s  {text}\n")
        sys.stdout.flush()


async def work(
    name: str, manager: WorkerPoolManager, host: PretendedHost, show: Show, seconds: float, wishes: dict[str, Any]
) -> str:
    asked_at = time.monotonic()
    told = manager.explain(**{key: value for key, value in wishes.items() if key != "timeout"})
    show.say(f"{name:<9} asks: {told.summary}")
    try:
        assignment = await manager.request_gpu(**wishes)
    except ImpossibleRequestError as error:
        show.say(f"{name:<9} is told at once: {error}")
        return "impossible"
    except WorkerTimeoutError:
        show.say(f"{name:<9} gives up after {time.monotonic() - asked_at:.1f} s")
        return "timed out"
    waited = time.monotonic() - asked_at
    indices = assignment.local_gpu_ids
    show.say(f"{name:<9} has GPU {', '.join(map(str, indices))} after {waited:.1f} s")
    await asyncio.sleep(LOADING_SECONDS)
    for index in indices:
        host.memory_mb[index][name] = wishes.get("memory_mb", 18_000.0)
    await asyncio.sleep(seconds)
    for index in indices:
        del host.memory_mb[index][name]
    await manager.release_gpu(assignment)
    show.say(f"{name:<9} is done")
    return "served"


async def run() -> None:
    host, show = PretendedHost(), Show()
    draw = random.Random(7)  # noqa: S311  # the same show every time
    manager = WorkerPoolManager(on_reading_wanted=lambda _: manager.observe(host.readings()))

    async def keep_reading() -> None:
        while True:
            manager.observe(host.readings())
            await asyncio.sleep(READING_SECONDS)

    async with manager:
        reader = asyncio.create_task(keep_reading())
        host.memory_mb[3]["notebook"] = 22_000.0
        await asyncio.sleep(0)
        show.say("four GPUs; somebody's notebook fills GPU 3 and never asked anybody")
        wishes: list[dict[str, Any]] = [
            {},
            {},
            {"count": 2},
            {},
            {"memory_mb": 6_000, "share": True},
            {"memory_mb": 6_000, "share": True},
            {"memory_mb": 6_000, "share": True},
            {"priority": 5},
            {"gpu_model": "H100"},
            {"timeout": 0.2},
            {"only": [3]},
            {},
        ]
        workers = []
        for number, wish in enumerate(wishes, 1):
            seconds = draw.uniform(0.8, 2.0)
            workers.append(asyncio.create_task(work(f"worker {number}", manager, host, show, seconds, wish)))
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.3)
        status = manager.get_pool_status()
        show.say(f"now {status.active_workers} hold a GPU and {status.blocked_workers} wait")
        show.say("why would one more wait?")
        for line in str(manager.explain()).splitlines():
            show.say(f"    {line}")
        await asyncio.sleep(1.0)
        del host.memory_mb[3]["notebook"]
        show.say("the notebook is closed: GPU 3 is seen to be free, and granted")
        outcomes = await asyncio.gather(*workers)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        manager.observe(host.readings())
        status = manager.get_pool_status()
        summary = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        show.say(f"{summary}; {status.available_gpus} of {status.total_gpus} GPUs are free again")


if __name__ == "__main__":
    asyncio.run(run())
