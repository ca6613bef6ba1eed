"""The routes that clients ask every few seconds, answered before the framework has looked at the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.gpu_server.events import EventStream
    from gpu_worker_pool.gpu_server.view import HostView, Kind


class HotFastAPI(FastAPI):
    """A FastAPI whose `hot` paths skip routing, middleware and validation: there is nothing in them to do."""

    #: Of the time it is started; there is nothing to answer before that.
    view: HostView
    events: EventStream

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: By path, what a GET of it asks for. Each is an ordinary route as well, for OpenAPI and for HEAD.
        self.hot: dict[str, Kind] = {}
        self.hot_headers: list[tuple[bytes, bytes]] = []

    def serve_from(self, view: HostView, events: EventStream) -> None:
        self.view = view
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and (kind := self.hot.get(scope["path"])):
            status, body = self.view.answer(kind)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *self.hot_headers,
            ]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await super().__call__(scope, receive, send)
