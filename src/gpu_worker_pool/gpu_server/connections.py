"""Closes slow connections: uvicorn waits forever for the headers of a request, or for a client that stops reading.

For a server that is started with `uvicorn`: `--http gpu_worker_pool.gpu_server.connections:GuardedProtocol`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpu_worker_pool.gpu_server.unix_socket import PEER, peer_of

if TYPE_CHECKING:
    import asyncio

    from gpu_worker_pool.gpu_server.unix_socket import Peer


class GuardedProtocol(HttpToolsProtocol):
    #: Time for a whole request to arrive, from the opening of the connection or the end of the last answer.
    request_seconds = 10.0
    #: Time for a client to read what was sent.
    reader_seconds = 30.0
    #: Size of a request line and its headers together.
    most_header_bytes = 64 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Since when the server waits for a request; None while it prepares an answer.
        self._waiting_since: float | None = None
        self._header_bytes = 0
        self._is_in_headers = True
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
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._reader_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # --- the request must arrive ---

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._header_bytes > self.most_header_bytes and not self.transport.is_closing():
            self.send_400_response("Request headers are too large.")

    def on_message_begin(self) -> None:
        self._is_in_headers = True
        super().on_message_begin()
        if self._peer is not None:
            self.scope[PEER] = self._peer  # type: ignore[typeddict-unknown-key]  # our own

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        # The answer may have been sent before the whole request arrived.
        if not self.cycle.response_complete:
            self._waiting_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A pipelined request still waits for its answer.
        if self.cycle.response_complete:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._waiting_since = self.loop.time()
        # One timer serves many requests: a timer per request would cost more than the request.
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self._waiting_since is None:
            return
        left = self._waiting_since + self.request_seconds - self.loop.time()
        if left <= 0:
            self.transport.close()
        else:
            self._deadline = self.loop.call_later(left, self._check_deadline)

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
