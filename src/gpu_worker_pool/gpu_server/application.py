"""Builds the FastAPI application from the settings. It begins to sample when it is started, not when it is built."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from gpu_worker_pool.api.gpu_rows import driver_facts
from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.simulated_load import SimulatedLoad
from gpu_worker_pool.core.settings import host_settings
from gpu_worker_pool.errors import LedgerUnusableError
from gpu_worker_pool.gpu_server import systemd
from gpu_worker_pool.gpu_server.api_docs import add_docs
from gpu_worker_pool.gpu_server.dashboard.page import host_id
from gpu_worker_pool.gpu_server.dashboard.peers import Fleet
from gpu_worker_pool.gpu_server.dashboard.usage import UsageView
from gpu_worker_pool.gpu_server.events import EventStream
from gpu_worker_pool.gpu_server.fast_path import FastPathAPI, ServerParts
from gpu_worker_pool.gpu_server.host_view import Health, HostView
from gpu_worker_pool.gpu_server.leases.events import LeaseEvents
from gpu_worker_pool.gpu_server.leases.routes import LEASE_TAG
from gpu_worker_pool.gpu_server.logs import log_like_a_server
from gpu_worker_pool.gpu_server.responses import Refusal, as_response, problem
from gpu_worker_pool.gpu_server.routes import TAGS, add_routes, health_event, snapshot_event
from gpu_worker_pool.gpu_server.security import Authenticator
from gpu_worker_pool.gpu_server.settings import ServerSettings
from gpu_worker_pool.gpu_server.webhooks import Webhooks
from gpu_worker_pool.hardware.sampler import host_sampler
from gpu_worker_pool.ledger.host import open_host_ledger
from gpu_worker_pool.state_directory import announce_privacy, state_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType

    from fastapi import FastAPI, Request, Response

    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.gpu_server.fleet.handlers import FleetHandlers
    from gpu_worker_pool.gpu_server.fleet.parts import FleetParts
    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import HostSample
    from gpu_worker_pool.ledger import Ledger, OnCommit

logger: logging.Logger = logging.getLogger(__name__)

#: How long the start waits for the first sample; a driver that hangs does not hold it up.
FIRST_SAMPLE_SECONDS = 2.0
#: How often health is checked for the listeners of `/events`.
HEALTH_SECONDS = 1.0
#: The same health message is logged at most this often.
REPEATED_LOG_SECONDS = 60.0


def create_app(settings: ServerSettings | None = None, reader: Reader | None = None) -> FastAPI:
    """`settings` default to the environment's, `reader` to the one that the settings name."""
    settings = settings or ServerSettings.from_environment()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert isinstance(app, FastPathAPI)
        log_like_a_server(settings)
        loop = asyncio.get_running_loop()
        stream = EventStream()
        # Looked up once, so that a problem with it is logged once.
        state_dir = _find_state_directory(settings.gpu_pool_state_dir) or settings.gpu_pool_state_dir

        def take(sample: HostSample) -> None:
            view.take(sample)
            broker.take(sample)
            if joined is not None:
                joined.took()
            if (shown := view.usable()) is not None and shown.sample is sample:
                stream.publish_snapshot(lambda: snapshot_event(shown))

        load = SimulatedLoad.of(settings.backend)
        sampler = host_sampler(
            settings.backend,
            interval_seconds=settings.refresh_interval,
            keep=settings.max_history,
            # The only step from the sampler's thread to the event loop.
            on_sample=lambda sample: loop.call_soon_threadsafe(take, sample),
            state_dir=state_dir,
            reader=reader,
            holders=tuple if load is None else load.holders,
        )

        pool_settings = host_settings(
            poll_seconds=settings.refresh_interval,
            most_waiting_of_an_account=settings.gpu_pool_most_waiting,
            most_leases_of_an_account=settings.gpu_pool_most_leases_of_a_caller,
            most_leases=settings.gpu_pool_most_leases,
        )

        def open_ledger(on_commit: OnCommit) -> Ledger:
            parts.has_state_directory = _find_state_directory(state_dir) is not None
            return open_host_ledger(
                settings.backend,
                pool_settings,
                on_commit,
                state_dir=state_dir,
                is_server=True,
                policy=settings.gpu_pool_policy,
            )

        broker = LeaseBroker(
            open_ledger,
            sampler.want_fresh,
            on_leases=None if load is None else load.take,
            idle_after_seconds=settings.gpu_pool_idle_after,
        )
        webhooks = Webhooks(lambda: broker.policy.policy, state_dir)
        lease_events = LeaseEvents(broker, stream, webhooks)
        view = HostView(
            lambda: sampler.seen,
            visible_devices=settings.cuda_visible_devices,
            interval_seconds=settings.refresh_interval,
            max_history=settings.max_history,
            see_leases=lease_events.promises,
        )
        fleet = Fleet(settings.gpu_pool_peers, host_id(settings, state_dir))
        joined = _join_fleet(settings, broker, view, pool_settings, sampler.want_fresh, state_dir)
        parts = ServerParts(view, broker, Authenticator(settings), stream, lease_events, fleet, UsageView(broker))
        lease_events.follow(view.promises_changed, None if joined is None else joined.changed)
        if joined is not None:
            parts.in_fleet = _fleet_handlers(joined)
        await broker.start()
        sampler.start()
        await asyncio.to_thread(sampler.wait_until_up_to_date, FIRST_SAMPLE_SECONDS)
        _log_start(settings, view)
        app.parts = parts
        if joined is not None:
            await joined.start()

        def stop_waiting() -> None:
            if joined is not None:
                joined.stop_waiting()
            stream.stop()
            broker.stop_listening()

        with _on_stop_signal(lambda: loop.call_soon_threadsafe(stop_waiting)):
            watch = asyncio.create_task(_watch(view, stream, lease_events))
            beside = asyncio.create_task(systemd.accompany(settings.host, settings.port))
            try:
                yield
            finally:
                watch.cancel()
                beside.cancel()
                stop_waiting()
                if settings.workers == 1 and not settings.reload:  # else it is one of several, which may be replaced
                    systemd.notify("STOPPING=1")
                await fleet.close()
                if joined is not None:
                    await joined.stop()
                await broker.stop()
                await webhooks.close()
                await asyncio.to_thread(sampler.stop)

    app = FastPathAPI(
        title=settings.title,
        description=settings.description,
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{settings.api_prefix}/openapi.json",
        lifespan=lifespan,
        openapi_tags=[LEASE_TAG, *TAGS],
        # Web pages may read statistics; they may change nothing, and send no credentials.
        get_headers=((b"access-control-allow-origin", b"*"),) if settings.enable_cors else (),
    )
    if settings.enable_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["GET"])
    add_routes(app, settings)
    add_docs(app, settings.docs_url, settings.redoc_url)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_allowed)
    return app


def _join_fleet(
    settings: ServerSettings,
    broker: LeaseBroker,
    view: HostView,
    pool_settings: PoolSettings,
    want_reading: Callable[[float], object],
    state_dir: str | None,
) -> FleetParts | None:
    """None for a server that is in no fleet, which loads nothing of it."""
    if not settings.is_in_fleet:
        return None
    from gpu_worker_pool.gpu_server.fleet.parts import FleetParts

    if state_dir is None:
        raise ValueError("a host of a fleet needs a directory for its ledger: set GPU_POOL_STATE_DIR")
    return FleetParts(settings, broker, view, pool_settings, want_reading, state_dir)


def _fleet_handlers(joined: FleetParts) -> FleetHandlers:
    from gpu_worker_pool.gpu_server.fleet.handlers import FleetHandlers

    return FleetHandlers(joined)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return as_response(request, error.reply)


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter of a GET: FastAPI lists what is wrong."""
    assert isinstance(error, RequestValidationError)
    return as_response(request, problem(422, "invalid", jsonable_encoder(error.errors())))


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if detail == "Not Found":
        home = f"{request.app.openapi_url.removesuffix('openapi.json')}"
        detail = f"there is no {request.url.path}; GET {home} lists what there is"
    return as_response(request, problem(404, "not_found", detail))


async def _not_allowed(request: Request, _error: Exception) -> Response:
    """Lists all methods of the path: each is a route, and Starlette only names those of the first."""
    found = [route for route in request.app.routes if isinstance(route, Route)]
    methods = {
        name for route in found if route.matches(request.scope)[0] is not Match.NONE for name in route.methods or ()
    }
    allowed = ", ".join(sorted(methods))
    detail = f"{request.url.path} does not support {request.method}, only {allowed}"
    return as_response(request, problem(405, "not_allowed", detail, ((b"allow", allowed.encode()),)))


def _find_state_directory(configured: str | None) -> str | None:
    """Where readings and leases are stored; None where no directory can be used now."""
    try:
        announce_privacy(configured)
        return str(state_directory(configured))
    except (OSError, LedgerUnusableError):
        return None


# --- while it runs ---


async def _watch(view: HostView, stream: EventStream, lease_events: LeaseEvents) -> None:
    last = view.health()
    logged_at: dict[tuple[str, str | None], float] = {}
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        stream.keep_alive()
        lease_events.publish_idle()
        health = view.health()
        if (health.status, health.code) != (last.status, last.code):
            stream.publish(health_event(health))
            # A driver that fails again and again is logged once per minute.
            now = time.monotonic()
            if now - logged_at.get((health.status, health.code), -math.inf) > REPEATED_LOG_SECONDS:
                logged_at[health.status, health.code] = now
                _log_health(health)
        last = health


def _log_health(health: Health) -> None:
    if health.status == "healthy":
        logger.info("GPU readings are healthy again")
    else:
        logger.warning("GPU readings are %s: %s", health.status, health.cause)


def _log_start(settings: ServerSettings, view: HostView) -> None:
    health, shown = view.health(), view.shown
    if shown is None:
        logger.error("no GPU readings yet (backend %s): %s; retrying", settings.backend, health.cause)
        return
    visibility, facts = shown.visibility, driver_facts(shown.sample)
    names = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in visibility.gpus).items())
    logger.info(
        "backend %s, driver %s, GPUs found: %d; shown: %d%s",
        facts["backend"],
        facts["driver_version"] or "unknown",
        visibility.total_gpus,
        len(visibility.gpus),
        f" ({names})" if names else "",
    )
    if view.filter.value is not None:
        logger.info(
            "CUDA_VISIBLE_DEVICES=%r is %s: showing GPUs %s of %d",
            view.filter.value,
            "in force" if visibility.is_filtering else "ignored, as none of its GPUs exist",
            [gpu.index for gpu in visibility.gpus],
            visibility.total_gpus,
        )
    for gpu in visibility.gpus:
        if gpu.fault:
            logger.warning("GPU %d (%s) must not be used: %s", gpu.index, gpu.name, gpu.fault)
    if health.status != "healthy":
        _log_health(health)


@contextlib.contextmanager
def _on_stop_signal(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` on SIGTERM and SIGINT: uvicorn waits for open streams before it shuts the application down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop()
        before[signal.Signals(number)](number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        # Without a handler, the signal ends the process.
        if callable(handler):
            before[number] = handler
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
