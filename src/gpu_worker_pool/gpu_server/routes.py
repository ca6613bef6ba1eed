"""The routes for GPUs and for the server itself; those for leases are in `gpu_server/leases/routes.py`."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import HTTPException, Query, Request, Response

from gpu_worker_pool.api.gpu_rows import driver_facts
from gpu_worker_pool.api.replies import FLEET_FEATURE, INNER_LEASES
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.gpu_server import schemas
from gpu_worker_pool.gpu_server.compression import in_pieces
from gpu_worker_pool.gpu_server.dashboard.page import add_dashboard
from gpu_worker_pool.gpu_server.events import EventStreamResponse, event, json_event
from gpu_worker_pool.gpu_server.fast_path import FastRoute
from gpu_worker_pool.gpu_server.leases.routes import HOME_ENTRIES, LEASE_ROUTES
from gpu_worker_pool.gpu_server.metrics import render
from gpu_worker_pool.gpu_server.responses import Reply, as_json, as_response, problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import BaseModel

    from gpu_worker_pool.gpu_server.fast_path import FastPathAPI, RequestContext, ServerParts
    from gpu_worker_pool.gpu_server.host_view import Health, HostView, Kind, Shown
    from gpu_worker_pool.gpu_server.settings import ServerSettings
    from gpu_worker_pool.hardware.samples import GPUReading

#: How long metrics wait for what the ledger has counted.
TOTALS_SECONDS = 0.5

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": schemas.ProblemSchema, "description": "No sample is recent enough; the body names the cause."}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": schemas.ProblemSchema, "description": "It cannot grant leases, or has no recent readings."}
}
_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"model": schemas.ProblemSchema, "description": "There is no such GPU."}
}
_HOME = {
    "/": "This help message",
    "/gpu/stats": "Get detailed GPU statistics",
    "/gpu/count": "Get number of installed GPUs",
    "/gpu/summary": "Get summary of GPU usage",
    "/gpu/history": "Get the last readings of each GPU",
    "/health": "Health check endpoint",
    "/livez": "Probe: is the process alive",
    "/readyz": "Probe: are readings recent and leases possible",
    "/config": "Get server configuration",
    "/metrics": "Metrics for Prometheus",
    "/events": "Stream of snapshots (server-sent events)",
    "/dashboard": "Live page, for people",
    **HOME_ENTRIES,
}
TAGS = (
    {"name": "gpus", "description": "What the GPUs of this host are doing."},
    {"name": "server", "description": "The server itself: health, probes, settings, metrics and events."},
)
FEATURES = ["history", "metrics", "events", "dashboard"]


def _gpu_route(operation_id: str, path: str, kind: Kind, schema: type[BaseModel], summary: str) -> FastRoute:
    async def handler(context: RequestContext) -> Reply:
        return context.parts.view.answer(kind)

    openapi = {
        "operation_id": operation_id,
        "name": operation_id,
        "summary": summary,
        "tags": ["gpus"],
        "responses": {200: {"model": schema}} | _UNAVAILABLE,
    }
    return FastRoute("GET", path, handler, openapi)


FAST_ROUTES = (
    _gpu_route("get_gpu_stats", "/gpu/stats", "stats", schemas.Stats, "Everything known about every GPU"),
    _gpu_route("get_gpu_count", "/gpu/count", "count", schemas.Count, "How many GPUs there are"),
    _gpu_route(
        "get_gpu_summary", "/gpu/summary", "summary", schemas.Summary, "What an allocator needs to know, in short"
    ),
    *LEASE_ROUTES,
)


def add_routes(app: FastPathAPI, settings: ServerSettings) -> None:
    def add(path: str, endpoint: Callable[..., Any], model: type[BaseModel] | None = None, **kwargs: Any) -> None:
        path = settings.api_prefix + path
        kwargs = {"tags": ["server"], "name": kwargs["operation_id"]} | kwargs
        app.add_api_route(path, endpoint, methods=["GET"], response_model=model, **kwargs)
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    async def home(request: Request) -> dict[str, Any]:
        """What this server offers you: `leases` is only among the features for callers that can acquire them."""
        endpoints = {settings.api_prefix + path: what for path, what in _HOME.items()}
        endpoints |= {settings.docs_url: "Swagger API documentation", settings.redoc_url: "ReDoc API documentation"}
        parts = app.parts
        has_leases = parts.has_state_directory and parts.authenticator.offers_leases(request.scope)
        features = [*FEATURES, INNER_LEASES, "leases"] if has_leases else FEATURES
        if has_leases and parts.in_fleet is not None and (fleet_id := parts.in_fleet.fleet_id):
            features = [*features, f"{FLEET_FEATURE}{fleet_id}"]
        return {"message": settings.title, "version": settings.version, "endpoints": endpoints, "features": features}

    async def config() -> dict[str, Any]:
        """The server's settings."""
        return _config(settings, app.parts)

    async def health() -> dict[str, Any]:
        """Always 200; `status` says whether the readings are reliable, `error` why not."""
        return _health(app.parts.view)

    async def livez() -> schemas.Alive:
        """For a probe: 200 for as long as the process answers. Nothing else is checked."""
        return schemas.Alive()

    async def readyz(request: Request) -> Response:
        """For a probe: 200 if readings are recent and leases can be granted; otherwise 503 with the reason."""
        reply = _readiness(app.parts)
        return as_response(request, reply)

    async def history(
        request: Request,
        gpu_id: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only this GPU.")] = None,
        limit: Annotated[int | None, Query(ge=1, le=10_000, description="At most the newest N readings.")] = None,
    ) -> Response:
        """The last readings of every GPU that is shown, oldest first."""
        return _history(request, app.parts.view, gpu_id, limit)

    async def metrics(request: Request) -> Response:
        """In the text format of Prometheus, or in OpenMetrics if `Accept` names it."""
        broker = app.parts.broker
        totals: dict[str, Any] = {}
        # A ledger that is locked must not delay them; they say themselves where it cannot be used.
        with suppress(GPUWorkerPoolError, TimeoutError):
            async with asyncio.timeout(TOTALS_SECONDS):
                totals = await broker.totals()
        of_fleet = () if app.parts.in_fleet is None else await app.parts.in_fleet.metrics()
        accept = request.headers.get("accept", "")
        body, content_type = render(app.parts.view, broker, accept, totals, of_fleet)
        return Response(body, headers={"content-type": content_type})

    async def events() -> Response:
        """`snapshot`: the answer of `/gpu/stats`, with every sample. `health`: first, and when it changes.

        `leases`: first, all leases and waiting requests. `lease` and `queue`: what happens to them.
        """
        parts = app.parts

        def first() -> bytes:
            shown = parts.view.usable()
            snapshot = b"" if shown is None else snapshot_event(shown)
            return health_event(parts.view.health()) + parts.lease_events.first() + snapshot

        return EventStreamResponse(parts.events, first)

    add("/", home, schemas.Home, operation_id="get_home")
    add("/config", config, schemas.Config, operation_id="get_config")
    described = _UNAVAILABLE | _NOT_FOUND
    add(
        "/gpu/history",
        history,
        schemas.HistorySchema,
        operation_id="get_gpu_history",
        tags=["gpus"],
        responses=described,
    )
    add("/health", health, schemas.HealthBody, operation_id="get_health")
    add("/livez", livez, schemas.Alive, operation_id="get_liveness")
    ready = {200: {"model": schemas.Ready}} | _NOT_READY
    add("/readyz", readyz, operation_id="get_readiness", responses=ready)
    formats: dict[str, Any] = {"text/plain": {}, "application/openmetrics-text": {}}
    described = {200: {"content": formats}}
    add("/metrics", metrics, operation_id="get_metrics", responses=described, response_class=Response)
    described = {200: {"content": {"text/event-stream": {}}}}
    add("/events", events, operation_id="stream_events", responses=described, response_class=Response)
    for route in FAST_ROUTES:
        app.add_fast_route(route, settings.api_prefix)
    add_dashboard(app, settings)


def snapshot_event(shown: Shown) -> bytes:
    return event("snapshot", shown.body("stats", boot_time()))


def health_event(health: Health) -> bytes:
    return json_event("health", {"status": health.status, "error": health.cause, "error_code": health.code})


def _config(settings: ServerSettings, parts: ServerParts) -> dict[str, Any]:
    view = parts.view
    visibility = view.shown.visibility if view.shown is not None else None
    return {
        # The schemas name the settings that are shown.
        "server": schemas.ServerConfig.model_validate(settings, from_attributes=True),
        "api": schemas.APIConfig.model_validate(settings, from_attributes=True),
        "monitoring": schemas.MonitoringConfig.model_validate(settings, from_attributes=True),
        "gpu_filtering": {
            "cuda_visible_devices": view.filter.value,
            "visible_gpu_ids": None if visibility is None else [gpu.index for gpu in visibility.gpus],
            "filtering_active": visibility is not None and visibility.is_filtering,
            "total_system_gpus": None if visibility is None else visibility.total_gpus,
            "visible_gpu_count": None if visibility is None else len(visibility.gpus),
        },
        "leases": {
            "open_to": parts.authenticator.open_to,
            "idle_after": settings.gpu_pool_idle_after,
            "most_waiting": settings.gpu_pool_most_waiting,
            "policy": parts.broker.policy.source,
            "policy_problem": parts.broker.policy.problem,
            "most_leases_of_a_caller": settings.gpu_pool_most_leases_of_a_caller,
            "most_leases": settings.gpu_pool_most_leases,
        },
    }


def _health(view: HostView) -> dict[str, Any]:
    health, shown = view.health(), view.shown
    return {
        "status": health.status,
        "nvidia_smi_available": view.nvidia_smi_available,
        "timestamp": datetime.now().isoformat(),
        "error": health.cause,
        "error_code": health.code,
        "sample_age_seconds": None if health.sample_age_seconds is None else round(health.sample_age_seconds, 3),
        "gpu_count": None if shown is None else len(shown.visibility.gpus),
        **driver_facts(None if shown is None else shown.sample),
    }


def _readiness(parts: ServerParts) -> Reply:
    if parts.view.usable() is None:
        return parts.view.problem()
    if parts.has_state_directory and (found := parts.broker.problem) is not None:
        return problem(503, "ledger_unavailable", found)
    return Reply(200, as_json({"status": "ready"}))


def _history(request: Request, view: HostView, gpu_id: int | None, limit: int | None) -> Response:
    if view.shown is None:
        return as_response(request, view.problem())
    visible = view.shown.visibility.gpus
    gpus = [gpu for gpu in visible if gpu_id is None or gpu.index == gpu_id]
    if gpu_id is not None and not gpus:
        raise HTTPException(404, f"there is no GPU {gpu_id}; shown: {[gpu.index for gpu in visible]}")
    age = max(boot_time() - view.shown.sample.begun_at, 0.0)
    opening = b'{"max_history":%d,"sample_age_seconds":%.3f,"gpus":[' % (view.history.maxlen or 0, age)
    samples = list(view.history)[-limit:] if limit else list(view.history)
    size = sum(map(len, _history_parts(opening, gpus, samples)))
    return in_pieces(request, _history_parts(opening, gpus, samples), size)


def _history_parts(opening: bytes, gpus: list[GPUReading], samples: list[dict[str, bytes]]) -> Iterator[bytes]:
    yield opening
    for number, gpu in enumerate(gpus):
        facts = json.dumps({"gpu_id": gpu.index, "name": gpu.name, "uuid": gpu.uuid})
        yield b'%b%b,"readings":[' % (b"," if number else b"", facts[:-1].encode())
        rows = (row for sample in samples if (row := sample.get(gpu.identity)) is not None)
        yield next(rows, b"")
        for row in rows:
            yield b","
            yield row
        yield b"]}"
    yield b"]}"
