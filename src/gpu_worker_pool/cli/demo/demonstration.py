"""The demonstration: a server, a dozen workers in several processes, one of which is killed, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.demo.show import LiveShow, PlainShow
from gpu_worker_pool.cli.failures import CommandError
from gpu_worker_pool.cli.tables import is_pretty, print_line
from gpu_worker_pool.cli.views import overview
from gpu_worker_pool.cli.views.http_host import open_http_host
from gpu_worker_pool.cli.views.queries import HostAnswer
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.errors import DriverError, GPUWorkerPoolError
from gpu_worker_pool.hardware.readers.choose import make_reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpu_worker_pool.cli.demo.show import Show
    from gpu_worker_pool.cli.views.http_host import HTTPHost

LONGEST_SECONDS: Final = 19.0
START_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.25
SIMULATED: Final = 4
PROGRAMS: Final = 3
#: So long the one that will be killed has its GPU.
KILL_AFTER_SECONDS: Final = 1.5

WISHES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {},
    {"count": 2},
    {},
    {"memory_mb": 6000, "share": True},
    {"memory_mb": 6000, "share": True},
    {"memory_mb": 6000, "share": True},
    {"priority": 5},
    {"gpu_model": "H100"},
    {"timeout": 0.3},
    {"only": [0]},
)
VICTIM: Final = f"worker {len(WISHES) + 1}"


def demonstrate(*, simulate: int | None, is_plain: bool) -> int:
    backend = f"simulated:{simulate}" if simulate is not None else _backend()
    show: Show = PlainShow() if is_plain or not is_pretty() else LiveShow()
    try:
        return asyncio.run(_demonstrate(backend, show))
    except TimeoutError:
        raise CommandError("the demonstration took too long and was ended; is this machine very busy?") from None


def _backend() -> str:
    """Real GPUs, if there are any."""
    try:
        return "auto" if make_reader("auto", boot_time).read().gpus else f"simulated:{SIMULATED}"
    except DriverError:
        return f"simulated:{SIMULATED}"


async def _demonstrate(backend: str, show: Show) -> int:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-pool-demo-", ignore_cleanup_errors=True))
        stage = _Stage(backend, folder, show)
        stack.enter_context(show)
        async with asyncio.timeout(LONGEST_SECONDS + START_SECONDS):
            url = await stack.enter_async_context(stage.server())
            host = await stack.enter_async_context(open_http_host(EndpointConfig("demo", url)))
            await stage.play(host)
    return stage.sum_up()


class _Stage:
    def __init__(self, backend: str, folder: str, show: Show) -> None:
        self._backend = backend
        self._folder = folder
        self._show = show
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("GPU_", "CUDA_"))
        } | {"GPU_BACKEND": backend, "GPU_POOL_STATE_DIR": folder, "REFRESH_INTERVAL": "0.25"}
        self._outcomes: dict[str, str] = {}
        self._url = ""
        self._free_at_last = ""

    # --- the server ---

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = ["serve", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--no-access-log"]
        self._show.say(f"starting a server: gpu-pool {' '.join(arguments[:5])}")
        process = self._start(arguments, stdout=subprocess.DEVNULL)
        try:
            await _until_listening(port, process)
            self._url = f"http://127.0.0.1:{port}"
            yield self._url
        finally:
            _end(process)

    def _start(self, arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-m", "gpu_worker_pool", *arguments],
            env=self._environment,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    # --- the play ---

    async def play(self, host: HTTPHost) -> None:
        stats = await host.stats()
        kind = "pretended" if self._backend.startswith("simulated") else "real"
        total = len(WISHES) + 1
        self._show.say(f"{stats['gpu_count']} {kind} GPUs; {total} workers in {PROGRAMS + 1} programs want one")
        looking = asyncio.create_task(self._keep_looking(host, total))
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await asyncio.gather(self._victim(host), *(self._program(number) for number in range(PROGRAMS)))
                await asyncio.sleep(2 * LOOK_SECONDS)
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
        free = await host.explain_requirements(ANY_GPU)
        unoccupied = sum(1 for gpu in free["gpus"] if not gpu["obstacles"])
        self._free_at_last = f"{unoccupied} of {len(free['gpus'])} GPUs are free again"

    async def _keep_looking(self, host: HTTPHost, total: int) -> None:
        has_explained = False
        while True:
            with suppress(GPUWorkerPoolError):
                seen = await overview.everything_of(host)
                self._show.see([HostAnswer(host.endpoint, seen, None)], len(self._outcomes), total)
                queue = seen["queue"] or []
                # Not in a moment in which everything is just being given back.
                if not has_explained and len(queue) >= 3 and any("held by" in why for why in queue[-1]["reasons"]):
                    has_explained = True
                    self._explain(queue[-1])
            await asyncio.sleep(LOOK_SECONDS)

    def _explain(self, last: dict[str, Any]) -> None:
        self._show.say(f"why does {last['label']} wait? {last['reasons'][0]}")
        for reason in last["reasons"][1:]:
            self._show.say(f"    {reason}")

    async def _program(self, number: int) -> None:
        """Some of the workers, in a process of their own."""
        draw = random.Random(number)  # noqa: S311  # the same show every time
        workers = [
            {
                "name": f"worker {index + 1}",
                "after": 0.1 * (index // PROGRAMS),
                "seconds": draw.uniform(1.0, 2.5),
                "wishes": requirements,
            }
            for index, requirements in enumerate(WISHES)
            if index % PROGRAMS == number
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpu_worker_pool.cli.demo.worker",
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"endpoint": self._url, "workers": workers}).encode())
            process.stdin.close()
            async for line in process.stdout:
                self._hear(json.loads(line))
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()

    def _hear(self, told: dict[str, Any]) -> None:
        name, what = told["worker"], told["what"]
        match what:
            case "asks":
                self._show.say(f"{name} asks for {_spoken(name)}")
            case "has":
                gpus = ", ".join(map(str, told["gpus"]))
                self._show.say(f"{name} has GPU {gpus} after {told['seconds']:.1f} s")
            case "impossible":
                self._outcomes[name] = "told at once that it is impossible"
                self._show.say(f"{name} is told at once that it can never be granted: {told['text']}")
            case "timed out":
                self._outcomes[name] = "gave up"
                self._show.say(f"{name} gives up after {told['seconds']:.1f} s, as it wanted to")
            case "done":
                self._outcomes[name] = "served"
                self._show.say(f"{name} is done")

    # --- the one that is killed ---

    async def _victim(self, host: HTTPHost) -> None:
        """Without the server, by the same ledger: a command that is killed with all that belongs to it."""
        self._show.say(f"{VICTIM} asks without the server: gpu-pool run -- sleep 60")
        arguments = ["run", "-e", "local://", "--priority", "9", "--label", VICTIM, "--", "sleep", "60"]
        process = self._start(arguments, stdout=subprocess.DEVNULL)
        try:
            lease = await self._lease_of_victim(host)
            gpus = ", ".join(str(gpu["gpu_id"]) for gpu in lease["gpus"])
            self._show.say(f"{VICTIM} has GPU {gpus}")
            await asyncio.sleep(KILL_AFTER_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
            self._show.say(f"{VICTIM} is killed (kill -9), and cannot give back GPU {gpus}")
            killed_at = boot_time()
            while await _is_held(host, lease["lease_id"]):  # noqa: ASYNC110  # nobody tells us
                await asyncio.sleep(0.05)
            self._show.say(f"GPU {gpus} is back {boot_time() - killed_at:.1f} s after {VICTIM} was killed")
            self._outcomes[VICTIM] = "killed"
        finally:
            _end(process)

    async def _lease_of_victim(self, host: HTTPHost) -> dict[str, Any]:
        while True:
            for row in (await host.leases())["leases"]:
                if row["label"] == VICTIM:
                    found: dict[str, Any] = row
                    return found
            await asyncio.sleep(0.05)

    # --- the end ---

    def sum_up(self) -> int:
        outcomes = list(self._outcomes.values())
        told = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        print_line()
        print_line(f"{told}; {self._free_at_last}")
        print_line()
        print_line("Try it yourself, in two shells:")
        if self._backend.startswith("simulated"):
            print_line("  export GPU_BACKEND=simulated:1    pretends to have one GPU")
        print_line("  gpu-pool run -- sleep 30          twice: the second one waits, and is told why")
        print_line("  gpu-pool status                   who has it, who waits")
        print_line("  gpu-pool explain                  why one more would wait")
        return 0 if len(outcomes) == len(WISHES) + 1 else 1


def _spoken(name: str) -> str:
    requirements = WISHES[int(name.removeprefix("worker ")) - 1]
    words = {
        "count": f"{requirements.get('count')} GPUs at once",
        "share": f"{requirements.get('memory_mb')} MB of a GPU, to share",
        "priority": "a GPU, and is more important",
        "gpu_model": f"a GPU called {requirements.get('gpu_model')}",
        "timeout": "a GPU, and has no patience",
        "only": "GPU 0 and no other",
    }
    return next((said for wish, said in words.items() if wish in requirements), "a GPU")


async def _is_held(host: HTTPHost, lease_id: str) -> bool:
    return any(row["lease_id"] == lease_id for row in (await host.leases())["leases"])


async def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if process.poll() is not None:
                raise CommandError("the server did not start; gpu-pool serve says why, gpu-pool doctor what to do")
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
