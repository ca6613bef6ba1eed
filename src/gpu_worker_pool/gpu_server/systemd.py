"""Speaks with systemd if it started this server: says that it is ready, alive and stopping, and takes its sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final

_EVERY_SECONDS: Final = 0.02
#: What to connect to where a server listens on all addresses.
_OURS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not bound
#: The first socket that systemd passes on.
_FIRST_DESCRIPTOR: Final = 3
#: How many per `WatchdogSec`, so that one that is late does not end the server.
_SIGNS_OF_LIFE_PER_LIMIT: Final = 3


async def accompany(host: str, port: int) -> None:
    """While the server runs: report when it accepts connections, and then that its event loop is alive."""
    if not _address():
        return
    # The port is opened after the application has started, or by another process: so try until it answers.
    while port and not _is_socket_activated():
        with suppress(OSError):
            _, writer = await asyncio.open_connection(_OURS.get(host, host), port)
            writer.close()
            break
        await asyncio.sleep(_EVERY_SECONDS)
    notify("READY=1")
    limit = os.environ.get("WATCHDOG_USEC", "")
    while limit.isdecimal() and int(limit) > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(limit) / 1e6 / _SIGNS_OF_LIFE_PER_LIMIT)


def notify(text: str) -> None:
    if not (address := _address()):
        return
    # systemd may be gone; that must not stop a server.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.setblocking(False)
        notifier.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        notifier.sendall(text.encode())


def _address() -> str:
    address = os.environ.get("NOTIFY_SOCKET", "")
    return address if address.startswith(("/", "@")) else ""


def _is_socket_activated() -> bool:
    return os.environ.get("LISTEN_FDS", "").isdecimal()


def inherited_sockets() -> list[socket.socket]:
    """The sockets of a systemd socket unit, on which the server listens instead of opening a port.

    Raises an `OSError` for one that is not of TCP: of a Unix socket that systemd made, clients see systemd's process
    behind it, and could not know whether to trust it.
    """
    number = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not number.isdecimal():
        return []
    found = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(number)):
        os.set_inheritable(descriptor, False)
        each = socket.socket(fileno=descriptor)
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            raise OSError(
                "the socket unit passes on a socket that is not of TCP: let it have ListenStream=PORT, and use "
                "--socket PATH (GPU_POOL_SOCKET) for a Unix socket"
            )
        found.append(each)
    return found
