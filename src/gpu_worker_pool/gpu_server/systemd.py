"""Tells systemd, if it started this server with `Type=notify`, that the server accepts connections."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final

_EVERY_SECONDS: Final = 0.02
#: What to connect to where a server listens on all addresses.
_OURS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not bound


async def notify_when_listening(host: str, port: int) -> None:
    """The port is opened after the application has started, or by another process: so try until it answers."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    while port:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(_OURS.get(host, host), port)
            writer.close()
            break
        await asyncio.sleep(_EVERY_SECONDS)
    # systemd may be gone; that must not stop a server.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        notifier.sendall(b"READY=1")
