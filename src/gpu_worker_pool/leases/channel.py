"""The messages between a program and its lease process: one JSON object each, and file descriptors."""

from __future__ import annotations

import fcntl
import json
import socket
import termios
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Far more than any message needs.
_LARGEST_BYTES = 1 << 17
#: With one message.
_MOST_DESCRIPTORS = 4
#: Of messages that are only reports. Far less than the kernel keeps for a process that does not read.
_MOST_UNREAD_BYTES = 1 << 14


class Channel:
    """One end of the connection; it closes when the process at the other end exits."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **message: Any) -> bool:
        """False if the other process is gone. It gets copies of the descriptors, as the message's `descriptors`."""
        try:
            socket.send_fds(self._socket, [json.dumps({"kind": kind, **message}).encode()], descriptors)
        except OSError:
            return False
        return True

    def report(self, kind: str, **message: Any) -> None:
        """Like `send`, but not while many messages are unread: a suspended process must find the few that count."""
        unread_bytes = array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, unread_bytes)
        if unread_bytes[0] < _MOST_UNREAD_BYTES:
            self.send(kind, **message)

    def receive(self) -> list[dict[str, Any]] | None:
        """All messages that have arrived; None after the last one."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                message = self.receive_one()
            except BlockingIOError:
                return messages
            if message is None:
                return messages or None
            messages.append(message)

    def receive_one(self) -> dict[str, Any] | None:
        """Raises a `BlockingIOError` if none has arrived yet."""
        try:
            read, descriptors, *_ = socket.recv_fds(self._socket, _LARGEST_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            raise
        except OSError:
            return None
        message: dict[str, Any] | None = json.loads(read) if read else None
        if message is not None and descriptors:
            message["descriptors"] = descriptors
        return message

    def close(self) -> None:
        self._socket.close()


def channel() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)
