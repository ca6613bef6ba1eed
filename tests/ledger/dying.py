"""Grants GPUs until it is killed, at every write there is, one process each: `python -m tests.ledger.dying FOLDER`.

What was promised to somebody, it writes down at once: that must be in the ledger afterwards.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gpu_worker_pool.core import Cancelled, Effect, Granted, PoolSettings, Released, Renewed, Requested
from gpu_worker_pool.ledger import Committed
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.testing import gpus, snapshot
from tests.ledger.disks import DiesAt, WatchedDisk
from tests.ledger.places import request

BOOT_ID = "a boot"
SURVIVED = "survived"
MOST_CALLS = 2000


async def grant_gpus(folder: Path, settings: PoolSettings | None = None) -> None:
    now = 1000.0
    written_down = os.open(folder / "promised", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write_down(*words: str) -> None:
        os.write(written_down, (" ".join(words) + "\n").encode())

    def told(committed: Committed) -> None:
        for effect in committed.effects:
            if isinstance(effect, Granted):
                lease = effect.lease
                write_down("granted", lease.request.request_id, lease.lease_id, ",".join(lease.gpu_ids))

    def held(effects: tuple[Effect, ...]) -> str:
        return next(effect.lease.lease_id for effect in effects if isinstance(effect, Granted))

    ledger = SQLiteLedger(
        folder / "ledger.db", settings or PoolSettings(), told, clock=lambda: now, boot_id=BOOT_ID, first_fence=0
    )
    await ledger.submit(snapshot(gpus(3), at=now))
    first = held(await ledger.submit(Requested(request("first"))))
    both = await asyncio.gather(*(ledger.submit(Requested(request(name))) for name in ("second", "third")))
    await ledger.submit(Requested(request("waits", count=2)))
    await ledger.submit(Requested(request("gives-up")))
    await ledger.submit(Cancelled("gives-up"))
    write_down("ended", "gives-up")
    now += 1.0
    await ledger.submit(Renewed(first))
    await asyncio.gather(ledger.submit(Released(first)), ledger.submit(Released(held(both[0]))))
    write_down("ended", "first")
    write_down("ended", "second")
    now += 0.1
    await ledger.submit(snapshot(gpus(3), at=now))
    await ledger.close()
    write_down(SURVIVED)


def main() -> None:
    folder = Path(sys.argv[1])
    for is_after in (False, True):
        for number in range(1, MOST_CALLS):
            place = folder / f"{'after' if is_after else 'before'}-{number}"
            place.mkdir()
            pid = os.fork()
            if pid == 0:
                disk = WatchedDisk(DiesAt(number, is_after=is_after))
                asyncio.run(grant_gpus(place))
                disk.unregister()
                os._exit(0)
            os.waitpid(pid, 0)
            if (place / "promised").exists() and SURVIVED in (place / "promised").read_text():
                break


if __name__ == "__main__":
    main()
