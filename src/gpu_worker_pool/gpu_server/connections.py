"""Bounds what a connection may send and leave unread, and closes slow ones; uvicorn would wait and store without end.

For a server that is started with `uvicorn`: `--http gpu_worker_pool.gpu_server.connections:GuardedProtocol`.
"""

from __future__ import annotations

import resource
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpu_worker_pool.gpu_server.unix_socket import PEER, peer_of
from gpu_worker_pool.gpu_server.wrong_keys import network_of

if TYPE_CHECKING:
    import asyncio

    from gpu_worker_pool.gpu_server.unix_socket import Peer


#: In the scope of a request with `Upgrade`: the function that hands over its connection. No client can set it.
TAKE_OVER: Final = "gpu_pool.take_over"
#: Files that are reserved for the ledger, the driver and the log.
RESERVED_FILES: Final = 100
#: Each may have some 100 kB of headers or of an answer that is not read yet.
MOST_CONNECTIONS: Final = 5_000


@lru_cache(maxsize=1)
def most_connections() -> int:
    """Of this process: more would leave it no files, and then it could neither read the GPUs nor renew leases."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else max(min(MOST_CONNECTIONS, files - RESERVED_FILES), files // 2)


def _age(connection: GuardedProtocol) -> float:
    """The sort key that puts the oldest first."""
    since = connection.waiting_since
    return connection._opened_at if since is None else since  # noqa: SLF001  # our own


class TooMuchError(Exception):
    """Raised within the parser, which then parses nothing more of this connection."""


class GuardedProtocol(HttpToolsProtocol):
    #: Time for a whole request to arrive, from the opening of the connection or the end of the last answer.
    request_seconds: float = 10.0
    #: Time for a client to read what was sent.
    reader_seconds: float = 30.0
    #: The same when the server stops.
    stop_seconds: float = 1.5
    #: Size of a request line and its headers together; also of trailers, and of anything else between parts of a body.
    most_header_bytes = 64 * 1024
    #: How many headers and trailers a request may have.
    most_headers = 128
    #: How many parts the body of a request may come in: each costs some microseconds, however short it is.
    most_parts = 4096
    #: How much of a body is stored, which is more than any request may have. The rest is read and dropped, so that the
    #: answer finds a client that listens.
    most_body_bytes = 64 * 1024
    #: How many requests, and how many bytes of them, a client may send ahead while an earlier one is unanswered. The
    #: connection is closed after the last of these is answered, and the client sends the others again.
    most_pipelined = 16
    most_pipelined_bytes = 64 * 1024
    #: How much is read and dropped: of a body that is too large or was answered before, and of what was sent too far
    #: ahead.
    most_unwanted_bytes = 1024 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened_at = 0.0
        #: Since when the server waits for a request; None while it prepares an answer.
        self.waiting_since: float | None = None
        #: Since the request began, or since the last part of its body.
        self._header_bytes = 0
        self._headers_seen = 0
        self._parts_seen = 0
        self._body_bytes = 0
        self._pipelined_bytes = 0
        self._unwanted_bytes = 0
        #: The request that is being answered; `cycle` is the last one that was sent, which may be behind it.
        self._running: Any = None
        #: Whether the client sent too many requests ahead: nothing more of it is read.
        self._is_full = False
        self._deadline: asyncio.TimerHandle | None = None
        self._reader_deadline: asyncio.TimerHandle | None = None
        #: Who connected to the Unix socket; None over TCP.
        self._peer: Peer | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        try:
            # Now, and not with each request: the process may end, and its number be used again.
            self._peer = peer_of(transport)
        except OSError as error:
            self.logger.warning("a connection was closed, as it is unknown who made it: %s", error)
            transport.abort()
            return
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(self.request_seconds, self._check_deadline)
        self._opened_at = self.waiting_since
        if len(self.connections) > most_connections():
            self._make_room()

    def _make_room(self) -> None:
        """Close another one: this one may be a renewal.

        Of the caller that has the most: the one that has been silent longest, else the oldest. So a caller that opens
        very many closes its own, whatever these are waiting for.
        """
        by_caller: dict[str, list[GuardedProtocol]] = {}
        for each in self.connections:
            if isinstance(each, GuardedProtocol) and each is not self:
                by_caller.setdefault(each._caller(), []).append(each)  # noqa: SLF001  # our own
        others = max(by_caller.values(), key=len)
        silent = [each for each in others if each.waiting_since is not None]
        # Some at once, as looking through all of them takes a while.
        for each in sorted(silent or others, key=_age)[: len(others) // 100 + 1]:
            each.transport.abort()

    def _caller(self) -> str:
        if self._peer is not None:
            return self._peer.account
        return network_of(self.client[0]) if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._reader_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._running is not None:
            # uvicorn only tells the last request. An earlier one may be a stream, or hold a place in the queue.
            self._running.disconnected = True
            self._running.message_event.set()

    # --- the request must arrive ---

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_full:
            # An answer that takes long reads on, to notice when the client is gone.
            self._drop(data)
            return
        self._header_bytes += len(data)
        if self.pipeline:
            self._pipelined_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._pipelined_bytes > self.most_pipelined_bytes:
            self._take_no_more()
        elif self._header_bytes > self.most_header_bytes:
            self.send_400_response("Request headers are too large.")

    def send_400_response(self, msg: str) -> None:
        cycle: Any = self.cycle  # None before the first request
        if self._is_full:
            return
        if cycle is None or cycle.response_complete:
            super().send_400_response(msg)
        elif not cycle.more_body:
            self._take_no_more()  # the requests before it are answered first
        elif cycle.response_started:
            self.transport.close()  # in the middle of its answer
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self.most_pipelined:
            self._take_no_more()
            raise TooMuchError
        self._headers_seen = self._parts_seen = self._unwanted_bytes = self._body_bytes = 0
        super().on_message_begin()
        if self._peer is not None:
            self.scope[PEER] = self._peer  # type: ignore[typeddict-unknown-key]  # our own

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.scope[TAKE_OVER] = self._take_over  # type: ignore[typeddict-unknown-key]  # our own
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def _take_over(self, protocol: asyncio.Protocol, name: str) -> None:
        """The connection speaks another protocol from now on; the request gets no other answer."""
        cycle: Any = self.cycle
        for timer in (self._deadline, self._reader_deadline):
            if timer is not None:
                timer.cancel()
        cycle.disconnected = True
        self.connections.discard(self)
        self.transport.write(
            f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {name}\r\n\r\n".encode()
        )
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()
        protocol.connection_made(self.transport)

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn warns about every upgrade, as it only knows web sockets."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        if self._headers_seen > self.most_headers:
            raise TooMuchError
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        self._parts_seen += 1
        if self._parts_seen > self.most_parts:
            raise TooMuchError
        if self.cycle.response_complete:
            self._drop(body)
            return
        room = max(self.most_body_bytes - self._body_bytes, 0)
        self._body_bytes += len(body)
        super().on_body(body[:room])
        if self._body_bytes > self.most_unwanted_bytes:
            self.cycle.more_body = False  # it is too large whatever follows: now its answer can say so

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        # The answer may have been sent before the whole request arrived.
        if not self.cycle.response_complete:
            self.waiting_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.pipeline or self._is_full:
            # uvicorn would keep reading, and collect requests faster than it answers them.
            self.flow.pause_reading()
        else:
            self._pipelined_bytes = 0
        # A pipelined request may still wait for its answer, or the next one for its body.
        if self.cycle.response_complete or (self.cycle.more_body and not self.pipeline):
            self.waiting_since = self.loop.time()

    def _take_no_more(self) -> None:
        self._is_full = True
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def _drop(self, data: bytes) -> None:
        self._unwanted_bytes += len(data)
        if self._unwanted_bytes > self.most_unwanted_bytes:
            self.transport.close()

    def _check_deadline(self) -> None:
        # One timer serves many requests: a timer per request would cost more than the request.
        left = self.request_seconds
        if not self.transport.is_closing() and self.waiting_since is not None:
            left = self.waiting_since + self.request_seconds - self.loop.time()
            if left <= 0:
                self.transport.close()
        if self.transport.is_closing():
            # Closing waits until everything is sent, and so for a client that does not read.
            self._deadline = self.loop.call_later(self.reader_seconds, self.transport.abort)
        else:
            self._deadline = self.loop.call_later(left, self._check_deadline)

    def shutdown(self) -> None:
        """The server stops, and will cancel what is not answered by then, with a traceback for each."""
        super().shutdown()
        self.loop.call_later(self.stop_seconds, self._abort_if_stuck)

    def _abort_if_stuck(self) -> None:
        cycle: Any = self.cycle  # as above
        is_incomplete = cycle is not None and cycle.more_body and not cycle.response_complete
        if self.flow.write_paused or is_incomplete:
            self.transport.abort()

    # --- and the answer must be read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_deadline is None:
            self._reader_deadline = self.loop.call_later(self.reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_deadline is not None:
            self._reader_deadline.cancel()
            self._reader_deadline = None
