"""The files of the live page, read and compressed once; no other file is served."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from gpu_worker_pool.gpu_server.compression import accepts_gzip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

HERE: Final = Path(__file__).parent

#: No content from other servers, no inline scripts, no frames.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    # The browser checks each time: after an upgrade, old and new files must not mix.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
#: Further headers of the page itself; they apply to its parts, too.
PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    compressed: bytes
    headers: Mapping[str, str]
    #: Changes with the content.
    tag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        content = path.read_bytes()
        tag = f'W/"{sha256(content).hexdigest()[:16]}"'
        headers = {**HEADERS, **(PAGE_HEADERS if path.suffix == ".html" else {}), "etag": tag}
        headers["content-type"] = _TYPES[path.suffix]
        return cls(content, gzip.compress(content, mtime=0), headers, tag)

    def answer(self, request: Request) -> Response:
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self.headers)
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(self.compressed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.content, headers=self.headers)


def page_files() -> dict[str, PageFile]:
    """All files of the page, by name."""
    paths = [*HERE.glob("web/*"), *HERE.glob("uplot/*")]
    return {path.name: PageFile.read(path) for path in sorted(paths) if path.suffix in _TYPES}
