"""A program that uses this host's broker, as one with `local://` does: it takes commands line by line, answers in JSON.

Run as `python -m tests.integration.broker_process STATE_DIR BACKEND`, then give it lines such as `acquire name 5` and
`release lease-1`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core import Lease, PoolSettings, Request
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.hardware.processes import name_of_this_process


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps({"at": boot_time(), **what}) + "\n")
    sys.stdout.flush()


class Program:
    def __init__(self, state_dir: str, backend: str) -> None:
        self._place = state_dir, backend
        self._process = name_of_this_process()

    async def acquire(self, name: str, wait_seconds: str, ttl_seconds: str = "60") -> None:
        request = Request(name, worker_id=name, owner="me", ttl_seconds=float(ttl_seconds), process=self._process)
        found = await self._host.broker.acquire(request, wait_seconds=float(wait_seconds))
        if isinstance(found, Lease):
            say(lease=found.lease_id, gpus=found.gpu_ids, state=found.state, name=name, fence=found.fence)
        else:
            say(position=found.position, reasons=found.reasons, name=name)

    async def release(self, lease_id: str) -> None:
        await self._host.broker.release(lease_id, "me")
        say(released=lease_id)

    async def renew(self, lease_id: str) -> None:
        lease = await self._host.broker.renew(lease_id, "me")
        say(renewed=lease.lease_id)

    async def cycles(self, name: str, number: str) -> None:
        """Take a GPU, hold it for a moment, give it back; so many times."""
        for each in range(int(number)):
            request = Request(f"{name}-{each}", worker_id=name, owner="me", ttl_seconds=30.0, process=self._process)
            lease = await self._host.broker.acquire(request, wait_seconds=20.0)
            while not isinstance(lease, Lease):
                lease = await self._host.broker.acquire(request, wait_seconds=20.0)
            held_from = boot_time()
            await asyncio.sleep(0.002 * (each % 5))
            held_until = boot_time()
            await self._host.broker.release(lease.lease_id, "me")
            say(gpus=lease.gpu_ids, fence=lease.fence, held=[held_from, held_until])
        say(done=name)

    async def run(self) -> None:
        state_dir, backend = self._place
        settings = PoolSettings(offer_ttl_seconds=1.0, poll_seconds=1.0)
        self._host = LocalBroker(backend, state_dir=state_dir, settings=settings)
        await self._host.start()
        say(started=True)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while request_class := await asyncio.to_thread(sys.stdin.readline):
                command, *arguments = request_class.split()
                tasks.add(asyncio.create_task(self._do(command, arguments)))
        finally:
            for task in tasks:
                task.cancel()
            await self._host.stop()

    async def _do(self, command: str, arguments: list[str]) -> None:
        try:
            await getattr(self, command)(*arguments)
        except GPUWorkerPoolError as error:
            say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    asyncio.run(Program(*sys.argv[1:]).run())
