"""Runs the application under uvicorn with the given settings."""

from __future__ import annotations

import contextlib
import logging.config
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

import gpu_worker_pool
from gpu_worker_pool.gpu_server.logs import logging_config

if TYPE_CHECKING:
    from gpu_worker_pool.gpu_server.settings import ServerSettings

logger = logging.getLogger(__name__)

#: Streams end when the server stops; other requests get this long to end.
SHUTDOWN_SECONDS = 3


def serve(settings: ServerSettings) -> None:
    config = logging_config(settings)
    logging.config.dictConfig(config)
    _allow_many_connections()
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("GPU statistics on http://%s:%d%s/", shown, settings.port, settings.api_prefix)
    reached = "localhost" if settings.host in ("0.0.0.0", "::") else shown  # noqa: S104  # compared, not bound
    logger.info("live page on http://%s:%d%s/dashboard", reached, settings.port, settings.api_prefix)
    uvicorn.run(
        "gpu_worker_pool.gpu_server:app",
        host=settings.host,
        port=settings.port,
        reload=settings.reload,
        # Only the package, not the working directory.
        reload_dirs=[str(Path(gpu_worker_pool.__file__).parent)] if settings.reload else None,
        workers=settings.workers,
        log_config=config,
        log_level=settings.log_level,
        access_log=settings.access_log,
        ws="none",
        http="gpu_worker_pool.gpu_server.connections:GuardedProtocol",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def _allow_many_connections() -> None:
    """The usual limit of 1024 files would be reached with as many idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))
