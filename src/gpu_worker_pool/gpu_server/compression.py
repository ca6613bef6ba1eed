"""Compresses large answers with gzip for clients that accept it, and sends those without a bound in pieces."""

from __future__ import annotations

import asyncio
import re
import struct
import zlib
from typing import TYPE_CHECKING, Final

from starlette.responses import StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

#: Smaller answers fit into few packets anyway.
SMALLEST_BYTES: Final = 4096
#: Of whole answers: an eighth smaller than with level 4, at twice the time, which another thread spends.
_LEVEL: Final = 6
#: Of the parts of a stream, which the event loop compresses.
_PART_LEVEL: Final = 4
_GZIP_FORMAT: Final = 31
#: The same with a smaller window, which takes 64 kB of memory instead of 256 kB.
_SMALL_GZIP_FORMAT: Final = 16 + 13
_SMALL_MEMORY: Final = 6
#: What is made and sent at a time of an answer in pieces.
PIECE_BYTES: Final = 32 * 1024
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
    packer = zlib.compressobj(_PART_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
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


def in_pieces(request: Request, parts: Iterable[bytes], size: int) -> Response:
    """JSON of this size, made while it is sent: of a connection that does not read it, a few pieces are stored."""
    headers = {"vary": "accept-encoding"}
    pieces = _joined(() if request.method == "HEAD" else parts)
    if size >= SMALLEST_BYTES and accepts_gzip(request.headers.get("accept-encoding", "")):
        headers["content-encoding"] = "gzip"
        body = _packed(pieces)
    else:
        headers["content-length"] = str(size)
        body = _one_by_one(pieces)
    return StreamingResponse(body, headers=headers, media_type="application/json")


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts, of which most are short, in pieces of about one size."""
    piece: list[bytes] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(piece)
            piece.clear()
            size = 0
    yield b"".join(piece)


async def _one_by_one(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)  # others are served between two of them


async def _packed(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _SMALL_GZIP_FORMAT, _SMALL_MEMORY)
    for piece in pieces:
        yield await asyncio.to_thread(packer.compress, piece)
    yield packer.flush()
