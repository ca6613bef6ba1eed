"""The caller's end of a connection: reads a request body up to a limit, and notices when the caller disconnects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from gpu_worker_pool.gpu_server.responses import Refusal

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive

MOST_BODY_BYTES: Final = 16 * 1024
#: This much of a body that is too large is read and dropped: a caller that still sends when the connection is closed
#: gets a broken pipe, and never sees the refusal.
MOST_DROPPED_BYTES: Final = 1024 * 1024
#: Faster answers are not watched: watching would cost more than most of them.
WATCH_AFTER_SECONDS: Final = 0.1


async def read_body(receive: Receive, declared: bytes | None) -> bytes:
    """`declared`: the `Content-Length`, if there is one."""
    if declared is not None and not (declared.isdigit() and len(declared) < 10 and int(declared) <= MOST_DROPPED_BYTES):
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= MOST_BODY_BYTES:
            chunks.append(chunk)
        is_complete = not message.get("more_body", False)
        if size > MOST_BODY_BYTES and (is_complete or size > MOST_DROPPED_BYTES):
            raise _too_large()
        if is_complete:
            return b"".join(chunks)


def _too_large() -> Refusal:
    return Refusal(
        413,
        "too_large",
        f"the body is larger than {MOST_BODY_BYTES // 1024} KiB, which no request needs",
        # The rest of the body is not read.
        headers=((b"connection", b"close"),),
    )


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_gone(receive: Receive) -> bool:
    """Whether the connection is already known to be closed; it does not wait."""
    step = getattr(waiting := receive(), "send", None)
    if step is None:
        return False
    try:
        step(None)
    except StopIteration as done:
        return bool(done.value["type"] == "http.disconnect")
    # The connection is open: `receive` would wait for the next message.
    waiting.close()  # type: ignore[attr-defined]  # a coroutine, as it has `send`
    return False


class DisconnectWatch:
    """`with DisconnectWatch(receive):` raises `CallerGoneError` inside the block when the caller disconnects."""

    __slots__ = ("_is_gone", "_receive", "_task", "_timer", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin_to_watch)
        return self

    def _begin_to_watch(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(until_gone(self._receive))
        self._watch.add_done_callback(self._gone)

    def _gone(self, watch: asyncio.Task[None]) -> None:
        if self._task is not None and not watch.cancelled():
            self._is_gone = True
            self._task.cancel()

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        task, self._task = self._task, None
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if not self._is_gone or task is None:
            return
        # A second cancellation, from elsewhere, is passed on.
        if task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise CallerGoneError from error


class CallerGoneError(Exception):
    """The caller disconnected; no answer can be sent."""
