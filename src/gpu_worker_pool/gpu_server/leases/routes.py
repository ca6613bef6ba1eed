"""The routes of the lease API: one table with the handler, the callers and the schemas of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from gpu_worker_pool._version import __version__
from gpu_worker_pool.gpu_server.fast_path import FastRoute
from gpu_worker_pool.gpu_server.leases import handlers, schemas
from gpu_worker_pool.lease_variables import GPUNaming

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gpu_worker_pool.gpu_server.fast_path import Handler, Method

#: `TITLE` and `VERSION` name the whole API; this says whose leases these are.
LEASE_TAG: Final = {
    "name": "leases",
    "description": f"The lease API of gpu-worker-pool {__version__}: a held GPU is granted to no other request.",
}
HOME_ENTRIES: Final = {
    "/leases": "Leases: POST to request one, GET to see all",
    "/queue": "Requests that wait",
    "/explain": "POST requirements to see which GPUs meet them",
}
_REFUSED: Final = {
    400: "A header was sent twice.",
    401: "A key is needed, or the one that was sent is wrong.",
    403: "The token is missing or wrong; or this server gives no leases to other hosts.",
    404: "There is no such lease, or no such request waits.",
    409: "It can never be granted, or it has ended, or the id was used for another request.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "`Host` is not a name of this machine.",
    422: "The request is invalid; `reasons` says why.",
    429: "This caller has too many waiting requests or leases, or there are too many in all.",
    503: "The ledger cannot be used now, or the server is stopping. Try again.",
}
_TOKEN: Final = {
    "name": "X-Lease-Token",
    "in": "header",
    "description": "The secret of the lease.",
    "schema": {"type": "string", "pattern": schemas.TOKEN_PATTERN},
}
_GPU_NAMES: Final = {
    "name": "gpu_names",
    "in": "query",
    "description": schemas.GPU_NAMES_DESCRIPTION,
    "schema": {"type": "string", "enum": list(get_args(GPUNaming)), "default": "index"},
}
_ID_DESCRIPTIONS: Final = {
    "lease_id": "From the answer to `POST /leases`.",
    "request_id": "From the request.",
    "host": "From `GET /fleet`.",
}


def _route(
    operation_id: str,
    method: Method,
    path: str,
    handler: Handler,
    answers: dict[int, type[BaseModel]],
    refusals: tuple[int, ...] = (),
    *,
    is_open: bool = True,
    takes_token: bool = True,
    body: type[BaseModel] | None = None,
    is_body_needed: bool = True,
    query: tuple[dict[str, Any], ...] = (),
) -> FastRoute:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": description,
            "schema": {"type": "string", "pattern": schemas.ID_PATTERN},
        }
        for name, description in _ID_DESCRIPTIONS.items()
        if f"{{{name}}}" in path
    ]
    parameters.extend(query)
    extra: dict[str, Any] = {"parameters": parameters}
    if not is_open:
        if takes_token:
            parameters.append(_TOKEN)
        refusals = (400, 401, 403, 421, *refusals)
        extra["security"] = [{"key": []}, {}]  # a key, or none on this host
    if body is not None:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        extra["requestBody"] = {"required": is_body_needed, "content": content}
    responses: dict[int | str, dict[str, Any]] = {status: {"model": model} for status, model in answers.items()}
    responses |= {status: {"model": schemas.Refused, "description": _REFUSED[status]} for status in (*refusals, 503)}
    openapi = {
        "operation_id": operation_id,
        "name": operation_id,
        "status_code": min(answers),
        "responses": responses,
        "openapi_extra": extra,
        "tags": [LEASE_TAG["name"]],
    }
    return FastRoute(method, path, handler, openapi, is_open=is_open, body=body)


_FLEET_ACTIONS: Final[tuple[tuple[str, Method, str, Handler], ...]] = (
    ("drain_host", "POST", "/fleet/hosts/{host}/drain", handlers.drain_host),
    ("undrain_host", "POST", "/fleet/hosts/{host}/undrain", handlers.undrain_host),
    ("remove_host", "DELETE", "/fleet/hosts/{host}", handlers.remove_host),
)
LEASE_ROUTES: Final = (
    _route(
        "acquire_lease",
        "POST",
        "/leases",
        handlers.acquire,
        {201: schemas.GrantedLease, 202: schemas.StillWaitingSchema},
        (409, 413, 415, 422, 429),
        is_open=False,
        body=schemas.LeaseRequest,
    ),
    _route(
        "renew_lease",
        "POST",
        "/leases/{lease_id}/renew",
        handlers.renew,
        {200: schemas.LeaseSchema},
        (404, 409, 413, 415, 422),
        is_open=False,
        body=schemas.RenewalBody,
        is_body_needed=False,
        query=(_GPU_NAMES,),
    ),
    _route(
        "yield_lease",
        "POST",
        "/leases/{lease_id}/yield",
        handlers.ask_to_leave,
        {200: schemas.AskedSchema},
        (404, 409, 413, 415, 422),
        is_open=False,
        takes_token=False,
        body=schemas.YieldBody,
        is_body_needed=False,
    ),
    _route(
        "release_lease",
        "DELETE",
        "/leases/{lease_id}",
        handlers.release,
        {200: schemas.ReleasedSchema},
        (404, 409),
        is_open=False,
    ),
    _route(
        "cancel_request",
        "DELETE",
        "/queue/{request_id}",
        handlers.cancel,
        {200: schemas.CancelledSchema},
        (404,),
        is_open=False,
    ),
    _route(
        "list_leases",
        "GET",
        "/leases",
        handlers.leases,
        {200: schemas.Leases},
    ),
    _route(
        "get_lease",
        "GET",
        "/leases/{lease_id}",
        handlers.lease,
        {200: schemas.LeaseRowSchema},
        (404,),
    ),
    _route(
        "list_queue",
        "GET",
        "/queue",
        handlers.queue,
        {200: schemas.Queue},
    ),
    _route(
        "explain_request", "GET", "/queue/{request_id}", handlers.explanation, {200: schemas.ExplanationSchema}, (404,)
    ),
    _route("get_fleet", "GET", "/fleet", handlers.fleet, {200: schemas.FleetSchema}, (404,)),
    _route("link_to_fleet", "GET", "/fleet/link", handlers.fleet_link, {200: schemas.FleetSchema}, (404, 409)),
    *(
        _route(
            name,
            method,
            path,
            handler,
            {200: schemas.AdministeredSchema},
            (404, 415),
            is_open=False,
            takes_token=False,
        )
        for name, method, path, handler in _FLEET_ACTIONS
    ),
    _route(
        "explain_requirements",
        "POST",
        "/explain",
        handlers.explanation_of_requirements,
        {200: schemas.ExplanationSchema},
        (409, 413, 415, 422),
        body=schemas.RequirementsBody,
    ),
)
