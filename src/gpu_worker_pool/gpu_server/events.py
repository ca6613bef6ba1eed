"""`/events`: a stream of what happens, the same bytes to everybody who listens.

Whoever reads slowly misses snapshots and delays nobody: of those it has not yet sent, a listener keeps the newest.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: Proxies and browsers give up on a silent stream.
KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": still here\n\n"
#: How long a browser waits before it comes back.
_RETRY = b"retry: 2000\n\n"


def event(name: str, data: bytes, event_id: int | None = None) -> bytes:
    number = b"" if event_id is None else b"id: %d\n" % event_id
    return b"%bevent: %b\ndata: %b\n\n" % (number, name.encode(), data)


def json_event(name: str, data: dict[str, Any]) -> bytes:
    return event(name, json.dumps(data, allow_nan=False).encode())


class EventStream:
    """Belongs to one event loop; everything here is called in its thread."""

    def __init__(self) -> None:
        self.listeners: set[_Listener] = set()
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        self._published_at = self._loop.time()

    def publish(self, chunk: bytes) -> None:
        self._published_at = self._loop.time()
        for listener in self.listeners:
            listener.chunk = chunk
            listener.wake()

    def keep_alive(self) -> None:
        if self._loop.time() - self._published_at >= KEEP_ALIVE_SECONDS:
            self.publish(_KEEP_ALIVE)

    def stop(self) -> None:
        """End every stream: an open one would keep the server from stopping."""
        self._is_stopped = True
        for listener in self.listeners:
            listener.wake()

    async def serve(self, receive: Receive, send: Send, first: bytes) -> None:
        listener = _Listener()
        # `send` never says that nobody reads any more.
        watch = asyncio.create_task(_until_gone(receive))
        watch.add_done_callback(lambda _: listener.wake())
        self.listeners.add(listener)
        try:
            await send({"type": "http.response.body", "body": _RETRY + first, "more_body": True})
            while not (self._is_stopped or watch.done()):
                if chunk := listener.take():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                else:
                    listener.waiting = self._loop.create_future()
                    await listener.waiting
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.listeners.discard(listener)
            watch.cancel()


class _Listener:
    """What one stream has still to send, and what wakes it."""

    __slots__ = ("chunk", "waiting")

    def __init__(self) -> None:
        self.chunk = b""
        self.waiting: asyncio.Future[None] | None = None

    def take(self) -> bytes:
        chunk, self.chunk = self.chunk, b""
        return chunk

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Written to the connection directly: a thousand listeners must cost next to nothing."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream, first: bytes) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._stream.serve(receive, send, self._first)
