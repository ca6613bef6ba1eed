"""The messages between an executor and its workers: a kind, and bytes that are mostly pickled."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

#: To a worker: what it is to import and call before its first task; a task.
PREPARE: Final = b"P"
TASK: Final = b"T"
#: From a worker: it is ready; it cannot become ready; a task's value; a task's exception; SIGINT came during a task.
READY: Final = b"R"
UNUSABLE: Final = b"U"
VALUE: Final = b"V"
EXCEPTION: Final = b"E"
INTERRUPTED: Final = b"S"

#: The kind, and the number of bytes.
_HEADER: Final = struct.Struct("!cQ")
_MOST_BYTES_AT_ONCE: Final = 1 << 20


class BlockingEnd:
    """A worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Raises an `OSError` if the executor is gone."""
        if len(payload) < _MOST_BYTES_AT_ONCE:
            self._write(_HEADER.pack(kind, len(payload)) + payload)
        else:
            self._write(_HEADER.pack(kind, len(payload)))
            self._write(payload)

    def receive(self) -> tuple[bytes, bytes] | None:
        """None after the last one."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, size = _HEADER.unpack(header)
        payload = self._read(size)
        return None if payload is None else (kind, payload)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _read(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = os.read(self._descriptor, min(size, _MOST_BYTES_AT_ONCE))
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class WaitlessEnd:
    """An executor's end, which never waits: a worker that is stopped must not hold up the others."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """What cannot be sent now is sent by `flush`; a worker that is gone is noticed by `receive`."""
        self._unsent += _HEADER.pack(kind, len(payload))
        self._unsent += payload
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(memoryview(self._unsent)[:_MOST_BYTES_AT_ONCE])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """All messages that have arrived, and whether more may come."""
        is_open = True
        while True:
            try:
                part = self._socket.recv(_MOST_BYTES_AT_ONCE)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                is_open = False
                break
            self._unread += part
            if len(part) < _MOST_BYTES_AT_ONCE:
                break
        return self._whole_messages(), is_open

    def _whole_messages(self) -> list[tuple[bytes, bytes]]:
        messages: list[tuple[bytes, bytes]] = []
        begin = 0
        while len(self._unread) - begin >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._unread, begin)
            end = begin + _HEADER.size + size
            if len(self._unread) < end:
                break
            messages.append((kind, bytes(memoryview(self._unread)[begin + _HEADER.size : end])))
            begin = end
        if begin:
            del self._unread[:begin]
        return messages

    def close(self) -> None:
        self._socket.close()
