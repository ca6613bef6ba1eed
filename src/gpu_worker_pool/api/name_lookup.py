"""Looks up host names, each in its own daemon thread, so that a name server that hangs delays one endpoint only.

The event loop's own lookups share a few threads with other blocking calls, and a program waits for them at its end.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp.resolver import ThreadedResolver

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def make_resolver() -> ThreadedResolver:
    """aiohttp's own, except for the two calls that block."""
    return ThreadedResolver(loop=_Lookups())  # type: ignore[arg-type]  # it uses nothing else of a loop


class _Lookups:
    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        return await _in_own_thread(partial(socket.getaddrinfo, *args, **kwargs))

    async def getnameinfo(self, *args: Any) -> Any:
        return await _in_own_thread(partial(socket.getnameinfo, *args))


async def _in_own_thread(call: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: OSError | UnicodeError | None) -> None:
        if answer.done():
            return  # the caller was cancelled
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # of `T`, since there was no error

    def look_up() -> None:
        result, failure = None, None
        try:
            result = call()
        except (OSError, UnicodeError) as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    Thread(target=look_up, name="gpu-pool name lookup", daemon=True).start()
    return await answer
