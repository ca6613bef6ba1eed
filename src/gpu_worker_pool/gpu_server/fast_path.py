"""The routing table of requests that are answered before FastAPI sees them; OpenAPI describes them as other routes.

FastAPI's routing, middleware and validation would cost more than reading the statistics or granting a lease.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Final, Literal

from fastapi import FastAPI, Response

from gpu_worker_pool.gpu_server.disconnect import CallerGoneError
from gpu_worker_pool.gpu_server.responses import REFUSED_BY_BROKER, Refusal, Reply, as_refusal, content_type_of
from gpu_worker_pool.gpu_server.security import read_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.broker.broker import LeaseBroker
    from gpu_worker_pool.gpu_server.dashboard.peers import Fleet
    from gpu_worker_pool.gpu_server.dashboard.usage import UsageView
    from gpu_worker_pool.gpu_server.events import EventStream
    from gpu_worker_pool.gpu_server.fleet.handlers import FleetHandlers
    from gpu_worker_pool.gpu_server.host_view import HostView
    from gpu_worker_pool.gpu_server.leases.events import LeaseEvents
    from gpu_worker_pool.gpu_server.security import Authenticator, Caller, RequestHeaders

    Handler = Callable[["RequestContext"], Awaitable[Reply]]
    Method = Literal["GET", "POST", "DELETE"]


@dataclass(slots=True)
class ServerParts:
    """What the handlers of a running server work with."""

    view: HostView
    broker: LeaseBroker
    authenticator: Authenticator
    events: EventStream
    lease_events: LeaseEvents
    fleet: Fleet
    usage: UsageView
    #: None: this server is in no fleet.
    in_fleet: FleetHandlers | None = None
    #: Whether there is a directory for the ledger, usable or not. Without one, clients assign GPUs in process.
    has_state_directory: bool = True
    #: The last answer to `GET /queue`, and what it shows.
    queue_shown: tuple[object, Reply] = (None, Reply(503, b""))


class RequestContext:
    """One request on its way through a handler."""

    __slots__ = ("_headers", "caller", "identifier", "parts", "receive", "scope")

    #: Who sent it; set for routes that are not open to everyone.
    caller: Caller

    def __init__(self, parts: ServerParts, scope: Scope, receive: Receive, identifier: str = "") -> None:
        self.parts: ServerParts = parts
        self.scope: Scope = scope
        self.receive: Receive = receive
        #: The parameter in the path.
        self.identifier: str = identifier
        self._headers: RequestHeaders | None = None

    @property
    def headers(self) -> RequestHeaders:
        if self._headers is None:
            self._headers = read_headers(self.scope)
        return self._headers


@dataclass(frozen=True, slots=True)
class FastRoute:
    method: Method
    #: Without the API prefix; it may hold one parameter, such as `{lease_id}`.
    path: str
    #: Its name and docstring are those of the operation in OpenAPI.
    handler: Handler
    #: Further arguments of `FastAPI.add_api_route`: schemas, statuses and texts for OpenAPI.
    openapi: dict[str, Any]
    #: False: only for callers that the `Authenticator` lets through.
    is_open: bool = True
    #: The schema of its body.
    body: type[BaseModel] | None = None


class FastPathAPI(FastAPI):
    #: Set when the server starts; it answers nothing before that.
    parts: ServerParts

    def __init__(self, *, get_headers: tuple[tuple[bytes, bytes], ...] = (), **kwargs: Any) -> None:
        """`get_headers` are sent with the answer to every GET."""
        super().__init__(**kwargs)
        self._get_headers = get_headers
        self._fixed_routes: dict[tuple[str, str], FastRoute] = {}
        self._bodies: list[type[BaseModel]] = []
        self._routes_with_parameter: list[tuple[re.Pattern[str], FastRoute]] = []

    def add_fast_route(self, route: FastRoute, prefix: str) -> None:
        path = prefix + route.path
        if "{" in path:
            start, _, rest = path.partition("{")
            end = rest.partition("}")[2]
            pattern = re.compile(f"{re.escape(start)}([^/]+){re.escape(end)}", re.DOTALL)
            self._routes_with_parameter.append((pattern, route))
        else:
            self._fixed_routes[route.method, path] = route
        if route.body is not None:
            self._bodies.append(route.body)
        self.add_api_route(
            path,
            _never_called,
            methods=[route.method],
            description=cleandoc(route.handler.__doc__ or ""),
            response_class=Response,
            response_model=None,
            **route.openapi,
        )
        if route.method == "GET":
            self.add_api_route(path, _never_called, methods=["HEAD"], include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            # Swagger UI shows where to enter a key; each route says whether it takes one.
            schema["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "Needed from other hosts only."}
            }
            for body in self._bodies:
                described = body.model_json_schema(ref_template="#/components/schemas/{model}")
                parts = described.pop("$defs", {})
                schema["components"]["schemas"] |= {body.__name__: described, **parts}
            # Our classes are called `…Schema` to differ from those of the core; generated clients need not know.
            self.openapi_schema = json.loads(re.sub(r'(?<=\w)Schema"', '"', json.dumps(schema)))
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, identifier = None, ""
        if scope["type"] == "http":
            route = self._fixed_routes.get((scope["method"], scope["path"]))
            if route is None:
                route, identifier = self._find_route(scope)
        if route is None:
            await super().__call__(scope, receive, send)
            return
        context = RequestContext(self.parts, scope, receive, identifier)
        try:
            if not route.is_open:
                context.caller = self.parts.authenticator.identify(scope, context.headers)
            reply = await route.handler(context)
        except Refusal as refusal:
            reply = refusal.reply
        except REFUSED_BY_BROKER as error:
            reply = as_refusal(error).reply
        except CallerGoneError:
            return
        status, body, extra = reply
        content_type = content_type_of(status, scope["headers"])
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *extra]
        if route.method == "GET":
            headers += self._get_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _find_route(self, scope: Scope) -> tuple[FastRoute | None, str]:
        """The route and the parameter in its path; without a route, FastAPI answers."""
        method, path = scope["method"], scope["path"]
        # Inside another application the path begins with where this one is mounted.
        root = scope.get("root_path")
        if root and path.startswith(f"{root}/"):
            path = path[len(root) :]
        if method == "HEAD":
            method = "GET"
        route = self._fixed_routes.get((method, path))
        if route is not None:
            return route, ""
        for pattern, each in self._routes_with_parameter:
            if each.method == method and (match := pattern.fullmatch(path)):
                return each, match[1]
        # FastAPI would take `/leases` with a line feed behind it for `/leases`.
        return (None if path.isprintable() else _NO_ROUTE), ""


async def _not_found(context: RequestContext) -> Reply:
    raise Refusal(404, "not_found", f"there is no {context.scope['path'][:200]!r}")


_NO_ROUTE: Final = FastRoute("GET", "", _not_found, {})


async def _never_called() -> None:
    raise NotImplementedError  # FastAPI only describes this route; `FastPathAPI` answers it
