"""Accepts TLS connections, and bounds those that are still in their handshake: the server does not see them before."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sized

logger: logging.Logger = logging.getLogger(__name__)

#: The same as for a request.
HANDSHAKE_SECONDS: Final = 10.0
#: How much the kernel receives for a connection before it is read. With TLS each connection has a buffer for what is
#: read at once, which would otherwise grow to 256 KiB, whatever the client sends.
RECEIVED_BYTES: Final = 16 * 1024
#: How long to wait after a connection could not be accepted, for example because files ran out.
PAUSE_SECONDS: Final = 0.1


class TLSListener:
    """A listening socket, with the methods of an `asyncio.Server` that uvicorn calls. Belongs to its event loop."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        *,
        most: int,
        backlog: int,
    ) -> None:
        """`connections`: those that have finished their handshake; `most`: the limit for both kinds together."""
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._connections = connections
        self._most = most
        #: Those in their handshake, the oldest first.
        self._shaking: dict[asyncio.Task[None], None] = {}
        listening.setblocking(False)
        # Connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
        listening.listen(backlog)
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept_all())

    async def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error.strerror)
                self._drop_oldest()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._connections) + len(self._shaking) >= self._most:
                # If all have finished their handshake, the protocol itself makes room.
                self._drop_oldest()
            task = self._loop.create_task(self._shake_hands(connection))
            self._shaking[task] = None
            task.add_done_callback(self._shaking.pop)

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except (OSError, asyncio.CancelledError) as error:
            # Nothing awaits this task, and a failed handshake is the caller's problem.
            connection.close()
            logger.debug("a TLS handshake failed: %r", error)

    def _drop_oldest(self) -> None:
        for task in self._shaking:
            if not task.cancelling():
                task.cancel()
                return

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._shaking:
            task.cancel()
        self._listening.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)
