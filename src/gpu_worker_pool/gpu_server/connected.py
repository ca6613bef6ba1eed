"""The caller at the other end: what it sends, up to a limit, and whether it is still there while it waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from gpu_worker_pool.gpu_server.security import Refusal

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive

MOST_BODY_BYTES: Final = 64 * 1024
#: A caller that is answered sooner is not watched: that would cost more than most answers.
WATCH_AFTER_SECONDS: Final = 0.1
# What is still on its way is not waited for.
_TOO_LARGE: Final = Refusal(
    413,
    "too_large",
    f"the body is larger than {MOST_BODY_BYTES // 1024} KiB, which no request needs",
    headers=((b"connection", b"close"),),
)


async def read_body(receive: Receive, declared: bytes | None) -> bytes | Refusal | None:
    """None if the caller left before it had said all."""
    if declared is not None and not (declared.isdigit() and len(declared) < 10 and int(declared) <= MOST_BODY_BYTES):
        return _TOO_LARGE
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MOST_BODY_BYTES:
            return _TOO_LARGE
        if not message.get("more_body", False):
            return b"".join(chunks)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_gone(receive: Receive) -> bool:
    """Whether the connection is known to be closed at this moment."""
    step = getattr(waiting := receive(), "send", None)
    if step is None:
        return False
    try:
        step(None)
    except StopIteration as done:
        return bool(done.value["type"] == "http.disconnect")
    # It would wait for something to happen. It is not waited for.
    waiting.close()  # type: ignore[attr-defined]  # a coroutine, as it has `send`
    return False


class DisconnectWatch:
    """`with DisconnectWatch(receive):` awaits inside end with `CallerGoneError` as soon as the caller disconnects."""

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
        # Unless somebody else wants the task to end, too.
        if task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise CallerGoneError from error


class CallerGoneError(Exception):
    """Nobody is there to be answered."""
