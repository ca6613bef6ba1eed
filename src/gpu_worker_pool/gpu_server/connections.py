"""Connections that dawdle are closed: uvicorn alone waits for ever for the headers of a request, or for a reader.

`--http gpu_worker_pool.gpu_server.connections:GuardedProtocol` gives the same to a server started by `uvicorn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio


class GuardedProtocol(HttpToolsProtocol):
    #: For a whole request to arrive, from the moment the connection is open or the last answer was sent.
    request_seconds = 10.0
    #: For a reader to take what was sent before more is sent.
    reader_seconds = 30.0
    #: For a request line and its headers together.
    most_header_bytes = 64 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Since when bytes of a request are owed to us; None while we owe an answer.
        self._waiting_since: float | None = None
        self._header_bytes = 0
        self._is_in_headers = True
        self._deadline: asyncio.TimerHandle | None = None
        self._reader_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
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

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        # An answer may have been sent before the last of the request came in.
        if not self.cycle.response_complete:
            self._waiting_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A request that came along with the one before is owed an answer, too.
        if self.cycle.response_complete:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._waiting_since = self.loop.time()
        # Left running from one request to the next: a timer for each would cost more than the request.
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self._waiting_since is None:
            return
        left = self._waiting_since + self.request_seconds - self.loop.time()
        if left <= 0:
            self.transport.close()
        else:
            self._deadline = self.loop.call_later(left, self._look_at_deadline)

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
