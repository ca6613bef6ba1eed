"""Answers that are large and alike all over are sent compressed to those who can read that."""

from __future__ import annotations

import asyncio
import re
import struct
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

#: Less than this is sent in few packets as it is.
SMALLEST_BYTES: Final = 4096
#: Nearly as small as it gets, in half the time.
_LEVEL: Final = 4
_GZIP_FORMAT: Final = 31
#: An empty one.
_LAST_PART: Final = b"\x03\x00"
_QUALITY: Final = re.compile(r";\s*q\s*=\s*([0-9.]+)")


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether it is named, and not named as unwanted."""
    for word in accept_encoding.lower().split(","):
        if word.partition(";")[0].strip() in ("gzip", "x-gzip"):
            quality = _QUALITY.search(word)
            return quality is None or quality[1].strip("0.") != ""
    return False


def gzip_part(plain: bytes) -> bytes:
    """A part of a `GzipStream`; it refers to nothing before it, so that many can share it, and can be read at once."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(plain) + packer.flush(zlib.Z_SYNC_FLUSH)


class GzipStream:
    """What makes one gzip file of parts: its beginning and its end."""

    #: Neither a name nor a time, made on a system that is not told.
    beginning: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"

    def __init__(self) -> None:
        self._checksum = 0
        self._size = 0

    def count(self, plain: bytes) -> None:
        """It has this part."""
        self._checksum = zlib.crc32(plain, self._checksum)
        self._size += len(plain)

    def end(self) -> bytes:
        return _LAST_PART + struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF)


async def compressed(request: Request, response: Response) -> Response:
    """The same answer, in another thread meanwhile made smaller where that is worth it."""
    response.headers["vary"] = "accept-encoding"
    body = bytes(response.body)
    if len(body) < SMALLEST_BYTES or not accepts_gzip(request.headers.get("accept-encoding", "")):
        return response
    response.body = await asyncio.to_thread(zlib.compress, body, _LEVEL, _GZIP_FORMAT)
    response.headers["content-encoding"] = "gzip"
    response.headers["content-length"] = str(len(response.body))
    return response
