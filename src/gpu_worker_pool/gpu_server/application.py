"""The application: settings in, a FastAPI out. It begins to sample when it is started, not when it is made."""

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
from gpu_worker_pool.gpu_server.api_docs import add_docs
from gpu_worker_pool.gpu_server.dashboard.page import host_id
from gpu_worker_pool.gpu_server.dashboard.peers import Fleet
from gpu_worker_pool.gpu_server.events import EventStream
from gpu_worker_pool.gpu_server.hot import HotFastAPI
from gpu_worker_pool.gpu_server.leases.api import LeaseAPI
from gpu_worker_pool.gpu_server.leases.events import LeaseNews
from gpu_worker_pool.gpu_server.logs import log_like_a_server
from gpu_worker_pool.gpu_server.routes import add_routes, health_event, snapshot_event
from gpu_worker_pool.gpu_server.security import Authenticator
from gpu_worker_pool.gpu_server.settings import ServerSettings
from gpu_worker_pool.gpu_server.view import Health, HostView
from gpu_worker_pool.hardware.host import host_sampler
from gpu_worker_pool.ledger.host import open_host_ledger
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType

    from fastapi import FastAPI, Request

    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import HostSample
    from gpu_worker_pool.ledger import Ledger, Tell

logger = logging.getLogger(__name__)

#: A start with a driver that answers begins with a sample; with one that hangs, it does not wait for it.
FIRST_SAMPLE_SECONDS = 2.0
#: How often health is looked at for those who listen to `/events`.
HEALTH_SECONDS = 1.0
SAME_LINE_SECONDS = 60.0


def create_app(settings: ServerSettings | None = None, reader: Reader | None = None) -> FastAPI:
    """`settings`: by default the environment's; `reader`: by default the one they name."""
    settings = settings or ServerSettings.from_environment()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert isinstance(app, HotFastAPI)
        log_like_a_server(settings)
        loop = asyncio.get_running_loop()
        stream = EventStream()
        state_dir = _chosen_folder(settings)

        def take(sample: HostSample) -> None:
            view.take(sample)
            broker.take(sample)
            if (shown := view.usable()) is not None and shown.sample is sample:
                stream.publish_snapshot(lambda: snapshot_event(shown))

        load = SimulatedLoad.of(settings.gpu_backend)
        sampler = host_sampler(
            settings.gpu_backend,
            interval_seconds=settings.refresh_interval,
            keep=settings.max_history,
            # The only crossing from the sampler's thread to the loop's.
            on_sample=lambda sample: loop.call_soon_threadsafe(take, sample),
            state_dir=state_dir,
            reader=reader,
            holders=tuple if load is None else load.holders,
        )

        def open_ledger(tell: Tell) -> Ledger:
            leases.has_place = _can_have_folder(state_dir)
            return open_host_ledger(settings.gpu_backend, _pool_settings(settings), tell, state_dir=state_dir)

        broker = LeaseBroker(
            open_ledger,
            sampler.want_fresh,
            on_leases=None if load is None else load.take,
            idle_after_seconds=settings.gpu_pool_idle_after,
        )
        news = LeaseNews(broker, stream)
        view = HostView(
            lambda: sampler.seen,
            visible_devices=settings.cuda_visible_devices,
            interval_seconds=settings.refresh_interval,
            max_history=settings.max_history,
            see_promises=news.promises,
        )
        leases = LeaseAPI(broker, Authenticator(settings), view, settings.api_prefix)
        news.follow(view.promises_changed)
        await broker.start()
        sampler.start()
        await asyncio.to_thread(sampler.wait_until_up_to_date, FIRST_SAMPLE_SECONDS)
        _log_start(settings, view)
        fleet = Fleet(settings.gpu_pool_peers, host_id(settings, state_dir))
        app.serve_from(view, stream, leases, news, fleet)

        def stop_waiting() -> None:
            stream.stop()
            broker.stop_listening()

        with _told_of_signals(lambda: loop.call_soon_threadsafe(stop_waiting)):
            watch = asyncio.create_task(_watch(view, stream, news))
            try:
                yield
            finally:
                watch.cancel()
                stop_waiting()
                await fleet.close()
                await broker.stop()
                await asyncio.to_thread(sampler.stop)

    app = HotFastAPI(
        title=settings.title,
        description=settings.description,
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{settings.api_prefix}/openapi.json",
        lifespan=lifespan,
    )
    if settings.enable_cors:
        # Statistics are open to be read; nothing else is, and nobody's credentials are of use here.
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["GET"])
        app.hot_headers.append((b"access-control-allow-origin", b"*"))
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
    """The router knows of the first route with this path only; each method has its own."""
    found = [route for route in request.app.routes if isinstance(route, Route)]
    methods = {
        name for route in found if route.matches(request.scope)[0] is not Match.NONE for name in route.methods or ()
    }
    allowed = ", ".join(sorted(methods))
    detail = f"{request.method} is not for {request.url.path}: {allowed} are"
    return JSONResponse({"detail": detail}, status_code=405, headers={"allow": allowed})


def _chosen_folder(settings: ServerSettings) -> str | None:
    """Where readings and leases are kept, found once, so that it is said once; None where there is none now."""
    try:
        return str(state_directory(settings.gpu_pool_state_dir))
    except OSError:
        return settings.gpu_pool_state_dir


def _can_have_folder(chosen: str | None) -> bool:
    try:
        state_directory(chosen)
    except OSError:
        return False
    return True


def _pool_settings(settings: ServerSettings) -> PoolSettings:
    return PoolSettings(
        poll_seconds=settings.refresh_interval, most_waiting_of_an_account=settings.gpu_pool_most_waiting
    )


# --- while it runs ---


async def _watch(view: HostView, stream: EventStream, news: LeaseNews) -> None:
    told = view.health()
    logged_at: dict[tuple[str, str | None], float] = {}
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        stream.keep_alive()
        news.look_for_idle()
        health = view.health()
        if (health.status, health.code) != (told.status, told.code):
            stream.publish(health_event(health))
            # A driver that comes and goes all the time is worth a line a minute.
            now = time.monotonic()
            if now - logged_at.get((health.status, health.code), -math.inf) > SAME_LINE_SECONDS:
                logged_at[health.status, health.code] = now
                _log_health(health)
        told = health


def _log_health(health: Health) -> None:
    if health.status == "healthy":
        logger.info("GPU readings are healthy again")
    else:
        logger.warning("GPU readings are %s: %s", health.status, health.cause)


def _log_start(settings: ServerSettings, view: HostView) -> None:
    health, shown = view.health(), view.shown
    if shown is None:
        logger.error("no GPU readings yet (backend %s): %s; trying on", settings.gpu_backend, health.cause)
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
            "in force" if visibility.is_filtering else "ignored, as nothing in it was found",
            [gpu.index for gpu in visibility.gpus],
            visibility.total_gpus,
        )
    for gpu in visibility.gpus:
        if gpu.fault:
            logger.warning("GPU %d (%s) must not be used: %s", gpu.index, gpu.name, gpu.fault)
    if health.status != "healthy":
        _log_health(health)


@contextlib.contextmanager
def _told_of_signals(tell: Callable[[], object]) -> Iterator[None]:
    """uvicorn waits for open streams before it tells the application that it stops: so listen to what it listens to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        tell()
        before[signal.Signals(number)](number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        # Nobody's handler: the signal ends the process, streams and all.
        if callable(handler):
            before[number] = handler
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
