"""Compresses large answers with gzip for clients that accept it."""

from __future__ import annotations

import asyncio
import re
import struct
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

#: Smaller answers fit into few packets anyway.
SMALLEST_BYTES: Final = 4096
#: Nearly as small as level 9, in half the time.
_LEVEL: Final = 4
_GZIP_FORMAT: Final = 31
#: An empty final deflate block.
_LAST_PART: Final = b"\x03\x00"
_QUALITY: Final = re.compile(r";\s*q\s*=\s*([0-9.]+)")


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether gzip is listed, and not with quality 0."""
    for word in accept_encoding.lower().split(","):
        if word.partition(";")[0].strip() in ("gzip", "x-gzip"):
            quality = _QUALITY.search(word)
            return quality is None or quality[1].strip("0.") != ""
    return False


def gzip_part(plain: bytes) -> bytes:
    """A part of a `GzipStream`. It refers to no earlier part, so that all streams can share it."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(plain) + packer.flush(zlib.Z_SYNC_FLUSH)


class GzipStream:
    """Joins parts to one gzip file: adds the header, and the checksum at the end."""

    #: A header without file name, time and system.
    beginning: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"

    def __init__(self) -> None:
        self._checksum = 0
        self._size = 0

    def count(self, plain: bytes) -> None:
        """Adds a part to the checksum."""
        self._checksum = zlib.crc32(plain, self._checksum)
        self._size += len(plain)

    def end(self) -> bytes:
        return _LAST_PART + struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF)


async def compressed(request: Request, response: Response) -> Response:
    """The answer, compressed in another thread if that is worth it."""
    response.headers["vary"] = "accept-encoding"
    body = bytes(response.body)
    if len(body) < SMALLEST_BYTES or not accepts_gzip(request.headers.get("accept-encoding", "")):
        return response
    response.body = await asyncio.to_thread(zlib.compress, body, _LEVEL, _GZIP_FORMAT)
    response.headers["content-encoding"] = "gzip"
    response.headers["content-length"] = str(len(response.body))
    return response
