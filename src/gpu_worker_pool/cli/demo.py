"""`gpu-pool demo`: starts a server, sends a dozen workers to it, kills one of them, and prints what happens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool import GPUWorkerPoolClient, ImpossibleRequestError, WorkerTimeoutError
from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.output import print_line, printable
from gpu_worker_pool.cli.own_command import own_command
from gpu_worker_pool.cli.tables import is_pretty, make_console, make_table
from gpu_worker_pool.cli.views import overview
from gpu_worker_pool.cli.views.queries import open_hosts, opened, query_hosts
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.obstacles import ObstacleKind
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.errors import DriverError, GPUWorkerPoolError
from gpu_worker_pool.hardware.readers.choose import make_reader
from gpu_worker_pool.hardware.readers.simulated import OUTSIDERS_VARIABLE, SimulatedHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.live import Live

    from gpu_worker_pool.cli.views.queries import Host

LONGEST_SECONDS: Final = 29.0
KILL_AFTER_SECONDS: Final = 1.5

#: What each worker asks for: in words, and as arguments of `request_gpu`.
WORKERS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("a GPU", {}),
    ("a GPU", {}),
    ("2 GPUs at once", {"count": 2}),
    ("a GPU", {}),
    *(("6000 MB of a shared GPU", {"memory_mb": 6000, "share": True}),) * 3,
    ("a GPU, with a higher priority", {"priority": 5}),
    ("an H100", {"gpu_model": "H100"}),
    ("a GPU within 0.3 s", {"timeout": 0.3}),
    ("GPU 0 and no other", {"only": [0]}),
)
#: With fewer simulated GPUs, all of them are needed for the workers.
FEWEST_WITH_NOTEBOOK: Final = 3
VICTIM: Final = f"worker {len(WORKERS) + 1}"


def demonstrate(*, simulate: int | None, is_plain: bool) -> int:
    backend = f"simulated:{simulate}" if simulate is not None else _backend()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-pool-demo-", ignore_cleanup_errors=True))
        live: Live | None = None
        if is_pretty() and not is_plain:
            from rich.live import Live

            live = stack.enter_context(Live(console=make_console(), auto_refresh=False))
        demo = Demo(backend, folder, live)
        try:
            asyncio.run(demo.run())
        except TimeoutError:
            raise CommandError("the demo took too long and was stopped; is this machine very busy?") from None
    return demo.sum_up()


def _backend() -> str:
    """Real GPUs, if there are any; else four for the workers, and one with a notebook."""
    with suppress(DriverError):
        if make_reader("auto", boot_time).read().gpus:
            return "auto"
    return "simulated:5"


class Demo:
    def __init__(self, backend: str, folder: str, live: Live | None) -> None:
        self._kind = "simulated" if backend.startswith("simulated") else "real"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_", "CUDA_"))}
        self._environment = inherited | {"GPU_BACKEND": backend, "GPU_POOL_STATE_DIR": folder}
        #: Real GPUs may have real outsiders, which would keep the workers waiting for too long.
        self._requirements = Requirements(policy="idle") if self._kind == "simulated" else ANY_GPU
        if self._kind == "simulated" and (count := SimulatedHost.parse(backend).count) >= FEWEST_WITH_NOTEBOOK:
            self._environment[OUTSIDERS_VARIABLE] = f"{count - 1}:15GiB"
        self._live = live
        self._begun_at = time.monotonic()
        self._events: deque[str] = deque(maxlen=12)
        #: By worker.
        self._outcomes: dict[str, str] = {}
        self._free_at_the_end = ""

    async def run(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._say(f"starting a server: gpu-pool serve --host 127.0.0.1 --port {port}")
        server = self._start("serve", "--host", "127.0.0.1", "--port", port, REFRESH_INTERVAL="0.25")
        try:
            async with asyncio.timeout(LONGEST_SECONDS), open_hosts([f"demo=http://127.0.0.1:{port}"]) as (host,):
                await self._play(opened(host), server)
        finally:
            _kill(server)

    async def _play(self, host: Host, server: subprocess.Popen[bytes]) -> None:
        gpu_count = await self._wait_for_server(host, server)
        self._say(f"{gpu_count} {self._kind} GPUs; {len(WORKERS) + 1} workers in 2 programs ask for them")
        for gpu, why in await self._left_alone(host):
            self._say(f"GPU {gpu} is left alone: {why}, without a lease")
        watcher = asyncio.create_task(self._watch(host))
        try:
            async with GPUWorkerPoolClient(host.endpoint.url, polling_interval=0.5, environ={}) as client:
                await asyncio.gather(self._victim(host), *(self._work(client, n) for n in range(len(WORKERS))))
            await asyncio.sleep(0.5)  # until the last load is gone
        finally:
            watcher.cancel()
        gpus = (await host.explain_requirements(self._requirements))["gpus"]
        self._free_at_the_end = f"{sum(not gpu['obstacles'] for gpu in gpus)} of {len(gpus)} GPUs are free again"
        for gpu, why in await self._left_alone(host):
            self._free_at_the_end += f", and GPU {gpu} was left alone: {why}"

    async def _left_alone(self, host: Host) -> list[tuple[int, str]]:
        """GPUs that outsiders use, and who they are."""
        return [
            (gpu["gpu_id"], obstacle["text"])
            for gpu in (await host.explain_requirements(self._requirements))["gpus"]
            for obstacle in gpu["obstacles"]
            if obstacle["kind"] == ObstacleKind.FOREIGN_PROCESS
        ]

    async def _wait_for_server(self, host: Host, server: subprocess.Popen[bytes]) -> int:
        while server.poll() is None:
            with suppress(GPUWorkerPoolError):
                count: int = (await host.stats())["gpu_count"]
                return count
            await asyncio.sleep(0.05)
        raise CommandError("the server did not start; gpu-pool serve says why, gpu-pool doctor what to do")

    async def _work(self, client: GPUWorkerPoolClient, number: int) -> None:
        name, (words, requirements) = f"worker {number + 1}", WORKERS[number]
        await asyncio.sleep(0.1 * (number // 3))
        self._say(f"{name} asks for {words}")
        asked_at = time.monotonic()
        try:
            assignment = await client.request_gpu(label=name, policy=self._requirements.policy, **requirements)
        except ImpossibleRequestError as error:
            self._finish(name, "rejected at once", "; ".join(error.reasons) or str(error))
        except WorkerTimeoutError:
            self._finish(name, "gave up", f"after {time.monotonic() - asked_at:.1f} s")
        else:
            gpus = ", ".join(map(str, assignment.local_gpu_ids))
            self._say(f"{name} has GPU {gpus} after {time.monotonic() - asked_at:.1f} s")
            await asyncio.sleep(random.Random(number).uniform(1.0, 2.5))  # noqa: S311  # the same show every time
            await client.release_gpu(assignment)
            self._finish(name, "served", f"releases GPU {gpus}")

    async def _victim(self, host: Host) -> None:
        """Asks without the server, on the same ledger, and is killed with everything it started."""
        self._say(f"{VICTIM} asks without the server: gpu-pool run -- sleep 60")
        process = self._start("run", "-e", "local://", "--priority", "9", "--label", VICTIM, "--", "sleep", "60")
        try:
            gpus = await self._wait_for_victims_lease(host, is_held=True)
            self._say(f"{VICTIM} has GPU {gpus}")
            await asyncio.sleep(KILL_AFTER_SECONDS)
        finally:
            _kill(process)
        self._say(f"{VICTIM} is killed (kill -9) and cannot release GPU {gpus}")
        killed_at = time.monotonic()
        await self._wait_for_victims_lease(host, is_held=False)
        self._finish(VICTIM, "killed", f"GPU {gpus} is back {time.monotonic() - killed_at:.1f} s later")

    async def _wait_for_victims_lease(self, host: Host, *, is_held: bool) -> str:
        while True:
            leases = [row for row in (await host.leases())["leases"] if row["label"] == VICTIM]
            if bool(leases) == is_held:
                return ", ".join(str(gpu["gpu_id"]) for row in leases for gpu in row["gpus"])
            await asyncio.sleep(0.05)

    async def _watch(self, host: Host) -> None:
        has_explained = False
        while True:
            (seen,) = await query_hosts([host], overview.everything_of)
            if seen.error is None:
                self._draw(overview.parts([seen]))
                reasons = next((row["reasons"] for row in (seen.body["queue"] or [])[2:]), ())
                if not has_explained and any("held by" in reason for reason in reasons):
                    has_explained = True
                    self._say(f"why does {seen.body['queue'][2]['label']} wait? " + "\n             ".join(reasons))
            await asyncio.sleep(0.25)

    def _start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-P", "-m", "gpu_worker_pool", *arguments],
            env=self._environment | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _finish(self, name: str, outcome: str, details: str) -> None:
        self._outcomes[name] = outcome
        self._say(f"{name}: {outcome}, {details}")

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._begun_at:5.1f} s  {text}"
        self._events.extend(line.splitlines())
        if self._live is None:
            for each in line.splitlines():
                print_line(each)
            sys.stdout.flush()

    def _draw(self, parts: Sequence[overview.Part]) -> None:
        if self._live is None:
            return
        from rich.console import Group
        from rich.text import Text

        tables = [make_table(part.columns, part.rows, title=part.title) for part in parts if part.rows]
        progress = Text(f"{len(self._outcomes)} of {len(WORKERS) + 1} workers are done", style="green")
        events = Text(printable("\n".join(self._events)), style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(progress, *tables, events), refresh=True)

    def sum_up(self) -> int:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(self._outcomes.values()).items()))
        gpu_pool = own_command()
        commands = {
            "export GPU_BACKEND=simulated:1": "simulate one GPU",
            f"{gpu_pool} run -- sleep 30": "in both: the second one waits, and says why",
            f"{gpu_pool} status": "who holds the GPU, who waits",
            f"{gpu_pool} explain": "why one more request would wait",
        }
        if self._kind != "simulated":
            del commands["export GPU_BACKEND=simulated:1"]
        width = max(map(len, commands))
        lines = [f"  {command.ljust(width)}   {why}" for command, why in commands.items()]
        is_relative = os.sep in gpu_pool and not gpu_pool.lstrip("'").startswith(os.sep)
        where = " in this folder" if is_relative else ""
        for line in ("", f"{counts}; {self._free_at_the_end}", "", f"Try it yourself, in two shells{where}:", *lines):
            print_line(line)
        return 0 if len(self._outcomes) == len(WORKERS) + 1 else 1


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
