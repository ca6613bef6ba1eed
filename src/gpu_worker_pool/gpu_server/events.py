"""`/events`: a stream that sends the same bytes to all listeners, compressed once for those that accept gzip.

A slow listener misses snapshots, of which only the newest counts, but no other event, and does not delay others.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response

from gpu_worker_pool.gpu_server.compression import GzipStream, accepts_gzip, gzip_part
from gpu_worker_pool.gpu_server.disconnect import until_gone
from gpu_worker_pool.gpu_server.responses import as_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

#: Proxies and browsers close a silent stream.
KEEP_ALIVE_SECONDS: Final = 15.0
_KEEP_ALIVE: Final = b": still here\n\n"
#: How long a browser waits before it reconnects.
_RETRY: Final = b"retry: 2000\n\n"
#: A listener that is further behind is disconnected; it reconnects and gets the present state.
MOST_QUEUED: Final = 1000


def event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def json_event(name: str, data: dict[str, Any]) -> bytes:
    return event(name, as_json(data))


class _Chunk:
    """Bytes for all listeners, compressed when the first one needs that."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @cached_property
    def packed(self) -> bytes:
        return gzip_part(self.plain)


class EventStream:
    """Belongs to one event loop; all methods are called in its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: set[_Listener] = set()
        self._is_stopped = False
        self._published_at = self._loop.time()

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def publish_snapshot(self, make: Callable[[], bytes]) -> None:
        """Replaces a snapshot that was not sent yet; `make` is only called if there are listeners."""
        if not self._listeners:
            return
        self._published_at = self._loop.time()
        chunk = _Chunk(make())
        for listener in self._listeners:
            listener.newest = chunk
            listener.wake()

    def publish(self, plain: bytes) -> None:
        self._published_at = self._loop.time()
        chunk = _Chunk(plain)
        for listener in self._listeners:
            listener.add(chunk)
            listener.wake()

    def keep_alive(self) -> None:
        if self._loop.time() - self._published_at >= KEEP_ALIVE_SECONDS:
            self.publish_snapshot(lambda: _KEEP_ALIVE)

    def stop(self) -> None:
        """Ends every stream: an open one would keep the server from stopping."""
        self._is_stopped = True
        for listener in self._listeners:
            listener.wake()

    async def serve(self, receive: Receive, send: Send, first: Callable[[], bytes], *, is_packed: bool = False) -> None:
        """`first` makes the present state; it is called when the listener is registered, so that no event is missed."""
        listener = _Listener(GzipStream() if is_packed else None)
        # `send` does not report that the client has disconnected.
        watch = asyncio.create_task(until_gone(receive))
        watch.add_done_callback(lambda _: listener.wake())
        self._listeners.add(listener)
        listener.add(_Chunk(_RETRY + first()))
        body = (GzipStream.beginning if is_packed else b"") + listener.take()
        try:
            while not (self._is_stopped or watch.done() or listener.is_lost):
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                else:
                    listener.waiting = self._loop.create_future()
                    await listener.waiting
                body = listener.take()
            # With the pending bytes, which the checksum at the end of a compressed stream includes.
            await send({"type": "http.response.body", "body": body + listener.end(), "more_body": False})
        finally:
            self._listeners.discard(listener)
            watch.cancel()


class _Listener:
    """What one stream still has to send."""

    __slots__ = ("_gzip", "_queued", "is_lost", "newest", "waiting")

    def __init__(self, gzip: GzipStream | None) -> None:
        #: None: it does not accept gzip.
        self._gzip = gzip
        self.newest: _Chunk | None = None
        self._queued: list[_Chunk] = []
        #: Whether it is so far behind that an event had to be dropped.
        self.is_lost = False
        self.waiting: asyncio.Future[None] | None = None

    def add(self, chunk: _Chunk) -> None:
        if len(self._queued) < MOST_QUEUED:
            self._queued.append(chunk)
        else:
            self.is_lost = True

    def take(self) -> bytes:
        if self.newest is not None:
            self._queued.append(self.newest)
        body = b"".join(map(self._bytes_of, self._queued))
        self._queued.clear()
        self.newest = None
        return body

    def end(self) -> bytes:
        return b"" if self._gzip is None else self._gzip.end()

    def _bytes_of(self, chunk: _Chunk) -> bytes:
        if self._gzip is None:
            return chunk.plain
        self._gzip.count(chunk.plain)
        return chunk.packed

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class EventStreamResponse(Response):
    """Writes to the connection directly, so that a thousand listeners are cheap."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream, first: Callable[[], bytes]) -> None:
        super().__init__(headers={"cache-control": "no-store", "vary": "accept-encoding", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_packed = accepts_gzip(Headers(scope=scope).get("accept-encoding", ""))
        if is_packed:
            self.headers["content-encoding"] = "gzip"
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._stream.serve(receive, send, self._first, is_packed=is_packed)
