"""Serves `/docs` and `/redoc` from files in this package, so that they work without internet access."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from fastapi import FastAPI

VENDORED = Path(__file__).parent / "vendored"

#: The browser loads nothing from other servers, whatever a bundled script requests.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; worker-src blob:"
)

_SWAGGER_UI = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{assets}/swagger-ui/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="{assets}/swagger-ui/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
  url: "{openapi}", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout"
}});
</script>
</body>
</html>
"""

_REDOC = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>body {{ margin: 0; }}</style>
</head>
<body>
<redoc spec-url="{openapi}"></redoc>
<script src="{assets}/redoc/redoc.standalone.js"></script>
</body>
</html>
"""


def add_docs(app: FastAPI, docs_url: str, redoc_url: str) -> None:
    openapi_url = app.openapi_url
    assert openapi_url is not None

    def add(path: str, template: str) -> None:
        async def page() -> Response:
            # Relative to the page, so that it also works behind a proxy that adds a prefix.
            up = "../" * (path.count("/") - 1)
            filled = template.format(
                title=escape(app.title),
                openapi=up + openapi_url.lstrip("/"),
                assets=f"{up}{docs_url.lstrip('/')}/assets",
            )
            return HTMLResponse(filled, headers={"content-security-policy": _POLICY})

        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)

    add(docs_url, _SWAGGER_UI)
    add(redoc_url, _REDOC)
    app.mount(f"{docs_url}/assets", StaticFiles(directory=VENDORED), name="docs-assets")
