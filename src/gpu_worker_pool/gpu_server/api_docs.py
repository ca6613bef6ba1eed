"""Serves `/docs` and `/redoc` from files in this package, so that they work without internet access."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from fastapi import FastAPI

VENDORED = Path(__file__).parent / "vendored"

#: The browser loads nothing from other servers, whatever a bundled script requests. No page may frame these: clicks of
#: its readers would request GPUs.
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; worker-src blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
_NO_ICON = "data:,"


def add_docs(app: FastAPI, docs_url: str, redoc_url: str) -> None:
    title, openapi_url = escape(app.title), (app.openapi_url or "").lstrip("/")
    # Addresses are relative to the page, so that it also works behind a proxy that adds a prefix.
    docs_root, redoc_root = ("../" * (url.count("/") - 1) for url in (docs_url, redoc_url))
    assets = f"{docs_url.lstrip('/')}/assets"
    docs = get_swagger_ui_html(
        openapi_url=docs_root + openapi_url,
        title=title,
        swagger_js_url=f"{docs_root}{assets}/swagger-ui/swagger-ui-bundle.js",
        swagger_css_url=f"{docs_root}{assets}/swagger-ui/swagger-ui.css",
        swagger_favicon_url=_NO_ICON,
        # The validator is a server on the internet.
        swagger_ui_parameters={"validatorUrl": None},
    )
    redoc = get_redoc_html(
        openapi_url=redoc_root + openapi_url,
        title=title,
        redoc_js_url=f"{redoc_root}{assets}/redoc/redoc.standalone.js",
        redoc_favicon_url=_NO_ICON,
        with_google_fonts=False,
    )

    def add(url: str, html: bytes | memoryview) -> None:
        async def page() -> Response:
            return HTMLResponse(html, headers=_HEADERS)

        app.add_api_route(url, page, methods=["GET", "HEAD"], include_in_schema=False)

    add(docs_url, docs.body)
    add(redoc_url, redoc.body)
    app.mount(f"{docs_url}/assets", StaticFiles(directory=VENDORED), name="docs-assets")
