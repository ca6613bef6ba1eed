"""Runs the application under uvicorn with the given settings: over TCP, and on a Unix socket if there is to be one."""

from __future__ import annotations

import contextlib
import logging.config
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.supervisors import ChangeReload, Multiprocess

import gpu_worker_pool
from gpu_worker_pool.gpu_server.logs import logging_config
from gpu_worker_pool.gpu_server.unix_socket import UnixListener

if TYPE_CHECKING:
    import socket

    from gpu_worker_pool.gpu_server.settings import ServerSettings

logger = logging.getLogger(__name__)

APPLICATION: Final = "gpu_worker_pool.gpu_server:app"
#: Streams end when the server stops; other requests get this long to end.
SHUTDOWN_SECONDS = 3


def serve(settings: ServerSettings) -> None:
    """Raises an `OSError` that says why it cannot listen on the Unix socket."""
    config = logging_config(settings)
    logging.config.dictConfig(config)
    _allow_many_connections()
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("GPU statistics on http://%s:%d%s/", shown, settings.port, settings.api_prefix)
    reached = "localhost" if settings.host in ("0.0.0.0", "::") else shown  # noqa: S104  # compared, not bound
    logger.info("live page on http://%s:%d%s/dashboard", reached, settings.port, settings.api_prefix)
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "reload": settings.reload,
        # Only the package, not the working directory.
        "reload_dirs": [str(Path(gpu_worker_pool.__file__).parent)] if settings.reload else None,
        "workers": settings.workers,
        "log_config": config,
        "log_level": settings.log_level,
        "access_log": settings.access_log,
        "ws": "none",
        "http": "gpu_worker_pool.gpu_server.connections:GuardedProtocol",
        "timeout_graceful_shutdown": SHUTDOWN_SECONDS,
    }
    if settings.gpu_pool_socket is None:
        uvicorn.run(APPLICATION, **options)
    elif settings.api_prefix:
        raise OSError(f"a socket ({settings.gpu_pool_socket}) has no API_PREFIX: unset API_PREFIX, or GPU_POOL_SOCKET")
    else:
        _serve_on_socket_too(settings.gpu_pool_socket, uvicorn.Config(APPLICATION, **options))


def _serve_on_socket_too(path: str, config: uvicorn.Config) -> None:
    """As `uvicorn.run`, which listens at one place only."""
    # First: where another server has the port, its socket is left alone.
    tcp = config.bind_socket()
    with UnixListener(path) as listener, contextlib.suppress(KeyboardInterrupt):
        logger.info("for users of this host on the Unix socket %s", path)
        sockets = [tcp, listener.socket]
        # All processes get both sockets; the file is removed by this one.
        if config.should_reload:
            ChangeReload(config, target=uvicorn.Server(config).run, sockets=sockets).run()
        elif config.workers > 1:
            Multiprocess(config, sockets=sockets).run()
        else:
            _RemovingServer(config, listener).run(sockets)


class _RemovingServer(uvicorn.Server):
    """Removes the file of the socket when it stops: uvicorn then ends the process by the signal that stopped it."""

    def __init__(self, config: uvicorn.Config, listener: UnixListener) -> None:
        super().__init__(config)
        self._listener = listener

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.remove()
        await super().shutdown(sockets)


def _allow_many_connections() -> None:
    """The usual limit of 1024 files would be reached with as many idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))
