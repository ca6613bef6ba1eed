"""Answers that are large and alike all over are sent compressed to those who can read that."""

from __future__ import annotations

import asyncio
import re
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
_QUALITY: Final = re.compile(r";\s*q\s*=\s*([0-9.]+)")


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether it is named, and not named as unwanted."""
    for word in accept_encoding.lower().split(","):
        if word.partition(";")[0].strip() in ("gzip", "x-gzip"):
            quality = _QUALITY.search(word)
            return quality is None or quality[1].strip("0.") != ""
    return False


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
