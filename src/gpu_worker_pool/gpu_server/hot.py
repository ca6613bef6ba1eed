"""The routes that clients ask every few seconds, answered before the framework has looked at the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.gpu_server.view import Answer


class HotFastAPI(FastAPI):
    """A FastAPI whose `hot` paths skip routing, middleware and validation: there is nothing in them to do."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: By path, what answers a GET of it. Each is an ordinary route as well, for OpenAPI and for HEAD.
        self.hot: dict[str, Callable[[], Answer]] = {}
        self.hot_headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and (answer := self.hot.get(scope["path"])):
            status, body = answer()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *self.hot_headers,
            ]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await super().__call__(scope, receive, send)
