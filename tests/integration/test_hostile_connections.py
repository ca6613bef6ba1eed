"""Connections that send without end or never read: what the server stores for each is bounded; others are served."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from tests.integration.test_tls import make_certificate
from tests.server_process import ServerProcess
from uvicorn.server import ServerState

from gpu_worker_pool.gpu_server.compression import PIECE_BYTES, in_pieces
from gpu_worker_pool.gpu_server.connections import GuardedProtocol

MIB = 1024 * 1024
#: Much less than an attack sends, and much more than a connection may cost.
MOST_GROWTH_MIB = 40
MOST_SENT = 16 * MIB

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /leases HTTP/1.1\r\n" + HEAD
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {"GPU_BACKEND": "simulated:2", "ACCESS_LOG": "false", "LOG_LEVEL": "error"}
    with ServerProcess(tmp_path_factory.mktemp("server"), **settings) as running:
        running.get("/openapi.json")  # it is built once
        yield running


def resident_mib(server: ServerProcess) -> float:
    assert server.process is not None
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def connect(server: ServerProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


def flood(connection: socket.socket, part: bytes) -> int:
    """How much it could send: until the server closed the connection, or read no more for three seconds."""
    sent, data = 0, part * (MIB // 8 // len(part) + 1)
    with contextlib.suppress(OSError):
        while sent < 8 * MOST_SENT:
            sent += connection.send(data)
    return sent


@pytest.mark.parametrize(
    ("beginning", "part"),
    [
        pytest.param(CHUNKED + b"0\r\n", b"X-More: " + b"y" * 100 + b"\r\n", id="trailers"),
        pytest.param(CHUNKED + b"0\r\nX-More: ", b"y" * 1000, id="a trailer"),
        pytest.param(GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a:\r\n", id="trailers after the answer"),
        pytest.param(CHUNKED, b"1;" + b"y" * 1000, id="an extension of a chunk"),
        pytest.param(GET[:-2], b"a:\r\n", id="headers"),
        pytest.param(b"", GET, id="requests ahead"),
        pytest.param(b"", b"HEAD / HTTP/1.1\r\n\r\n", id="small requests ahead"),
        pytest.param(b"", CHUNKED.replace(b"/leases", b"/explain") + b"0\r\n\r\n", id="posts ahead"),
        pytest.param(GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n", id="an unwanted body"),
        pytest.param(CHUNKED, b"1\r\n \r\n", id="a body in tiny parts"),
        pytest.param(GET, b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n", id="streams ahead"),
    ],
)
def test_what_is_sent_without_end_is_refused(server: ServerProcess, beginning: bytes, part: bytes) -> None:
    before = resident_mib(server)
    with connect(server) as connection:
        connection.sendall(beginning)
        sent = flood(connection, part)
        assert sent < MOST_SENT
        assert resident_mib(server) - before < MOST_GROWTH_MIB
        assert server.get("/health").status == 200


@pytest.mark.parametrize(("has_tls", "most_kib"), [(False, 160), (True, 280)])
def test_large_bodies_of_many_connections_are_not_stored(tmp_path: Path, has_tls: bool, most_kib: int) -> None:
    """Nobody needs a key to send one, and with TLS the event loop has a buffer of its own for each connection."""
    certificate, key, _ = make_certificate(tmp_path / "tls")
    tls = {"GPU_POOL_TLS_CERT": str(certificate), "GPU_POOL_TLS_KEY": str(key)} if has_tls else {}
    head = POST + b"Content-Length: 1000000\r\n\r\n"
    settings = {"GPU_BACKEND": "simulated:2", "ACCESS_LOG": "false", "LOG_LEVEL": "error"} | tls
    with ServerProcess(tmp_path, **settings) as server, contextlib.ExitStack() as stack:
        server.ask("POST", "/explain", {})
        before = resident_mib(server)
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(100)]
        if has_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(certificate)
            connections = [context.wrap_socket(each, server_hostname="localhost") for each in connections]
        for each in connections:
            stack.enter_context(contextlib.closing(each))
            each.sendall(head)
        for _ in range(99):
            for each in connections:
                each.sendall(b"y" * 10_000)
        assert resident_mib(server) - before < len(connections) * most_kib / 1024
        connections[0].sendall(b"y" * 10_000)
        assert connections[0].recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_without_end_is_refused_as_too_large_once_that_is_known(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(CHUNKED)
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b"y" * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_requests_sent_ahead_are_answered_up_to_a_number_and_then_the_connection_is_closed(
    server: ServerProcess,
) -> None:
    one = b"GET /gpu/count HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(one * 8)
        assert answers(connection, 8) == 8
        connection.sendall(one * 8)
        assert answers(connection, 8) == 8, "as often as its client waits"
    with connect(server) as connection:
        connection.sendall(one * 200)
        assert answers(connection) == 17


def answers(connection: socket.socket, most: int = 1000) -> int:
    """How many came whole, until there are that many, or the connection was closed."""
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < most or not received.endswith(b"}"):
        data = connection.recv(65536)
        if not data:
            break
        received += data
    assert received.endswith(b"}")
    return received.count(b"HTTP/1.1 200 OK")


LITTLE_ROOM = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (250, 250))
runpy.run_module("gpu_worker_pool.gpu_server", run_name="__main__")
"""


def test_more_connections_than_files_leave_room_for_others_and_for_the_ledger(tmp_path: Path) -> None:
    settings = {"GPU_BACKEND": "simulated:2", "REFRESH_INTERVAL": "0.1"}
    with (
        ServerProcess(tmp_path, arguments=["-c", LITTLE_ROOM], **settings) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(400):
            stack.enter_context(contextlib.closing(connect(server)))
        reply = server.ask("POST", "/leases", {"ttl_seconds": 60, "wait_seconds": 5}, timeout=5)
        assert reply.status == 201
        token = {"X-Lease-Token": reply.json["token"]}
        for _ in range(3):
            assert server.ask("POST", f"/leases/{reply.json['lease_id']}/renew", headers=token, timeout=5).status == 200
        assert server.get("/health", timeout=5).json["status"] == "healthy"
        assert "Too many open files" not in server.log
        assert "Traceback" not in server.log


def test_more_streams_of_one_caller_than_files_leave_room_for_others(tmp_path: Path) -> None:
    """None of these connections is silent: each waits for events."""
    settings = {"GPU_BACKEND": "simulated:2", "REFRESH_INTERVAL": "0.1", "HOST": "0.0.0.0"}
    with (
        ServerProcess(tmp_path, arguments=["-c", LITTLE_ROOM], **settings) as server,
        contextlib.ExitStack() as stack,
    ):
        # Of other addresses of this host, so that the caller below is not one of them.
        own = stack.enter_context(stream_from("127.0.0.1", server))
        for _ in range(400):
            stack.enter_context(stream_from("127.0.0.2", server))
        for _ in range(3):
            assert server.ask("POST", "/leases", {"wait_seconds": 1}, timeout=5).status in (201, 202)
        own.settimeout(5)
        assert own.recv(65536), "closed although its caller has few"
        assert "Too many open files" not in server.log
        assert "Traceback" not in server.log


def stream_from(address: str, server: ServerProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5, source_address=(address, 0))
    connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        connection.recv(1)  # its stream has begun
    return connection


@pytest.mark.parametrize("workers", ["1", "2"])
def test_handshakes_that_never_begin_leave_room_for_others_and_for_the_ledger(tmp_path: Path, workers: str) -> None:
    certificate, key, _ = make_certificate(tmp_path / "tls")
    tls = {"GPU_POOL_TLS_CERT": str(certificate), "GPU_POOL_TLS_KEY": str(key)}
    settings = {"GPU_BACKEND": "simulated:2", "REFRESH_INTERVAL": "0.1", "WORKERS": workers} | tls
    with (
        ServerProcess(tmp_path, arguments=["-c", LITTLE_ROOM], **settings) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(400 * int(workers)):
            stack.enter_context(contextlib.closing(connect(server)))
        reply = server.ask("POST", "/leases", {"ttl_seconds": 60, "wait_seconds": 5}, timeout=5)
        assert reply.status == 201
        token = {"X-Lease-Token": reply.json["token"]}
        for _ in range(3):
            assert server.ask("POST", f"/leases/{reply.json['lease_id']}/renew", headers=token, timeout=5).status == 200
        assert server.get("/health", timeout=5).json["status"] == "healthy"
        assert "Too many open files" not in server.log
        assert "Traceback" not in server.log
        assert server.terminate()[0] in (0, -signal.SIGTERM)


class Hasty(GuardedProtocol):
    request_seconds = 0.2
    reader_seconds = 0.2


@contextlib.asynccontextmanager
async def hasty_server(application: Any) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A connection to a server that is impatient, and what that server knows of its connections."""
    config = uvicorn.Config(application, http=Hasty, lifespan="off", log_config=None, timeout_keep_alive=1)
    config.load()
    state = ServerState()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Hasty(config, state, {}), sock=listener)
        await loop.sock_connect(client, listener.getsockname())
        async with asyncio.timeout(20):
            yield client, state
        server.close()


async def test_one_that_reads_nothing_is_cut_off_even_where_little_is_left_to_send() -> None:
    """What is left is less than makes uvicorn pause, so that only the end of the connection waits for the reader."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"y" * 60_000})

    async with hasty_server(application) as (client, state):
        await asyncio.get_running_loop().sock_sendall(client, GET)
        while not state.total_requests:
            await asyncio.sleep(0.01)
        assert all(each.transport.get_write_buffer_size() for each in state.connections)
        while state.connections:
            await asyncio.sleep(0.01)


async def test_a_request_behind_another_one_must_arrive_in_time_too() -> None:
    seen = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        if scope["method"] == "POST":
            while (await receive())["type"] != "http.disconnect":
                pass
            seen.append("gone")
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with hasty_server(application) as (client, _):
        await asyncio.get_running_loop().sock_sendall(client, GET + CHUNKED + b"5\r\n{")
        while seen[-1:] != ["gone"]:
            await asyncio.sleep(0.01)
    assert seen == ["/openapi.json", "/leases", "gone"]


async def test_what_is_being_answered_ends_with_its_connection_also_where_more_was_sent_ahead() -> None:
    """uvicorn says so to the last request only: a stream, or a place in the queue, outlived its client."""
    seen = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        seen.append("gone")

    async with hasty_server(application) as (client, _):
        await asyncio.get_running_loop().sock_sendall(client, GET + GET)
        while not seen:
            await asyncio.sleep(0.01)
        client.close()
        while seen[-1:] != ["gone"]:
            await asyncio.sleep(0.01)
    assert seen == ["/openapi.json", "gone"]


async def test_a_body_in_tiny_parts_is_read_up_to_a_number_of_them() -> None:
    """Each costs some microseconds, whatever it holds, and nobody else is served meanwhile."""
    received = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            received.append(len(message["body"]))

    async with hasty_server(application) as (client, state):
        await asyncio.get_running_loop().sock_sendall(client, CHUNKED)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(client, b"1\r\n \r\n" * 20_000)
        while state.connections:
            await asyncio.sleep(0.01)
    assert sum(received) <= Hasty.most_parts


@pytest.mark.parametrize("accepts", ["identity", "gzip"])
async def test_of_a_long_answer_that_is_not_read_a_few_pieces_are_made(accepts: str) -> None:
    """A history may have tens of megabytes, and thousands of connections may ask for it."""
    number, size, noise = 20_000, 1024, random.Random(0)
    taken = 0

    def parts() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(number):
            taken += 1
            yield noise.randbytes(size)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await in_pieces(Request(scope), parts(), number * size)(scope, receive, send)

    asked = GET[:-2] + f"Accept-Encoding: {accepts}\r\n\r\n".encode()
    async with hasty_server(application) as (client, state):
        await asyncio.get_running_loop().sock_sendall(client, asked)
        while not any(each.flow.write_paused for each in state.connections):
            await asyncio.sleep(0.01)
        while state.connections:
            await asyncio.sleep(0.01)
    assert 0 < taken * size < 8 * PIECE_BYTES + MIB
