"""Starts the server with the options of `gpu-pool serve`, which override every variable."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Final

import click

from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.output import printable
from gpu_worker_pool.gpu_server.serving import serve
from gpu_worker_pool.gpu_server.settings import ServerSettings
from gpu_worker_pool.hardware.readers.choose import check_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES: Final = {
    "host": "HOST",
    "port": "PORT",
    "backend": "GPU_BACKEND",
    "workers": "WORKERS",
    "state_dir": "GPU_POOL_STATE_DIR",
    "log_level": "LOG_LEVEL",
    "access_log": "ACCESS_LOG",
}


def serve_with(given: Mapping[str, str | int | bool | None]) -> None:
    chosen = dict(given)
    simulate = chosen.pop("simulate")
    if simulate is not None:
        if chosen["backend"] is not None:
            raise click.UsageError("--simulate and --backend exclude each other: give only one of them.")
        chosen["backend"] = f"simulated:{simulate}"
    elif chosen["backend"] is not None:
        try:
            check_backend(str(chosen["backend"]), "--backend")
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    # Through the environment, because each worker process reads its settings itself.
    os.environ.update({_VARIABLES[name]: str(value) for name, value in chosen.items() if value is not None})
    os.environ["RELOAD"] = "false"
    # The application reads them again, and reports problems.
    settings = ServerSettings.from_environment(complain=lambda _: None)
    _check_port(settings.host, settings.port)
    serve(settings)


def _check_port(host: str, port: int) -> None:
    """Before uvicorn does, to report it in one sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise click.UsageError(f"no address {printable(host)!r} on this host (--host, or HOST).") from None
        hint = "; choose another with --port" if port else ""
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
