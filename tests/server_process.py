"""A real server in a real process, for tests: started on a free port, with an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, Self

#: What a test's server must not inherit from whoever runs the tests.
_OURS = [
    "HOST",
    "PORT",
    "RELOAD",
    "LOG_LEVEL",
    "ACCESS_LOG",
    "WORKERS",
    "TITLE",
    "DESCRIPTION",
    "VERSION",
    "DOCS_URL",
    "REDOC_URL",
    "ENABLE_CORS",
    "API_PREFIX",
    "CUDA_VISIBLE_DEVICES",
    "REFRESH_INTERVAL",
    "MAX_HISTORY",
    "LOG_FORMAT",
    "GPU_BACKEND",
    "GPU_POOL_STATE_DIR",
    "GPU_POOL_API_KEYS",
    "GPU_POOL_ADMIN_KEYS",
    "GPU_POOL_OPEN_ON_LOOPBACK",
    "GPU_POOL_HOSTS",
    "GPU_POOL_IDLE_AFTER",
    "GPU_POOL_MOST_WAITING",
    "GPU_POOL_POLICY",
    "GPU_POOL_MOST_LEASES_OF_A_CALLER",
    "GPU_POOL_MOST_LEASES",
    "GPU_POOL_PEERS",
    "GPU_POOL_SOCKET",
    "GPU_POOL_TLS_CERT",
    "GPU_POOL_TLS_KEY",
    "GPU_POOL_FLEET_DATABASE",
    "GPU_POOL_FLEET_JOIN",
    "GPU_POOL_FLEET_KEY_FILE",
    "GPU_POOL_FLEET_INSECURE",
    "GPU_POOL_FLEET_STRATEGY",
    "GPU_POOL_HOST_NAME",
    "GPU_POOL_URL",
]
START_SECONDS = 30.0
_ANY_CERTIFICATE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_ANY_CERTIFICATE.check_hostname, _ANY_CERTIFICATE.verify_mode = False, ssl.CERT_NONE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Reply(NamedTuple):
    status: int
    headers: Message[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.body, parse_constant=refuse)


class ServerProcess:
    """`with ServerProcess(tmp_path, GPU_BACKEND="simulated:4") as server: server.get("/health")`."""

    def __init__(
        self,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        wait: bool = True,
        prefix: Sequence[str] = (),
        address: str = "127.0.0.1",
        **env: str,
    ) -> None:
        """`prefix`: before the command, such as one that enters a network namespace with this `address`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address, self._command_prefix = address, prefix
        self.port = free_port()
        self.prefix = env.get("API_PREFIX", "")
        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        own = {
            "HOST": address,
            "PORT": str(self.port),
            "RELOAD": "false",
            "GPU_POOL_STATE_DIR": str(folder / "state"),
        }
        self.environment = inherited | own | env
        self._arguments = list(arguments) or ["-m", "gpu_worker_pool.gpu_server"]
        self._wait = wait
        self._log_path = folder / f"log-{self.port}.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        arguments = [argument.replace("{port}", str(self.port)) for argument in self._arguments]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command_prefix, sys.executable, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while self._wait:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            assert time.monotonic() < deadline, f"the server did not start:\n{self.log}"
            try:
                if self.get("/health", timeout=2).status == 200:
                    return
            except OSError:
                time.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def url(self) -> str:
        scheme = "https" if "GPU_POOL_TLS_CERT" in self.environment else "http"
        return f"{scheme}://{self.address}:{self.port}{self.prefix}"

    def get(self, path: str, *, method: str = "GET", timeout: float = 10, **headers: str) -> Reply:
        return self.ask(method, path, headers=headers, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 40,
    ) -> Reply:
        """`body`: bytes as they are, anything else as JSON."""
        sent = dict(headers or {})
        data = body
        if body is not None:
            sent = {"Content-Type": "application/json"} | sent
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=_ANY_CERTIFICATE) as reply:
                return Reply(reply.status, reply.headers, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())

    def terminate(self) -> tuple[int, float]:
        """The exit status, and how long it took."""
        assert self.process is not None
        begun = time.monotonic()
        self.process.terminate()
        status = self.process.wait(timeout=20)
        return status, time.monotonic() - begun

    def kill(self) -> None:
        """The whole group: a reloader and workers have children."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=20)
