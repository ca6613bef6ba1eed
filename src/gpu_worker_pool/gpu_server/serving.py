"""Runs the application under uvicorn, as the settings say, with connections that dawdle closed."""

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

#: Streams are told to end and do; what has not ended by then is not waited for.
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
        # Only our own files: somebody's home directory is no business of ours.
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
    """The usual 1024 files would be used up by as many idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))
