"""Real users of a server's Unix socket, for tests: processes forked from this one, which any user may run."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import multiprocessing
import os
import pwd
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Imported before the fork: other users may not be able to read the files.
import gpu_worker_pool.cli.checking.diagnosis
import gpu_worker_pool.cli.commands.doctor
import gpu_worker_pool.cli.commands.leases
import gpu_worker_pool.cli.commands.queue
import gpu_worker_pool.cli.commands.release
import gpu_worker_pool.cli.commands.status
import gpu_worker_pool.cli.tables
import gpu_worker_pool.cli.views.lists
import gpu_worker_pool.cli.views.overview
import gpu_worker_pool.cli.views.release
import gpu_worker_pool.cli.views.socket_host  # noqa: F401
from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.cli.program import run_program
from gpu_worker_pool.core import PoolSettings, Request
from gpu_worker_pool.ledger.host import open_host_ledger
from tests.server_process import ServerProcess

#: They exist on every Linux, run nothing, and own nothing here.
NAMES = ("daemon", "bin")
SECONDS = 30.0


class Answer(NamedTuple):
    status: int
    body: Any


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


def ask(path: str, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
    connection = _UnixConnection(path)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, url, sent, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return Answer(reply.status, json.loads(reply.read()))
    finally:
        connection.close()


def gpu_pool(path: str, *arguments: str) -> tuple[int, str, str]:
    """The command line, without the files of its program: status, stdout, stderr."""
    for name in list(os.environ):
        if name.startswith(("GPU_", "CUDA_")):
            del os.environ[name]
    os.environ["GPU_POOL_SOCKET"] = path
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_program(arguments)
    return status, out.getvalue(), err.getvalue()


class UserProcess:
    """A process of this user, which does what it is told until it is ended. `name` None: the user of the tests."""

    def __init__(self, name: str | None) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self._ours.send((function, args))
        assert self._ours.poll(SECONDS), f"{function.__name__} took too long"
        try:
            result, error = self._ours.recv()
        except EOFError:
            raise AssertionError(f"the process ended in {function.__name__}") from None
        assert error is None, error
        return result

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(SECONDS)


def _live(pipe: Any, name: str | None) -> None:
    if name is not None:
        user = pwd.getpwnam(name)
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except BaseException as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


def needs_root() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to act as other users")
    for name in NAMES:
        try:
            pwd.getpwnam(name)
        except KeyError:
            pytest.skip(f"this host has no user {name}")


@contextmanager
def open_folder() -> Iterator[Path]:
    """One that all users can enter; its path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class SocketServer(ServerProcess):
    """A server on `socket` as well as on TCP."""

    def __init__(self, folder: Path, *, wait: bool = True, **env: str) -> None:
        self.socket = str(folder / "run" / "gpu-pool.sock")
        settings = {"GPU_BACKEND": "simulated:1", "REFRESH_INTERVAL": "0.2", "ACCESS_LOG": "false"}
        super().__init__(folder, wait=wait, **(settings | {"GPU_POOL_SOCKET": self.socket} | env))

    def on_socket(self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """As the user of the tests, in this process."""
        return ask(self.socket, method, url, body, headers)


async def requests_in(server: SocketServer) -> dict[str, Request]:
    """What the ledger has, by request id."""
    backend, state_dir = server.environment["GPU_BACKEND"], server.environment["GPU_POOL_STATE_DIR"]
    broker = LeaseBroker(
        lambda on_commit: open_host_ledger(backend, PoolSettings(), on_commit, state_dir=state_dir), lambda _: None
    )
    await broker.start()
    try:
        found = [lease.request for lease in await broker.held()] + [each.request for each in await broker.queue()]
        return {request.request_id: request for request in found}
    finally:
        await broker.stop()
