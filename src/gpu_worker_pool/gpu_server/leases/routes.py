"""The routes of the lease API, as OpenAPI shows them. `api` answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import Request, Response

from gpu_worker_pool.gpu_server.leases import schemas

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.gpu_server.answers import JSONAnswer
    from gpu_worker_pool.gpu_server.hot import HotFastAPI

LEASE_ROUTES: Final = {
    "/leases": "Leases: POST to ask for one, GET to see all",
    "/queue": "Requests that wait",
    "/explain": "POST wishes to see what keeps each GPU from them",
}
_REFUSED: Final = {
    400: "A header was sent twice.",
    401: "A key is needed, or the one that was sent is wrong.",
    403: "Not yours: the token is missing or wrong; or leases are closed to callers from elsewhere.",
    404: "There is no such lease, or no such request waits.",
    409: "It can never be granted, or it has ended, or the id was used for something else.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "`Host` is no name of this machine.",
    422: "The request makes no sense; `reasons` says why.",
    429: "Too many requests of this caller wait already.",
    503: "The ledger cannot be used now, or the server is stopping. Ask again.",
}
_TOKEN: Final = {
    "name": "X-Lease-Token",
    "in": "header",
    "description": "The secret that the lease was granted with.",
    "schema": {"type": "string", "pattern": schemas.TOKEN_PATTERN},
}
_LEASE_ID: Final = {
    "name": "lease_id",
    "in": "path",
    "required": True,
    "description": "As `POST /leases` told it.",
    "schema": {"type": "string", "pattern": schemas.ID_PATTERN},
}
#: Programs on this host need none.
_KEY_OR_NONE: Final[dict[str, Any]] = {"security": [{"key": []}, {}]}
_REQUEST_ID: Final = _LEASE_ID | {"name": "request_id", "description": "As it was asked with."}


class _Delegated(Response):
    """Answered by the lease API itself, where the application is part of another one and is not asked directly."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = scope["app"]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        found = app.leases.find(scope["method"], path)
        assert found is not None  # the route has led here
        await app.leases.serve(found, scope, receive, send)


def add_lease_routes(app: HotFastAPI, prefix: str) -> None:
    def add(
        method: str,
        path: str,
        endpoint: Any,
        answers: dict[int, type[BaseModel]],
        refusals: tuple[int, ...],
        parameters: tuple[dict[str, Any], ...] = (),
        **extra: Any,
    ) -> None:
        is_open = method == "GET" or path == "/explain"
        responses: dict[int | str, dict[str, Any]] = {status: {"model": model} for status, model in answers.items()}
        responses |= {
            status: {"model": schemas.Refused, "description": _REFUSED[status]} for status in (*refusals, 503)
        }
        app.add_api_route(
            prefix + path,
            endpoint,
            methods=[method],
            status_code=min(answers),
            response_class=Response,
            response_model=None,
            responses=responses,
            openapi_extra={"parameters": list(parameters), **({} if is_open else _KEY_OR_NONE), **extra},
            tags=["leases"],
        )
        if method == "GET":
            app.add_api_route(prefix + path, endpoint, methods=["HEAD"], include_in_schema=False)

    async def acquire() -> Response:
        """Ask for GPUs: 201 with a lease, or after `wait_seconds` 202 with the place in the queue.

        Asking again with the same `request_id` gives the same lease, or keeps the place and waits on. Whoever does not
        ask for half a minute loses its place. With an `X-Lease-Token` of your own nobody else can repeat the request.
        """
        return _Delegated()

    async def renew() -> Response:
        """Keep it for another `ttl_seconds`. A lease that has ended is never revived: 409."""
        return _Delegated()

    async def release() -> Response:
        """Give it back; twice is harmless. An administrator's key releases anybody's, also out of a quarantine."""
        return _Delegated()

    async def cancel() -> Response:
        """Take a request back. If it was granted in the same moment, so is the grant."""
        return _Delegated()

    async def leases() -> Response:
        """All leases, oldest first, with what their holders make of them."""
        return _plain(await app.leases.leases())

    async def lease(request: Request) -> Response:
        """One lease. Those that have ended are not shown."""
        return _plain(await app.leases.lease(request.path_params["lease_id"]))

    async def queue() -> Response:
        """All who wait, the next one first."""
        return _plain(await app.leases.queue())

    async def explanation(request: Request) -> Response:
        """Why a request waits: for every GPU what keeps it from it, with the numbers."""
        return _plain(await app.leases.explanation(request.path_params["request_id"]))

    async def explanation_of_requirements(request: Request) -> Response:
        """Why somebody who asked for this now would wait; open to all, and nothing is asked for.

        The answer is that of `GET /queue/{request_id}`, with an empty `request_id`.
        """
        return _plain(await app.leases.explanation_of_requirements(request.scope, request.receive))

    changing = (400, 401, 403, 421)
    asked, requirement_options = (
        {"required": True, "content": {"application/json": {"schema": shape.model_json_schema()}}}
        for shape in (schemas.LeaseRequest, schemas.RequirementsBody)
    )
    granted_or_not: dict[int, type[BaseModel]] = {201: schemas.GrantedLease, 202: schemas.StillWaiting}
    refusals = (*changing, 409, 413, 415, 422, 429)
    renewing = (*changing, 404, 409, 415)
    add("POST", "/leases", acquire, granted_or_not, refusals, (_TOKEN,), requestBody=asked)
    add("POST", "/leases/{lease_id}/renew", renew, {200: schemas.Lease}, renewing, (_LEASE_ID, _TOKEN))
    add("DELETE", "/leases/{lease_id}", release, {200: schemas.Released}, (*changing, 404, 409), (_LEASE_ID, _TOKEN))
    add("DELETE", "/queue/{request_id}", cancel, {200: schemas.Cancelled}, (*changing, 404), (_REQUEST_ID, _TOKEN))
    add("GET", "/leases", leases, {200: schemas.Leases}, ())
    add("GET", "/leases/{lease_id}", lease, {200: schemas.LeaseRow}, (404,), (_LEASE_ID,))
    add("GET", "/queue", queue, {200: schemas.Queue}, ())
    add("GET", "/queue/{request_id}", explanation, {200: schemas.Explanation}, (404,), (_REQUEST_ID,))
    explained: dict[int, type[BaseModel]] = {200: schemas.Explanation}
    add(
        "POST",
        "/explain",
        explanation_of_requirements,
        explained,
        (409, 413, 415, 422),
        requestBody=requirement_options,
    )


def _plain(answer: JSONAnswer) -> Response:
    return answer.as_response()
