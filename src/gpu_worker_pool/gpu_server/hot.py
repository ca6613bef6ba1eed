"""The routes that clients ask every few seconds, answered before the framework has looked at the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.gpu_server.dashboard.peers import Fleet
    from gpu_worker_pool.gpu_server.events import EventStream
    from gpu_worker_pool.gpu_server.leases.api import LeaseAPI
    from gpu_worker_pool.gpu_server.leases.events import LeaseNews
    from gpu_worker_pool.gpu_server.view import HostView, Kind


class HotFastAPI(FastAPI):
    """A FastAPI whose `hot` paths skip routing, middleware and validation: there is nothing in them to do.

    So does what changes leases: it is checked there, and no web page needs to hear the answer.
    """

    #: Of the time it is started; there is nothing to answer before that.
    view: HostView
    events: EventStream
    leases: LeaseAPI
    news: LeaseNews
    fleet: Fleet

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: By path, what a GET of it asks for. Each is an ordinary route as well, for OpenAPI and for HEAD.
        self.hot: dict[str, Kind] = {}
        self.hot_headers: list[tuple[bytes, bytes]] = []

    def serve_from(self, view: HostView, events: EventStream, leases: LeaseAPI, news: LeaseNews, fleet: Fleet) -> None:
        self.view = view
        self.events = events
        self.leases = leases
        self.news = news
        self.fleet = fleet

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        # Swagger UI shows where to put a key; which routes take one, they say themselves.
        schema["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "Needed from other hosts only."}
        }
        return schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        if method == "GET" and (kind := self.hot.get(scope["path"])):
            status, body = self.view.answer(kind)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *self.hot_headers,
            ]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif method in ("POST", "DELETE") and (found := self.leases.find(method, scope["path"])):
            await self.leases.serve(found, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
