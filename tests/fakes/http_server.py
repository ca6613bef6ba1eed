"""A server that does to its clients whatever a test says, with plain sockets in threads of its own.

So it serves asyncio clients, blocking ones, and clients whose event loop is stuck. A behaviour is a function of a
`Conversation`; those below can be used as they are, or called to make one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

#: A client that reads slowly, or not at all, must not keep a test's thread for ever.
LONGEST_SECONDS = 20.0


@dataclass
class Conversation:
    """One connection, after a request was read on it."""

    server: HostileServer
    socket: socket.socket
    #: The request up to the empty line.
    request: bytes

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)
        self.server.bytes_sent += len(data)

    def pause(self, seconds: float) -> None:
        """Less where the server is stopped meanwhile."""
        if self.server.stopping.wait(seconds):
            raise ConnectionAbortedError("the server is being stopped")


Behaviour = Callable[[Conversation], object]


def head(status: int = 200, **headers: object) -> bytes:
    """A response up to its body; `_` in a header's name is a dash."""
    lines = [f"HTTP/1.1 {status} Said So", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(body: bytes, status: int = 200, **headers: object) -> Behaviour:
    """A complete answer; the connection stays open for another request."""
    return lambda talk: talk.send(head(status, Content_Length=len(body), **headers) + body)


def answer_json(value: Any, status: int = 200, **headers: object) -> Behaviour:
    return answer(json.dumps(value).encode(), status, Content_Type="application/json", **headers)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One behaviour a request; the last one stays."""
    left = list(behaviours)

    def behave(talk: Conversation) -> None:
        now = left.pop(0) if len(left) > 1 else left[0]
        now(talk)

    return behave


def silent(talk: Conversation) -> None:
    talk.pause(LONGEST_SECONDS)


def hang_up(talk: Conversation) -> None:
    talk.socket.shutdown(socket.SHUT_RDWR)


def raw(data: bytes) -> Behaviour:
    """These bytes and the end of the connection."""

    def behave(talk: Conversation) -> None:
        talk.send(data)
        hang_up(talk)

    return behave


def stops_after(data: bytes) -> Behaviour:
    """These bytes, and then nothing more, ever."""

    def behave(talk: Conversation) -> None:
        talk.send(data)
        silent(talk)

    return behave


def drip(data: bytes, seconds_a_byte: float = 0.02) -> Behaviour:
    def behave(talk: Conversation) -> None:
        for byte in data:
            talk.send(bytes([byte]))
            talk.pause(seconds_a_byte)

    return behave


def reset_after(data: bytes) -> Behaviour:
    def behave(talk: Conversation) -> None:
        talk.send(data)
        # Long enough for the client to have read what came, without which the reset would swallow it.
        talk.pause(0.1)
        talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        talk.socket.close()

    return behave


def flood(start: bytes, chunk: bytes = bytes(65536), total_bytes: int = 1 << 30) -> Behaviour:
    """After `start`, as much as the client takes."""

    def behave(talk: Conversation) -> None:
        talk.send(start)
        for _ in range(total_bytes // len(chunk)):
            talk.send(chunk)

    return behave


def gzip_bomb(size_bytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(1 << 20)
    return b"".join([*(packer.compress(zeros) for _ in range(size_bytes >> 20)), packer.flush()])


@dataclass
class HostileServer:
    """Use as a context manager. `behaviour` may be exchanged at any time; it counts for the next request."""

    behaviour: Behaviour
    #: For https; wrapped before the first byte is read.
    tls: ssl.SSLContext | None = None
    #: Accept, and do not even begin TLS.
    is_deaf: bool = False
    #: Where to listen; 0 for any that is free.
    at_port: int = 0
    #: The requests so far, each up to its empty line.
    requests: list[bytes] = field(default_factory=list, init=False)
    connections: int = field(default=0, init=False)
    bytes_sent: int = field(default=0, init=False)
    stopping: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.at_port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        with self._lock:
            sockets = [self._listener, *self._open]
        for it in sockets:
            # Wakes whoever is blocked in it, which closing alone does not.
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONGEST_SECONDS)
            assert not thread.is_alive(), "a behaviour does not end"
        self._listener.close()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def open_connections(self) -> int:
        with self._lock:
            return len(self._open)

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._open.add(connection)
                self._threads.append(thread)
            self.connections += 1
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # Clients hang up in every way there is, and that is no error here.
        try:
            with contextlib.suppress(OSError):
                connection.settimeout(LONGEST_SECONDS)
                if self.is_deaf:
                    self.stopping.wait(LONGEST_SECONDS)
                    return
                if self.tls is not None:
                    connection = self._encrypted(connection, self.tls)
                for request in _requests(connection):
                    self.requests.append(request)
                    self.behaviour(Conversation(self, connection, request))
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _encrypted(self, connection: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        encrypted = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        # The first one is empty from here on.
        with self._lock:
            self._open.discard(connection)
            self._open.add(encrypted)
        try:
            encrypted.do_handshake()
        except OSError:
            with self._lock:
                self._open.discard(encrypted)
            encrypted.close()
            raise
        return encrypted


def _requests(connection: socket.socket) -> Iterator[bytes]:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
        # TLS where none is spoken: real servers answer that, too.
        if data.startswith(b"\x16\x03"):
            yield data
            return
        while b"\r\n\r\n" in data:
            request, _, data = data.partition(b"\r\n\r\n")
            yield request


@contextlib.contextmanager
def refusing_url() -> Iterator[str]:
    """A URL at which nothing listens, and, while this lasts, nothing will."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


@contextlib.contextmanager
def black_hole_url() -> Iterator[str]:
    """A URL whose host answers nothing, not even the attempt to connect: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(64):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            raise AssertionError("this system's queues do not fill")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def summary(*gpus: Mapping[str, object], **more: object) -> dict[str, Any]:
    """A reply of `/gpu/summary` as the documents have it."""
    return {
        "gpu_count": len(gpus),
        "total_memory_mb": 10240 * len(gpus),
        "total_used_memory_mb": 2048 * len(gpus),
        "total_memory_usage_percent": 20.0 if gpus else None,
        "average_utilization_percent": 15.0 if gpus else None,
        "gpus_summary": list(gpus),
        "timestamp": "2025-07-23T10:30:00.123456",
        **more,
    }


def gpu_row(gpu_id: object = 0, **more: object) -> dict[str, Any]:
    """A row of it."""
    return {
        "gpu_id": gpu_id,
        "name": "NVIDIA GeForce RTX 3080",
        "memory_usage_percent": 20.0,
        "utilization_percent": 15,
        **more,
    }
