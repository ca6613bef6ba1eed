"""`gpu-pool serve` starts the server."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import click

from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.output import printable

if TYPE_CHECKING:
    from gpu_worker_pool.gpu_server.settings import ServerSettings

# Most options are named after the variable that they override.


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool serve
  gpu-pool serve --simulate 4 --port 8080      without a GPU
  gpu-pool serve --host 127.0.0.1              for programs on this host only
  GPU_POOL_API_KEYS=… gpu-pool serve           also leases for other hosts

\b
Environment variables, or a file .env, set everything else; gpu-pool config lists them. Ctrl-C
ends the server.
"""
)
@click.option("--host", "HOST", metavar="ADDRESS", help="Address to listen on.  [default: HOST, else 0.0.0.0]")
@click.option(
    "--port", "PORT", type=click.IntRange(0, 65535), metavar="N", help="Port to use.  [default: PORT, else 8000]"
)
@click.option("--simulate", type=click.IntRange(0, 10_000), metavar="N", help="Serve N simulated GPUs.")
@click.option(
    "--backend",
    "GPU_BACKEND",
    help="How to read the GPUs: auto, nvml, nvidia-smi, amd, simulated:N, or a package's.  [default: GPU_BACKEND]",
)
@click.option("--workers", "WORKERS", type=click.IntRange(1, 1024), metavar="N", help="Number of server processes.")
@click.option(
    "--state-dir", "GPU_POOL_STATE_DIR", metavar="FOLDER", help="Folder of the ledger.  [default: GPU_POOL_STATE_DIR]"
)
@click.option(
    "--socket",
    "GPU_POOL_SOCKET",
    metavar="PATH",
    help="Also listen on this Unix socket, which knows its users.  [default: GPU_POOL_SOCKET, else none]",
)
@click.option(
    "--tls-cert",
    "GPU_POOL_TLS_CERT",
    metavar="FILE",
    help="Serve https with this certificate (PEM); read again on SIGHUP. gpu-pool cert makes one.",
)
@click.option("--tls-key", "GPU_POOL_TLS_KEY", metavar="FILE", help="The key of the certificate (PEM).")
@click.option(
    "--fleet",
    "GPU_POOL_FLEET_DATABASE",
    metavar="URL",
    help="Join the fleet of this PostgreSQL database, as a candidate for dispatcher. Put a password "
    "into the variable, or into the file of PGPASSFILE.  [default: GPU_POOL_FLEET_DATABASE]",
)
@click.option(
    "--join",
    "GPU_POOL_FLEET_JOIN",
    metavar="URL[,URL]",
    help="Join the fleet of these servers, which have --fleet.  [default: GPU_POOL_FLEET_JOIN]",
)
@click.option(
    "--fleet-key-file",
    "GPU_POOL_FLEET_KEY_FILE",
    metavar="FILE",
    help="File with the fleet's key, the same on all hosts.  [default: GPU_POOL_FLEET_KEY_FILE]",
)
@click.option(
    "--fleet-insecure",
    "GPU_POOL_FLEET_INSECURE",
    is_flag=True,
    default=None,
    help="Allow links over plain http to other hosts, which others on the network can read.",
)
@click.option(
    "--url",
    "GPU_POOL_URL",
    metavar="URL",
    help="The address at which other hosts reach this server.  [default: GPU_POOL_URL, else where it listens]",
)
@click.option(
    "--log-level",
    "LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    help="How much to log.",
)
@click.option("--access-log/--no-access-log", "ACCESS_LOG", default=None, help="Log every request, or do not.")
def serve(*, simulate: int | None, **chosen: str | int | bool | None) -> None:
    """Serve statistics of this host's GPUs, and leases on them, over HTTP.

    Run one server per host. It shares its leases with programs on this host that use local://.
    """
    from gpu_worker_pool.errors import LedgerUnusableError
    from gpu_worker_pool.gpu_server.serving import serve
    from gpu_worker_pool.gpu_server.settings import ServerSettings, alias_of
    from gpu_worker_pool.hardware.readers.choose import check_backend
    from gpu_worker_pool.host_socket import parse_socket
    from gpu_worker_pool.state_directory import locate

    backend = chosen["GPU_BACKEND"]
    if simulate is not None:
        if backend is not None:
            raise click.UsageError("--simulate and --backend exclude each other: give only one of them.")
        chosen["GPU_BACKEND"] = f"simulated:{simulate}"
    elif backend is not None:
        try:
            check_backend(str(backend), "--backend")
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    if (database := chosen["GPU_POOL_FLEET_DATABASE"]) is not None:
        from gpu_worker_pool.fleet.database_url import check_argument

        try:
            check_argument(str(database), "--fleet")
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    if (path := chosen["GPU_POOL_SOCKET"]) is not None:
        try:
            parse_socket(str(path), "--socket")
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
    try:
        locate(str(chosen["GPU_POOL_STATE_DIR"] or ""))
    except LedgerUnusableError as error:
        raise click.UsageError(f"{error}.") from None
    # Through the environment, because each worker process reads its settings itself.
    chosen["RELOAD"] = "false"
    for name, value in chosen.items():
        if value is not None:  # an option wins over both names of its variable
            os.environ[name] = os.environ[alias_of(name)] = str(value)
    # The application reads them again, and reports problems.
    settings = ServerSettings.from_environment(complain=lambda _: None)
    _check_fleet(settings)
    if not os.environ.get("LISTEN_FDS"):  # else systemd has it open
        _check_port(settings.host, settings.port)
    serve(settings)


def _check_fleet(settings: ServerSettings) -> None:
    """A server that should be in a fleet must not run outside it: a setting that cannot be used ends it."""
    wanted = ("GPU_POOL_FLEET_DATABASE", "GPU_POOL_FLEET_JOIN")
    if not any(os.environ.get(name, "").strip() for name in wanted):
        return
    problems: list[str] = []
    type(settings).from_environment(complain=problems.append)
    for problem in problems:
        if problem.startswith(("GPU_POOL_FLEET", "GPU_POOL_HOST_NAME", "GPU_POOL_URL")):
            raise click.UsageError(f"{problem.removesuffix('; ignoring it')}.")
    from gpu_worker_pool.fleet.store import StoreMismatch
    from gpu_worker_pool.gpu_server.fleet.parts import check_database, check_settings

    try:
        check_settings(settings)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    try:
        check_database(settings)
    except StoreMismatch as error:
        raise CommandError(str(error)) from None


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
