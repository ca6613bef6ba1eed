"""Name lookups that wait for nobody: each in a thread of its own, so that a name server that hangs delays one endpoint.

The event loop's own lookups share a few threads with everything else that blocks, and a program waits for them to end.
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
    """aiohttp's own, but for the two calls that block."""
    return ThreadedResolver(loop=_Lookups())  # type: ignore[arg-type]  # it asks a loop for nothing else


class _Lookups:
    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        return await _in_a_thread_of_its_own(partial(socket.getaddrinfo, *args, **kwargs))

    async def getnameinfo(self, *args: Any) -> Any:
        return await _in_a_thread_of_its_own(partial(socket.getnameinfo, *args))


async def _in_a_thread_of_its_own(call: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: OSError | UnicodeError | None) -> None:
        if answer.done():
            return  # nobody waits for it any more
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
