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

from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from gpu_worker_pool.api.gpu_rows import driver_facts
from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.simulated_load import SimulatedLoad
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.errors import LedgerUnusableError
from gpu_worker_pool.gpu_server.api_docs import add_docs
from gpu_worker_pool.gpu_server.dashboard.page import host_id
from gpu_worker_pool.gpu_server.dashboard.peers import Fleet
from gpu_worker_pool.gpu_server.events import EventStream
from gpu_worker_pool.gpu_server.fast_path import FastPathAPI, ServerParts
from gpu_worker_pool.gpu_server.host_view import Health, HostView
from gpu_worker_pool.gpu_server.leases.events import LeaseEvents
from gpu_worker_pool.gpu_server.leases.routes import LEASE_TAG
from gpu_worker_pool.gpu_server.logs import log_like_a_server
from gpu_worker_pool.gpu_server.routes import add_routes, health_event, snapshot_event
from gpu_worker_pool.gpu_server.security import Authenticator
from gpu_worker_pool.gpu_server.settings import ServerSettings
from gpu_worker_pool.gpu_server.systemd import notify_when_listening
from gpu_worker_pool.hardware.sampler import host_sampler
from gpu_worker_pool.ledger.host import open_host_ledger
from gpu_worker_pool.state_directory import announce_privacy, state_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType

    from fastapi import FastAPI, Request

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import HostSample
    from gpu_worker_pool.ledger import Ledger, OnCommit

logger = logging.getLogger(__name__)

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

        pool_settings = PoolSettings(
            poll_seconds=settings.refresh_interval, most_waiting_of_an_account=settings.gpu_pool_most_waiting
        )

        def open_ledger(on_commit: OnCommit) -> Ledger:
            parts.has_state_directory = _find_state_directory(state_dir) is not None
            return open_host_ledger(settings.backend, pool_settings, on_commit, state_dir=state_dir)

        broker = LeaseBroker(
            open_ledger,
            sampler.want_fresh,
            on_leases=None if load is None else load.take,
            idle_after_seconds=settings.gpu_pool_idle_after,
        )
        lease_events = LeaseEvents(broker, stream)
        view = HostView(
            lambda: sampler.seen,
            visible_devices=settings.cuda_visible_devices,
            interval_seconds=settings.refresh_interval,
            max_history=settings.max_history,
            see_leases=lease_events.promises,
        )
        fleet = Fleet(settings.gpu_pool_peers, host_id(settings, state_dir))
        parts = ServerParts(view, broker, Authenticator(settings), stream, lease_events, fleet)
        lease_events.follow(view.promises_changed)
        await broker.start()
        sampler.start()
        await asyncio.to_thread(sampler.wait_until_up_to_date, FIRST_SAMPLE_SECONDS)
        _log_start(settings, view)
        app.parts = parts

        def stop_waiting() -> None:
            stream.stop()
            broker.stop_listening()

        with _on_stop_signal(lambda: loop.call_soon_threadsafe(stop_waiting)):
            watch = asyncio.create_task(_watch(view, stream, lease_events))
            ready = asyncio.create_task(notify_when_listening(settings.host, settings.port))
            try:
                yield
            finally:
                watch.cancel()
                ready.cancel()
                stop_waiting()
                await fleet.close()
                await broker.stop()
                await asyncio.to_thread(sampler.stop)

    app = FastPathAPI(
        title=settings.title,
        description=settings.description,
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{settings.api_prefix}/openapi.json",
        lifespan=lifespan,
        openapi_tags=[LEASE_TAG],
        # Web pages may read statistics; they may change nothing, and send no credentials.
        get_headers=((b"access-control-allow-origin", b"*"),) if settings.enable_cors else (),
    )
    if settings.enable_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["GET"])
    add_routes(app, settings)
    add_docs(app, settings.docs_url, settings.redoc_url)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_allowed)
    return app


async def _not_found(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if detail == "Not Found":
        home = f"{request.app.openapi_url.removesuffix('openapi.json')}"
        detail = f"there is no {request.url.path}; GET {home} lists what there is"
    return JSONResponse({"detail": detail}, status_code=404)


async def _not_allowed(request: Request, _error: Exception) -> JSONResponse:
    """Lists all methods of the path: each is a route, and Starlette only names those of the first."""
    found = [route for route in request.app.routes if isinstance(route, Route)]
    methods = {
        name for route in found if route.matches(request.scope)[0] is not Match.NONE for name in route.methods or ()
    }
    allowed = ", ".join(sorted(methods))
    detail = f"{request.url.path} does not support {request.method}, only {allowed}"
    return JSONResponse({"detail": detail}, status_code=405, headers={"allow": allowed})


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
