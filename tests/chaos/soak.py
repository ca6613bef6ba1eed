"""A long run of a server with four workers, under churn, kills, freezes and one full disk; says what grew, and judges.

`python -m tests.chaos.soak [MINUTES]`, or `make soak`. The disk is only filled as root, who may mount a small one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.history import Span
from tests.chaos.server_watch import ServerWatch
from tests.chaos.test_chaos import GPUS, TTL_SECONDS, Workers, all_can_be_had, judge, workers_of
from tests.ledger.disks import fill, mounted
from tests.server_process import ServerProcess

SERVER_WORKERS = 4
#: Until then everything is loaded that is loaded once.
WARM_UP_SECONDS = 20.0
FULL_SECONDS = 10.0
#: What may be more at the end than after the warm-up, whatever the length: caches that fill up, requests remembered.
MOST_GROWTH = {"memory MiB": 60.0, "descriptors": 40, "threads": 8}
#: Large enough for what is remembered: only the soak itself fills it.
DISK_MB = 100
DISK_MB_PER_MINUTE = 40
MOST_DISK_MB = 500
#: A request that has ended is remembered for a day, in about 3 kB, until the ledger has 256 MiB.
BYTES_PER_GRANT = 4_000
LEDGER_BYTES = 8_000_000


@dataclass
class Size:
    memory_mib: float
    descriptors: int
    threads: int
    ledger_bytes: int

    @classmethod
    def of(cls, server: ServerProcess, state: Path) -> Size:
        assert server.process is not None
        pids = _tree(server.process.pid)
        fields = [_status(pid) for pid in pids]
        return cls(
            sum(int(each.get("VmRSS", "0 kB").split()[0]) for each in fields) / 1024,
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),  # noqa: PTH208
            sum(int(each.get("Threads", "0")) for each in fields),
            sum(file.stat().st_size for file in state.glob("ledger-*")),
        )

    def __str__(self) -> str:
        return (
            f"memory {self.memory_mib:.0f} MiB, {self.descriptors} descriptors, {self.threads} threads, "
            f"ledger {self.ledger_bytes / 1e6:.2f} MB"
        )


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def soak(minutes: float) -> list[str]:
    """What is wrong; empty if nothing is."""
    draw = random.Random(29)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        disk: Path | None = folder / "disk"
        try:
            size = min(DISK_MB + DISK_MB_PER_MINUTE * minutes, MOST_DISK_MB)
            stack.enter_context(mounted(folder / "disk", f"{size:.0f}m"))
        except pytest.skip.Exception:
            disk = None
        state = (disk or folder) / "state"
        env = {"GPU_BACKEND": f"simulated:{GPUS}", "LOG_LEVEL": "warning", "WORKERS": str(SERVER_WORKERS)}
        env["GPU_POOL_STATE_DIR"] = str(state)
        server = stack.enter_context(ServerProcess(folder / "server", **env))
        workers = stack.enter_context(workers_of(server.url, folder, folder / "not-used", draw))
        watch = stack.enter_context(ServerWatch(server, TTL_SECONDS / 4))
        ends_at = time.monotonic() + 60 * minutes
        time.sleep(min(WARM_UP_SECONDS, 20 * minutes))
        start = Size.of(server, state)
        print(f"at the start: {start}", flush=True)  # noqa: T201
        away: list[Span] = []
        half = time.monotonic() + (ends_at - time.monotonic()) / 2
        while time.monotonic() < ends_at:
            _trouble(workers, server, draw)
            if disk is not None and not away and time.monotonic() > half:
                away.append(_fill(disk))
        workers.finish()
        grants = workers.granted()
        end = Size.of(server, state)
        print(f"at the end:   {end}; {grants} grants, {len(workers.killed_at)} holders killed", flush=True)  # noqa: T201
        print("the disk was full once" if away else "the disk was not filled: that needs root", flush=True)  # noqa: T201
        # Fault 33: one worker of the server, or a holder, was frozen for longer than a part of the TTL.
        long_pauses = [span for span in workers.paused if span.ended_at - span.begun_at > TTL_SECONDS / 2]
        problems = _grown(start, end, grants)
        try:
            judge(workers, folder / "histories", 10, [*away, *long_pauses, *watch.silences])
            assert len(asyncio.run(all_can_be_had(server.url))) == GPUS, "a GPU has leaked"
            assert "Traceback" not in server.log, server.log[-3000:]
        except AssertionError as problem:
            # Most assertions have no text of their own: then where it was says what is wrong.
            problems.append(str(problem) or "".join(traceback.format_tb(problem.__traceback__)))
        return problems


def _trouble(workers: Workers, server: ServerProcess, draw: random.Random) -> None:
    time.sleep(draw.uniform(0.5, 2.0))
    what = draw.random()
    if what < 0.5:
        workers.kill_one()
    elif what < 0.7:
        workers.pause_one(draw.uniform(0.1, 1.5 * TTL_SECONDS))
    elif what < 0.8:
        assert server.process is not None
        frozen = draw.choice(_tree(server.process.pid)[1:])
        begun_at = time.monotonic()
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(draw.uniform(0.1, TTL_SECONDS))
        # uvicorn replaces a worker process without a sign of life for five seconds, as may happen on a busy machine.
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)
        # It may have been in a transaction, and all who asked it waited.
        workers.paused.append(Span(begun_at, time.monotonic() + TTL_SECONDS))


def _fill(disk: Path) -> Span:
    begun_at = time.monotonic()
    filler = fill(disk)
    time.sleep(FULL_SECONDS)
    filler.unlink()
    return Span(begun_at, time.monotonic() + TTL_SECONDS)


def _grown(start: Size, end: Size, grants: int) -> list[str]:
    found = {
        "memory MiB": end.memory_mib - start.memory_mib,
        "descriptors": end.descriptors - start.descriptors,
        "threads": end.threads - start.threads,
    }
    problems = [
        f"{what}: {by:.0f} more, of {MOST_GROWTH[what]} allowed" for what, by in found.items() if by > MOST_GROWTH[what]
    ]
    if end.ledger_bytes > LEDGER_BYTES + BYTES_PER_GRANT * grants:
        problems.append(f"the ledger has {end.ledger_bytes} bytes after {grants} grants")
    return problems


def main() -> None:
    """The exit status is 1 if something is wrong."""
    problems = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
    print("\n".join(problems) or "nothing grew beyond its limit, no GPU was held twice, none was lost")  # noqa: T201
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
