"""Runs the application under uvicorn with the given settings: over TCP, and on a Unix socket if there is to be one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging.config
import os
import resource
import signal
import ssl
import stat
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.supervisors import ChangeReload, Multiprocess, multiprocess

import gpu_worker_pool
from gpu_worker_pool.gpu_server.connections import most_connections
from gpu_worker_pool.gpu_server.handshakes import TLSListener
from gpu_worker_pool.gpu_server.logs import logging_config
from gpu_worker_pool.gpu_server.systemd import inherited_sockets
from gpu_worker_pool.gpu_server.unix_socket import UnixListener

if TYPE_CHECKING:
    import socket

    from uvicorn.supervisors.basereload import BaseReload

    from gpu_worker_pool.gpu_server.settings import ServerSettings

logger: logging.Logger = logging.getLogger(__name__)

APPLICATION: Final = "gpu_worker_pool.gpu_server:app"
#: As uvicorn has it.
STARTUP_FAILURE: Final = 3
#: Streams end when the server stops; other requests get this long to end.
SHUTDOWN_SECONDS = 3


def serve(settings: ServerSettings) -> None:
    """Raises an `OSError` that says why it cannot listen on the Unix socket, or cannot use the certificate."""
    config = logging_config(settings)
    logging.config.dictConfig(config)
    _allow_many_connections()
    tls = _tls_options(settings)
    if tls and threading.current_thread() is threading.main_thread():
        # Until it is handled: one that comes while the server starts must not end it, nor its processes.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    inherited = inherited_sockets()
    scheme = "https" if tls else "http"
    host, port = inherited[0].getsockname()[:2] if inherited else (settings.host, settings.port)
    shown = f"[{host}]" if ":" in host else host
    logger.info("GPU statistics on %s://%s:%d%s/", scheme, shown, port, settings.api_prefix)
    reached = "localhost" if host in ("0.0.0.0", "::") else shown  # noqa: S104  # compared, not bound
    logger.info("live page on %s://%s:%d%s/dashboard", scheme, reached, port, settings.api_prefix)
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
        **tls,
    }
    if settings.gpu_pool_socket is not None:
        if settings.api_prefix:
            raise OSError(
                f"a socket ({settings.gpu_pool_socket}) has no API_PREFIX: unset API_PREFIX, or GPU_POOL_SOCKET"
            )
        if tls and settings.workers > 1:
            raise OSError("a server with TLS and a Unix socket has one process: unset WORKERS, or GPU_POOL_SOCKET")
        _serve_on_socket_too(settings.gpu_pool_socket, uvicorn.Config(APPLICATION, **options), inherited)
    elif inherited:
        _serve_on(uvicorn.Config(APPLICATION, **options), inherited)
    elif tls:
        with_tls = uvicorn.Config(APPLICATION, **options)
        _serve_on(with_tls, [with_tls.bind_socket()])
    else:
        uvicorn.run(APPLICATION, **options)


def _tls_options(settings: ServerSettings) -> dict[str, str]:
    certificate, key = settings.gpu_pool_tls_cert, settings.gpu_pool_tls_key
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        missing = "GPU_POOL_TLS_CERT (--tls-cert)" if certificate is None else "GPU_POOL_TLS_KEY (--tls-key)"
        raise OSError(f"a server with TLS needs a certificate and its key: set {missing}, too")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one: for files that hold something else or do not match
        raise OSError(
            f"the certificate {certificate} with the key {key} cannot be used: {error.strerror or error}"
        ) from None
    if Path(key).stat().st_mode & stat.S_IROTH:
        logger.warning("all users can read %s, and could pose as this server: chmod o-rwx %s", key, key)
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def _serve_on_socket_too(path: str, config: uvicorn.Config, inherited: list[socket.socket]) -> None:
    # First: where another server has the port, its socket is left alone.
    tcp = inherited or [config.bind_socket()]
    with UnixListener(path) as listener:
        logger.info("for users of this host on the Unix socket %s", path)
        _serve_on(config, tcp, listener)


def _serve_on(config: uvicorn.Config, tcp: list[socket.socket], listener: UnixListener | None = None) -> None:
    """As `uvicorn.run`, which listens at one place only."""
    # All processes get all sockets; the file of the Unix socket is removed by this one.
    sockets = tcp if listener is None else [*tcp, listener.socket]
    with contextlib.suppress(KeyboardInterrupt):
        if config.should_reload:
            reloader = ChangeReload(config, target=Server(config).run, sockets=sockets)
            if config.is_ssl:
                signal.signal(signal.SIGHUP, lambda *_: _pass_on(signal.SIGHUP, reloader))
            reloader.run()
        elif config.workers > 1:
            # On SIGHUP they are started again.
            if "target" in inspect.signature(Multiprocess).parameters:
                more: dict[str, Any] = {"target": Server(config).run}
            else:
                # Newer versions of uvicorn offer no other way to say what each process runs.
                multiprocess.Process, more = ServerWorker, {}  # type: ignore[misc]
            Multiprocess(config, sockets=sockets, **more).run()
        else:
            server = Server(config, listener)
            server.run(tcp)
            if not server.started:
                sys.exit(STARTUP_FAILURE)


def _pass_on(number: signal.Signals, reloader: BaseReload) -> None:
    if (pid := reloader.process.pid) is not None:
        os.kill(pid, number)


class Server(uvicorn.Server):
    """One process: reads its certificate again on SIGHUP, and serves a Unix socket without TLS beside its port."""

    def __init__(self, config: uvicorn.Config, listener: UnixListener | None = None) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        # We accept TLS connections ourselves: uvicorn would know of one, and close it, only after its handshake.
        await super().startup(sockets if context is None else [])
        loop = asyncio.get_running_loop()
        if context is not None:
            for each in sockets or [self.config.bind_socket()]:
                self.servers.append(self._tls_listener(each, context))
        if self._listener is not None:
            self.servers.append(
                await loop.create_server(self._protocol, sock=self._listener.socket, backlog=self.config.backlog)
            )
        if context is not None and threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, self._reload_certificate)

    def _tls_listener(self, listening: socket.socket, context: ssl.SSLContext) -> Any:
        return TLSListener(
            listening,
            context,
            self._protocol,
            self.server_state.connections,
            most=most_connections(),
            backlog=self.config.backlog,
        )

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=None
        )
        return made

    def _reload_certificate(self) -> None:
        """For connections from now on; those that are open stay as they are."""
        certificate, key = str(self.config.ssl_certfile), str(self.config.ssl_keyfile)
        assert self.config.ssl is not None
        try:
            # First elsewhere: loading a key that does not fit would leave the context half changed.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            self.config.ssl.load_cert_chain(certificate, key)
        except OSError as error:
            logger.error(  # noqa: TRY400  # the sentence says it all
                "the certificate %s cannot be used, so the old one stays: %s", certificate, error
            )
        else:
            logger.info("the certificate %s was read again", certificate)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listener is not None:
            # Now: uvicorn ends the process by the signal that stopped it.
            self._listener.remove()
        await super().shutdown(sockets)


class ServerWorker(multiprocess.Process):
    """One of several processes, with our server."""

    @property
    def server(self) -> uvicorn.Server:
        if self._server is None:
            self._server = Server(self.config)
        return self._server


def _allow_many_connections() -> None:
    """The usual limit of 1024 files would be reached with as many idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))
