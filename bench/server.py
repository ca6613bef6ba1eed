"""Measures the server, as ratios within one run, with real processes on this machine and simulated GPUs.

It compares the CPU time of the server's process, which a slow client does not change.
`--strict` makes it exit with 1 if a target is missed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.nvml import FakeNVML, fake_gpus

from bench.table import Row, print_table

REQUESTS = 6_000
CONNECTIONS = 16
TURNS = 5
LISTENERS = 1_000

BARE = """
import os
BODY = open(os.environ["BARE_BODY"], "rb").read()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})
"""
OURS = ["-m", "gpu_worker_pool.gpu_server"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(arguments: list[str], folder: Path, **env: str) -> Iterator[tuple[int, int]]:
    """Its pid and port."""
    port = free_port()
    own = {"HOST": "127.0.0.1", "PORT": str(port), "RELOAD": "false", "ACCESS_LOG": "false", "LOG_LEVEL": "warning"}
    process = subprocess.Popen(
        [sys.executable, *(argument.replace("{port}", str(port)) for argument in arguments)],
        cwd=folder,
        env=os.environ | own | {"GPU_POOL_STATE_DIR": str(folder)} | env,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        time.sleep(0.5)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(20)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fetch(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received.partition(b"\r\n\r\n")[2]


def microseconds_a_request(pid: int, port: int, path: str) -> float:
    """A ratio of the server's CPU time."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    begun = processor_seconds(pid)
    for _ in range(REQUESTS // CONNECTIONS):
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            connection.recv(65536)
    used = processor_seconds(pid) - begun
    for connection in connections:
        connection.close()
    return used / REQUESTS * 1e6


def measure_summary(folder: Path) -> Row:
    (folder / "bare.py").write_text(BARE)
    bare = ["-m", "uvicorn", "bare:app", "--port", "{port}", "--no-access-log", "--log-level", "warning"]
    bare += ["--http", "httptools"]
    with server(OURS, folder, GPU_BACKEND="simulated:8") as (our_pid, our_port):
        (folder / "body").write_bytes(fetch(our_port, "/gpu/summary"))
        with server(bare, folder, BARE_BODY=str(folder / "body")) as (bare_pid, bare_port):
            ours, theirs = [], []
            for _ in range(TURNS):
                ours.append(microseconds_a_request(our_pid, our_port, "/gpu/summary"))
                theirs.append(microseconds_a_request(bare_pid, bare_port, "/gpu/summary"))
    return Row("GET /gpu/summary (8 GPUs) against a bare ASGI application", min(ours), min(theirs), 0.5, is_speed=True)


def measure_listeners(folder: Path) -> Row:
    """The CPU time that a thousand streams add to the server, at one sample per second of 8 GPUs."""
    with server(OURS, folder, GPU_BACKEND="simulated:8", REFRESH_INTERVAL="1") as (pid, port):
        seconds = 10.0
        begun = processor_seconds(pid)
        time.sleep(seconds)
        idle = processor_seconds(pid) - begun
        listeners = subprocess.Popen([sys.executable, "-c", LISTEN, str(port), str(LISTENERS)], stdout=subprocess.PIPE)
        try:
            assert listeners.stdout is not None
            listeners.stdout.readline()
            begun = processor_seconds(pid)
            time.sleep(seconds)
            busy = processor_seconds(pid) - begun
            assert listeners.poll() is None, "the server ended a stream"
        finally:
            listeners.kill()
            listeners.wait()
    return Row("1,000 stream subscribers, of a core", (busy - idle) / seconds * 1e6, 1e6, 0.05, is_speed=False)


LISTEN = """
import asyncio, resource, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
async def main():
    async def listen():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        await reader.readuntil(b"\\r\\n\\r\\n")
        async def drain():
            while await reader.read(1 << 16):
                pass
            writer.close()  # a reference, so that the connection stays open until now
            sys.exit("the server ended a stream")
        return asyncio.create_task(drain())
    tasks = [await listen() for _ in range(count)]
    print("ready", flush=True)
    await asyncio.wait(tasks)
asyncio.run(main())
"""

SAMPLES = """
import gc, sys
from pathlib import Path
from gpu_worker_pool.gpu_server.host_view import HostView
from gpu_worker_pool.hardware.readers.choose import make_reader
from gpu_worker_pool.hardware.sample_log import SampleLog
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.hardware.sampler import Sampler
view = HostView(lambda: sampler.seen, max_history=100)
sampler = Sampler(make_reader("simulated:8", boot_time), interval_seconds=0.05, on_sample=view.take,
                  open_log=lambda: SampleLog(Path(sys.argv[1]), "bench", keep=100))
def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
after = {}
for number in range(1, 100_001):
    sampler.want_fresh(boot_time())
    sampler._turn()
    view.answer("stats")
    if number in (10_000, 100_000):
        after[number] = resident()
print(after[10_000], after[100_000])
"""


#: A real call goes to the kernel and takes longer than this.
CALL_MICROSECONDS = 5

NVML = """
import time
import pynvml
from gpu_worker_pool.hardware.readers.nvml import NVMLReader
reader = NVMLReader()
reader.read()
def bare():
    pynvml.nvmlDeviceGetCount()
    for index in range(8):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetUUID(handle)
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        pynvml.nvmlDeviceGetMigMode(handle)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
        pynvml.nvmlDeviceGetPowerUsage(handle)
        pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        pynvml.nvmlDeviceGetFieldValues(handle, (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,))
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        pynvml.nvmlDeviceGetTotalEccErrors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)
def best(run):
    times = []
    for _ in range(400):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e6
print(best(reader.read), best(bare))
"""


def measure_nvml(folder: Path) -> Row:
    fake = FakeNVML(folder, gpus=fake_gpus(8))
    fake.delay_us = CALL_MICROSECONDS
    fake.write()
    done = subprocess.run(
        [sys.executable, "-c", NVML], check=True, capture_output=True, text=True, env=os.environ | fake.env
    )
    ours, bare = map(float, done.stdout.split())
    return Row("sampling 8 GPUs by NVML against the bare calls", ours, bare, 1.2, is_speed=False)


def measure_memory(folder: Path) -> Row:
    done = subprocess.run([sys.executable, "-c", SAMPLES, str(folder)], check=True, capture_output=True, text=True)
    early, late = map(float, done.stdout.split())
    return Row("memory (MB) after 100,000 samples against 10,000", late, early, 1.05, is_speed=False)


def main() -> int:
    rows = []
    for measure in (measure_summary, measure_nvml, measure_listeners, measure_memory):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder)))
    is_reached = print_table(rows, "µs")
    return int("--strict" in sys.argv and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
