"""The routes of the live page: the page, its files, and data that only the page uses.

The files are read and compressed once; no other file is served.
"""

from __future__ import annotations

import gzip
import secrets
import socket
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException, Request, Response
from starlette.responses import JSONResponse

from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.gpu_server.compression import accepts_gzip, compressed
from gpu_worker_pool.hardware.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.gpu_server.fast_path import FastPathAPI
    from gpu_worker_pool.gpu_server.settings import ServerSettings

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
    "x-frame-options": "DENY",  # for what does not know `frame-ancestors`
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_NO_STORE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def add_dashboard(app: FastPathAPI, settings: ServerSettings) -> None:
    paths = [*HERE.glob("web/*"), *HERE.glob("uplot/*")]
    files = {path.name: PageFile.read(path) for path in sorted(paths) if path.suffix in _TYPES}

    def add(path: str, endpoint: Callable[..., Any]) -> None:
        # Not in OpenAPI: these routes change with the page.
        path = f"{settings.api_prefix}/dashboard{path}"
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)

    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "the page has no such file")
        return found.answer(request)

    async def host() -> Response:
        body = {
            "host_id": app.parts.fleet.own_id,
            "name": socket.gethostname(),
            "title": settings.title,
            "refresh_interval": settings.refresh_interval,
            "peers": app.parts.fleet.names,
            # Relative to the API prefix, as a proxy may add a path: the documentation is not under the prefix.
            "docs": "../" * settings.api_prefix.count("/") + settings.docs_url.lstrip("/"),
        }
        return JSONResponse(body, headers=_NO_STORE)

    async def peers(request: Request) -> Response:
        return await compressed(request, _json(app.parts.fleet.shown()))

    async def peers_history(request: Request) -> Response:
        return await compressed(request, _json(await app.parts.fleet.history()))

    async def usage(request: Request) -> Response:
        try:
            body = await app.parts.usage.body()
        except GPUWorkerPoolError as error:
            return JSONResponse({"detail": str(error)}, status_code=503, headers=_NO_STORE)
        return await compressed(request, JSONResponse(body, headers=_NO_STORE))

    add("", page)
    add("/usage", usage)
    add("/files/{name}", file)
    add("/host", host)
    add("/peers", peers)
    add("/peers/history", peers_history)


def host_id(settings: ServerSettings, state_dir: str | None) -> str:
    """The same for all servers that show the same GPUs of this host: a list of peers may include the host itself."""
    try:
        folder = Path(state_dir or "/nowhere").stat()
        facts = (boot_id(), folder.st_dev, folder.st_ino, settings.backend, settings.cuda_visible_devices)
    except OSError:
        return secrets.token_hex(8)
    return sha256(repr(facts).encode()).hexdigest()[:16]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers=_NO_STORE)


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
